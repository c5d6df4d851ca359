"""Shared parts of the adapters of engines: what is of no one engine."""
