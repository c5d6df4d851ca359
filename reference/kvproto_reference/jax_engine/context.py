"""Prefill with context parallelism: each rank along mesh axis `cp` computes and stores the tokens that it owns.

The new keys and values of a step are gathered, so that each rank attends to all of them with its own queries, masked by
position. For the rows committed before, queries are gathered instead: each rank attends with all of them over its own
rows, and the results are merged, along tokens as DCP does along heads.
"""

from __future__ import annotations

import functools

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from .attention import Heads, Partial, Pools, Reads, Rows, attend, exchanged, rows_of, union

__all__ = ["ContextAttention"]


@attrs.frozen
class ContextAttention:
    """Attention of a layer for the tokens that one of `ranks` CP ranks owns of each span."""

    scale: float
    width: int
    """Elements of a head's output."""
    ranks: int

    def __call__(self, q: jax.Array, new: Rows, pool: Pools, reads: Reads, heads: Heads) -> jax.Array:
        """Attend with q [spans, n, heads, row_dim] of this rank's tokens; returns [spans, n, heads, width].

        `new` [spans, n, KV heads, row_dim] are their rows by part, and `pool` the rank's.
        """
        gather = functools.partial(lax.all_gather, axis_name="cp", axis=1, tiled=True)
        rows, at = {part: gather(x) for part, x in new.items()}, gather(reads.positions)[:, None]
        seen = (at >= 0) & (at <= reads.positions[..., None])
        parts = [self._attend(q, rows, heads, seen)]
        if reads.table.shape[1]:
            rows = rows_of(pool, reads.table)
            held = jnp.arange(next(iter(rows.values())).shape[1]) < reads.bounds[:, None, None]
            parts.append(exchanged(self._attend(gather(q), rows, heads, held), "cp", self.ranks, 1))
        return union(parts).out.astype(q.dtype)

    def _attend(self, q: jax.Array, rows: Rows, heads: Heads, seen: jax.Array) -> Partial:
        return attend(q, rows, heads.own, seen, self.scale, self.width)
