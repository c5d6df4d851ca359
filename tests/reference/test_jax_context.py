"""Attention of prefill's CP groups in JAX against float64 attention; rows of others and of padding are NaN."""

import numpy as np
import pytest

pytest.importorskip("jax", exc_type=ImportError)
import jax.numpy as jnp

from kvproto_reference.attention.batch import batch_of
from kvproto_reference.jax_engine.attention import Heads, Paged, Reads
from kvproto_reference.jax_engine.context import ContextAttention
from kvproto_reference.jax_engine.mesh import RANKS, host_devices, mesh_of
from kvproto_reference.jax_engine.programs import compiled
from tests.reference.jax_case import DIM, PAGE, SPANS, Case, N, shards

host_devices(8)


@pytest.mark.parametrize(("kind", "ranks"), [("gqa", 2), ("mla", 3), ("gqa", 8)])
def test_ranks_attend_with_their_tokens_to_all(kind: str, ranks: int) -> None:
    case = Case.draw(kind, 3)
    attend = ContextAttention(DIM**-0.5, case.width, ranks)

    def program(pool, reads, q, new):  # type: ignore[no-untyped-def]
        heads = Heads(*[jnp.array(case.heads)] * 2)
        mine = {part: x[0] for part, x in new.items()}
        paged = {part: Paged(x) for part, x in pool.items()}
        return attend(q[0], mine, paged, Reads(*(x[0] for x in reads)), heads)[None]

    run = compiled(mesh_of(1, 1, ranks), program, (RANKS,) * 4, RANKS)
    for interleave in (1, 3, PAGE):
        of = shards(kind, ranks, interleave)
        # of each rank and span: its tokens, counted from the first of the span
        mine = [[np.flatnonzero(s.owners(x.start + np.arange(x.count)) == s.cp_rank) for x in SPANS] for s in of]

        def dealt(values, rest, mine=mine):  # type: ignore[no-untyped-def]
            """Of each span [count or more, ...] -> [ranks, spans, n, ...]."""
            made = np.full((ranks, len(SPANS), N, *values[0].shape[1:]), rest, values[0].dtype)
            for rank, spans in enumerate(mine):
                for i, some in enumerate(spans):
                    made[rank, i, : len(some)] = values[i][some]
            return made

        reads = Reads(
            dealt([x.start + np.arange(x.count) for x in SPANS], -1),
            np.stack([case.pages] * ranks),
            np.stack([batch_of(SPANS, shard, whole=False).bounds for shard in of]),
            *[np.zeros((ranks, 1), np.int32)] * 2,  # what a pass by token reads
        )
        new = {part: dealt(rows, np.nan) for part, rows in case.new().items()}
        found = np.asarray(run(case.pools(of), reads, dealt(case.q.astype(np.float32), np.nan), new))
        whole = np.zeros(found.shape[1:], np.float32)
        for rank, spans in enumerate(mine):
            for i, some in enumerate(spans):
                whole[i, some] = found[rank, i, : len(some)]
        assert case.error(whole) < 1e-5
