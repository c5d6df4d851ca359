"""Back end `xla`: attention of one rank by page table, merged over the ranks of a DCP group.

All of it runs inside shard_map, over a mesh with an axis `dcp`. A step is a grid [spans, n], in which the tokens of a
span stand in order, with padding behind them. XLA never writes a pool, so attention is over the new rows, which are at
hand, causally, and over the rows committed to the pool before, which all tokens of a span see. A rank alone joins them.
In a group these are two passes, and they and the shares of the ranks merge by log-sum-exp (spec/v1/dcp.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from ..errors import EngineError

__all__ = [
    "EXCHANGES",
    "Attention",
    "Heads",
    "Paged",
    "Partial",
    "Pools",
    "Reads",
    "attend",
    "exchanged",
    "merge",
    "rows_of",
    "union",
]

Rows = Mapping[str, jax.Array]


class Paged(NamedTuple):
    """The pool of a layer and part on one rank, among others in one array [pages of all, rows, KV heads, row_dim]."""

    rows: jax.Array
    first: jax.Array | int = 0
    """Its first page there."""


Pools = Mapping[str, Paged]


class Partial(NamedTuple):
    """Attention over some of the tokens: normalised `out` [..., heads, width] and its log-sum-exp `lse` [..., heads].

    The log-sum-exp is natural and float32. Where there is no token, `out` is 0 and `lse` is -inf.
    """

    out: jax.Array
    lse: jax.Array


class Reads(NamedTuple):
    """Indices of the rows that one rank computes in a step, and reads from its pool."""

    positions: jax.Array
    """Positions of the tokens that the rank computes, int32 [spans, n]; -1 for padding."""
    table: jax.Array
    """Page table of each span's committed rows, int32 [spans, pages]; `pages` is 0 if no rank has any."""
    bounds: jax.Array
    """Committed rows of this rank that all tokens of a span attend to, int32 [spans]."""
    token_bounds: jax.Array
    """Rows of this rank up to and including each token's, new ones counted, int32 [spans, n]."""
    new: jax.Array
    """Index of each token's row among this rank's rows of the span, int32 [spans, n]; out of range for other ranks'."""


class Heads(NamedTuple):
    """The KV head of the rank that each query head reads, int32 [heads]: for its DCP group's heads, and for its own.

    None: as many consecutive query heads read each KV head, on all ranks.
    """

    group: jax.Array | None
    own: jax.Array | None


