"""The seams of attention: what a kernel does, and what an exchange does for a DCP group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..models import Rows
from .batch import Batch
from .lse import Found, Partial, merge

__all__ = ["Exchange", "Kernel"]


class Kernel(Protocol):
    """A back end: attention over the pages of one pool, and over rows in hand."""

    def plan(self, batch: Batch) -> None:
        """Take over the arrays of the next step; nothing of a step before is needed any more."""

    def pool(self, layer: int, q: Tensor) -> Found:
        """Over the first `batch.bounds` rows of each span in this rank's pages, not causal.

        q [tokens, heads, row_dim], of all heads of the DCP group. Spans without such rows get the neutral element.
        """
        ...

    def pool_by_token(self, layer: int, q: Tensor) -> Found:
        """Over the first `batch.token_bounds` rows for each token by itself: new rows are stored, and read as the rest.

        Reads the pages once a token; it is what passes over several tokens are checked against.
        """
        ...

    def new(self, q: Tensor, rows: Rows) -> Found:
        """Over the new tokens of the same span, causal; q [tokens, heads, row_dim] of this rank's own heads."""
        ...

    def merge(self, parts: Sequence[Found]) -> Partial:
        """Attention over the union of disjoint sets of tokens."""
        return merge([part.natural() for part in parts])


class Exchange(Protocol):
    """Makes attention over all shards of a DCP group from each rank's attention over its own; a collective."""

    def queries(self, q: Tensor) -> Tensor:
        """q [tokens, heads, row_dim] as this rank projects it -> the heads of all ranks, in rank order."""
        ...

    def own(self, q: Tensor) -> Tensor:
        """q as this rank projects it -> this rank's own heads."""
        ...

    def merge(self, part: Found) -> Found:
        """The group's heads over this rank's tokens -> this rank's heads over all tokens."""
        ...

    def check(self) -> None:
        """Once a step is over: raise EngineError where the exchange failed on any rank."""
        return
