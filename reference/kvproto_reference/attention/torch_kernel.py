"""Back end `torch`: plain tensor operations in float32, on any device. The others are checked against it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.pool import KVPool
from ..cache.sharding import Ints
from ..models import Rows
from .base import Kernel
from .batch import Batch
from .lse import Partial

__all__ = ["TorchKernel"]


class TorchKernel(Kernel):
    """Attention by page table over one rank's pool: the pages of a span are gathered, then masked by its bound.

    If nothing is merged (`alone`), rows are gathered instead, by the head that reads them, for torch's fused attention.
    """

    def __init__(
        self,
        pool: KVPool,
        group_heads: Sequence[int],
        own_heads: Sequence[int],
        reach: int | None = None,
        fixed: bool = False,
    ) -> None:
        """The index in the pool of the KV head that each query head reads, of the DCP group and of this rank.

        With `reach` a token attends to the last so many tokens, of which it is one; ranks do not deal tokens then.
        With `fixed` a step in which every span is one token can be captured: its arrays are where those of the last
        such step were, and its page tables have room for a power of two of pages.
        """
        self._reach, self._fixed = reach, fixed
        self._again: dict[tuple[int, Hashable], _Fixed] = {}
        self._pool, self._scale = pool, pool.config.score_scale
        self._values = pool.config.value_dim
        self._group_heads, self._own_heads = (torch.tensor(h, device=pool.device) for h in (group_heads, own_heads))
        # query heads that read one KV head are rows of one product, unless a KV head has more of them than another
        kv_heads, shared = sorted(set(own_heads)), len(own_heads) // len(set(own_heads))
        even = list(own_heads) == [head for head in kv_heads for _ in range(shared)]
        self._read_heads = np.array(kv_heads if even else own_heads)

    def repeats(self, batch: Batch) -> Hashable | None:
        if not (self._fixed and batch.whole):
            return None
        return 1 << (max(len(span.pages) for span in batch.spans) - 1).bit_length()

    def plan(self, batch: Batch) -> None:
        width = self.repeats(batch)
        if not isinstance(width, int):
            self._step = _Step(batch, self._pool, self._read_heads, self._reach)
            return
        key = batch.tokens, width
        if key not in self._again:
            self._again[key] = _Fixed(batch, self._pool, self._read_heads, self._reach, width)
        self._step = self._again[key]
        self._again[key].put(batch)

    def pool(self, layer: int, q: Tensor) -> Partial:
        step = self._step
        return self._attend(layer, q[step.at], step.positions[step.at], *step.by_span)[step.where]

    def pool_by_token(self, layer: int, q: Tensor) -> Partial:
        step = self._step
        return self._attend(layer, q[:, None], step.positions[:, None], *step.by_token)[:, 0]

    def new(self, q: Tensor, rows: Rows, which: Tensor | None = None) -> Partial:
        """As `Kernel.new`; `which` [n] are the tokens of the step that the queries belong to, if not all."""
        k, v = self._keys_values(rows, self._own_heads)
        seen = self._step.seen if which is None else self._step.seen[which]
        return _attend(q[None], k[None], v[None], seen[None], self._scale)[0]

    def alone(self, layer: int, q: Tensor) -> Tensor | None:
        if isinstance(self._step, _Fixed):  # its rows are of another number in each step
            return None
        step, kv, width = self._step, len(self._read_heads), q.shape[-1]
        spans, n = step.at.shape
        rows = [self._rows(layer, part, step.rows).view(spans, kv, -1, width) for part in self._pool.config.parts]
        # [spans, n, KV heads, heads of each, d]: the queries of a span that read one head are those of one product
        asked = q[step.at].view(spans, n, kv, -1, width).permute(0, 2, 3, 1, 4).reshape(spans, kv, -1, width).float()
        shared = asked.shape[2] // n
        mask = step.mask if n == 1 else step.mask.repeat(1, 1, shared, 1)
        out = F.scaled_dot_product_attention(asked, rows[0], rows[-1], mask, scale=self._scale)[..., : self._values]
        out = out.view(spans, kv, shared, n, -1).permute(0, 3, 1, 2, 4).reshape(spans, n, kv * shared, -1)
        return (out[:, 0] if n == 1 else out[step.where]).to(q.dtype)

    def _rows(self, layer: int, part: str, rows: Tensor) -> Tensor:
        return self._pool.read_rows(layer, part, rows).float()

    def _attend(self, layer: int, q: Tensor, positions: Tensor, table: Tensor, bounds: Tensor) -> Partial:
        """q [spans, n, heads, d], positions [spans, n], table [spans, pages], bounds [spans]."""
        rows = {part: self._pool.read(layer, part, table).flatten(1, 2) for part in self._pool.config.parts}
        k, v = self._keys_values(rows, self._group_heads)
        at = torch.arange(k.shape[1], device=q.device)
        there = (at < bounds[:, None])[:, None]
        if self._reach is not None:  # row i is that of token i
            there = there & (at > positions[..., None] - self._reach)
        return _attend(q, k, v, there, self._scale)

    def _keys_values(self, rows: Rows, heads: Tensor) -> tuple[Tensor, Tensor]:
        k = rows["k"] if "k" in rows else rows["latent"]
        v = rows.get("v", k)
        return k[..., heads, :], v[..., heads, : self._values]


class _Step:
    """The arrays of a step on the device, each made when it is first read."""

    def __init__(self, batch: Batch, pool: KVPool, heads: Ints, reach: int | None) -> None:
        self._batch, self._pool, self._heads, self._reach = batch, pool, heads, reach
        self._counts = np.diff(batch.starts)
        self._span = np.repeat(np.arange(len(self._counts)), self._counts)

    @cached_property
    def by_span(self) -> tuple[Tensor, Tensor]:
        """Page tables of the spans, and how many of their rows are read."""
        return self._reads(np.arange(len(self._counts)), self._batch.bounds)

    @cached_property
    def by_token(self) -> tuple[Tensor, Tensor]:
        """The same of each token's span."""
        return self._reads(self._span, self._batch.token_bounds)

    @cached_property
    def _nth(self) -> Ints:
        """A span's tokens [spans, n]; spans are padded to the longest with their last token."""
        nth: Ints = np.minimum(np.arange(self._counts.max()), self._counts[:, None] - 1)
        return nth

    @cached_property
    def at(self) -> Tensor:
        """Token `at[span, i]` of the step is the span's i-th."""
        return self._device(self._batch.starts[:-1, None] + self._nth)

    @cached_property
    def where(self) -> tuple[Tensor, Tensor]:
        """The span of each token, and its number there."""
        nth = np.arange(self._batch.tokens) - self._batch.starts[self._span]
        return self._device(self._span), self._device(nth)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token [tokens]."""
        return self._device(self._batch.positions)

    @cached_property
    def seen(self) -> Tensor:
        """Whether a token [tokens] sees the row of a new token [tokens]."""
        span, behind = self._span, self._batch.positions[:, None] - self._batch.positions
        near = behind >= 0 if self._reach is None else (behind >= 0) & (behind < self._reach)
        return self._device((span[:, None] == span) & near)

    @cached_property
    def rows(self) -> Tensor:
        """Rows of the pool by KV head [spans * heads * m] that a span sees, padded with its first."""
        size, first = self._pool.page_size, self._first
        counts = self._bounds[self._batch.starts[1:] - 1] - first
        slots = np.empty((len(counts), counts.max()), np.int64)
        for row, span, lo, n in zip(slots, self._batch.spans, first, counts, strict=True):
            pages = np.asarray(span.pages[lo // size : -(-(lo + n) // size)], np.int64)
            row[:n] = (pages[:, None] * size + np.arange(size)).ravel()[lo % size :][:n]
            row[n:] = row[0]
        kv_heads = next(iter(self._pool.tensors.values())).shape[2]
        return self._device((slots[:, None] * kv_heads + self._heads[:, None]).ravel())

    @cached_property
    def mask(self) -> Tensor:
        """0 or minus infinity [spans, 1, n, m], by the rows that a token sees; what a token is padded with sees all."""
        bounds = self._bounds[self._batch.starts[:-1, None] + self._nth][..., None]
        first, last = self._first, self._bounds[self._batch.starts[1:] - 1]
        at = first[:, None, None] + np.arange((last - first).max())
        sees = at < bounds if self._reach is None else (at < bounds) & (at >= bounds - self._reach)
        return self._device(np.where(sees, 0, -np.inf).astype(np.float32))[:, None]

    @cached_property
    def _bounds(self) -> Ints:
        """The number of rows before the one that follows a token [tokens]."""
        bounds: Ints = self._batch.token_bounds.astype(np.int64)
        return bounds

    @cached_property
    def _first(self) -> Ints:
        """The first row [spans] that a token of the span sees."""
        bounds = self._bounds[self._batch.starts[:-1]]
        first: Ints = np.zeros_like(bounds) if self._reach is None else np.maximum(bounds - self._reach, 0)
        return first

    def _reads(self, spans: Ints, bounds: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Page tables of these spans, padded with page 0 [n, pages], and how many of their rows are read [n]."""
        most = self._most(bounds)
        table = np.zeros((len(spans), most), np.int64)
        for i, span in enumerate(spans):
            some = self._batch.spans[span].pages[:most]
            table[i, : len(some)] = some
        return self._device(table), self._device(bounds)

    def _most(self, bounds: npt.NDArray[np.int32]) -> int:
        """Pages for which a page table has room."""
        return max(-(-int(bounds.max()) // self._pool.page_size), 1)

    def _device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.device)


class _Fixed(_Step):
    """A step of one token in each span whose arrays stay where they are, with room for `width` pages in each table."""

    def __init__(self, batch: Batch, pool: KVPool, heads: Ints, reach: int | None, width: int) -> None:
        super().__init__(batch, pool, heads, reach)
        self._width = width
        self._kept = *self.by_span, self.positions, self.at, *self.where

    def put(self, batch: Batch) -> None:
        """Fill them with those of another such step."""
        other = _Fixed(batch, self._pool, self._heads, self._reach, self._width)
        for mine, theirs in zip(self._kept, other._kept, strict=True):
            mine.copy_(theirs)

    def _most(self, bounds: npt.NDArray[np.int32]) -> int:
        return self._width


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Partial:
    """q [b, n, heads, d], k [b, m, heads, d], v [b, m, heads, width], seen bool [b, n or 1, m].

    Rows that no query sees may be NaN.
    """
    ever = seen.any(1)[..., None, None]
    k, v = (torch.where(ever, rows, 0).float() for rows in (k, v))
    scores = torch.einsum("bnhd,bmhd->bnhm", q.float(), k) * scale
    scores = torch.where(seen[:, :, None], scores, -math.inf)
    lse = torch.logsumexp(scores, -1)
    some = seen.any(-1).expand(q.shape[:2])
    weights = torch.exp(scores - torch.where(some[..., None], lse, 0)[..., None])
    return Partial.of(torch.einsum("bnhm,bmhw->bnhw", weights, v).to(q.dtype), lse, some)
