"""Transports: they map peers' memory and run copy programs; found by the entry-point group `kvproto.transports`."""

from kvproto.transport.loading import default, find, load, names

__all__ = ["default", "find", "load", "names"]
