"""Copy programs against brute force, and the checks of columns and grants."""

import random
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.copying.columns import check_columns
from kvproto.copying.execute import _batches, checksums, execute
from kvproto.copying.grants import check_grants, items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, RowMap, Window
from kvproto.errors import KvprotoError, RemoteError
from kvproto.planning.geometry import (
    Geometry,
    Group,
    Rank,
    decode_geometry,
    encode_geometry,
    gqa,
    handoff,
    mla,
    owns,
    validate,
)  # fmt: skip
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import Plan, plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType, ErrorCode, ItemKind
from kvproto.wire.messages import Columns, Grants
from tests.errors import raises
from tests.plan import oracle
from tests.plan.programs import ITEMS, Held, hold, spans
from tests.plan.worlds import caches, layout, regions, side
from tests.pools import lower


@settings(max_examples=130, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**48))
def test_every_byte_against_brute_force(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    cached = caches(rng)
    source, sink = (
        side(rng, cached, rng.randint(0, 3), complete=True),
        side(rng, cached, rng.randint(0, 3), complete=False),
    )
    for geometry in (source, sink):
        validate(geometry)
        assert decode_geometry(encode_geometry(geometry)) == geometry
    made = plan(source, sink)
    assert made == plan(decode_geometry(encode_geometry(source)), decode_geometry(encode_geometry(sink)))
    whole, asked = spans(rng, cached, source, sink)
    have = {r.rank: hold(rng, source, r.rank, whole) for r in source.ranks}
    pools = {}
    for number, held in have.items():
        pools[number] = oracle.noise(held.lengths, number)
        for (region, at), where in held.targets.items():
            pools[number][region][at] = oracle.value(where)
    before = {n: {i: p.copy() for i, p in pool.items()} for n, pool in pools.items()}
    for rank in sink.ranks:
        held = hold(rng, sink, rank.rank, asked)
        mine = oracle.noise(held.lengths, 99)
        for (region, at), where in held.targets.items():
            mine[region][at] = oracle.value(where) ^ 0xFF
        wanted = {i: p.copy() for i, p in mine.items()}
        for (region, at), where in held.targets.items():
            wanted[region][at] = oracle.value(where)
        here = {i: memoryview(p) for i, p in mine.items()}
        written = 0
        for number in made.required(rank.rank):
            there = {i: memoryview(p) for i, p in pools[number].items()}
            pair = Pair(
                made.between(number, rank.rank), RankLayout(source, number, have[number].columns),
                RankLayout(sink, rank.rank, held.columns),
            )  # fmt: skip
            program = pair.lower(have[number].windows, held.windows)
            with monkeypatch.context() as m:
                m.setattr("kvproto.copying.lowering._FEW", 0)
                assert _same(program, pair.lower(have[number].windows, held.windows))
            assert execute(program, there, here) == program.bytes == sum(program.bytes_by_group().values())
            written += program.bytes
            sent = checksums(program, there, sink=False)
            assert sent == checksums(program, here, sink=True)
            parts = [checksums(part, there, sink=False) for part in program.parts(max(program.bytes // 2, 1))]
            assert sent == {group: sum(part.get(group, 0) for part in parts) & (1 << 64) - 1 for group in sent}
            slices = [checksums(part, there, sink=False) for part in program.slices(rng.randint(1, 200))]
            assert sent == {group: sum(part.get(group, 0) for part in slices) & (1 << 64) - 1 for group in sent}
            with monkeypatch.context() as m:
                m.setattr("kvproto.copying.execute._MOST_BYTES", -1)
                assert sent == checksums(program, there, sink=False)
                assert execute(program, there, here) == program.bytes
            assert sent == _sums(made, source, sink, number, rank.rank, held)
            _flip(rng, program, here, sent)
        assert all(np.array_equal(mine[i], wanted[i]) for i in mine)
        assert written == len(held.targets)  # each byte exactly once
    assert all(np.array_equal(pools[n][i], before[n][i]) for n in pools for i in pools[n])


def _same(one: CopyProgram, other: CopyProgram) -> bool:
    return all(np.array_equal(a, b) for m, n in zip(one.maps, other.maps, strict=True) for a, b in _arrays(m, n))


def _arrays(one: RowMap, other: RowMap) -> list[tuple[Any, Any]]:
    names = ("source_item", "source_row", "sink_item", "sink_row", "rows", "piece_first", "piece_rows")
    return [(getattr(one, name), getattr(other, name)) for name in names]


def _sums(made: Plan, source: Geometry, sink: Geometry, number: int, rank: int, held: Held) -> dict[int, int]:
    """The checksums that the spec defines, over the bytes that the routes of the pair name."""
    found = {}
    groups = oracle.group_of(source)
    shares = {o.group: o for r in sink.ranks if r.rank == rank for o in r.owns}
    for route in made.between(number, rank):
        group = next(g for g in sink.groups if g.id == route.group)
        index = {(group.model, p.name): i for i, p in enumerate(group.parts)}
        moved, paged = {}, group.kind == ItemKind.PAGE
        turns: dict[tuple[int, int, str, int], int | None] = {}
        for _, where in oracle.bytes_of(group, shares[group.id], held.columns[group.id], held.asked[group.id]):
            model, layer, part, row, at = where
            if where[:4] not in turns:
                turns[where[:4]] = oracle.cp_rank_of(groups[model, part, layer], row) if paged else 0
            turn = turns[where[:4]]
            for box in route.boxes:
                inside = box.layer_lo <= layer < box.layer_hi and box.lo <= at < box.hi
                if inside and (index[model, part], turn) == (box.part, box.source_class):
                    assert where not in moved
                    moved[where] = oracle.value(where)
        if moved:
            found[group.id] = oracle.checksum(moved, index)
    return found


def _flip(rng: random.Random, program: CopyProgram, pools: dict[int, memoryview], sums: dict[int, int]) -> None:
    """One changed bit changes the checksum of its group, and of no other."""
    if not program.bytes:
        return
    op = rng.choice([op for op in program.ops if program.maps[op["map"]].size])
    rows = program.maps[op["map"]]
    i = rng.randrange(rows.rows.size)
    row = int(rows.sink_row[i]) + rng.randrange(int(rows.rows[i]))
    lane, byte, bit = rng.randrange(op["lanes"]), rng.randrange(op["lane_bytes"]), 1 << rng.randrange(8)
    at = (
        op["sink_offset"]
        + int(rows.sink_item[i]) * op["sink_item_stride"]
        + row * op["sink_row_stride"]
        + lane * op["sink_lane_stride"]
    )
    region = pools[int(op["sink_region"])]
    region[int(at) + byte] ^= bit
    changed = checksums(program, pools, sink=True)
    region[int(at) + byte] ^= bit
    assert {g for g in sums if changed[g] != sums[g]} == {op["group"]}


def test_columns_that_overlap_or_leave_their_region() -> None:
    """KVP-REG-COLUMNS, KVP-REG-OVERLAP and KVP-REG-REGION, each at the number that is wrong."""
    target = mla(0, "target", 0, 1152, 64)
    geometry, _ = pool(target)
    good = Columns(
        group=0, items=2, region=np.array([0]), offset=np.array([0]), item_stride=np.array([64 * 1152]),
        row_stride=np.array([1152]), lane_stride=np.array([1152]),
    )  # fmt: skip
    region = regions({0: 2 * 64 * 1152})
    check_columns(geometry, 0, region, (good,))
    check_columns(geometry, 0, region, (attrs.evolve(good, lane_stride=np.array([2**64 - 1], np.uint64)),))  # one lane
    page = 64 * 1152
    for change, code, path in (
        ({"row_stride": np.array([1000])}, ErrorCode.BAD_COLUMNS, "row_stride[0]"),
        ({"item_stride": np.array([0])}, ErrorCode.BAD_COLUMNS, "item_stride[0]"),
        ({"item_stride": np.array([page - 1])}, ErrorCode.BAD_COLUMNS, "item_stride[0]"),
        ({"item_stride": np.array([page + 1])}, ErrorCode.OUT_OF_REGION, "item_stride[0]"),
        ({"item_stride": np.array([2**64 - 1], np.uint64)}, ErrorCode.OUT_OF_REGION, "item_stride[0]"),
        ({"items": 3}, ErrorCode.OUT_OF_REGION, "item_stride[0]"),
        ({"offset": np.array([page + 1])}, ErrorCode.OUT_OF_REGION, "offset[0]"),
        ({"offset": np.array([2**64 - 1], np.uint64)}, ErrorCode.OUT_OF_REGION, "offset[0]"),
        ({"region": np.array([1])}, ErrorCode.BAD_COLUMNS, "region[0]"),
        ({"offset": np.array([0, 0])}, ErrorCode.BAD_COLUMNS, "offset"),
    ):
        with raises(RemoteError, code=code, path=f"columns[0].{path}"):
            check_columns(geometry, 0, region, (attrs.evolve(good, **change),))


def pool(group: Group, items: int = 4, **more: Any) -> tuple[Geometry, dict[int, Columns]]:
    """One rank that owns layer 0 of one group, stored without gaps."""
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, [0], **more),)),))
    sizes = [p.lanes * p.lane_bytes for p in group.parts]
    rows = [
        (items * group.rows * sum(sizes[:i]), group.rows * s, s, p.lane_bytes)
        for i, (p, s) in enumerate(zip(group.parts, sizes, strict=True))
    ]
    offset, item_stride, row_stride, lane_stride = np.array(rows, np.uint64).T.copy()
    return geometry, {
        group.id: Columns(
            group=group.id, items=items, region=np.zeros(len(rows), np.uint32), offset=offset, item_stride=item_stride,
            row_stride=row_stride, lane_stride=lane_stride,
        )
    }  # fmt: skip


