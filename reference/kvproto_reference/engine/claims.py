"""Pages of requests that are being fetched: claimed once the source can use them, and without deadlock.

A request that holds some pages waits for the rest. So pages are given only while the requests could still finish one
after the other, in the order in which they began: the first with what is free, the next with what the first leaves, and
so on. Requests that are being decoded finish by themselves or give way, and free all of their pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from .prefix import PrefixCache
from .sequence import TokenSequence

__all__ = ["Claim", "claimed"]


@attrs.define(eq=False)
class Claim:
    """The pages that one request holds and needs."""

    sequence: TokenSequence
    whole: tuple[int, ...]
    """Pages of each model's pool that it needs before it is decoded."""
    useful: dict[int, int] = attrs.Factory(dict)
    """By rank: the token up to which its sources can use pages."""
    tokens: int = 0
    """The token up to which it has pages."""

    def wanted(self, ranks: int) -> int:
        """The token up to which all ranks can use pages."""
        return min(self.useful.values()) if len(self.useful) == ranks else 0

    @property
    def held(self) -> tuple[int, ...]:
        """Pages that it has of each pool."""
        return tuple(map(len, self.sequence.tables))


def claimed(
    claim: Claim,
    need: Sequence[int],
    waiting: Iterable[Claim],
    running: Sequence[int],
    pages: PrefixCache,
    spare: Sequence[int] = (),
) -> bool:
    """Give a request `need` pages of each pool in all, unless there are too few or a request would wait for ever.

    `waiting` are all claims in the order in which they began, and `running` the pages of requests that finish by
    themselves or give way, for which `spare` pages stay free. Returns whether the request has the pages.
    """
    fresh = [max(n - have, 0) for n, have in zip(need, claim.held, strict=True)]
    left = [n + more - some for n, more, some in zip(pages.available, running, fresh, strict=True)]
    for each in waiting:
        has = [n + some if each is claim else n for n, some in zip(each.held, fresh, strict=True)]
        if any(n - have > free for n, have, free in zip(each.whole, has, left, strict=True)):
            return False
        left = [free + have for free, have in zip(left, has, strict=True)]
    return pages.extend(claim.sequence, fresh, spare)
