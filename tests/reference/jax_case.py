"""A case of attention over tokens that ranks deal among them, for the JAX engine: what each rank has, and the result."""

from collections.abc import Sequence
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kvproto import Cache, DType, Parallel, lay_out
from kvproto_reference.attention.batch import Batch, Span, batch_of
from kvproto_reference.cache import Shard
from kvproto_reference.jax_engine import attention
from kvproto_reference.jax_engine.attention import Attention, Heads, Paged, Reads
from kvproto_reference.jax_engine.mesh import RANKS, mesh_of
from kvproto_reference.jax_engine.programs import compiled

HEADS, PAGE, PAGES, DIM, WIDTH = 24, 4, 64, 8, 6
SPANS = [Span(0, 4, range(0, 16)), Span(3, 1, range(16, 32)), Span(17, 3, range(32, 48)), Span(41, 4, range(48, 64))]
"""Nothing committed; fewer tokens than ranks; the rest begin in the middle of a page."""
N = 4
DEALS = [(1, "cyclic"), (3, "cyclic"), (3, "zigzag"), (PAGE, "cyclic")]
"""Consecutive tokens of a rank, and the name of the deal."""
Floats = npt.NDArray[np.float64]


def shards(kind: str, ranks: int, interleave: int, deal: str = "cyclic") -> list[Shard]:
    made = (
        Cache.gqa("kv", 1, kv_heads=2, head_dim=DIM, page=PAGE, dtype=DType.F32)
        if kind == "gqa"
        else Cache.mla("kv", 1, latent=WIDTH, rope=DIM - WIDTH, page=PAGE, dtype=DType.F32)
    )
    (group,) = lay_out([made], Parallel(cp=ranks, interleave=interleave, deal=deal)).groups
    return [Shard(group, rank) for rank in range(ranks)]


