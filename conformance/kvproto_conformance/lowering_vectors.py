"""Makes vectors/lowering.json by the suite's own lowering: `python -m kvproto_conformance.lowering_vectors`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Rank, gqa, mla, owns
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind
from kvproto.wire.messages import Columns, Grants
from kvproto_conformance.checking import extensions
from kvproto_conformance.lowering import copies, stream, sums
from kvproto_conformance.row_vectors import changed, dealt, one, one_two, over, sections
from kvproto_conformance.suites import MADE, text

FILE = MADE / "lowering.json"
Case = tuple[str, str, dict[str, Any], dict[str, Any], str]
"""Id, clause, source, sink, note."""
EXACT = "KVP-PLAN-EXACT"


def columns(
    geometry: Geometry, rank: int, pools: dict[int, int], gap: int, apart: bool = False, pad: int = 0,
    odd: bool = False,
) -> list[Columns]:  # fmt: skip
    """Items one after the other, [item, row, lane], with `gap` bytes after each row and `pad` after each item.

    A region a group, or a column each where they are `apart`. `odd`: each second layer has a byte more after a row.
    """
    groups, made = {g.id: g for g in geometry.groups}, []
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group, at, found = groups[share.group], 0, []
        for n in range(share.layers.size):
            for p, part in enumerate(group.parts):
                row = part.lane_bytes * sum(s.hi - s.lo for s in share.lanes if s.part == p) + gap + (odd and n % 2)
                found.append((at, row * group.rows + pad, row, part.lane_bytes))
                at += (row * group.rows + pad) * pools[group.id]
        offset, item, step, lane = np.array(found, np.uint64).T.copy()
        region = np.full(len(found), group.id + 1, np.uint32)
        if apart:
            region += 2 * np.arange(len(found), dtype=np.uint32)
        made.append(
            Columns(group=group.id, items=pools[group.id], region=region, offset=offset, item_stride=item, row_stride=step, lane_stride=lane)
        )  # fmt: skip
    return made


def side(
    geometry: Geometry, items: list[int], first: int, count: int, rank: int = 0, gap: int = 0, apart: bool = False,
    pad: int = 0, pool: int = 8, odd: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One rank, all of whose groups have the same window and items, of a pool of so many."""
    pools = {g.id: pool for g in geometry.groups}
    grants = [
        Grants(group=g.id, first=first, count=count, valid=first + count, items=np.array(items, np.uint32))
        for g in geometry.groups
    ]
    return {
        "geometry": to_json(geometry), "rank": str(rank), "columns": [to_json(c) for c in columns(geometry, rank, pools, gap, apart, pad, odd)],
        "windows": [to_json(grant) for grant in grants],
    }  # fmt: skip


def lowered() -> Iterator[Case]:
    """All cases of this file."""
    kv = gqa(0, "target", 0, 2, 4, 4, dtype=DType.U8)
    yield from by_windows(kv)
    yield from by_sections(kv)
    yield from by_kinds(kv)
    yield from by_tables(kv)
    yield from by_shares()
    yield from by_many(kv)


def by_windows(kv: Group) -> Iterator[Case]:
    """Rings and pages, and rows that stand for several tokens."""
    ring = attrs.evolve(kv, kind=ItemKind.RING, rows=8)
    yield "ring-to-pages", EXACT, side(one(ring), [2], 0, 20), side(one(kv), [1, 5], 13, 7), "the worked example"
    yield "pages-to-ring", EXACT, side(one(kv), [0, 1, 2, 7, 5], 0, 20), side(one(ring), [3], 13, 7), "the same back"
    longer = attrs.evolve(ring, rows=16)
    yield "ring-to-ring", EXACT, side(one(ring), [2], 0, 20, gap=1), side(one(longer), [4], 13, 7), "rings of 8 and 16"
    scales = attrs.evolve(gqa(0, "scales", 0, 2, 4, 1), tokens_per_row=16, partial=True)
    yield (
        "scale-of-a-page-in-part", EXACT, side(one(scales), [3, 0, 2], 0, 45), side(one(scales), [1, 6], 16, 29),
        "row 2 is the scale of tokens 32 to 44",
    )  # fmt: skip
    whole = attrs.evolve(scales, partial=None)
    yield (
        "rows-covered-wholly", EXACT, side(one(whole), [3, 0], 0, 45), side(one(whole), [1], 16, 29),
        "without partial row 1 alone",
    )  # fmt: skip
    half = over(scales, 2, 1)
    yield (
        "scales-of-one-head", EXACT, side(half, [3, 0], 0, 20, rank=1), side(one(scales), [1, 6], 0, 20),
        "from the second of two ranks",
    )  # fmt: skip


