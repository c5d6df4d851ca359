"""The packed stream gives the bytes that the executor gives, and both sides agree on it without seeing each other's layout."""

import random
from collections.abc import Iterable
from itertools import pairwise

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.copying.execute import execute
from kvproto.copying.grants import items_needed
from kvproto.copying.program import EMPTY_MAP, CopyProgram, Operations, RankLayout, Window
from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry, Rank, gqa, mla, owns
from kvproto.planning.plan import Plan, plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns
from tests.errors import raises
from tests.plan import oracle
from tests.plan.programs import Held, Spans, hold, random_pairs, spans
from tests.plan.worlds import caches, side
from tests.pools import lower


def seen_by_sink(made: Plan, source: Geometry, number: int, sink: RankLayout, asked: dict[int, Window]) -> CopyProgram:
    """The program that a sink makes: of the source it knows the Description alone."""
    routes = made.between(number, sink.rank)
    groups = {g.id: g for g in source.groups}
    wanted: dict[int, list[Window]] = {}
    for route in routes:
        for id in {box.source_group for box in route.boxes}:
            wanted.setdefault(id, []).append(asked[route.group])
    windows, counts = {}, {}
    for share in next(r for r in source.ranks if r.rank == number).owns:
        some = wanted.get(share.group, [])
        first = min((w.first for w in some), default=0)
        count = max((w.first + w.count for w in some), default=0) - first
        counts[share.group] = max(items_needed(groups[share.group], share.cp_rank, first, count), 1)
        windows[share.group] = Window(first, count, np.arange(counts[share.group]))
    columns = columns_without_gaps(source, number, counts)[0]
    return lower(routes, RankLayout(source, number, columns), sink, windows, asked)


def two_engines(rng: random.Random) -> tuple[Geometry, Geometry, Spans, Spans]:
    """A source and a sink, and what of each is asked; the source may have computed more."""
    cached = caches(rng)
    source, sink = side(rng, cached, 0, complete=True), side(rng, cached, 0, complete=False)
    return source, sink, *spans(rng, cached, source, sink)


def chunks(rng: random.Random, length: int, most: int) -> Iterable[tuple[int, int]]:
    """The stream cut anywhere, in no order."""
    cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.randint(0, most)))})
    pieces = list(pairwise(cuts))
    return rng.sample(pieces, len(pieces))


