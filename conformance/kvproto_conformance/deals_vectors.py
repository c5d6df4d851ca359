"""Plan vectors of deals by a table, of 4-bit elements, and of caches over ranks of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire.enums import DType

Case = tuple[str, str, tuple[Geometry, Geometry], list[str], str]

EXACT = "KVP-PLAN-EXACT"
LATENT = Cache.mla("target", 2, latent=24, rope=8, page=16)
HEADS = Cache.gqa("target", 2, kv_heads=8, head_dim=16, page=16)
DRAFT = Cache.gqa("draft", 2, kv_heads=4, head_dim=16, page=16, model=1)
TALL = Cache.mla("target", 8, latent=24, rope=8, page=16)
ROWS = Cache.compressed("rows of 4", 2, dim=16, tokens_per_row=4, page_rows=16)


def cases() -> Iterator[Case]:
    """id, clause, source and sink, features, note."""
    for id_, caches, source, sink, note in DEALS:
        yield id_, EXACT, (lay_out(caches, source), lay_out(caches, sink)), [], note
    dealt = lay_out([LATENT], Parallel(tp=8, dcp=2, interleave=4, deal="zigzag")), lay_out([LATENT], Parallel(tp=2))
    for feature, clause in (("SPREAD_ONE", "KVP-PLAN-SPREAD"), ("FEW_SOURCES", EXACT)):
        yield f"zigzag-{feature.lower()}", clause, dealt, [feature], "four replicas of each share of a zigzag"
    zigzag, cyclic = (opaque(Parallel(cp=2, interleave=4, deal=deal)) for deal in ("zigzag", "cyclic"))
    stated = attrs.evolve(cyclic, groups=(attrs.evolve(cyclic.groups[0], order=np.array([0, 1], np.uint32)),))
    yield "opaque-zigzag", EXACT, (zigzag, zigzag), [], "opaque pages move between equal zigzags"
    yield "opaque-order-in-turn", EXACT, (cyclic, stated), [], "an order that says what is said without one"
    yield "refused-opaque-deals", "KVP-PLAN-OPAQUE", (cyclic, zigzag), [], "equal numbers, another order"
    for id_, clause, a, b, sizes, note in FOUR_BITS:
        yield id_, clause, (lay_out([a], Parallel(tp=sizes[0])), lay_out([b], Parallel(tp=sizes[1]))), [], note
    for id_, here, source, there, sink, note in OWN:
        yield id_, EXACT, (lay_out(here, source), lay_out(there, sink)), [], note


def opaque(sizes: Parallel) -> Geometry:
    """Latents of which strides do not describe the bytes."""
    made = lay_out([LATENT], sizes)
    (group,) = made.groups
    parts = tuple(attrs.evolve(part, encoding="tiled.4") for part in group.parts)
    return attrs.evolve(made, groups=(attrs.evolve(group, parts=parts),))


DEALS: Sequence[tuple[str, list[Cache], Parallel, Parallel, str]] = [
    ("zigzag-2-to-one", [LATENT], Parallel(cp=2, interleave=16, deal="zigzag"), Parallel(), "a zigzag to ranks that hold all"),
    ("one-to-zigzag-2", [LATENT], Parallel(), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"), "and back"),
    ("zigzag-alike", [LATENT], Parallel(cp=2, interleave=4, deal="zigzag"), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"),
     "equal zigzags: each share has one source"),
    ("zigzag-4-to-cyclic-4", [LATENT], Parallel(cp=4, interleave=4, deal="zigzag"), Parallel(tp=4, dcp=4, interleave=4),
     "runs meet in pairs: a sink needs two sources"),
    ("zigzag-4x16-to-cyclic-2x1", [LATENT], Parallel(cp=4, interleave=16, deal="zigzag"), Parallel(tp=2, dcp=2), "every pair shares a row"),
    ("zigzag-4x2-to-zigzag-2x4", [LATENT], Parallel(cp=4, interleave=2, deal="zigzag"), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"),
     "equal turns: half of the pairs share nothing"),
    ("zigzag-origins", [LATENT], Parallel(cp=2, interleave=4, origin=8, deal="zigzag"), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"),
     "from half a turn on: each share is the other's"),
    ("zigzag-origins-odd", [LATENT], Parallel(cp=2, interleave=4, origin=3, deal="zigzag"), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"),
     "from the middle of a run on"),
    ("quarters-to-cyclic", [LATENT], Parallel(cp=4, interleave=64), Parallel(tp=4, dcp=4, interleave=16), "contiguous quarters of 256 tokens"),
    ("quarters-in-runs", [LATENT], Parallel(cp=4, interleave=16, deal=(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)),
     Parallel(tp=2, dcp=2, interleave=128), "the same quarters in short runs, to halves"),
    ("shares-of-unequal-size", [LATENT], Parallel(cp=2, interleave=8, deal=(0, 1, 1)), Parallel(tp=2, dcp=2, interleave=8), "rank 1 stores twice as much"),
    ("spans", [LATENT], Parallel(cp=3, interleave=4, deal=(0, 0, 0, 1, 2, 2)), Parallel(tp=3, dcp=3, interleave=4, deal="zigzag"),
     "spans of 12, 4 and 8 tokens to a zigzag over three ranks"),
    ("ranks-in-another-order", [LATENT], Parallel(cp=3, interleave=4, deal=(2, 1, 0)), Parallel(tp=3, dcp=3, interleave=4),
     "in turn from the last rank on: each sink has another source"),
    ("shares-that-never-meet", [LATENT], Parallel(cp=4, interleave=4, deal=(0, 1, 2, 3, 2, 3)), Parallel(tp=2, dcp=2, interleave=4, deal=(0, 0, 1, 1, 1, 1)),
     "a source rank that serves one share only"),
    ("zigzag-of-rows", [ROWS], Parallel(cp=2, interleave=8, deal="zigzag"), Parallel(tp=2, dcp=2, interleave=4, deal="zigzag"), "rows of four tokens"),
    ("zigzag-and-heads", [HEADS], Parallel(tp=2, cp=2, interleave=16, deal="zigzag"), Parallel(tp=8, dcp=2, interleave=4), "heads cut, tokens dealt, both otherwise"),
    ("zigzag-beside-a-draft", [LATENT, DRAFT], Parallel(tp=2, cp=2, interleave=16, deal="zigzag"), Parallel(tp=4, dcp=4), "a draft that nobody deals"),
]  # fmt: skip
"""id, caches, source, sink and what it shows."""


def _four(scale_block: int | None, scale_dtype: DType | None = DType.F8E4M3, dtype: DType = DType.F4E2M1) -> Cache:
    return Cache.gqa(
        "target", 2, kv_heads=4, head_dim=64, page=16, dtype=dtype, scale_block=scale_block, scale_dtype=scale_dtype
    )


NVFP4, MXFP4, BARE = _four(16), _four(32, DType.F8E8M0), _four(None, None)
LATENT4 = Cache.mla(
    "target", 2, latent=48, rope=16, page=16, dtype=DType.F4E2M1, scale_block=32, scale_dtype=DType.F8E8M0
)
FOUR_BITS: Sequence[tuple[str, str, Cache, Cache, tuple[int, int], str]] = [
    ("nvfp4-2-4", EXACT, NVFP4, NVFP4, (2, 4), "4-bit heads with the scales of their blocks of 16"),
    ("nvfp4-8-1", EXACT, NVFP4, NVFP4, (8, 1), "the same, more ranks than heads"),
    ("mxfp4-4-2", EXACT, MXFP4, MXFP4, (4, 2), "blocks of 32, scales that are powers of two"),
    ("mxfp4-latent-4-2", EXACT, LATENT4, LATENT4, (4, 2), "a 4-bit latent on every rank"),
    ("refused-scales", "KVP-PLAN-FIT", NVFP4, MXFP4, (2, 2), "equal elements, other scales"),
    ("refused-blocks", "KVP-PLAN-FIT", _four(32), NVFP4, (2, 2), "equal scales, of other blocks"),
    ("refused-no-scales", "KVP-PLAN-FIT", BARE, NVFP4, (2, 2), "elements without their scales"),
    ("refused-four-bits-as-bytes", "KVP-PLAN-FIT", BARE, Cache.gqa("target", 2, kv_heads=4, head_dim=32, page=16, dtype=DType.U8),
     (2, 2), "equal bytes that one side says nothing of"),
]  # fmt: skip
"""id, clause, cache of the source and of the sink, TP of both, and what it shows."""

OWN: Sequence[tuple[str, list[Cache], Parallel, list[Cache], Parallel, str]] = [
    ("draft-of-smaller-tp", [LATENT, DRAFT.over(tp=2)], Parallel(tp=8), [LATENT, DRAFT], Parallel(tp=4), "a draft of TP 2, each half on four ranks"),
    ("draft-of-smaller-tp-at-decode", [LATENT, DRAFT], Parallel(tp=4), [LATENT, DRAFT.over(tp=2)], Parallel(tp=8), "the same at the sink"),
    ("draft-on-the-first-rank", [HEADS, DRAFT.over(tp=1, copies=False)], Parallel(tp=4, pp=2), [HEADS, DRAFT], Parallel(tp=2), "one rank has the draft"),
    ("draft-on-the-first-ranks-of-both", [HEADS, DRAFT.over(tp=2, copies=False)], Parallel(tp=4), [HEADS, DRAFT.over(tp=1, copies=False)], Parallel(tp=8),
     "sink ranks without a draft await fewer"),
    ("draft-by-heads", [LATENT, DRAFT.over(cp=1, tp=4)], Parallel(cp=4, interleave=16), [LATENT, DRAFT], Parallel(tp=4, dcp=4),
     "the target's ranks deal tokens, the draft's divide heads"),
    ("draft-with-its-own-interleave", [LATENT, DRAFT.over(interleave=4)], Parallel(cp=2, interleave=16),
     [LATENT, DRAFT.over(interleave=8)], Parallel(tp=4, dcp=2), "two groups, two deals"),
    ("draft-over-stages", [TALL, DRAFT.over(stages=(1, 1))], Parallel(pp=2), [TALL, DRAFT], Parallel(tp=2), "a draft that stages divide"),
    ("deal-of-one-cache", [LATENT, Cache.indexer("index", 2, head_dim=16, page=16, scale_block=None)], Parallel(tp=4, dcp=2),
     [LATENT.over(dcp=4, interleave=4, deal="zigzag"), Cache.indexer("index", 2, head_dim=16, page=16, scale_block=None)], Parallel(tp=4, dcp=2),
     "a cache of DCP 4 in an engine of DCP 2"),
    ("virtual-2x2", [TALL], Parallel(pp=2, virtual=2), [TALL], Parallel(tp=2), "layers 0, 1, 4, 5 and 2, 3, 6, 7"),
    ("virtual-4x2-to-2", [TALL], Parallel(pp=4, virtual=2), [TALL], Parallel(pp=2), "layer chunks dealt round to four, to halves"),
    ("virtual-2x2-uneven", [TALL], Parallel(pp=2, virtual=2, stages=(1, 3, 0, 4)), [TALL], Parallel(pp=2, virtual=4), "chunks of any size, one empty"),
    ("virtual-4x2-replicas", [TALL], Parallel(tp=4, pp=4, virtual=2), [TALL], Parallel(), "stages of four replicas each, whose layers are dealt out"),
    ("virtual-and-zigzag", [TALL], Parallel(pp=2, virtual=2, cp=2, interleave=4, deal="zigzag"), [TALL], Parallel(tp=4, dcp=2, interleave=4),
     "layers and tokens, both in an order of their own"),
]  # fmt: skip
"""id, caches and sizes of the source, and of the sink, and what it shows."""