def by_sections(kv: Group) -> Iterator[Case]:
    """Parts that one side stores in several sections."""
    joint = mla(0, "target", 0, 12, 4, dtype=DType.U8)
    split = sections(joint, 8, 4)
    window = ([5, 2, 7], 0, 11), ([3, 1], 5, 6)
    yield (
        "latent-joint", EXACT, side(one(split), *window[0]), side(one(joint), *window[1], gap=3),
        "two buffers to one row",
    )  # fmt: skip
    yield (
        "latent-split", EXACT, side(one(joint), *window[0], gap=3), side(one(split), *window[1]),
        "one row to two buffers",
    )  # fmt: skip
    yield (
        "latent-elsewhere", EXACT, side(one(split), *window[0]), side(one(sections(joint, 3, 9)), *window[1]),
        "cut at 3 and at 8",
    )  # fmt: skip
    two = sections(kv, 3, 1)
    yield (
        "heads-in-sections", EXACT, side(one(two), *window[0]), side(one(kv), *window[1]), "a byte of every head apart",
    )  # fmt: skip
    fine = gqa(0, "target", 0, 4, 2, 4, dtype=DType.U8)
    yield (
        "sections-folded", EXACT, side(one(fine), *window[0]), side(one(two), *window[1]),
        "lanes of 2 bytes to 3 and 1",
    )  # fmt: skip
    yield (
        "sections-of-a-rank", EXACT, side(odd_small(), *window[0], rank=1), side(one(kv), *window[1]),
        "lanes in another order",
    )  # fmt: skip


def by_kinds(kv: Group) -> Iterator[Case]:
    """Slots with scratch rows, items that move whole, and deals in turn."""
    ring = attrs.evolve(kv, kind=ItemKind.RING, rows=8)
    state = attrs.evolve(kv, kind=ItemKind.SLOT, rows=5, live_rows=3)
    yield (
        "slot-with-scratch", EXACT, side(one(state), [6], 0, 9), side(one(attrs.evolve(state, rows=3)), [0], 0, 9),
        "scratch is never sent",
    )  # fmt: skip
    yield (
        "opaque-slot-with-scratch", EXACT, side(one(changed(state, 0, encoding="tiled")), [6], 0, 9),
        side(one(changed(state, 0, encoding="tiled")), [0], 0, 9),
        "which rows are scratch cannot be told, so it moves whole",
    )  # fmt: skip
    coded = changed(kv, 0, encoding="tiled")
    yield (
        "opaque-in-part", "KVP-GRANT-WHOLE", side(one(coded), [5, 2, 7], 0, 11), side(one(coded), [3, 1], 4, 7),
        "whole items, the plain part too",
    )  # fmt: skip
    yield (
        "dealt", EXACT, side(dealt(kv, 2, 3), [4, 6], 0, 14), side(dealt(attrs.evolve(kv, rows=3), 2, 2), [1, 7, 2], 0, 14), "3 tokens in turn to 2 tokens in turn",
    )  # fmt: skip
    yield (
        "ring-to-dealt", EXACT, side(one_two(ring), [2], 0, 20), side(dealt(kv, 2, 3), [1, 5], 12, 8),
        "rank 0 of two takes its runs of 3",
    )  # fmt: skip
    yield (
        "layers-of-two-models", "KVP-STG-ORDER", side(models(4), [5, 2, 7], 0, 11), side(models(3), [3, 1, 0], 2, 7),
        "two layers of the target, keys and values of a draft, pages of other sizes",
    )  # fmt: skip


