"""Page allocator of one pool."""

import random
from collections.abc import Iterable

from ..errors import EngineError, OutOfPages


class PageAllocator:
    """Free list over `pages` pages, in an order shuffled by `seed`.

    Real allocators hand out scattered pages; the shuffle keeps two engines from agreeing on page ids by accident.
    """

    def __init__(self, pages: int, seed: int = 0) -> None:
        if pages < 1:
            raise EngineError(f"a pool needs at least one page, not {pages}")
        self._pages = pages
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages; raises OutOfPages, taking none, when fewer are free."""
        if n < 0:
            raise EngineError(f"cannot allocate {n} pages")
        if n > len(self._free):
            raise OutOfPages(f"{n} pages requested, {len(self._free)} of {self._pages} are free")
        taken, self._free = self._free[:n], self._free[n:]
        self._held.update(taken)
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Return pages; raises EngineError, freeing none, when one is not held."""
        pages = list(ids)
        if len(set(pages)) != len(pages):
            raise EngineError(f"pages {pages} name a page twice")
        for page in pages:
            if page not in self._held:
                raise EngineError(f"page {page} is freed but not held")
        self._held.difference_update(pages)
        self._free.extend(pages)
