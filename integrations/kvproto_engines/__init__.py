"""Shared parts of the adapters of engines, which know none of the engines by name."""

from kvproto.distributions import check_versions

check_versions("kvproto-engines")