def by_many(kv: Group) -> Iterator[Case]:
    """Windows of many pages, in pools whose items touch or lie apart: what is one run of bytes depends on both."""
    single, two, three = (attrs.evolve(kv, rows=rows) for rows in (1, 2, 3))
    deal, turn = dealt(two, 2, 4), table(three, [0, 1, 1, 0], 6)
    whole, late, part = (0, 95), (9, 80), (0, 33)
    for id_, source, a, from_, pad, sink, b, to, other, note in (
        ("many-single-rows", one(single), 0, whole, 0, one(single), 0, late, 0, "both pools touch"),
        ("many-single-rows-apart", one(single), 0, whole, 3, one(single), 0, late, 3, "neither does"),
        ("many-single-rows-joined", one(single), 0, whole, 3, one(three), 0, late, 0, "rows by themselves to pages of 3"),
        ("many-to-single-rows", one(three), 0, whole, 0, one(single), 0, late, 3, "the same back"),
        ("many-pages", one(two), 0, whole, 0, one(three), 0, late, 0, "pages of 2 to pages of 3, which touch"),
        ("many-pages-apart", one(two), 0, whole, 5, one(three), 0, late, 7, "the same, of items that lie apart"),
        ("many-pages-to-apart", one(three), 0, whole, 0, one(two), 0, late, 5, "one pool touches, the other does not"),
        ("many-pages-from-apart", one(three), 0, whole, 7, one(two), 0, late, 0, "the same the other way"),
        ("few-pages-apart", one(two), 0, part, 5, one(three), 0, part, 7, "no more than 32 pages, of items that lie apart"),
        ("many-dealt", deal, 1, whole, 5, turn, 1, late, 7, "between deals, of items that lie apart"),
        ("many-dealt-that-touch", deal, 0, whole, 0, turn, 1, late, 0, "the same of pools that touch"),
        ("many-from-dealt", turn, 0, whole, 7, one(single), 0, late, 3, "from a deal by a table to single rows"),
        ("many-to-dealt", one_two(single), 0, whole, 0, deal, 1, late, 5, "from single rows to a deal in turn"),
    ):  # fmt: skip
        here, there = (
            side(geometry, scattered(geometry, rank, *window), *window, rank, pad=gap, pool=_MANY)
            for geometry, rank, window, gap in ((source, a, from_, pad), (sink, b, to, other))
        )
        yield id_, EXACT, here, there, note


_MANY = 96
"""Items of a pool of many."""


