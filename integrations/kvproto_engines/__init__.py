"""Shared parts of the adapters of engines, which know none of the engines by name."""
