"""Pages of requests that are on their way: claimed when the source has a use for them, and never so that all wait.

A request that holds some pages waits for the rest. So pages are given only as long as the requests could still end one
after the other, in the order in which they began: the first with what is free, the next with what the first leaves, and
so on. What is being decoded ends by itself, and leaves all that it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import attrs

from .prefix import PrefixCache
from .sequence import Sequence

__all__ = ["Claim", "claimed"]


@attrs.define(eq=False)
class Claim:
    """What one request holds and needs."""

    sequence: Sequence
    whole: tuple[int, int]
    """Pages of the target's and of the draft's pool that it needs in the end."""
    useful: dict[int, int] = attrs.Factory(dict)
    """Up to which token the sources of each rank have a use for pages."""
    tokens: int = 0
    """Up to which it has them."""

    def wanted(self, ranks: int) -> int:
        """Up to which token all ranks have a use for pages."""
        return min(self.useful.values()) if len(self.useful) == ranks else 0

    @property
    def held(self) -> tuple[int, int]:
        """Pages of both pools."""
        return len(self.sequence.target_pages), len(self.sequence.draft_pages)


def claimed(claim: Claim, need: Many[int], waiting: Iterable[Claim], running: Many[int], pages: PrefixCache) -> bool:
    """Give a request so many pages of both pools in all, if there are enough and nobody has to wait for ever.

    `waiting`: all claims in the order in which they began; `running`: pages that requests hold which end by themselves.
    """
    fresh = [max(n - have, 0) for n, have in zip(need, claim.held, strict=True)]
    left = [n + more - some for n, more, some in zip(pages.available, running, fresh, strict=True)]
    for each in waiting:
        has = [n + some if each is claim else n for n, some in zip(each.held, fresh, strict=True)]
        if any(n - have > free for n, have, free in zip(each.whole, has, left, strict=True)):
            return False
        left = [free + have for free, have in zip(left, has, strict=True)]
    return pages.grow(claim.sequence, fresh)
