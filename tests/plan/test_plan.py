"""The planner against brute force, and its refusals."""

import itertools
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.errors import PlanError, RemoteError
from kvproto.execute import checksums, execute
from kvproto.geometry import (
    Geometry,
    Group,
    LaneSpan,
    Owns,
    Part,
    Rank,
    decode_geometry,
    encode_geometry,
    facts,
    gqa,
    handoff,
    mla,
    owns,
    validate,
)
from kvproto.plan import Plan, plan
from kvproto.program import Side, Window, check_columns, items_needed, lower
from kvproto.wire.enums import DType, ErrorCode, ItemKind, MemoryKind
from kvproto.wire.messages import Columns, Region
from tests.plan.oracle import Request, fill, value, walk

ITEMS = 14


@attrs.frozen
class Cache:
    """What both sides agree on for one model's group."""

    model: int
    kind: ItemKind
    names: tuple[str, ...]
    heads: int
    lane_bytes: int
    layers: tuple[int, ...]
    tokens_per_row: int


@st.composite
def caches(draw: st.DrawFn) -> list[Cache]:
    found = []
    for model in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from([ItemKind.PAGE, ItemKind.PAGE, ItemKind.PAGE, ItemKind.SLOT, ItemKind.RING]))
        names = draw(st.sampled_from([("k", "v"), ("latent",)]))
        heads = draw(st.integers(1, 4))
        layers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(sorted).map(tuple))
        step = draw(st.sampled_from([1, 1, 2])) if kind == ItemKind.PAGE else 1
        found.append(Cache(model, kind, names, heads, draw(st.sampled_from([2, 4])), layers, step))
    return found


