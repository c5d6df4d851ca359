"""The interfaces of attention: what a kernel does, and what an exchange does for a DCP group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from ..models import Rows
from .batch import Batch
from .lse import Found, Partial, merge

__all__ = ["Exchange", "Kernel"]


class Kernel(Protocol):
    """A back end: attention over the pages of one pool, and over rows in hand."""

    def plan(self, batch: Batch) -> None:
        """Prepare for the arrays of the next step; those of earlier steps are no longer needed."""

    def repeats(self, batch: Batch) -> Hashable | None:
        """A key that steps of as many tokens share if one of them, captured, can be replayed for the others.

        It is the same on all ranks; None: such a step cannot be captured.
        """
        return None

    def pool(self, layer: int, q: Tensor) -> Found:
        """Attention over the first `batch.bounds` rows of each span in this rank's pages, not causal.

        q [tokens, heads, row_dim] has all heads of the DCP group. Spans without such rows get the neutral element.
        """
        ...

    def pool_by_token(self, layer: int, q: Tensor) -> Found:
        """Attention of each token over its first `batch.token_bounds` rows, among which new rows are stored already.

        It reads the pages once for each token; passes over several tokens are checked against it.
        """
        ...

    def new(self, q: Tensor, rows: Rows) -> Found:
        """Causal attention over the new tokens of the same span; q [tokens, heads, row_dim] has this rank's heads."""
        ...

    def alone(self, layer: int, q: Tensor) -> Tensor | None:
        """Attention [tokens, heads, width] of each token over all rows up to its own, new ones stored among them.

        It is called if this rank has all rows, so that no part is merged; None: this kernel makes parts all the same.
        """
        return None

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
        """Raise EngineError, once a step is over, if the exchange failed on any rank."""
        return
