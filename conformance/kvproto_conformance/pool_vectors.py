"""Makes lowering-pools.json, of all that strides can state: `python -m kvproto_conformance.pool_vectors`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Owns, Rank, gqa, handoff, mla, owns
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ItemKind
from kvproto.wire.messages import Columns, Grants
from kvproto_conformance.lowering_vectors import Case, shares, table, text_of
from kvproto_conformance.row_vectors import changed, dealt, layers_apart, one, one_two, sections
from kvproto_conformance.suites import MADE

FILE = MADE / "lowering-pools.json"
POOL = 12
"""Items of a pool."""
Strides = tuple[int, int, int]
"""Bytes from item to item, from row to row and from lane to lane."""
Order = Callable[[int, int, int], Strides]
"""Strides by the rows of an item, the lanes that a rank has, and the bytes of a lane."""


def tokens(rows: int, lanes: int, size: int) -> Strides:
    """NHD: all heads of a token side by side."""
    return rows * lanes * size, lanes * size, size


def heads(rows: int, lanes: int, size: int) -> Strides:
    """HND: all tokens of a head side by side."""
    return lanes * rows * size, size, rows * size


def padded(rows: int, lanes: int, size: int) -> Strides:
    """A byte after each lane."""
    return rows * lanes * (size + 1), lanes * (size + 1), size + 1


def between(rows: int, lanes: int, size: int) -> Strides:
    """The first rows of all items, then their second rows: a pool that was transposed."""
    return lanes * size, POOL * lanes * size, size


def heads_between(rows: int, lanes: int, size: int) -> Strides:
    """A pool for each head, as of engines that keep heads apart."""
    return rows * size, size, POOL * rows * size


def columns(share: Owns, group: Group, *orders: Order, joint: bool = False) -> Columns:
    """The columns of a share in its group's region: layers take turns with the orders; if `joint`, in each item."""
    made: list[Strides] = []
    for n in range(share.layers.size):
        for p, part in enumerate(group.parts):
            lanes = sum(span.hi - span.lo for span in share.lanes if span.part == p)
            made.append(orders[n % len(orders)](group.rows, lanes, part.lane_bytes))
    sizes = [_end(strides, group, share, i) for i, strides in enumerate(made)]
    offsets = np.cumsum([0, *sizes[:-1]])
    item, row, lane = (np.array(each, np.uint64) for each in zip(*made, strict=True))
    if joint:
        offsets, item = np.cumsum([0, *item.tolist()[:-1]]), np.full(len(made), item.sum())
    return Columns(
        group=group.id, items=POOL, region=np.full(len(made), group.id + 1, np.uint32),
        offset=offsets.astype(np.uint64), item_stride=item, row_stride=row, lane_stride=lane,
    )  # fmt: skip


def _end(strides: Strides, group: Group, share: Owns, column: int) -> int:
    """Bytes from the first of a column to the end of its last."""
    p = column % len(group.parts)
    lanes = sum(span.hi - span.lo for span in share.lanes if span.part == p)
    counts = POOL, group.rows, lanes
    return sum((n - 1) * each for n, each in zip(counts, strides, strict=True)) + group.parts[p].lane_bytes