@st.composite
def sides(draw: st.DrawFn, cached: list[Cache], replica: int) -> Geometry:
    """One side's way of holding the caches: any split of layers, lanes and tokens over ranks, replicated or not."""
    size = draw(st.integers(1, 4))
    groups, shares = [], {r: [] for r in range(size)}
    for cache in cached:
        fold = draw(st.sampled_from([1, 2]))
        paged = cache.kind == ItemKind.PAGE
        cp = draw(st.integers(1, min(3, size))) if paged else 1
        step = cache.tokens_per_row
        parts = tuple(
            Part(name=n, dtype=DType.U8, lanes=cache.heads * fold, lane_bytes=cache.lane_bytes // fold)
            for n in cache.names
        )
        rows = draw(st.integers(12, 14)) if cache.kind == ItemKind.RING else draw(st.integers(1, 4)) if paged else 5
        group = Group(
            id=cache.model + 3 * replica, name=f"m{cache.model}", model=cache.model, kind=cache.kind, rows=rows,
            tokens_per_row=step, cp_size=cp, interleave=step * draw(st.integers(1, 3)), parts=parts,
            origin=step * draw(st.integers(0, 2)) if cp > 1 else 0, live_rows=3 if cache.kind == ItemKind.SLOT else None,
        )  # fmt: skip
        groups.append(group)
        for r in range(size):
            lanes = cache.heads * fold
            cut = draw(st.lists(st.integers(0, lanes), min_size=2, max_size=2, unique=True).map(sorted))
            pieces = [(cut[0], cut[1])] if draw(st.booleans()) else [(0, lanes)]
            if pieces[0][1] - pieces[0][0] > 1 and draw(st.booleans()):
                lo, hi = pieces[0]
                middle = draw(st.integers(lo + 1, hi - 1))
                pieces = [(middle, hi), (lo, middle)]
            layers = draw(st.lists(st.sampled_from(cache.layers), min_size=1, unique=True).map(sorted))
            shares[r].append(owns(group, layers, pieces, cp_rank=r % cp))
        # one whole copy of every class, so that a source covers what any sink may want
        if replica == 0:
            for c in range(cp):
                shares.setdefault(100 + c, []).append(owns(group, cache.layers, None, cp_rank=c))
    return Geometry(
        replica=replica, facts=(), groups=tuple(groups),
        ranks=tuple(Rank(rank=r, owns=tuple(s)) for r, s in sorted(shares.items())),
    )  # fmt: skip


def columns_of(geometry: Geometry, rank: int, draw: st.DrawFn) -> tuple[dict[int, Columns], int]:
    """Any layout of strides: NHD or HND, padded, all in one region."""
    groups = {g.id: g for g in geometry.groups}
    found, at = {}, draw(st.integers(0, 9))
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        rows = []
        for _ in share.layers:
            for p, part in enumerate(group.parts):
                lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
                axes = {"row": group.rows, "lane": lanes}
                order = draw(st.permutations(["row", "lane"]))
                strides, step = {}, part.lane_bytes
                for axis in order:
                    strides[axis] = step + draw(st.integers(0, 1))
                    step = strides[axis] * (axes[axis] - 1) + step
                item = step + draw(st.integers(0, 3))
                rows.append((at, item, strides["row"], strides["lane"]))
                at += item * ITEMS + draw(st.integers(0, 2))
        offset, item_stride, row_stride, lane_stride = np.array(rows, np.uint64).T.copy()
        found[group.id] = Columns(
            group=group.id, items=ITEMS, region=np.zeros(len(rows), np.uint32), offset=offset, item_stride=item_stride,
            row_stride=row_stride, lane_stride=lane_stride,
        )  # fmt: skip
    return found, at


def request(group: Group, share: Owns, first: int, count: int, draw: st.DrawFn, skip_nothing: bool = False) -> Request:
    need = items_needed(group, share.cp_rank, first, count)
    return Request(first, count, draw(st.permutations(range(ITEMS)))[:need])


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_byte_against_brute_force(data: st.DataObject) -> None:
    cached = data.draw(caches())
    source, sink = data.draw(sides(cached, 0)), data.draw(sides(cached, 1))
    for geometry in (source, sink):
        validate(geometry)
        assert encode_geometry(decode_geometry(encode_geometry(geometry))) == encode_geometry(geometry)
    made = plan(source, sink)
    assert made == plan(source, sink)
    span = {c.model: (data.draw(st.integers(4, 9)), data.draw(st.integers(0, 12))) for c in cached}
    held = {}
    for geometry in (source, sink):
        groups = {g.id: g for g in geometry.groups}
        for rank in geometry.ranks:
            columns, length = columns_of(geometry, rank.rank, data.draw)
            region = Region(id=0, base=0, length=length, kind=MemoryKind.HOST, boot=bytes(16), handles=())
            check_columns(geometry, rank.rank, {0: region}, tuple(columns.values()))
            asked = {s.group: request(groups[s.group], s, *span[groups[s.group].model], data.draw) for s in rank.owns}
            held[geometry.replica, rank.rank] = columns, asked, fill(geometry, rank.rank, columns, asked, length)
    for rank in sink.ranks:
        columns, asked, pool = held[1, rank.rank]
        wanted = pool.copy()
        targets = dict(walk(sink, rank.rank, columns, asked))
        for at, where in targets.items():
            pool[at] ^= 0xFF
            wanted[at] = value(where)
        written = 0
        for number in made.required(rank.rank):
            theirs, their_asked, their_pool = held[0, number]
            program = lower(
                made.between(number, rank.rank), Side(source, number, theirs), Side(sink, rank.rank, columns),
                windows(their_asked), windows(asked),
            )  # fmt: skip
            regions = {0: memoryview(their_pool)}, {0: memoryview(pool)}
            written += execute(program, *regions)
            assert program.bytes == sum(program.bytes_by_group().values())
            assert checksums(program, regions[0], sink=False) == checksums(program, regions[1], sink=True)
        assert np.array_equal(pool, wanted)
        assert written == len(targets)  # each byte exactly once


def windows(asked: dict[int, Request]) -> dict[int, Window]:
    return {g: Window(r.first, r.count, np.array(r.items, np.int64)) for g, r in asked.items()}


def heads(kv_heads: int, tp: int, rank: int) -> tuple[int, int]:
    return (rank * kv_heads // tp, (rank + 1) * kv_heads // tp) if tp <= kv_heads else (rank * kv_heads // tp,) * 2


def engine(tp: int, groups: list[Group], layers: list[int], replica: int = 0) -> Geometry:
    ranks = []
    for r in range(tp):
        shares = []
        for group, count in zip(groups, layers, strict=True):
            lanes = group.parts[0].lanes
            lo, hi = heads(lanes, tp, r)
            shares.append(owns(group, range(count), [(lo, max(hi, lo + 1))]))
        ranks.append(Rank(rank=r, owns=tuple(shares)))
    return Geometry(replica=replica, facts=(), groups=tuple(groups), ranks=tuple(ranks))


MLA, GQA = mla(0, "target", 0, 1152, 64), gqa(1, "draft", 1, 8, 256, 64)


def test_mla_target_with_gqa_draft_8_to_4() -> None:
    made = plan(engine(8, [MLA, GQA], [61, 1]), engine(4, [MLA, GQA], [61, 1]))
    # eight candidates, four sinks: layer i of sink j comes from rank (4 i + j) mod 8
    for j in range(4):
        layers = {
            r.source: [n for b in r.boxes for n in range(b.layer_lo, b.layer_hi)]
            for r in made.routes
            if r.sink == j and r.group == 0
        }
        assert layers == {j: list(range(0, 61, 2)), j + 4: list(range(1, 61, 2))}
        assert {r.source for r in made.routes if r.sink == j and r.group == 1} == {2 * j, 2 * j + 1}
        assert made.required(j) == tuple(sorted({j, j + 4, 2 * j, 2 * j + 1}))
    load = [
        sum(b.layer_hi - b.layer_lo for r in made.routes if r.source == s and r.group == 0 for b in r.boxes)
        for s in range(8)
    ]
    assert max(load) - min(load) <= 1


def test_one_rank_to_many_and_back() -> None:
    spread = plan(engine(1, [MLA], [3]), engine(4, [MLA], [3]))
    assert spread.served(0) == (0, 1, 2, 3)
    gathered = plan(engine(2, [GQA], [2]), engine(1, [GQA], [2]))
    assert [(r.source, b.lo, b.hi) for r in gathered.routes for b in r.boxes if b.part == 0] == [
        (0, 0, 1024),
        (1, 1024, 2048),
    ]


def test_the_ordinal_of_the_sink_replica_turns_the_election() -> None:
    ordinals = [plan(engine(8, [MLA], [1]), engine(1, [MLA], [1], replica=r)) for r in range(8)]
    assert [p.required(0) for p in ordinals] == [(r,) for r in range(8)]
    assert len({p.digest for p in ordinals}) == 8


@pytest.mark.parametrize("kv_heads", range(1, 13))
def test_every_tensor_parallel_pair_covers_every_head_once(kv_heads: int) -> None:
    group = gqa(0, "target", 0, kv_heads, 16, 16)
    sizes = [t for t in range(1, 13) if kv_heads % t == 0 or t % kv_heads == 0]
    for s, d in itertools.product(sizes, sizes):
        made = plan(engine(s, [group], [1]), engine(d, [group], [1]))
        for rank in range(d):
            got = sorted((b.lo, b.hi) for r in made.routes if r.sink == rank for b in r.boxes if b.part == 0)
            lo, hi = heads(kv_heads, d, rank)
            assert [x for span in got for x in range(*span)] == list(range(lo * 16, max(hi, lo + 1) * 16))


def changed(group: Group = GQA, **changes: Any) -> Geometry:
    return engine(2, [attrs.evolve(group, **changes)], [2])


def part(**changes: Any) -> tuple[Part, ...]:
    return tuple(attrs.evolve(p, **changes) for p in GQA.parts)


PAGED = engine(2, [GQA], [2])
MISFITS: dict[str, tuple[Geometry, Geometry, ErrorCode, str, str, str]] = {
    "fact": (attrs.evolve(PAGED, facts=facts({"rope": "1e6"})), attrs.evolve(PAGED, facts=facts({"rope": "5e5"})),
             ErrorCode.IDENTITY_MISMATCH, "facts[rope]", "1e6", "5e5"),
    "absent fact": (attrs.evolve(PAGED, facts=facts({"rope": "1e6"})), PAGED, ErrorCode.IDENTITY_MISMATCH, "facts[rope]", "1e6", "(absent)"),
    "dtype": (PAGED, changed(parts=part(dtype=DType.BF16)), ErrorCode.DTYPE_MISMATCH, "groups[draft].parts[k].dtype", "F32", "BF16"),
    "extent": (PAGED, changed(parts=part(lane_bytes=128)), ErrorCode.LANE_MISMATCH, "groups[draft].parts[k].lanes",
               "8 lanes of 256 bytes", "8 lanes of 128 bytes"),
    "kind": (PAGED, changed(kind=ItemKind.SLOT), ErrorCode.KIND_MISMATCH, "groups[draft].kind", "PAGE", "SLOT"),
    "rows": (PAGED, changed(tokens_per_row=4), ErrorCode.ROW_MISMATCH, "groups[draft].tokens_per_row", "1", "4"),
    "layer": (PAGED, engine(2, [GQA], [3]), ErrorCode.LAYER_MISSING, "groups[draft].parts[k]", "no layer 2", "layer 2 of model 1"),
    "part": (engine(2, [MLA], [2]), PAGED, ErrorCode.PART_MISSING, "groups[draft].parts[k]", "(absent)", "model 1"),
    "opaque": (changed(parts=part(encoding="tiled")), PAGED, ErrorCode.LAYOUT_OPAQUE, "groups[draft].parts[k].encoding", "tiled", "None"),
    "common multiple": (changed(cp_size=1021, interleave=1019), changed(cp_size=1013, interleave=1013), ErrorCode.ROW_MISMATCH,
               "groups[draft].interleave", "1021 ranks of 1019 tokens", "1013 ranks of 1013 tokens"),
    "nobody": (attrs.evolve(PAGED, ranks=PAGED.ranks[:1]), PAGED, ErrorCode.COVERAGE, "groups[draft].parts[k]",
               "no rank owns bytes 1024..2048 of cp rank 0", "rank 1 needs them"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit(misfit: str) -> None:
    source, sink, *wanted = MISFITS[misfit]
    with pytest.raises(PlanError) as caught:
        plan(source, sink)
    error = caught.value
    assert [error.code, error.path, error.mine, error.yours] == wanted


def test_a_draft_that_nobody_wants_is_not_sent() -> None:
    made: Plan = plan(engine(2, [MLA, GQA], [2, 1]), engine(1, [MLA], [2]))
    assert {r.group for r in made.routes} == {0}


def test_handoff_makes_routes_and_no_copies() -> None:
    first = handoff(0, "first token", {"token": (DType.U32, 4)})
    side = engine(1, [first], [1])
    made = plan(side, side)
    assert made.send_flags(0, 0) == (0,)
    assert lower(made.routes, Side(side, 0, {}), Side(side, 0, {}), {}, {}).ops == ()


BROKEN = {
    "groups": lambda g: attrs.evolve(g, groups=g.groups[::-1]),
    "ranks": lambda g: attrs.evolve(g, ranks=g.ranks[::-1]),
    "ranks[0].owns[0].group": lambda g: with_owns(engine(2, [MLA], [2]), group=7),
    "ranks[0].owns[0].layers": lambda g: with_owns(g, layers=np.array([1, 0], np.uint32)),
    "ranks[0].owns[0].cp_rank": lambda g: with_owns(g, cp_rank=1),
    "ranks[0].owns[0].lanes[0]": lambda g: with_owns(g, lanes=(LaneSpan(part=0, lo=0, hi=2),)),
    "ranks[0].owns[0].lanes": lambda g: with_owns(g, lanes=()),
}


def with_owns(geometry: Geometry, **changes: Any) -> Geometry:
    first, *rest = geometry.ranks
    share, *others = first.owns
    return attrs.evolve(geometry, ranks=(attrs.evolve(first, owns=(attrs.evolve(share, **changes), *others)), *rest))


@pytest.mark.parametrize("path", BROKEN)
def test_description_that_contradicts_itself(path: str) -> None:
    with pytest.raises(PlanError) as caught:
        validate(BROKEN[path](engine(2, [MLA, GQA], [2, 1])))
    assert (caught.value.code, caught.value.path) == (ErrorCode.BAD_GEOMETRY, path)


def test_columns_that_overlap_or_leave_their_region() -> None:
    side = engine(1, [MLA], [1])
    good = Columns(
        group=0, items=2, region=np.array([0]), offset=np.array([0]), item_stride=np.array([64 * 1152]),
        row_stride=np.array([1152]), lane_stride=np.array([1152]),
    )  # fmt: skip
    region = {0: Region(id=0, base=0, length=2 * 64 * 1152, kind=MemoryKind.HOST, boot=bytes(16), handles=())}
    check_columns(side, 0, region, (good,))
    for change, code in (
        ({"row_stride": np.array([1000])}, ErrorCode.BAD_COLUMNS),
        ({"item_stride": np.array([0])}, ErrorCode.BAD_COLUMNS),
        ({"offset": np.array([1])}, ErrorCode.OUT_OF_REGION),
        ({"offset": np.array([2**64 - 1], np.uint64)}, ErrorCode.OUT_OF_REGION),
        ({"region": np.array([1])}, ErrorCode.BAD_COLUMNS),
        ({"offset": np.array([0, 0])}, ErrorCode.BAD_COLUMNS),
    ):
        with pytest.raises(RemoteError) as caught:
            check_columns(side, 0, region, (attrs.evolve(good, **change),))
        assert caught.value.code == code
