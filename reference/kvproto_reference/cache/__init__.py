"""The paged pool of a rank, its memory and pages, and the tokens that the rank stores."""

from .pages import PageAllocator
from .pool import KVPool
from .sharding import Shard

__all__ = ["KVPool", "PageAllocator", "Shard"]