@attrs.frozen(eq=False)
class Case:
    """Rows and queries of all spans, and what attention over all of them is."""

    kind: str
    rows: dict[str, list[Floats]]
    """Of each span, [start + count, KV heads, dim]."""
    q: Floats
    """[spans, n, heads, dim]"""

    @classmethod
    def draw(cls, kind: str, seed: int = 0) -> "Case":
        draw = np.random.default_rng(seed)
        parts, kv_heads = (("k", "v"), 2) if kind == "gqa" else (("latent",), 1)
        rows = {p: [draw.normal(size=(s.start + s.count, kv_heads, DIM)) for s in SPANS] for p in parts}
        return cls(kind, rows, 3 * draw.normal(size=(len(SPANS), N, HEADS, DIM)))

    @property
    def width(self) -> int:
        return DIM if self.kind == "gqa" else WIDTH

    @property
    def heads(self) -> list[int]:
        return [head * len(self.first[0][0]) // HEADS for head in range(HEADS)]

    @property
    def first(self) -> list[Floats]:
        return next(iter(self.rows.values()))

    def dense(self) -> list[Floats]:
        """Of each span [count, heads, width], in float64."""
        found = []
        for i, span in enumerate(SPANS):
            k, v = self.first[i][:, self.heads], self.rows.get("v", self.first)[i][:, self.heads, : self.width]
            scores = np.einsum("nhd,mhd->nhm", self.q[i, : span.count], k) * DIM**-0.5
            hidden = np.arange(len(k)) > span.start + np.arange(span.count)[:, None]
            weights = np.exp(np.where(hidden[:, None], -np.inf, scores - scores.max(-1, keepdims=True)))
            found.append(np.einsum("nhm,mhw->nhw", weights / weights.sum(-1, keepdims=True), v))
        return found

    def pools(self, made: Sequence[Shard]) -> dict[str, npt.NDArray[np.float32]]:
        """What each rank has of the committed rows, [ranks * pages, rows, KV heads, dim]; all else is NaN."""
        found = {
            p: np.full((len(made), PAGES * PAGE, *x[0].shape[1:]), np.nan, np.float32) for p, x in self.rows.items()
        }
        for rank, shard in enumerate(made):
            for i, span in enumerate(SPANS):
                slots = shard.slots(np.array(span.pages), np.arange(span.start))
                for part, pool in found.items():
                    pool[rank, slots[slots >= 0]] = self.rows[part][i][: span.start][slots >= 0]
        return {part: pool.reshape(-1, PAGE, *pool.shape[2:]) for part, pool in found.items()}

    def new(self) -> dict[str, npt.NDArray[np.float32]]:
        """[spans, n, KV heads, dim]"""
        return {
            p: np.stack([np.pad(x[s.start :], ((0, N - s.count), (0, 0), (0, 0))) for x, s in zip(each, SPANS, strict=True)])
            .astype(np.float32)
            for p, each in self.rows.items()
        }  # fmt: skip

    @property
    def pages(self) -> npt.NDArray[np.int64]:
        """[spans, pages]"""
        return np.array([span.pages for span in SPANS])

    def error(self, found: Sequence[npt.NDArray[np.float32]]) -> float:
        """The largest of a head's output, relative in L2, of what was found for each span [count or more, heads, width]."""
        worst = 0.0
        for out, dense in zip(found, self.dense(), strict=True):
            errors = np.linalg.norm(out[: len(dense)] - dense, axis=-1) / np.linalg.norm(dense, axis=-1)
            worst = max(worst, np.nan_to_num(errors, nan=np.inf).max())
        return worst


def grid(batch: Batch, values: npt.NDArray[Any], rest: int) -> npt.NDArray[np.int32]:
    """[tokens] -> [spans, n]"""
    out = np.full((len(SPANS), N), rest, np.int32)
    for i, span in enumerate(SPANS):
        out[i, : span.count] = values[batch.starts[i] : batch.starts[i + 1]]
    return out


def program(case: Case, ranks: int, variants: Sequence[Attention], on: Sequence[int]) -> Any:
    """Takes pools, reads and queries by rank; gives what each variant does, which share most of what is compiled."""

    def run(pool: Any, reads: Reads, q: Any) -> Any:
        mine = Reads(*(x[0] for x in reads))
        each = HEADS // ranks
        own = attention.lax.dynamic_slice_in_dim(jnp.array(case.heads), attention.lax.axis_index("dcp") * each, each)
        new = {part: jnp.array(x) for part, x in case.new().items()}
        paged = {part: Paged(rows) for part, rows in pool.items()}
        return [made(q[0], new, paged, mine, Heads(jnp.array(case.heads), own))[None] for made in variants]

    return compiled(mesh_of(ranks, ranks, on=on), run, (RANKS, RANKS, RANKS), RANKS)


def worst(
    case: Case, ranks: int, deals: Sequence[tuple[int, str]], *variants: Attention, on: Sequence[int] = ()
) -> list[float]:
    """The largest error of a head's output, relative in L2, over all tokens and deals, of each variant.

    `on`: the GPUs of the ranks; none: host devices.
    """
    found, run, each = [0.0] * len(variants), program(case, ranks, variants, on), HEADS // ranks
    q, replicated = case.q.astype(np.float32), variants[0].replicated
    dealt = [q if replicated else q[:, :, rank * each : (rank + 1) * each] for rank in range(ranks)]
    for interleave, deal in deals:
        of = shards(case.kind, ranks, interleave, deal)
        batches = [batch_of(SPANS, shard) for shard in of]
        reads = Reads(
            np.stack([grid(b, b.positions, -1) for b in batches]),
            np.stack([case.pages] * ranks),
            np.stack([shard.rows(np.array([s.start for s in SPANS])) for shard in of]),
            np.stack([grid(b, b.token_bounds, 0) for b in batches]),
            np.stack([grid(b, np.where(b.slots < 0, 999, b.token_bounds - 1), 999) for b in batches]),
        )
        for nth, by_rank in enumerate(run(case.pools(of), reads, np.stack(dealt))):
            found[nth] = max(found[nth], case.error(np.concatenate(list(np.asarray(by_rank)), axis=2)))
    return found


def variant(case: Case, ranks: int, **how: Any) -> Attention:
    return Attention(DIM**-0.5, case.width, ranks, **how)