def scattered(geometry: Geometry, rank: int, first: int, count: int) -> list[int]:
    """As many items as a rank needs of these tokens, three by three in their order."""
    (share,) = next(r for r in geometry.ranks if r.rank == rank).owns
    need = items_needed(geometry.groups[0], share.cp_rank, first, count)
    return [(5 * (n // 3) + rank + 3) % (_MANY // 3) * 3 + n % 3 for n in range(need)]


def by_shares() -> Iterator[Case]:
    """Between ranks that own other heads and other layers: where a lane and a layer is depends on what its rank owns."""
    kv = gqa(0, "target", 0, 4, 2, 4, dtype=DType.U8)
    every = [(range(4), [(0, 4)])]
    heads = [(range(4), [(0, 2)]), (range(4), [(2, 4)])]
    outer = [(range(4), [(0, 1), (3, 4)]), (range(4), [(1, 3)])]
    stages = [(range(2), [(0, 4)]), (range(2, 4), [(0, 4)])]
    turns = [((0, 2), [(0, 4)]), ((1, 3), [(0, 4)])]
    window = ([5, 2, 7], 0, 11), ([3, 1], 5, 6)
    for id_, source, a, sink, b, note in (
        ("heads-of-the-second-rank", heads, 1, every, 0, "two heads of four to the rank that has all"),
        ("heads-to-the-second-rank", every, 0, heads, 1, "two of four heads to the rank that has no others"),
        ("heads-apart", outer, 0, every, 0, "the first head and the last, side by side at the source"),
        ("heads-to-apart", heads, 1, outer, 0, "the last head to the second place of its rank"),
        ("layers-of-the-second-stage", stages, 1, every, 0, "layers 2 and 3 are the first two of their rank"),
        ("layers-to-the-second-stage", every, 0, stages, 1, "the same the other way"),
        ("layers-of-turns", stages, 1, turns, 1, "layer 3 alone, which is the second of both ranks"),
    ):
        here, there = (
            side(shares(kv, owned), *at, rank=rank)
            for owned, at, rank in ((source, window[0], a), (sink, window[1], b))
        )
        yield id_, EXACT, here, there, note
    whole = shares(kv, every)
    here, there = side(whole, *window[0], apart=True), side(whole, *window[1])
    yield ("a-region-a-layer", EXACT, here, there, "allocations of their own at the source, one pool at the sink")
    here, there = side(whole, *window[0]), side(whole, *window[1], apart=True)
    yield "to-a-region-a-layer", EXACT, here, there, "the same the other way"
    for id_, a, b in (("odd-layers", True, False), ("to-odd-layers", False, True)):
        here, there = side(whole, *window[0], odd=a), side(whole, *window[1], odd=b)
        yield id_, EXACT, here, there, "rows of each second layer are a byte further from each other"


def shares(group: Group, owned: list[tuple[Any, list[tuple[int, int]]]]) -> Geometry:
    """Ranks that own these layers, and of each part these lanes."""
    made = tuple(Rank(rank=r, owns=(owns(group, layers, lanes),)) for r, (layers, lanes) in enumerate(owned))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=made)


def models(page: int) -> Geometry:
    """A target whose cache is latent, and a draft with heads."""
    groups = (gqa(0, "draft", 1, 2, 4, page, dtype=DType.U8), mla(1, "target", 0, 6, page, dtype=DType.U8))
    ranks = (Rank(rank=0, owns=(owns(groups[0], [0]), owns(groups[1], range(2)))),)
    return Geometry(replica=0, facts=(), groups=groups, ranks=ranks)


def by_tables(kv: Group) -> Iterator[Case]:
    """The same of deals by a table of runs, and of 4-bit elements."""
    rows, single = attrs.evolve(kv, tokens_per_row=2), attrs.evolve(kv, rows=1)
    zigzag, uneven, cyclic = table(kv, [0, 1, 1, 0], 3), table(kv, [0, 1, 1], 2), table(kv, [0, 1], 2)
    coded = table(changed(kv, 0, encoding="tiled"), [0, 1, 1, 0], 2)
    heads = Cache.gqa(
        "target", 1, kv_heads=2, head_dim=16, page=4, dtype=DType.F4E2M1, scale_block=16, scale_dtype=DType.F8E4M3
    )
    for id_, source, a, sink, b, first, count, note in (
        ("zigzag-rank-0", zigzag, 0, one(kv), 0, 0, 20, "runs 0 and 3 of the turn, then again"),
        ("zigzag-rank-1", zigzag, 1, one(kv), 0, 0, 20, "runs 1 and 2, which are six rows at a stretch"),
        ("to-zigzag", one(kv), 0, zigzag, 1, 5, 14, "a window that begins in the middle of a run"),
        ("zigzag-to-cyclic-0", zigzag, 0, cyclic, 0, 0, 20, "runs of 3 there and back to runs of 2 in turn"),
        ("zigzag-to-cyclic-1", zigzag, 1, cyclic, 0, 0, 20, "the other rank's share of it"),
        ("zigzag-alike", zigzag, 1, table(attrs.evolve(kv, rows=3), [0, 1, 1, 0], 3), 1, 3, 17, "equal deals, other pages"),
        ("zigzag-from-an-origin", table(kv, [0, 1, 1, 0], 3, 4), 1, zigzag, 0, 4, 16, "a turn that begins with token 4"),
        ("shares-of-unequal-size", uneven, 1, one(kv), 0, 0, 20, "two runs of three"),
        ("zigzag-to-unequal-shares", zigzag, 0, uneven, 1, 1, 18, "neither is in turn"),
        ("spans-of-three", table(kv, [0, 0, 2, 1, 1, 1, 2], 2), 2, cyclic, 1, 0, 20, "rank 2 takes a third of the runs, apart"),
        ("zigzag-of-rows", table(rows, [0, 1, 1, 0], 4), 1, one(rows), 0, 2, 25, "rows of two tokens, the last one incomplete"),
        ("zigzag-of-single-rows", table(single, [0, 1, 1, 0], 1), 0, one(single), 0, 1, 7, "pages of one row"),
        ("opaque-zigzag", coded, 1, coded, 1, 0, 16, "whole items between equal zigzags"),
        ("opaque-zigzag-late", coded, 0, coded, 0, 8, 12, "the same of a window that begins with the second item"),
        ("nvfp4-second-head", lay_out([heads]), 0, lay_out([heads], Parallel(tp=2)), 1, 3, 6, "8 bytes of 16 elements, a byte of scale"),
    ):  # fmt: skip
        here, there = (
            side(geometry, some(geometry, rank, first, count), first, count, rank)
            for geometry, rank in ((source, a), (sink, b))
        )
        yield id_, "KVP-DCP-OWNER" if "nvfp4" not in id_ else EXACT, here, there, note


def table(group: Group, order: list[int], interleave: int, origin: int = 0) -> Geometry:
    """A rank for each share of a deal whose runs are taken in this order."""
    ranks = max(order) + 1
    group = attrs.evolve(group, cp_size=ranks, interleave=interleave, origin=origin, order=np.array(order, np.uint32))
    made = tuple(Rank(rank=r, owns=(owns(group, [0], cp_rank=r),)) for r in range(ranks))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=made)


def some(geometry: Geometry, rank: int, first: int, count: int) -> list[int]:
    """As many items as a rank needs of these tokens, in no order."""
    (share,) = next(r for r in geometry.ranks if r.rank == rank).owns
    need = items_needed(geometry.groups[0], share.cp_rank, first, count)
    return [(5 * n + rank + 3) % 8 for n in range(need)]


def odd_small() -> Geometry:
    """Two ranks with other lanes of each section."""
    group = sections(gqa(0, "target", 0, 2, 4, 4, dtype=DType.U8), 3, 1)
    lanes: list[list[tuple[int, int, int]]] = [
        [(0, 0, 1), (1, 1, 2), (2, 0, 2)],
        [(0, 1, 2), (1, 1, 2), (1, 0, 1), (2, 0, 2)],
    ]
    made = []
    for rank, spans in enumerate(lanes):
        owned = tuple(LaneSpan(part=p, lo=lo, hi=hi) for p, lo, hi in spans)
        made.append(Rank(rank=rank, owns=(attrs.evolve(owns(group, [0]), lanes=owned),)))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(made))


def made() -> str:
    """The text of the file."""
    return text_of(lowered())


def text_of(cases: Iterable[Case]) -> str:
    """The text of a file of cases, with what the suite's own lowering makes of them."""
    rows = []
    for id_, clause, here, there, note in cases:
        given = {"source": here, "sink": there, "expected": copies(here, there), "sums": sums(here, there)}
        given["stream"] = stream(here, there)
        needs = extensions(here["geometry"], there["geometry"])
        rows.append({"id": id_, "clause": clause, **needs, **given, "note": note})
    return text("lowering", rows)


if __name__ == "__main__":
    FILE.write_text(made())
