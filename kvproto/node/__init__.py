"""The whole stack of one rank: registration, scheduling, copies and sessions; engines use it through `kvproto`."""

from kvproto.node.request import Computed, Finished
from kvproto.node.sink import SinkNode
from kvproto.node.source import SourceNode

__all__ = ["Computed", "Finished", "SinkNode", "SourceNode"]