PAGES = mla(0, "pages", 0, 8, 4)
RING = attrs.evolve(PAGES, kind=ItemKind.RING, rows=6, tokens_per_row=4)
OPAQUE = attrs.evolve(PAGES, parts=(attrs.evolve(PAGES.parts[0], encoding="tiled"),))
DEALT = attrs.evolve(PAGES, cp_size=2, interleave=4, origin=8)


def grant(first: int, count: int, items: list[int], valid: int | None = None, group: int = 0) -> Grants:
    made = np.array(items, np.uint32)
    return Grants(group=group, first=first, count=count, valid=first + count if valid is None else valid, items=made)


# KVP-GRANT-GROUPS, KVP-GRANT-COUNT, KVP-GRANT-RING, KVP-GRANT-POOL, KVP-GRANT-ALIAS, KVP-DCP-WINDOW
GRANTS: dict[str, tuple[Group, tuple[Grants, ...], ErrorCode | None, str]] = {
    "whole": (PAGES, (grant(0, 16, [3, 2, 1, 0]),), None, ""),
    "partial pages": (PAGES, (grant(3, 6, [3, 0, 1]),), None, ""),
    "more valid": (PAGES, (grant(0, 4, [0], valid=9),), None, ""),
    "nothing": (PAGES, (grant(5, 0, []),), None, ""),
    "a ring's worth of rows": (RING, (grant(8, 24, [1]),), None, ""),
    "dealt": (DEALT, (grant(8, 9, [1, 3]),), None, ""),
    "nothing of ours": (DEALT, (grant(12, 4, []),), None, ""),
    "no group": (PAGES, (), ErrorCode.BAD_GRANT, "grants"),
    "another group": (PAGES, (grant(0, 4, [0], group=1),), ErrorCode.BAD_GRANT, "grants"),
    "group twice": (PAGES, (grant(0, 4, [0]),) * 2, ErrorCode.BAD_GRANT, "grants"),
    "too few": (PAGES, (grant(3, 6, [0, 1]),), ErrorCode.BAD_GRANT, "grants[0].items"),
    "too many": (PAGES, (grant(0, 4, [0, 1]),), ErrorCode.BAD_GRANT, "grants[0].items"),
    "no ring": (RING, (grant(0, 4, []),), ErrorCode.BAD_GRANT, "grants[0].items"),
    "more than the ring": (RING, (grant(0, 28, [0]),), ErrorCode.BAD_GRANT, "grants[0].count"),
    "before the deal": (DEALT, (grant(0, 12, [0, 1]),), ErrorCode.BAD_GRANT, "grants[0].first"),
    "beyond the pool": (PAGES, (grant(0, 8, [0, 4]),), ErrorCode.OUT_OF_REGION, "grants[0].items"),
    "item twice": (PAGES, (grant(0, 8, [2, 2]),), ErrorCode.ITEM_ALIAS, "grants[0].items"),
}


