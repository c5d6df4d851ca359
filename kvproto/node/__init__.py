"""One rank's whole stack: registration, scheduling, copies and sessions put together; `kvproto` is the door to it."""

from kvproto.node.request import Computed, Finished
from kvproto.node.sink import SinkNode
from kvproto.node.source import SourceNode

__all__ = ["Computed", "Finished", "SinkNode", "SourceNode"]
