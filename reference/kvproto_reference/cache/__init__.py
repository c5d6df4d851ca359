"""The pools of a rank, their memory and pages, and the tokens that the rank stores."""

from .hybrid import NOTHING, HybridPools
from .pages import PageAllocator
from .pool import KVPool
from .sharding import Shard
from .states import StatePool

__all__ = ["NOTHING", "HybridPools", "KVPool", "PageAllocator", "Shard", "StatePool"]