@pytest.mark.parametrize("case", GRANTS)
def test_grants(case: str) -> None:
    group, grants, code, path = GRANTS[case]
    geometry, columns = pool(group)
    if code is None:
        check_grants(geometry, 0, columns, (0,), grants)
        return
    with raises(RemoteError, code=code, path=path):
        check_grants(geometry, 0, columns, (0,), grants)


@pytest.mark.parametrize("items", [None, np.empty(0, np.uint32)], ids=["absent", "empty"])
@pytest.mark.parametrize(("first", "count", "valid"), [(0, 0, 0), (3, 4, 9), (1 << 40, 1 << 40, 1 << 41)])
def test_the_window_of_a_hand_off_grant_says_nothing(items: Any, first: int, count: int, valid: int) -> None:
    """KVP-HND-WINDOW and KVP-GRANT-ABSENT; KVP-HND-GRANT: but the grant must be there."""
    group = handoff(0, "first token", {"token": (DType.I32, 4)})
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, [0]),)),))
    check_grants(geometry, 0, {}, (0,), (Grants(group=0, first=first, count=count, valid=valid, items=items),))
    with raises(RemoteError, code=ErrorCode.BAD_GRANT, path="grants") as caught:
        check_grants(geometry, 0, {}, (0,), ())
    assert "hand-off" in caught.value.advice


def test_items_of_pages_may_be_absent_where_none_are_needed() -> None:
    """KVP-GRANT-ABSENT."""
    geometry, columns = pool(PAGES)
    check_grants(geometry, 0, columns, (0,), (Grants(group=0, first=5, count=0, valid=5),))
    with raises(RemoteError, code=ErrorCode.BAD_GRANT, yours="no items"):
        check_grants(geometry, 0, columns, (0,), (Grants(group=0, first=0, count=4, valid=4),))


@pytest.mark.parametrize(
    ("group", "window"),
    [
        (PAGES, Window(0, 8, np.array([1]))),  # an item too few
        (PAGES, Window(4, 8, np.array([1, 2, 3]))),  # begins after the rows that are asked for
        (attrs.evolve(RING, tokens_per_row=1, rows=7), Window(0, 8, np.array([0]))),  # the ring has forgotten row 0
        (
            attrs.evolve(RING, tokens_per_row=1, rows=8),
            Window(0, 9, np.array([0])),
        ),  # row 8 has taken the place of row 0
        (attrs.evolve(RING, tokens_per_row=1, rows=8), Window(0, 8, np.array([], np.int64))),
    ],
)
def test_a_source_that_does_not_hold_the_rows_refuses(group: Group, window: Window) -> None:
    paged = group.kind == ItemKind.PAGE
    sink_group = attrs.evolve(group, rows=4 if paged else 9)
    (source, theirs), (sink, ours) = pool(group), pool(sink_group)
    items = np.array([0, 1] if paged else [0])
    routes = plan(source, sink).routes
    with raises(KvprotoError, code=ErrorCode.BAD_GRANT):
        lower(routes, RankLayout(source, 0, theirs), RankLayout(sink, 0, ours), {0: window}, {0: Window(0, 8, items)})


def test_rows_before_the_source_deals_are_refused() -> None:
    """KVP-DCP-WINDOW, of the source's own deal."""
    source, theirs = pool(DEALT, cp_rank=0)
    both = tuple(attrs.evolve(source.ranks[0], rank=r, owns=(owns(DEALT, [0], cp_rank=r),)) for r in range(2))
    source = attrs.evolve(source, ranks=both)
    sink, ours = pool(PAGES)
    window = {0: Window(0, 8, np.array([0, 1]))}
    with raises(KvprotoError, code=ErrorCode.BAD_GRANT):
        lower(
            plan(source, sink).between(0, 0), RankLayout(source, 0, theirs), RankLayout(sink, 0, ours), window, window
        )


@pytest.mark.parametrize(("offset", "alias"), [(16, False), (15, True), (17, True), (40, False), (0, True)])
def test_groups_may_share_records_row_by_row(offset: int, alias: bool) -> None:
    """A record of 24 bytes a row: 16 of the target, then 8 of the draft; the same items of both groups."""
    geometry, columns = unified(offset, 96)
    columns = {g: attrs.evolve(c, item_stride=np.array([96]), row_stride=np.array([24])) for g, c in columns.items()}
    given_ = (grant(0, 8, [2, 1]), grant(0, 8, [1, 2], group=1))
    if alias:
        with raises(RemoteError, code=ErrorCode.ITEM_ALIAS, path="grants[1].items"):
            check_grants(geometry, 0, columns, (0, 1), given_)
    else:
        check_grants(geometry, 0, columns, (0, 1), given_)


@pytest.mark.parametrize("item", [4, -1])
def test_an_item_beyond_the_pool_is_not_copied(item: int) -> None:
    geometry, columns = pool(mla(0, "latent", 0, 8, 4), 4)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 4, np.array([item]))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    memory = memoryview(bytearray(1024))
    with pytest.raises(IndexError, match="of 1 items of 16 rows"):
        execute(program, {0: memory}, {0: memory})