def views(pool: oracle.Pools) -> dict[int, memoryview]:
    return {i: memoryview(p) for i, p in pool.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_any_two_engines_agree_on_the_stream(seed: int) -> None:
    rng = random.Random(seed)
    source, sink, whole, wanted = two_engines(rng)
    made = plan(source, sink)
    have = {r.rank: hold(rng, source, r.rank, whole) for r in source.ranks}
    pools = {n: oracle.noise(held.lengths, n) for n, held in have.items()}
    for rank in sink.ranks:
        held = hold(rng, sink, rank.rank, wanted)
        mine = RankLayout(sink, rank.rank, held.columns)
        for number in made.required(rank.rank):
            _transfer(rng, made, source, number, have[number], views(pools[number]), mine, held)


def _transfer(
    rng: random.Random, made: Plan, source: Geometry, number: int, have: Held, there: dict[int, memoryview],
    mine: RankLayout, held: Held,
) -> None:  # fmt: skip
    theirs = RankLayout(source, number, have.columns)
    sent = lower(made.between(number, mine.rank), theirs, mine, have.windows, held.windows)
    taken = seen_by_sink(made, source, number, mine, held.windows)
    if rng.random() < 0.3:  # a part of it, as a prefill sends what it has
        layers = rng.sample(range(6), 3)
        tokens = rng.choice([None, (rng.randint(0, 9), rng.randint(10, 20))])
        sent, taken = sent.select(layers, tokens), taken.select(layers, tokens)
    here, wanted = oracle.noise(held.lengths, 99), oracle.noise(held.lengths, 99)
    execute(sent, there, views(wanted))
    out, into = PackedStream(sent, "source", there), PackedStream(taken, "sink", views(here))
    assert out.length == into.length == sent.bytes
    stream = bytearray(out.length)
    out.pack(0, stream)
    for a, b in chunks(rng, out.length, 6):
        piece = bytearray(b - a)
        out.pack(a, piece)
        assert piece == stream[a:b]
        into.unpack(a, piece)
    assert all(np.array_equal(here[i], wanted[i]) for i in wanted)


@attrs.frozen
class Layout:
    """How one side lays out a group: padding in bytes, and whether lanes are apart from rows."""

    rows: int
    between_rows: int
    between_items: int
    by_lane: bool

    def columns(self, lanes: int, size: int, items: int, layers: int) -> tuple[Columns, int]:
        """Strides, and the length of the region."""
        row = (size if self.by_lane else lanes * size) + self.between_rows
        item = row * self.rows * (lanes if self.by_lane else 1) + self.between_items
        full = np.ones(layers, np.uint64)
        return Columns(
            group=0, items=items, region=np.zeros(layers, np.uint32), offset=np.arange(layers, dtype=np.uint64) * np.uint64(item * items),
            item_stride=full * np.uint64(item), row_stride=full * np.uint64(row),
            lane_stride=full * np.uint64(row * self.rows if self.by_lane else size),
        ), item * items * layers  # fmt: skip


layouts = st.builds(
    Layout, st.sampled_from([1, 3, 16, 64]), st.sampled_from([0, 0, 16, 24]), st.sampled_from([0, 0, 128, 40]), st.booleans()
)  # fmt: skip


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layouts, layouts, st.sampled_from([48, 256, 1152, 8192]), st.integers(1, 4), st.booleans(), st.integers(0, 2**32)
)
def test_long_and_short_runs(ours: Layout, theirs: Layout, size: int, lanes: int, adjacent: bool, seed: int) -> None:
    rng, dice = random.Random(seed), np.random.default_rng(seed)
    tokens, layers = rng.randint(1, 300), 2
    sides, windows, memory = [], [], []
    for layout in (ours, theirs):
        group = gqa(0, "g", 0, lanes, size // 2, layout.rows) if lanes > 1 else mla(0, "g", 0, size, layout.rows)
        group = attrs.evolve(group, parts=(attrs.evolve(group.parts[0], name="p", lane_bytes=size),))
        geometry = Geometry(
            replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(layers)),)),)
        )
        needed = -(-tokens // layout.rows)
        columns, length = layout.columns(lanes, size, needed + 2, layers)
        sides.append(RankLayout(geometry, 0, {0: columns}))
        items = np.arange(needed) + 1 if adjacent else dice.permutation(needed + 2)[:needed]
        windows.append({0: Window(0, tokens, items)})
        memory.append(dice.integers(0, 256, length, np.uint8))
    made = plan(sides[0].geometry, sides[1].geometry)
    program = lower(made.between(0, 0), *sides, *windows)
    wanted, here = memory[1].copy(), memory[1].copy()
    execute(program, {0: memoryview(memory[0])}, {0: memoryview(wanted)})
    out = PackedStream(program, "source", {0: memoryview(memory[0])})
    into = PackedStream(seen_by_sink(made, sides[0].geometry, 0, sides[1], windows[1]), "sink", {0: memoryview(here)})
    for a, b in chunks(rng, out.length, 3):
        piece = bytearray(b - a)
        out.pack(a, piece)
        into.unpack(a, piece)
    assert np.array_equal(here, wanted)


@pytest.mark.parametrize("encoding", ["tiled", None])
def test_groups_that_move_whole_items(encoding: str | None) -> None:
    group = mla(0, "pages", 0, 8, 4)
    group = attrs.evolve(group, parts=(attrs.evolve(group.parts[0], encoding=encoding),))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, [0, 1]),)),))
    own = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 5})[0])
    windows = {0: Window(0, 16, np.array([4, 0, 2, 3]))}, {0: Window(4, 10, np.array([1, 4, 0]))}
    made = plan(geometry, geometry)
    program = lower(made.between(0, 0), own, own, *windows)
    assert program.bytes == (2 * 3 * 32 if encoding else 2 * 10 * 8)
    memory, here, wanted = (np.random.default_rng(n).integers(0, 256, 512, np.uint8) for n in (1, 2, 2))
    execute(program, {0: memoryview(memory)}, {0: memoryview(wanted)})
    stream = bytearray(program.bytes)
    PackedStream(program, "source", {0: memoryview(memory)}).pack(0, stream)
    PackedStream(seen_by_sink(made, geometry, 0, own, windows[1]), "sink", {0: memoryview(here)}).unpack(0, stream)
    assert np.array_equal(here, wanted)