def attend(q: jax.Array, rows: Rows, heads: jax.Array | None, seen: jax.Array, scale: float, width: int) -> Partial:
    """Attention of q [s, n, heads, d] over rows [s, m, KV heads, d] by part, where `seen` (bool [s, n or 1, m]) holds.

    `heads` are those of `Heads`, and `width` the elements of an output. Rows that nobody sees may be NaN. Queries that
    read one KV head are rows of one product.
    """
    ever = seen.any(1)[..., None, None]
    k = rows["k"] if "k" in rows else rows["latent"]
    k, v = (jnp.where(ever, x, 0).astype(jnp.float32) for x in (k, rows.get("v", k)))
    k, v = (jnp.swapaxes(x if heads is None else x[:, :, heads], 1, 2) for x in (k, v))
    spans, n, _, dim = q.shape
    kv, rows_seen = k.shape[1:3]
    asked = jnp.swapaxes(q.astype(jnp.float32).reshape(spans, n, kv, -1, dim), 1, 2)
    scores = jnp.einsum("skqd,skmd->skqm", asked.reshape(spans, kv, -1, dim), k) * scale
    scores = jnp.where(seen[:, None, :, None], scores.reshape(*asked.shape[:-1], rows_seen), -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    some = seen.any(-1)[:, None, :, None]
    weights = jnp.exp(scores - jnp.where(some, lse, 0)[..., None])
    out = jnp.einsum("skqm,skmw->skqw", weights.reshape(spans, kv, -1, rows_seen), v[..., :width])
    out = jnp.where(some[..., None], out.reshape(*asked.shape[:-1], -1), 0)
    lse = jnp.where(some, lse, -jnp.inf)
    return Partial(*(jnp.swapaxes(x, 1, 2).reshape(spans, n, -1, *x.shape[4:]) for x in (out, lse)))


def merge(parts: Partial) -> Partial:
    """Merge attention over disjoint sets of tokens, one for each index of the first axis."""
    total = jax.nn.logsumexp(parts.lse, 0)
    return Partial(_weighted(parts.out, _weights(parts.lse, total)).sum(0), total)


def _weights(lse: jax.Array, most: jax.Array) -> jax.Array:
    """exp(lse - most); 0 where there is no token at all."""
    return jnp.exp(lse - jnp.where(jnp.isneginf(most), 0, most))


def _weighted(out: jax.Array, weights: jax.Array) -> jax.Array:
    """out * weights, but 0 where the weight is 0: kernels leave garbage where they read no token, even NaN."""
    return jnp.where(weights[..., None] > 0, out * weights[..., None], 0)


def _by_sum(part: Partial, ranks: int) -> Partial:
    """Reduce-scatter weighted outputs and weights; a maximum over the ranks replaces gathering their log-sum-exps."""
    most = lax.pmax(part.lse, "dcp")  # type: ignore[no-untyped-call]
    weights = _weights(part.lse, most)
    scatter = functools.partial(lax.psum_scatter, axis_name="dcp", scatter_dimension=2, tiled=True)
    out, total = scatter(_weighted(part.out, weights)), scatter(weights)
    out = jnp.where(total[..., None] > 0, out / jnp.where(total > 0, total, 1)[..., None], 0)
    return Partial(out, jnp.log(total) + _own(most, ranks))


def _by_all_to_all(part: Partial, ranks: int) -> Partial:
    return exchanged(part, "dcp", ranks, 2)


def exchanged(part: Partial, among: str, ranks: int, along: int) -> Partial:
    """This rank's piece of axis `along`, merged over the `ranks` of mesh axis `among`.

    Outputs and log-sum-exps are packed into one all-to-all, and each rank merges what it receives.
    """
    packed = jnp.concatenate((part.out, part.lse[..., None]), -1)
    shape = packed.shape
    sent = jnp.moveaxis(packed.reshape(*shape[:along], ranks, -1, *shape[along + 1 :]), along, 0)
    received = lax.all_to_all(sent, among, split_axis=0, concat_axis=0, tiled=True)  # type: ignore[no-untyped-call]
    return merge(Partial(received[..., :-1], received[..., -1]))


def union(parts: Sequence[Partial]) -> Partial:
    """Merge attention over disjoint sets of tokens that are not stacked."""
    return merge(Partial(*(jnp.stack(each) for each in zip(*parts, strict=True))))


def rows_of(pool: Pools, table: jax.Array) -> dict[str, jax.Array]:
    """The rows [spans, rows, KV heads, row_dim] by part that page tables [spans, pages] name."""
    found = {part: x.rows.at[table + x.first].get(mode="promise_in_bounds") for part, x in pool.items()}
    return {part: x.reshape(len(table), -1, *x.shape[3:]) for part, x in found.items()}


EXCHANGES: dict[str, Callable[[Partial, int], Partial]] = {"ag_rs": _by_sum, "a2a": _by_all_to_all}
"""Turn the group's heads over a rank's tokens into the rank's heads over all tokens; names as in the torch engine."""


def _own(x: jax.Array, ranks: int) -> jax.Array:
    """This rank's heads of x [spans, n, heads of the group, ...]."""
    each = x.shape[2] // ranks
    return lax.dynamic_slice_in_dim(x, lax.axis_index("dcp") * each, each, 2)


def _check_exchange(_: object, __: object, name: str) -> None:
    if name not in EXCHANGES:
        raise EngineError(f"the exchange must be one of {sorted(EXCHANGES)}, not {name!r}")


@attrs.frozen
class Attention:
    """Attention of a layer over the pools of a DCP group of `ranks` and over the new tokens; raises EngineError."""

    scale: float
    width: int
    """Elements of a head's output."""
    ranks: int = 1
    exchange: str = attrs.field(default="a2a", validator=_check_exchange)
    replicated: bool = False
    """Whether every rank projects the queries of the whole group, so that none have to be gathered."""
    by_token: bool = False
    """Whether to attend token by token over the pool's rows with the new ones among them, to check the two passes."""
    reach: int | None = None
    """To how many of the last tokens a token attends, itself one of them; None: to all. Ranks deal no tokens then."""

    def __call__(self, q: jax.Array, new: Rows, pool: Pools, reads: Reads, heads: Heads) -> jax.Array:
        """Attend with this rank's q [spans, n, heads, row_dim]; returns [spans, n, own heads, width].

        `new` [spans, n, KV heads, row_dim] are rows by part.
        """
        own = _own(q, self.ranks) if self.replicated else q
        if self.by_token:
            return self._over_pool(q, new, pool, reads, heads).out.astype(q.dtype)
        causal = jnp.tri(q.shape[1], dtype=bool)[None]
        if self.reach is not None:
            causal &= ~jnp.tri(q.shape[1], k=-self.reach, dtype=bool)
        if not reads.table.shape[1]:
            found = attend(own, new, heads.own, causal, self.scale, self.width)
        elif self.ranks > 1:
            near = attend(own, new, heads.own, causal, self.scale, self.width)
            found = union([self._over_pool(q, new, pool, reads, heads), near])
        else:
            held, (spans, n) = rows_of(pool, reads.table), q.shape[:2]
            rows = {part: jnp.concatenate((old, new[part]), 1) for part, old in held.items()}
            seen = jnp.concatenate([
                jnp.broadcast_to(each, (spans, n, each.shape[-1]))
                for each in (self._seen(held, reads, reads.bounds[:, None]), causal)
            ], -1)  # fmt: skip
            found = attend(q, rows, heads.own, seen, self.scale, self.width)
        return found.out.astype(q.dtype)

    def _over_pool(self, q: jax.Array, new: Rows, pool: Pools, reads: Reads, heads: Heads) -> Partial:
        q = q if self.replicated else lax.all_gather(q, "dcp", axis=2, tiled=True)
        rows = rows_of(pool, reads.table)
        bounds = reads.bounds[:, None]
        if self.by_token:
            span = jnp.arange(len(q))[:, None]
            rows = {part: x.at[span, reads.new].set(new[part], mode="drop") for part, x in rows.items()}
            bounds = reads.token_bounds
        part = attend(q, rows, heads.group, self._seen(rows, reads, bounds), self.scale, self.width)
        return EXCHANGES[self.exchange](part, self.ranks) if self.ranks > 1 else part

    def _seen(self, rows: Rows, reads: Reads, bounds: jax.Array) -> jax.Array:
        """Whether each token sees each row of the pool, up to its bound [spans, n or 1]."""
        at = jnp.arange(next(iter(rows.values())).shape[1])
        seen = at < bounds[..., None]
        if self.reach is not None:  # row i is that of token i
            seen &= at > reads.positions[..., None] - self.reach
        return seen