def test_an_empty_window_copies_nothing() -> None:
    geometry, columns = pool(PAGES)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(5, 0, np.array([], np.int64))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    assert [m.size for m in program.maps] == [0]
    assert program.runs().count == 0
    assert program.bytes == execute(program, {}, {}) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_part_of_a_program_is_the_program_of_the_part(data: st.DataObject) -> None:
    """Tokens and layers picked out of a program move the same bytes as a program that was lowered for them alone."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    step = rng.choice([1, 1, 3])
    src = attrs.evolve(PAGES, rows=rng.choice([1, 2, 4]), tokens_per_row=step)
    dst = attrs.evolve(src, rows=rng.choice([1, 3, 4]))
    if rng.random() < 0.5:
        src = attrs.evolve(src, cp_size=2, interleave=step * rng.choice([1, 2]))
    if rng.random() < 0.5:
        dst = attrs.evolve(dst, cp_size=rng.choice([2, 3]), interleave=step * rng.choice([1, 3]))
    sides = []
    for group in (src, dst):
        shares = [Rank(rank=r, owns=(owns(group, range(3), cp_rank=r),)) for r in range(group.cp_size)]
        geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(shares))
        columns, lengths = layout(rng, geometry, 0, ITEMS)
        sides.append((RankLayout(geometry, 0, columns), lengths))
    (source, lengths), (sink, ours) = sides
    tokens = rng.randint(1, 40)
    windows = []
    for side_ in (source, sink):
        group = side_.groups[0]
        windows.append(
            {0: Window(0, tokens, np.array(rng.sample(range(ITEMS), items_needed(group, 0, 0, tokens)), np.int64))}
        )
    whole = lower(plan(source.geometry, sink.geometry).between(0, 0), source, sink, *windows)
    first, layers = rng.randint(0, tokens), rng.sample(range(3), rng.randint(0, 3))
    last = rng.randint(first, tokens)
    some = whole.select(layers, (first, last))
    there = {i: memoryview(p) for i, p in oracle.noise(lengths, 1).items()}
    got, want = (oracle.noise(ours, 2) for _ in range(2))
    assert execute(some, there, {i: memoryview(p) for i, p in got.items()}) == some.bytes
    # row by row and layer by layer, by the maps' own word
    full = {i: memoryview(p.copy()) for i, p in want.items()}
    execute(whole, there, full)
    for op in whole.ops:
        rows = whole.maps[op["map"]]
        at = np.repeat(rows.sink_item * op["sink_item_stride"] + rows.sink_row * op["sink_row_stride"], rows.rows)
        within = np.arange(rows.size) - np.repeat(np.cumsum(rows.rows) - rows.rows, rows.rows)
        for row, place in zip(rows.global_rows.tolist(), (at + within * op["sink_row_stride"]).tolist(), strict=True):
            if op["layer"] in layers and first <= row * step and (row + 1) * step <= last:
                for lane in range(op["lanes"]):
                    start = place + int(op["sink_offset"] + lane * op["sink_lane_stride"])
                    span_ = slice(start, start + int(op["lane_bytes"]))
                    want[int(op["sink_region"])][span_] = np.frombuffer(full[int(op["sink_region"])][span_], np.uint8)
    assert all(np.array_equal(got[i], want[i]) for i in got)


def test_layers_of_one_pool_may_have_strides_of_their_own() -> None:
    """KVP-REG-COLUMNS: lanes of layer 0 touch, those of layer 1 lie twice as far apart."""
    group = attrs.evolve(PAGES, rows=2, parts=(attrs.evolve(PAGES.parts[0], lanes=2, lane_bytes=4),))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(2)),)),))
    even = {n: np.array([s, s]) for n, s in (("item_stride", 16), ("row_stride", 8), ("lane_stride", 4))}
    plain = Columns(group=0, items=2, region=np.zeros(2, np.uint32), offset=np.array([0, 32]), **even)
    odd = attrs.evolve(plain, **{name: stride * [1, 2] for name, stride in even.items()})
    window = {0: Window(0, 4, np.array([0, 1]))}
    source, sink = (RankLayout(geometry, 0, {0: columns}) for columns in (odd, plain))
    program = lower(plan(geometry, geometry).routes, source, sink, window, window)
    there, here = np.arange(96, dtype=np.uint8), np.zeros(64, np.uint8)
    assert execute(program, {0: memoryview(there)}, {0: memoryview(here)}) == 64
    assert np.array_equal(here[:32], there[:32])
    assert np.array_equal(here[32:].reshape(8, 4), there[32:].reshape(8, 8)[:, :4])


@pytest.mark.parametrize(
    ("offsets", "batches"),
    [([0, 32, 64, 96, 128], [5]), ([0, 32, 96, 192, 320], [2, 2, 1]), ([0, 32, 64, 160, 256], [3, 2]), ([0], [1])],
)
def test_layers_that_lie_equally_far_apart_are_copied_as_one(offsets: list[int], batches: list[int]) -> None:
    """In the longest stretches, whose second layer says how far apart they are."""
    group = attrs.evolve(PAGES, rows=2, parts=(attrs.evolve(PAGES.parts[0], lanes=2, lane_bytes=4),))
    layers = range(len(offsets))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, layers),)),))
    even = {n: np.full(len(offsets), s) for n, s in (("item_stride", 16), ("row_stride", 8), ("lane_stride", 4))}
    zero = np.zeros(len(offsets), np.uint32)
    made = Columns(group=0, items=2, region=zero, offset=np.array(offsets), **even)
    side_, window = RankLayout(geometry, 0, {0: made}), {0: Window(0, 4, np.array([0, 1]))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    assert [len(batch.ops) for batch in _batches(program)] == batches
    there, here = np.random.default_rng(0).integers(1, 256, 352, np.uint8), np.zeros(352, np.uint8)
    assert execute(program, {0: memoryview(there)}, {0: memoryview(here)}) == 32 * len(offsets)
    moved = np.concatenate([np.arange(at, at + 32) for at in offsets])
    assert np.array_equal(here[moved], there[moved])
    assert not np.delete(here, moved).any()


def test_an_operation_larger_than_a_batch_is_copied() -> None:
    """Rows apart from each other at one side, so that the program is not a few slices."""
    group = attrs.evolve(PAGES, rows=64, parts=(attrs.evolve(PAGES.parts[0], lanes=1, lane_bytes=1 << 14),))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(2)),)),))
    size, one = 64 << 14, np.ones(2, np.int64)
    zero = np.zeros(2, np.uint32)

    def side_of(apart: int) -> tuple[RankLayout, bytearray]:
        strides = {"item_stride": one * size * apart, "row_stride": one * (apart << 14), "lane_stride": one * (1 << 14)}
        offset = np.array([0, size * apart])
        made = Columns(group=0, items=1, region=zero, offset=offset, **strides)
        return RankLayout(geometry, 0, {0: made}), bytearray(2 * size * apart)

    (source, there), (sink, here) = side_of(1), side_of(2)
    there[:] = np.random.default_rng(0).bytes(len(there))
    window = {0: Window(0, 64, np.array([0]))}
    program = lower(plan(geometry, geometry).routes, source, sink, window, window)
    assert execute(program, {0: memoryview(there)}, {0: memoryview(here)}) == 2 * size
    rows = np.frombuffer(here, np.uint8).reshape(128, 2, 1 << 14)
    assert np.array_equal(rows[:, 0].reshape(-1), np.frombuffer(there, np.uint8))
    assert not rows[:, 1].any()
    assert checksums(program, {0: memoryview(there)}, sink=False) == checksums(
        program, {0: memoryview(here)}, sink=True
    )


@pytest.mark.parametrize(
    ("parts", "moved"), [(((0, 4), (4, 8)), [0, 40]), (((0, 8),), [40]), (((0, 7), (7, 8), (8, 12)), [0, 40, 0])]
)
def test_state_goes_with_the_tokens_that_it_is_after(parts: tuple[tuple[int, int], ...], moved: list[int]) -> None:
    slots = attrs.evolve(PAGES, kind=ItemKind.SLOT, rows=5, live_rows=5)
    geometry, columns = pool(slots)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 8, np.array([1]))}
    whole = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    assert whole.bytes == 40
    assert [whole.select(tokens=tokens).bytes for tokens in parts] == moved


def test_runs_go_on_across_items_that_touch() -> None:
    geometry, columns = pool(attrs.evolve(PAGES, rows=2), 100)
    side_ = RankLayout(geometry, 0, columns)
    items = np.array([4, 5, 6, 9, 10])
    program = lower(
        plan(geometry, geometry).routes, side_, side_, {0: Window(0, 10, items)}, {0: Window(0, 10, items + 20)}
    )
    assert program.maps[0].rows.tolist() == [6, 4]
    assert (program.runs().count, program.runs().mean) == (2, 40.0)


def test_objects_do_not_multiply_with_pages() -> None:
    group = gqa(0, "heads", 0, 2, 8, 1)
    geometry, columns = pool(group, 1000)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 1000, np.random.default_rng(0).permutation(1000))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    assert (len(program.maps), len(program.ops)) == (1, 2)
    assert program.bytes == 1000 * 2 * 2 * 8


def test_checksum_of_a_model_with_a_great_number() -> None:
    group = attrs.evolve(PAGES, model=1 << 20)
    geometry, columns = pool(group)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 4, np.array([0]))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    memory = np.arange(128, dtype=np.uint8)
    where = {(1 << 20, 0, "latent", row, byte): row * 8 + byte for row in range(4) for byte in range(8)}
    assert checksums(program, {0: memoryview(memory)}, sink=False) == {
        0: oracle.checksum(where, {(1 << 20, "latent"): 0})
    }


@pytest.mark.parametrize("gap", [0, 3], ids=["contiguous", "padded rows"])
@pytest.mark.parametrize("width", [1, 8, 32, 257, 8192, 8193, 40_000])
def test_checksum_of_more_bytes_than_are_summed_at_once(width: int, gap: int) -> None:
    rows = 70_000 // width + 1
    group = mla(0, "pages", 0, width, rows)
    geometry, columns = pool(group, 1)
    stride = np.array([width + gap], np.uint64)
    columns[0] = attrs.evolve(columns[0], row_stride=stride, item_stride=stride * np.uint64(rows))
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, rows, np.array([0]))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    memory = np.random.default_rng(width).integers(0, 256, (rows, width + gap), dtype=np.uint8)
    memory[: rows // 2] = 255
    sums = checksums(program, {0: memoryview(memory.reshape(-1))}, sink=False)
    where = {(0, 0, "latent", row, at): int(memory[row, at]) for row in range(rows) for at in range(width)}
    assert sums == {0: oracle.checksum(where, {(0, "latent"): 0})}


def test_worked_examples_of_the_spec() -> None:
    """lowering.md: compressed rows, rings of two sizes, pages of two sizes."""
    for step, rows, items in ((4, 250, 4), (128, 7, 1)):
        group = attrs.evolve(mla(0, "c", 0, 8, 64), tokens_per_row=step)
        assert items_needed(group, 0, 0, 1001) == items
        geometry, columns = pool(group, 8)
        side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 1001, np.arange(items))}
        assert lower(plan(geometry, geometry).routes, side_, side_, window, window).maps[0].size == rows
    small, large = (attrs.evolve(mla(0, "w", 0, 8, n), kind=ItemKind.RING) for n in (8, 16))
    (source, theirs), (sink, ours) = pool(small), pool(large)
    window = {0: Window(13, 7, np.array([2]))}
    (rows_,) = lower(
        plan(source, sink).routes, RankLayout(source, 0, theirs), RankLayout(sink, 0, ours), window, window
    ).maps
    assert (rows_.source_row.tolist(), rows_.sink_row.tolist(), rows_.rows.tolist()) == ([5, 0], [13, 0], [3, 4])
    (source, theirs), (sink, ours) = pool(mla(0, "p", 0, 8, 16)), pool(mla(0, "p", 0, 8, 64))
    theirs[0] = attrs.evolve(theirs[0], item_stride=theirs[0].item_stride * 2, items=2)  # so that items do not touch
    ours[0] = attrs.evolve(ours[0], item_stride=ours[0].item_stride * 2, items=2)
    windows_ = {0: Window(3, 37, np.array([7, 1, 4]))}, {0: Window(3, 37, np.array([9]))}
    (rows_,) = lower(
        plan(source, sink).routes, RankLayout(source, 0, theirs), RankLayout(sink, 0, ours), *windows_
    ).maps
    assert rows_.source_item.tolist() == [7, 1, 4]
    assert (rows_.source_row.tolist(), rows_.sink_row.tolist(), rows_.rows.tolist()) == (
        [3, 0, 0],
        [3, 16, 32],
        [13, 16, 8],
    )


def test_worked_example_of_two_deals() -> None:
    """planning.md: CP 4 with interleave 4 to DCP 2 with interleave 6."""
    from kvproto.planning.deals import shared_classes

    a, b = attrs.evolve(PAGES, cp_size=4, interleave=4), attrs.evolve(PAGES, cp_size=2, interleave=6)
    assert len(shared_classes(a, b)) == 8
    assert [t for t in range(48) if t // 4 % 4 == 0 and t // 6 % 2 == 0] == [0, 1, 2, 3, 16, 17]


@pytest.mark.parametrize(
    ("first", "count", "moved"), [(0, 16, 4), (0, 5, 2), (4, 4, 1), (8, 1, 1), (4, 0, 0), (5, 4, None), (6, 0, 0)]
)
def test_opaque_items_move_whole(first: int, count: int, moved: int | None) -> None:
    """KVP-GRANT-WHOLE."""
    group = attrs.evolve(PAGES, parts=(attrs.evolve(PAGES.parts[0], encoding="tiled"),))
    geometry, columns = pool(group, 8)
    side_ = RankLayout(geometry, 0, columns)
    need = items_needed(group, 0, first, count)
    windows_ = {0: Window(0, 16, np.array([5, 2, 7, 0]))}, {0: Window(first, count, np.array([1, 6, 3, 4])[:need])}
    if moved is None:
        with raises(RemoteError, code=ErrorCode.BAD_GRANT):
            lower(plan(geometry, geometry).routes, side_, side_, *windows_)
        return
    program = lower(plan(geometry, geometry).routes, side_, side_, *windows_)
    here, there = (np.random.default_rng(i).integers(0, 256, 256, np.uint8) for i in (1, 2))
    wanted = there.copy()
    for source, sink in zip([5, 2, 7, 0][first // 4 :], [1, 6, 3, 4][:moved], strict=False):
        wanted[32 * sink : 32 * sink + 32] = here[32 * source : 32 * source + 32]
    assert execute(program, {0: memoryview(here)}, {0: memoryview(there)}) == program.bytes == 32 * moved
    assert np.array_equal(there, wanted)
    assert checksums(program, {0: memoryview(here)}, sink=False) == checksums(
        program, {0: memoryview(there)}, sink=True
    )


SCALES = lay_out([Cache.page_scales("scales", 1, kv_heads=2, page=4)])


@pytest.mark.parametrize("partial", [None, True])
@pytest.mark.parametrize(("kind", "refuses"), [(ItemKind.PAGE, True), (ItemKind.RING, True), (ItemKind.SLOT, False)])
@pytest.mark.parametrize(("first", "count", "inside"), [(2, 12, True), (2, 1, True), (2, 0, False), (4, 9, False)])
def test_a_window_does_not_begin_inside_a_row(
    kind: ItemKind, refuses: bool, partial: bool | None, first: int, count: int, inside: bool
) -> None:
    """KVP-GRANT-ROW: rows of 4 tokens; a slot moves whole."""
    group = attrs.evolve(SCALES.groups[0], kind=kind, rows=4, partial=partial)
    made = attrs.evolve(SCALES, groups=(group,))
    columns, _ = columns_without_gaps(made, 0, {0: 4})
    asked = (grant(first, count, list(range(items_needed(group, 0, first, count)))),)
    if not (refuses and inside):
        check_grants(made, 0, columns, (0,), asked)
        return
    with raises(
        RemoteError, code=ErrorCode.BAD_GRANT, path="grants[0].first", mine="a multiple of 4, where a row begins"
    ):
        check_grants(made, 0, columns, (0,), asked)


@pytest.mark.parametrize("encoding", ["maker.blocks", None])
@pytest.mark.parametrize(("first", "count", "inside"), [(4, 8, True), (4, 1, True), (4, 0, False), (8, 8, False)])
def test_a_window_of_whole_items_does_not_begin_inside_one(
    encoding: str | None, first: int, count: int, inside: bool
) -> None:
    """KVP-GRANT-WHOLE: items of 8 rows whose bytes only their maker knows; items of plain rows may be cut."""
    plain = lay_out([Cache.mla("latent", 1, latent=8, rope=8, page=8)])
    group = plain.groups[0]
    made = attrs.evolve(
        plain, groups=(attrs.evolve(group, parts=tuple(attrs.evolve(part, encoding=encoding) for part in group.parts)),)
    )
    columns = columns_without_gaps(made, 0, {0: 4})[0]
    asked = (grant(first, count, list(range(items_needed(made.groups[0], 0, first, count)))),)
    if not (encoding and inside):
        check_grants(made, 0, columns, (0,), asked)
        return
    with raises(RemoteError, code=ErrorCode.BAD_GRANT, path="grants[0].first", mine="where an item of 8 rows begins"):
        check_grants(made, 0, columns, (0,), asked)


SCALED = [
    Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=8), Cache.page_scales("scales", 2, kv_heads=2, page=4),
    Cache.gqa("draft", 2, kv_heads=2, head_dim=4, page=4, model=1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kv", "scales", "refused"),
    [(8, 8, False), (8, 4, True), (9, 8, True), (4, 8, True), (16, 16, False), (16, 8, True), (8, 16, True)],
)
def test_scales_of_pages_begin_with_the_rows_that_they_scale(kv: int, scales: int, refused: bool) -> None:
    """KVP-GRANT-SCALES: 16 tokens are asked for, so a window that begins at 16 is of none; the draft has no scales."""
    made = lay_out(SCALED)
    columns = columns_without_gaps(made, 0, {0: 2, 1: 4, 2: 4})[0]
    asked = tuple(
        grant(first, 16 - first, list(range(items_needed(g, 0, first, 16 - first))), group=g.id)
        for g, first in zip(made.groups, (kv, scales, 0), strict=True)
    )
    if not refused:
        check_grants(made, 0, columns, (0, 1, 2), asked)
        return
    with raises(RemoteError, code=ErrorCode.BAD_GRANT, path="grants[1].first") as caught:
        check_grants(made, 0, columns, (0, 1, 2), asked)
    assert caught.value.mine.startswith(f"{kv}, as of 'kv'")


def test_scales_may_be_dealt_from_another_token_than_the_rows() -> None:
    """KVP-GRANT-SCALES: tokens before an origin are not there to be asked for."""
    made = lay_out([SCALED[0], SCALED[1].replicated()], Parallel(tp=2, dcp=2, interleave=8, origin=8))
    columns = columns_without_gaps(made, 0, {0: 2, 1: 4})[0]
    for first in (0, 8):
        asked = grant(8, 8, [0], group=0), grant(first, 16 - first, list(range(4 - first // 4)), group=1)
        check_grants(made, 0, columns, (0, 1), asked)


@pytest.mark.parametrize(
    ("first", "count", "rows"), [(0, 16, [0, 1, 2, 3]), (4, 9, [1, 2, 3]), (8, 1, [2]), (4, 0, [])]
)
def test_scales_of_pages_move_between_ranks_that_divide_heads_in_another_way(
    first: int, count: int, rows: list[int]
) -> None:
    """From two ranks of one head each to one rank of both; the last page is not full."""
    source, sink = lay_out([Cache.page_scales("scales", 1, kv_heads=2, page=4)], Parallel(tp=2)), SCALES
    columns, length = columns_without_gaps(sink, 0, {0: 4})
    there, written = np.full(length, 0xEE, np.uint8), 0
    for rank in (0, 1):
        theirs, size = columns_without_gaps(source, rank, {0: 4})
        here = np.random.default_rng(rank).integers(0, 256, size, np.uint8)
        sides = RankLayout(source, rank, theirs), RankLayout(sink, 0, columns)
        windows_ = {0: Window(0, first + count, np.arange(4))}, {0: Window(first, count, np.arange(len(rows)))}
        program = lower(plan(source, sink).between(rank, 0), *sides, *windows_)
        written += execute(program, {0: memoryview(here)}, {0: memoryview(there)})
        for part in (0, 1):
            from_, to = int(theirs[0].offset[part]), int(columns[0].offset[part]) + 4 * rank
            for item, row in enumerate(rows):
                wanted = here[from_ + 4 * row : from_ + 4 * row + 4]
                assert there[to + 8 * item : to + 8 * item + 4].tolist() == wanted.tolist()
    assert written == 16 * len(rows)


def test_a_row_that_is_covered_in_part_goes_with_the_last_rows() -> None:
    """13 tokens in rows of 4: after 10 of them two rows may go, and the others when prefill is over."""
    side_ = RankLayout(SCALES, 0, columns_without_gaps(SCALES, 0, {0: 4})[0])
    window = {0: Window(0, 13, np.arange(4))}
    whole = lower(plan(SCALES, SCALES).routes, side_, side_, window, window)
    parts = [whole.since(0, 0, 10), whole.since(0, 10, None)]
    assert [part.maps[0].global_rows.tolist() for part in parts] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("spec", "early"),
    [
        (Cache.page_scales("scales", 1, kv_heads=1, page=4), frozenset({0})),
        (Cache.state("state", 1, parts={"s": (DType.F32, 1, 64)}), frozenset()),
        (Cache.mla("kv", 1, latent=8, rope=4, page=4), frozenset({0})),
    ],
)
def test_a_pair_knows_what_may_go_early_before_there_is_a_request(spec: Cache, early: frozenset[int]) -> None:
    geometry = lay_out([spec])
    side_ = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 4})[0])
    pair = Pair(plan(geometry, geometry).routes, side_, side_)
    number = items_needed(geometry.groups[0], 0, 0, 16) if geometry.groups[0].kind == ItemKind.PAGE else 1
    window = {0: Window(0, 16, np.arange(number))}
    assert pair.nothing.early == pair.lower(window, window).early == early
    assert (pair.nothing.bytes, pair.lower(window, window).bytes > 0) == (0, True)


def test_plain_parts_of_an_opaque_group_come_from_pages_of_its_size() -> None:
    """Keys that are tiled, in pages of 4; their plain scales beside them at the sink, in pages of 8 at the source."""
    tiled = attrs.evolve(PAGES.parts[0], name="k", encoding="tiled")
    plain = attrs.evolve(PAGES.parts[0], name="k_scale")
    beside = attrs.evolve(PAGES, parts=(tiled, plain))
    apart = attrs.evolve(PAGES, parts=(tiled,)), attrs.evolve(PAGES, id=1, rows=8, parts=(plain,))
    sides = []
    for groups in (apart, (beside,)):
        owned = (Rank(rank=0, owns=tuple(owns(g, [0]) for g in groups)),)
        geometry = Geometry(replica=0, facts=(), groups=groups, ranks=owned)
        sides.append(RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 4, 1: 2})[0]))
    with raises(KvprotoError, code=ErrorCode.LAYOUT_OPAQUE, path="groups[pages].rows"):
        plan(sides[0].geometry, sides[1].geometry)


def test_an_interleave_that_means_nothing_keeps_no_opaque_part_from_moving() -> None:
    """KVP-PLAN-OPAQUE: what `plan` accepts can be lowered; without a deal, interleave and origin are not compared."""
    source, theirs = pool(OPAQUE)
    sink, ours = pool(attrs.evolve(OPAQUE, interleave=64, origin=128))
    sides = RankLayout(source, 0, theirs), RankLayout(sink, 0, ours)
    window = {0: Window(0, 8, np.array([0, 1]))}
    assert Pair(plan(source, sink).routes, *sides).lower(window, window).bytes == 64


def test_opaque_rows_of_a_deal_are_counted_globally() -> None:
    """Pages of 4 rows, runs of 2 rows: rank 1 holds rows 2, 3, 6, 7 in its first page, 10, 11, 14, 15 in its second."""
    group = attrs.evolve(PAGES, cp_size=2, interleave=2, parts=(attrs.evolve(PAGES.parts[0], encoding="tiled"),))
    shares = tuple(Rank(rank=r, owns=(owns(group, [0], cp_rank=r),)) for r in (0, 1))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=shares)
    side_ = RankLayout(geometry, 1, columns_without_gaps(geometry, 1, {0: 4})[0])
    window = {0: Window(0, 16, np.array([3, 1]))}
    (rows,) = lower(plan(geometry, geometry).between(1, 1), side_, side_, window, window).maps
    assert rows.global_rows.tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    assert (rows.source_item.tolist(), rows.rows.tolist()) == ([3, 1], [4, 4])


@pytest.mark.parametrize(
    ("source", "sink", "first"),
    [
        (attrs.evolve(DEALT, origin=1 << 63), PAGES, 0),
        (PAGES, attrs.evolve(DEALT, origin=1 << 63), 0),
        (DEALT, DEALT, 1 << 63),
        (OPAQUE, OPAQUE, 1 << 63),
    ],
)
def test_places_beyond_64_bits_are_refused(source: Group, sink: Group, first: int) -> None:
    sides = [RankLayout(made, 0, columns) for made, columns in (pool(source), pool(sink))]
    ranks = [Rank(rank=1, owns=(owns(g, [0], cp_rank=g.cp_size - 1),)) for g in (source, sink)]
    whole = [attrs.evolve(s.geometry, ranks=(*s.geometry.ranks, r)) for s, r in zip(sides, ranks, strict=True)]
    window = {0: Window(first, 8, np.arange(2))}
    with raises(RemoteError, code=ErrorCode.BAD_GRANT):
        lower(plan(*whole).between(0, 0), *sides, window, window)


def test_no_tokens_are_picked_out_of_opaque_items() -> None:
    geometry, columns = pool(OPAQUE)
    side_, window = RankLayout(geometry, 0, columns), {0: Window(0, 7, np.array([3, 1]))}
    program = lower(plan(geometry, geometry).routes, side_, side_, window, window)
    assert program.select(layers=[0]).bytes == program.bytes
    assert program.select(layers=[1], tokens=(0, 6)).bytes == 0
    with raises(KvprotoError, code=ErrorCode.LAYOUT_OPAQUE):
        program.select(tokens=(0, 6))


def test_layers_and_parts_do_not_begin_at_one_place() -> None:
    """A pointer of one layer that is stated for another, or K's for V."""
    geometry, columns = pool(gqa(0, "heads", 0, 2, 8, 4))
    check_grants(geometry, 0, columns, (0,), (grant(0, 4, [1]),))
    columns[0] = attrs.evolve(columns[0], offset=np.zeros(2, np.uint64))
    with raises(RemoteError, code=ErrorCode.ITEM_ALIAS):
        check_grants(geometry, 0, columns, (0,), (grant(0, 4, [1]),))


