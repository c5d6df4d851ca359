"""Admission of requests, and which give way: pages are taken as answers grow, from the youngest if none are free.

Requests keep the order in which they came. Why all of them end: while one waits no younger one begins, so those that
hold pages become fewer until it comes back; and it comes back with the pages of its next step, which only an older one
may take. So each return of the oldest gains it a token, and alone it fits into the pools.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

import attrs

from .prefix import PrefixCache
from .sequence import TokenSequence

__all__ = ["Admission"]


@attrs.define(eq=False)
class Admission:
    """The requests of a decode engine that wait for pages or are decoded, the oldest first."""

    pages: PrefixCache
    need: Callable[[int], tuple[int, ...]]
    """Pages of each pool that so many rows take."""
    proposed: int
    """The most tokens that a step proposes."""
    grown: Callable[[Sequence[int]], None] = lambda pages: None
    """Called with pages of the target that a running request gets in addition: what they held is of no use to it."""
    waiting: list[TokenSequence] = attrs.field(factory=list, init=False)
    """Sequences without pages: new ones, and ones that gave way."""
    running: list[TokenSequence] = attrs.field(factory=list, init=False)
    """Sequences that are decoded, or computed again for it."""
    _came: dict[TokenSequence, int] = attrs.field(factory=dict, init=False)
    _count: int = attrs.field(default=0, init=False)

    def add(self, sequence: TokenSequence) -> None:
        """Let a new request wait; one that was decoded before is older than all that were not."""
        self._count += 1
        self._came[sequence] = -self._count if sequence.generated else self._count
        insort(self.waiting, sequence, key=self._came.__getitem__)

    def step(self, sequence: TokenSequence) -> tuple[int, ...]:
        """Pages of each pool that a request needs for its next step, or for its first one.

        One with images has all of its pages from the beginning, as decode could not compute it again.
        """
        return self.need(sequence.rows(None if sequence.images else self.proposed))

    @property
    def spare(self) -> list[int]:
        """Pages that whoever begins leaves free: one of each pool for each running request that may need more."""
        lacks = [[len(table) < n for table, n in zip(s.tables, self.need(s.rows()), strict=True)] for s in self.running]
        return [sum(each) for each in zip(*lacks, strict=True)] or [0] * len(self.need(0))

    def take(self, sequence: TokenSequence) -> int | None:
        """Give the oldest that waits its pages; returns how many of its tokens have rows, None if too few are free."""
        return self.pages.allocate(sequence, self.step(sequence), self.spare)

    def begin(self) -> TokenSequence:
        """The oldest that waits, which has its pages now and does not wait any more."""
        return self.waiting.pop(0)

    def run(self, sequence: TokenSequence) -> None:
        """Decode a request from now on."""
        insort(self.running, sequence, key=self._came.__getitem__)

    def rest(self, sequence: TokenSequence) -> None:
        """Decode a request no more, though it keeps its pages and its place, until it is run again or forgotten."""
        self.running.remove(sequence)

    def grow(self, give_way: Callable[[TokenSequence], None]) -> None:
        """Give all running requests the pages of their next step.

        While too few are free, `give_way` is called with the youngest, and takes back its pages.
        """
        for sequence in [*self.running]:
            while sequence in self.running:
                held = [*map(len, sequence.tables)]
                if self.pages.extend(sequence, [max(n - h, 0) for n, h in zip(self.step(sequence), held, strict=True)]):
                    self.grown(sequence.tables[0][held[0] :])
                    break
                youngest = self.running[-1]
                give_way(youngest)
                if youngest in self.running:  # else its engine has forgotten it
                    self.running.remove(youngest)
                    insort(self.waiting, youngest, key=self._came.__getitem__)

    def forget(self, sequence: TokenSequence) -> None:
        """Forget a request that is over, wherever it is."""
        self._came.pop(sequence, None)
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
