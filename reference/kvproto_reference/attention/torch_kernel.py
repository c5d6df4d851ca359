"""Back end `torch`: plain tensor operations in float32, on any device. The others are checked against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cache.pool import KVPool
from ..cache.sharding import Ints
from ..models import Rows
from .base import Kernel
from .batch import Batch
from .lse import Partial

__all__ = ["TorchKernel"]


class TorchKernel(Kernel):
    """Attention by page table over one rank's pool: the pages of a span are gathered, then masked by its bound."""

    def __init__(
        self, pool: KVPool, group_heads: Sequence[int], own_heads: Sequence[int], reach: int | None = None
    ) -> None:
        """The index in the pool of the KV head that each query head reads, of the DCP group and of this rank.

        With `reach` a token attends to the last so many tokens, of which it is one; ranks do not deal tokens then.
        """
        self._reach = reach
        self._pool, self._scale = pool, pool.config.score_scale
        self._values = pool.config.value_dim
        self._group_heads, self._own_heads = (torch.tensor(h, device=pool.device) for h in (group_heads, own_heads))

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        counts = np.diff(batch.starts)
        self._by_span = self._reads(batch, np.arange(len(counts)), batch.bounds)
        self._by_token = self._reads(batch, np.repeat(np.arange(len(counts)), counts), batch.token_bounds)
        # token `at[span, i]` of the step is the span's i-th; spans are padded to the longest with their last token
        nth = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        self._at = self._device(batch.starts[:-1, None] + nth)
        span = np.repeat(np.arange(len(counts)), counts)
        self._where = self._device(span), self._device(np.arange(batch.tokens) - batch.starts[span])
        behind = batch.positions[:, None] - batch.positions
        seen = (span[:, None] == span) & (behind >= 0)
        if self._reach is not None:
            seen &= behind < self._reach
        self._seen, self._positions = self._device(seen), self._device(batch.positions)

    def pool(self, layer: int, q: Tensor) -> Partial:
        return self._attend(layer, q[self._at], self._positions[self._at], *self._by_span)[self._where]

    def pool_by_token(self, layer: int, q: Tensor) -> Partial:
        return self._attend(layer, q[:, None], self._positions[:, None], *self._by_token)[:, 0]

    def new(self, q: Tensor, rows: Rows, which: Tensor | None = None) -> Partial:
        """As `Kernel.new`; `which` [n] are the tokens of the step that the queries belong to, if not all."""
        k, v = self._keys_values(rows, self._own_heads)
        seen = self._seen if which is None else self._seen[which]
        return _attend(q[None], k[None], v[None], seen[None], self._scale)[0]

    def _attend(self, layer: int, q: Tensor, positions: Tensor, table: Tensor, bounds: Tensor) -> Partial:
        """q [spans, n, heads, d], positions [spans, n], table [spans, pages], bounds [spans]."""
        rows = {part: self._pool.tensors[layer, part][table].flatten(1, 2) for part in self._pool.config.parts}
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

    def _reads(self, batch: Batch, spans: Ints, bounds: npt.NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Page tables of these spans, padded with page 0 [n, pages], and how many of their rows are read [n]."""
        size = self._pool.page_size
        most = max(-(-int(bounds.max()) // size), 1)
        table = np.zeros((len(spans), most), np.int64)
        for i, span in enumerate(spans):
            some = batch.spans[span].pages[:most]
            table[i, : len(some)] = some
        return self._device(table), self._device(bounds)

    def _device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._pool.device)


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