@pytest.mark.parametrize(("first", "refused"), [(12, False), (11, True)])
def test_an_opaque_ring_that_has_gone_on_is_refused(first: int, refused: bool) -> None:
    geometry, columns = pool(attrs.evolve(OPAQUE, kind=ItemKind.RING, rows=8))
    side_ = RankLayout(geometry, 0, columns)
    windows_ = {0: Window(0, 20, np.array([2]))}, {0: Window(first, 8, np.array([1]))}
    if not refused:
        assert lower(plan(geometry, geometry).routes, side_, side_, *windows_).maps[0].size == 8
        return
    with raises(RemoteError, code=ErrorCode.BAD_GRANT):
        lower(plan(geometry, geometry).routes, side_, side_, *windows_)


def unified(draft_offset: int, draft_stride: int) -> tuple[Geometry, dict[int, Columns]]:
    """Two groups over one region: items of 64 bytes for the target, of 32 for the draft."""
    groups = mla(0, "target", 0, 16, 4), mla(1, "draft", 1, 8, 4)
    ranks = (Rank(rank=0, owns=tuple(owns(g, [0]) for g in groups)),)
    geometry = Geometry(replica=0, facts=(), groups=groups, ranks=ranks)
    places = ((0, 64, 16), (draft_offset, draft_stride, 8))
    columns = {
        g.id: Columns(
            group=g.id, items=8, region=np.array([0]), offset=np.array([at]), item_stride=np.array([stride]),
            row_stride=np.array([row]), lane_stride=np.array([row]),
        )
        for g, (at, stride, row) in zip(groups, places, strict=True)
    }  # fmt: skip
    return geometry, columns