def side(
    geometry: Geometry, first: int, count: int, *orders: Order, rank: int = 0, items: list[int] | None = None,
    joint: bool = False, valid: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One rank, whose groups all have this window; it names as many items as are needed, in no order."""
    groups, grants, placed = {g.id: g for g in geometry.groups}, [], []
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        need = items_needed(group, share.cp_rank, first, count)
        some = [(5 * n + rank + 3) % POOL for n in range(need)] if items is None else items[:need]
        named = np.array(some, np.uint32) if group.kind != ItemKind.HANDOFF else None
        grants.append(Grants(group=group.id, first=first, count=count, valid=valid or first + count, items=named))
        if group.kind != ItemKind.HANDOFF:
            placed.append(columns(share, group, *(orders or (tokens,)), joint=joint))
    return {
        "geometry": to_json(geometry), "rank": str(rank), "columns": [to_json(each) for each in placed],
        "windows": [to_json(grant) for grant in grants],
    }  # fmt: skip


def whole(group: Group, layers: int = 2) -> Geometry:
    """One rank that has all layers of a group."""
    return Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(layers)),)),))


def cases() -> Iterator[Case]:
    """id, clause, source, sink, note."""
    yield from _orders()
    yield from _lanes()
    yield from _several()
    yield from _rows()


EXACT = "KVP-PLAN-EXACT"


def _orders() -> Iterator[Case]:
    """Pools of one cache in two orders of axes."""
    four, three = (gqa(0, "target", 0, 4, 3, rows, dtype=DType.U8) for rows in (4, 3))
    single = attrs.evolve(four, rows=1)
    for id_, source, from_, sink, to, note in (
        ("heads-first", four, (heads,), four, (heads,), "HND on both sides, from page to page of the same size"),
        ("heads-first-to-tokens", four, (heads,), four, (tokens,), "HND to NHD"),
        ("tokens-to-heads-first", four, (tokens,), three, (heads,), "NHD to HND, in pages of another size"),
        ("heads-first-other-pages", four, (heads,), three, (heads,), "HND on both sides: rows of a head touch within a page"),
        ("heads-padded", four, (padded,), four, (tokens,), "a byte after each head at the source"),
        ("to-heads-padded", four, (heads,), three, (padded,), "the same at the sink, from HND"),
        ("heads-in-pools-of-their-own", four, (heads_between,), three, (tokens,), "a pool for each head"),
        ("rows-of-all-items", four, (between,), three, (heads,), "items between the rows of an item"),
        ("to-rows-of-all-items", four, (tokens,), four, (between,), "the same at the sink"),
        ("layers-of-two-orders", four, (tokens, heads), four, (tokens,), "layer 0 in NHD and layer 1 in HND, as of two backends"),
        ("to-layers-of-two-orders", four, (heads,), three, (heads, tokens), "the same at the sink"),
        ("layers-of-two-orders-both", four, (tokens, heads), three, (padded, heads, tokens), "and three orders there"),
        ("single-rows-heads-first", single, (heads,), three, (heads,), "pages of one row, where HND and NHD are one"),
    ):  # fmt: skip
        layers = max(2, len(from_), len(to))
        a, b = side(whole(source, layers), 0, 11, *from_), side(whole(sink, layers), 5, 6, *to)
        yield id_, EXACT, a, b, note
    for id_, here, there, note in (
        ("joint-to-apart", True, False, "an item has K and V of all layers, as in a unified pool"),
        ("apart-to-joint", False, True, "the same at the sink"),
        ("joint-to-joint", True, True, "on both sides, of items of other sizes"),
    ):
        a, b = (
            side(whole(group), *window, order, joint=joint)
            for group, window, order, joint in ((four, (0, 11), heads, here), (three, (5, 6), tokens, there))
        )
        yield id_, EXACT, a, b, note


def _lanes() -> Iterator[Case]:
    """Lanes that do not touch, of which a rank has some, and which the other side cuts otherwise."""
    group = gqa(0, "target", 0, 8, 4, 4, dtype=DType.U8)
    fine, finest, coarse = (
        attrs.evolve(group, parts=tuple(attrs.evolve(p, lanes=n, lane_bytes=32 // n) for p in group.parts))
        for n in (16, 32, 4)
    )
    every, half = [(range(2), [(0, 8)])], [(range(2), [(0, 4)]), (range(2), [(4, 8)])]
    outer = [(range(2), [(0, 2), (7, 8)]), (range(2), [(2, 7)])]
    turned = [(range(2), [(5, 8), (0, 3)]), (range(2), [(3, 5)])]
    thirds = [(range(2), [(0, 5)]), (range(2), [(5, 11)]), (range(2), [(11, 16)])]
    quarters = [(range(2), [(n, n + 1)]) for n in range(4)]
    for id_, source, a, from_, sink, b, to, note in (
        ("half-heads-first", (group, half), 1, heads, (group, every), 0, tokens, "four of eight heads in HND to the rank that has all"),
        ("to-half-heads-first", (group, every), 0, heads, (group, half), 1, heads, "the same back, HND on both sides"),
        ("outer-heads-first", (group, outer), 0, heads, (group, every), 0, padded, "heads 0, 1 and 7, side by side at the source"),
        ("heads-first-to-turned", (group, half), 1, heads, (group, turned), 0, heads, "the last heads come first at the sink"),
        ("turned-to-outer", (group, turned), 0, padded, (group, outer), 1, heads, "heads 2, 5 and 6, in other places on each side"),
        ("folded-heads-first", (fine, [(range(2), [(0, 16)])]), 0, heads, (group, half), 1, tokens, "HND of lanes that are half as long"),
        ("folded-to-heads-first", (group, half), 1, tokens, (fine, [(range(2), [(0, 16)])]), 0, heads, "the same back"),
        ("folded-both-heads-first", (group, half), 0, heads, (fine, [(range(2), [(0, 16)])]), 0, heads, "HND on both sides, a lane to two"),
        ("folded-in-four", (coarse, quarters), 2, heads, (fine, [(range(2), [(0, 16)])]), 0, padded, "one lane of 8 bytes to four of 2"),
        ("folded-from-four", (fine, [(range(2), [(0, 16)])]), 0, padded, (coarse, quarters), 1, heads, "and back, none of which touch"),
        ("folded-thirds", (fine, thirds), 1, heads, (coarse, [(range(2), [(0, 4)])]), 0, heads, "lanes 5 to 10, which begin and end within a lane of the sink"),
        ("folded-to-thirds", (coarse, [(range(2), [(0, 4)])]), 0, heads, (fine, thirds), 1, heads, "the same back: from the middle of a lane on"),
        ("folded-to-thirds-padded", (coarse, [(range(2), [(0, 4)])]), 0, padded, (fine, thirds), 2, padded, "from the last byte of a lane on"),
        ("folded-to-halves-of-lanes", (coarse, quarters), 0, padded, (finest, [(range(2), [(3, 7)]), (range(2), [(0, 3), (7, 32)])]), 0, padded, "four bytes out of the middle of a lane"),
        ("folded-turned", (coarse, [(range(2), [(2, 4), (0, 2)])]), 0, heads, (fine, [(range(2), [(12, 16), (0, 4)]), (range(2), [(4, 12)])]), 0, heads, "both store lanes in another order, and in HND"),
    ):  # fmt: skip
        here, there = side(shares(*source), 0, 11, from_, rank=a), side(shares(*sink), 5, 6, to, rank=b)
        yield id_, EXACT, here, there, note
    cut = sections(sections(group, 3, 1), 1, 3, part=2)
    for id_, source_, from_, sink_, to, note in (
        ("sections-heads-first", whole(cut), heads, whole(group), heads, "two sections of each head, HND everywhere"),
        ("to-sections-heads-first", whole(group), tokens, whole(cut), heads, "to sections whose lanes lie apart"),
        ("sections-to-sections", whole(cut), padded, whole(sections(group, 2, 2)), heads, "cut elsewhere, and no lanes touch"),
        ("sections-folded-heads-first", whole(fine), heads, whole(cut), heads, "half lanes to sections of 3 bytes and 1"),
        ("sections-of-coarse-lanes", whole(sections(coarse, 5, 3)), padded, whole(fine), heads, "sections that end within a lane of the sink"),
        ("sections-of-coarse-lanes-back", whole(fine), padded, whole(sections(coarse, 3, 5)), heads, "the same back"),
    ):  # fmt: skip
        yield id_, EXACT, side(source_, 0, 11, from_), side(sink_, 5, 6, to), note


def _several() -> Iterator[Case]:
    """Several groups and ranks: which group of the source a layer comes from, and what is not copied at all."""
    kv = gqa(0, "target", 0, 2, 4, 4, dtype=DType.U8)
    joint = mla(0, "target", 0, 6, 4, dtype=DType.U8)
    apart, together = layers_apart(joint), whole(joint, 4)
    yield (
        "two-groups-to-one", EXACT, side(apart, 0, 11), side(together, 5, 6),
        "layers 0 and 2 from pages of 4, 1 and 3 from pages of 5",
    )  # fmt: skip
    yield "one-group-to-two", EXACT, side(together, 0, 11), side(apart, 5, 6), "the same back"
    other = attrs.evolve(joint, id=1, name="late", rows=3)
    halves = Geometry(
        replica=0, facts=(), groups=(joint, other),
        ranks=(Rank(rank=0, owns=(owns(joint, [0, 1]), owns(other, [2, 3, 5]))),),
    )  # fmt: skip
    yield "two-groups-to-two", EXACT, side(apart, 0, 11), side(Geometry(
        replica=0, facts=(), groups=halves.groups, ranks=(Rank(rank=0, owns=(owns(joint, [0, 1]), owns(other, [2, 3]))),)
    ), 5, 6), "each group of the sink draws from both"  # fmt: skip
    yield (
        "layers-that-nobody-asks-for", EXACT, side(halves, 0, 11), side(shares(joint, [((1, 2, 5), [(0, 1)])]), 5, 6),
        "layers 1, 2 and 5, out of two groups",
    )  # fmt: skip
    stacked = [(range(4), [(0, 2)]), (range(2, 6), [(0, 2)]), (range(1, 3), [(0, 2)])]
    for rank in range(3):
        yield (
            f"stages-that-overlap-{rank}", EXACT, side(shares(kv, stacked), 0, 11, heads, rank=rank),
            side(whole(kv, 6), 5, 6), "layers that two or three ranks have, of which each sends some",
        )  # fmt: skip
    first = handoff(1, "first token", {"token": (DType.U32, 4)})
    beside = Geometry(
        replica=0, facts=(), groups=(kv, first), ranks=(Rank(rank=0, owns=(owns(kv, [0, 1]), owns(first, [0]))),)
    )
    yield (
        "beside-a-hand-off", "KVP-STG-ORDER", side(beside, 0, 11), side(beside, 5, 6),
        "hand-off data are in no copy and no stream",
    )  # fmt: skip
    image = attrs.evolve(kv, axis="image")
    yield (
        "rows-of-images", EXACT, side(whole(image), 0, 11), side(whole(attrs.evolve(image, rows=3)), 5, 6, heads),
        "positions of images",
    )  # fmt: skip
    part = Geometry(
        replica=0, facts=(), groups=(kv,),
        ranks=(Rank(rank=0, owns=(attrs.evolve(owns(kv, [0, 3]), lanes=tuple(
            LaneSpan(part=p, lo=lo, hi=hi) for p, lo, hi in ((0, 1, 2), (0, 0, 1), (1, 0, 2))
        )),)),),
    )  # fmt: skip
    yield (
        "keys-turned-alone", EXACT, side(whole(kv, 4), 0, 11, heads), side(part, 5, 6, heads),
        "keys in another order of heads than values",
    )  # fmt: skip


def _rows() -> Iterator[Case]:
    """Items that touch or not, windows without rows, and items that move whole."""
    kv = gqa(0, "target", 0, 2, 4, 4, dtype=DType.U8)
    next_to = [2, 3, 4, 5]
    for id_, source, from_, sink, to, note in (
        ("pages-side-by-side", (whole(kv), 0, 15, tokens), next_to, (whole(kv), 3, 12, tokens), [4, 5, 6, 7], "one run of bytes over four pages"),
        ("pages-side-by-side-apart", (whole(kv), 0, 15, padded), next_to, (whole(kv), 3, 12, heads), next_to, "the same numbers, and no run"),
        ("pages-side-by-side-halfway", (whole(kv), 0, 15, tokens), [2, 3, 5, 6], (whole(kv), 3, 12, tokens), [1, 2, 3, 4], "a gap after the second page"),
        ("pages-backwards", (whole(kv), 0, 15, tokens), [5, 4, 3, 2], (whole(kv), 3, 12, tokens), [7, 6, 5, 4], "items that touch in the other direction"),
        ("no-row", (whole(kv), 0, 11, padded), next_to, (whole(kv), 11, 0, heads), [], "a window of no tokens, as after a prefix that is all there"),
        ("no-whole-row", (whole(attrs.evolve(kv, tokens_per_row=4)), 0, 11, padded), next_to, (whole(attrs.evolve(kv, tokens_per_row=4)), 8, 2, padded), [], "two tokens of a row of four"),
    ):  # fmt: skip
        yield id_, EXACT, side(*source, items=from_), side(*sink, items=to), note
    yield from _opaque_items(kv)
    yield from _items_of_heads(kv)


def _opaque_items(kv: Group) -> Iterator[Case]:
    """Items that move whole."""
    coded = changed(kv, 0, encoding="tiled")
    yield (
        "opaque-no-row", "KVP-GRANT-WHOLE", side(whole(coded), 0, 11), side(whole(coded), 8, 0),
        "a window of no tokens of whole items",
    )  # fmt: skip
    zigzag = table(coded, [0, 1, 1, 0], 2)
    yield (
        "opaque-no-row-of-a-rank", "KVP-GRANT-WHOLE", side(zigzag, 0, 16, rank=0), side(zigzag, 8, 0, rank=0),
        "the same of a deal",
    )  # fmt: skip
    turn = dealt(coded, 2, 4)
    yield (
        "opaque-of-the-other-rank", "KVP-GRANT-WHOLE", side(turn, 0, 12, rank=1), side(turn, 8, 4, rank=1),
        "all tokens of the window are rank 0's",
    )  # fmt: skip
    tiled = attrs.evolve(coded, kind=ItemKind.RING, rows=8)
    yield (
        "opaque-ring", "KVP-GRANT-WHOLE", side(whole(tiled), 0, 20, heads), side(whole(tiled), 12, 8),
        "it moves as it is, with its rows from 0",
    )  # fmt: skip


def _items_of_heads(kv: Group) -> Iterator[Case]:
    """Rings, slots and deals whose rows lie between their heads."""
    ring = attrs.evolve(kv, kind=ItemKind.RING, rows=8)
    yield (
        "ring-heads-first", EXACT, side(one_two(ring), 0, 20, heads), side(one_two(kv), 13, 7, heads),
        "a ring that wraps in each head, to pages",
    )  # fmt: skip
    yield (
        "pages-to-ring-heads-first", EXACT, side(one_two(kv), 0, 20, padded), side(one_two(ring), 13, 7, heads),
        "the same back",
    )  # fmt: skip
    yield (
        "ring-of-the-last-rows", EXACT, side(one_two(ring), 0, 20), side(one_two(kv), 12, 8),
        "all rows that the ring still has",
    )  # fmt: skip
    state = attrs.evolve(kv, kind=ItemKind.SLOT, rows=5, live_rows=3)
    yield (
        "slot-heads-first", EXACT, side(one(state), 0, 9, heads), side(one(attrs.evolve(state, rows=3)), 0, 9, padded),
        "state whose scratch rows lie between its heads",
    )  # fmt: skip
    deal = dealt(kv, 2, 3)
    yield (
        "dealt-heads-first", "KVP-DCP-OWNER", side(deal, 0, 20, heads, rank=1),
        side(dealt(attrs.evolve(kv, rows=3), 3, 2), 0, 20, heads, rank=2), "tokens dealt on both sides, in HND",
    )  # fmt: skip
    yield (
        "no-row-of-a-rank", "KVP-DCP-OWNER", side(deal, 0, 20, padded, rank=1), side(whole(kv), 6, 2, heads),
        "a window of two tokens, which rank 0 of the source has",
    )  # fmt: skip


def made() -> str:
    """The text of the file."""
    return text_of(cases())


if __name__ == "__main__":
    FILE.write_text(made())
