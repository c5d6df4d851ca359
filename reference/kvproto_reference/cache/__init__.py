"""Where rows lie: the paged pool of a rank, its memory, its pages, and the tokens that the rank stores."""

from .pages import PageAllocator
from .pool import KVPool
from .sharding import Shard

__all__ = ["KVPool", "PageAllocator", "Shard"]