def small() -> tuple[CopyProgram, bytearray]:
    """Eight rows of 8 bytes, pages of 4 in reverse."""
    group = mla(0, "pages", 0, 8, 4)
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, [0]),)),))
    own = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 2})[0])
    window = {0: Window(0, 8, np.array([1, 0]))}
    return lower(plan(geometry, geometry).between(0, 0), own, own, window, window), bytearray(range(64))


def test_rows_ascend_whatever_the_pages() -> None:
    program, memory = small()
    out = bytearray(64)
    PackedStream(program, "source", {0: memoryview(memory)}).pack(0, out)
    assert out == memory[32:] + memory[:32]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float64])
def test_buffers_of_any_elements_are_their_bytes(kind: type[np.generic]) -> None:
    program, memory = small()
    out, here = np.zeros((2, 32 // np.dtype(kind).itemsize), kind), bytearray(64)
    PackedStream(program, "source", {0: np.frombuffer(memory, kind)}).pack(0, out)
    assert out.tobytes() == memory[32:] + memory[:32]
    PackedStream(program, "sink", {0: np.frombuffer(here, kind)}).unpack(0, out)
    assert here == memory


def test_a_byte_in_the_middle_of_a_record() -> None:
    program, memory = small()
    wanted = bytes(memory)
    PackedStream(program, "sink", {0: memoryview(memory)}).unpack(35, b"\xff")
    assert [i for i in range(64) if memory[i] != wanted[i]] == [3]


@pytest.mark.parametrize(("offset", "size"), [(60, 5), (-1, 2), (65, 0)])
def test_beyond_the_stream(offset: int, size: int) -> None:
    program, memory = small()
    with raises(KvprotoError, code=ErrorCode.OUT_OF_RANGE):
        PackedStream(program, "source", {0: memoryview(memory)}).pack(offset, bytearray(size))


def test_a_program_that_leaves_its_memory() -> None:
    program, memory = small()
    for regions in ({0: memoryview(memory)[:63]}, {1: memoryview(memory)}):
        with raises(KvprotoError, code=ErrorCode.OUT_OF_REGION):
            PackedStream(program, "source", regions)


def test_a_pool_without_items_is_one_that_nothing_is_drawn_from() -> None:
    program, memory = small()
    ops = program.ops.copy()
    ops["source_items"] = 0
    ops["source_offset"] = len(memory)
    empty = CopyProgram((EMPTY_MAP,) * len(program.maps), Operations(ops), program.tokens_per_row)
    assert PackedStream(empty, "source", {0: memoryview(memory)}).length == 0
    with raises(KvprotoError, code=ErrorCode.OUT_OF_REGION):
        PackedStream(attrs.evolve(program, operations=Operations(ops)), "source", {0: memoryview(memory)})


def test_an_item_beyond_the_pool() -> None:
    program, memory = small()
    far = attrs.evolve(program.maps[0], sink_row=program.maps[0].sink_row + 4)
    with raises(KvprotoError, code=ErrorCode.OUT_OF_REGION):
        PackedStream(CopyProgram((far,), program.operations, program.tokens_per_row), "sink", {0: memoryview(memory)})


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_stream_is_there_as_far_as_its_layers_are(seed: int) -> None:
    rng = random.Random(seed)
    for program, lengths, _ in random_pairs(rng):
        layers = sorted({(int(op["model"]), int(op["layer"])) for op in program.ops})
        there = set(rng.sample(layers, rng.randint(0, len(layers))))
        before = 0
        for layer in layers:
            some = [op for op in program.ops if (op["model"], op["layer"]) == layer]
            size = sum(int(op["lanes"] * op["lane_bytes"]) * program.maps[op["map"]].size for op in some)
            if size and layer not in there:
                break
            before += size
        stream = PackedStream(program, "source", {i: memoryview(bytearray(n)) for i, n in lengths.items()})
        assert stream.prefix_bytes(there) == before
