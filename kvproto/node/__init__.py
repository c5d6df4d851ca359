"""One rank's whole stack: geometry, session, net and transport put together, for engines to embed."""

from kvproto.node.pool import Pool, pack
from kvproto.node.request import Computed, Finished
from kvproto.node.sink import SinkNode
from kvproto.node.source import SourceNode

__all__ = ["Computed", "Finished", "Pool", "SinkNode", "SourceNode", "pack"]