@pytest.mark.parametrize(
    ("offset", "stride", "target", "draft", "alias"),
    [
        (
            0,
            32,
            [2, 3],
            [0, 1, 2, 3],
            False,
        ),  # a unified pool: blocks 2 and 3 for the target, the first two for the draft
        (0, 32, [2, 3], [4, 0], True),  # draft item 4 is the first half of target item 2
        (0, 32, [0], [1], True),
        (0, 32, [0], [2], False),
        (512, 32, [0, 1], [0, 1], False),  # pools apart
        (32, 64, [0, 1], [0, 1], True),  # the draft inside the target's blocks
        (64, 96, [0], [0], False),
    ],
)
def test_items_of_two_groups_are_disjoint(
    offset: int, stride: int, target: list[int], draft: list[int], alias: bool
) -> None:
    geometry, columns = unified(offset, stride)
    given_ = (grant(0, 4 * len(target), target), grant(0, 4 * len(draft), draft, group=1))
    if not alias:
        check_grants(geometry, 0, columns, (0, 1), given_)
        return
    with raises(RemoteError, code=ErrorCode.ITEM_ALIAS, path="grants[1].items"):
        check_grants(geometry, 0, columns, (0, 1), given_)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*4 * [st.integers(-3, 1 << 40)], st.integers(1, 9)), min_size=1, max_size=20),
    st.sampled_from([1, 3]),
)
def test_the_reach_of_few_runs_and_of_many_is_that_of_their_rows(runs: list[tuple[int, ...]], times: int) -> None:
    columns = np.array(runs * times, np.int64).T
    m = RowMap(*columns, piece_first=columns[4], piece_rows=columns[4])
    rows = [(a, b + i, c, d + i) for a, b, c, d, n in runs for i in range(n)]
    assert m.size == len(rows) * times
    assert m.ends.tolist() == [sum(columns[4][: i + 1]) for i in range(len(columns[4]))]
    for reach, at in ((m.source_reach, 0), (m.sink_reach, 2)):
        items, numbers = zip(*(row[at : at + 2] for row in rows), strict=True)
        assert reach == (min(*items, *numbers), max(items), max(numbers)), at
