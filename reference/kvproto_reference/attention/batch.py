"""One step over several sequences: which tokens are computed, where their rows go, and what they attend to.

Everything here is numpy on the host, and the same on all ranks except slots, bounds and pages, which are the rank's.
Decisions that lead to a collective depend only on what is the same on all ranks (`Batch.prefix`, `Batch.whole`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from ..cache.sharding import Ints, Shard
from ..errors import EngineError

__all__ = ["Batch", "Span", "batch_of"]


@attrs.frozen
class Span:
    """Tokens [start, start + count) of one sequence, and its page table."""

    start: int
    count: int
    pages: Sequence[int]
    proposed: int = 0
    """The number of tokens, the last ones, that are proposals and may not stay."""
    window: Sequence[int] = ()
    """The pages in which the sliding windows of the sequence move (`cache/windows.py`)."""


@attrs.frozen(eq=False)
class Batch:
    """The spans of one step as arrays; a token is a row of the step, in the order of the spans."""

    spans: tuple[Span, ...]
    positions: Ints
    """Position of each token [tokens]."""
    slots: Ints
    """Slot of each new row in this rank's pool [tokens]; -1 if another rank stores it."""
    starts: npt.NDArray[np.int32]
    """First token of each span, and the end [spans + 1]."""
    bounds: npt.NDArray[np.int32]
    """Rows of this rank's pool that every token of a span attends to [spans]."""
    token_bounds: npt.NDArray[np.int32]
    """Rows of this rank's pool up to each token itself, once the new rows are stored [tokens]."""
    page_starts: npt.NDArray[np.int32]
    """First entry of each span in `pages`, and the end [spans + 1]."""
    pages: npt.NDArray[np.int32]
    """Pages that hold the rows within the bounds, span by span [entries]."""
    prefix: bool
    """Whether any rank attends to its pool at all."""
    whole: bool
    """Whether the pool's rows include the new ones, because every span is one token. Otherwise the new tokens are a
    separate pass, causal and not sharded, and the pool's pass is over what was committed before, for all tokens."""

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return len(self.positions)


def batch_of(spans: Sequence[Span], shard: Shard, whole: bool = True) -> Batch:
    """The arrays of a step; raises EngineError for a span without tokens, or beyond its page table.

    Without `whole` the new tokens are a separate pass even if each span is one token.
    """
    if not spans:
        raise EngineError("a step needs at least one span")
    size = shard.group.rows
    begins, counts, have = np.array([(s.start, s.count, len(s.pages)) for s in spans], np.int64).T
    ends = begins + counts
    if ((begins < 0) | (counts < 1)).any():
        nth = int(((begins < 0) | (counts < 1)).argmax())
        raise EngineError(f"positions [{begins[nth]}, {ends[nth]}) are no chunk")
    need = shard.pages(ends)
    if (need > have).any():
        nth = int((need > have).argmax())
        raise EngineError(f"position {ends[nth] - 1} needs {need[nth]} pages, not {have[nth]}")
    starts = _sums(counts)
    positions = np.repeat(begins - starts[:-1], counts) + np.arange(starts[-1])
    tables = [np.asarray(span.pages, np.int32) for span in spans]
    first = np.repeat(np.cumsum(have) - have, counts)
    slots = shard.slots(np.concatenate(tables).astype(np.int64), positions, first)
    whole = whole and bool((counts == 1).all())
    bounds = shard.rows(ends if whole else begins)
    held = -(-bounds // size)
    return Batch(
        spans=tuple(spans),
        positions=positions,
        slots=slots,
        starts=starts,
        bounds=bounds.astype(np.int32),
        token_bounds=shard.rows(positions + 1).astype(np.int32),
        page_starts=_sums(held),
        pages=np.concatenate([table[:n] for table, n in zip(tables, held.tolist(), strict=True)]),
        prefix=whole or bool(begins.any()),
        whole=whole,
    )


def _sums(counts: Sequence[int] | Ints) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
