"""Tokens of a sequence that a rank stores, and their places: kvproto's owner function, for the engine's bookkeeping.

Allocator, slot mapping, lengths and masks all use a `Shard`; the plan uses the same functions of the same group, so
what is attended to is what was handed over.
"""

from __future__ import annotations

from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvproto import Group, local_row, most_before, owned_before, owner

__all__ = ["Shard"]

Ints = npt.NDArray[np.int64]
Count = TypeVar("Count", int, Ints)


@attrs.frozen
class Shard:
    """The tokens of one cache group that one of `group.cp_size` ranks stores, in pages of `group.rows` rows."""

    group: Group
    cp_rank: int

    @property
    def count(self) -> int:
        """Ranks that a sequence is dealt over."""
        return self.group.cp_size

    def rows(self, tokens: Ints) -> Ints:
        """The number of tokens, of the first `tokens` (any shape), that this rank stores."""
        return owned_before(self.group, self.cp_rank, tokens)

    def owners(self, positions: Ints) -> Ints:
        """The rank that stores each position; both arrays are [n]."""
        return owner(self.group, positions)

    def pages(self, tokens: Count) -> Count:
        """Pages that the largest share of `tokens` tokens (one number, or any shape) needs.

        All ranks take as many, so that their tables agree.
        """
        return -(-most_before(self.group, tokens) // self.group.rows)

    @property
    def span(self) -> int:
        """Tokens of a sequence, over all ranks, that belong to a page."""
        return self.group.rows * self.count

    @property
    def whole(self) -> Shard:
        """All tokens, in pages of as many rows."""
        return Shard(attrs.evolve(self.group, cp_size=1, interleave=1, origin=0, order=None), 0)

    def slots(self, table: Ints, positions: Ints, first: Ints | int = 0) -> Ints:
        """The slot, page * rows + row, of each position [n] that is this rank's; -1 for the others'.

        `first` is where in `table` the page table of each position begins.
        """
        if self.count == 1:
            mine, rows = np.full(len(positions), True), positions
        else:
            mine, rows = owner(self.group, positions) == self.cp_rank, local_row(self.group, positions)
        page = np.minimum(first + rows // self.group.rows, max(len(table) - 1, 0))  # of others' rows: not used
        return np.where(mine, table[page] * self.group.rows + rows % self.group.rows, -1)
