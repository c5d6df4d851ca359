"""Recurrent states beside attention: an engine that evicts and loads back writes what one that keeps all writes."""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvproto import Cache as Group
from kvproto import DType, Parallel, Pool, Tiers, lay_out
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Route
from kvproto.rank.pool import columns_without_gaps
from kvproto.tiers import host_copies
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout, page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.transport.memory import allocate
from kvproto.transport.shm.transport import HostPager
from tests.tiers.schedules import Memory, stored

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from hybrid import NAMES, PAGE, Engine, Floats

PROMPT = [(7 * n * n + 3 * n) % 64 for n in range(27)]
"""Six pages, and three tokens of the seventh."""
PAGES = 6


@pytest.fixture(scope="module")
def right() -> list[int]:
    """What an engine writes that has never evicted anything."""
    engine = Engine(pages=64, host=1)
    return engine.answer(PROMPT, 12)[0]


def forgotten(engine: Engine) -> None:
    """The device has nothing any more, and what was there is something else."""
    engine.tiers.drain()
    engine.tiers.device.evict(engine.tiers.device.slots.count)
    for memory in engine.pool.memories.values():
        np.from_dlpack(memory).view(np.uint8)[:] = 0x3F


@pytest.mark.parametrize("where", ["device", "host", "storage"])
def test_tokens_after_a_hit_are_those_of_an_engine_that_never_evicts(
    right: list[int], tmp_path: Path, where: str
) -> None:
    engine = Engine(pages=16, host=16, storage=tmp_path)
    assert engine.answer(PROMPT, 12)[0] == right
    if where != "device":
        forgotten(engine)
    if where == "storage":
        engine.close()
        engine = Engine(pages=16, host=16, storage=tmp_path)
    tokens, found = engine.answer(PROMPT, 12)
    assert found == {"device": PAGES * (where == "device"), "host": PAGES * (where != "device")}
    assert tokens == right
    engine.close()


def test_a_hit_ends_where_a_state_was_kept(right: list[int]) -> None:
    """KVP-TIER-LENGTH: of six pages there, four can be used, and none where no state is; nothing wrong is written."""
    for kept, pages in (({8, 16}, 4), ({4}, 1), (set[int](), 0)):
        engine = Engine(pages=16, host=16)
        engine.answer(PROMPT, 12, states=kept)
        for _ in range(2):
            tokens, found = engine.answer(PROMPT, 12, states=kept)
            assert found["device"] + found["host"] == pages
            assert tokens == right
            forgotten(engine)
        engine.close()


def test_a_state_that_is_computed_later_joins_its_page(right: list[int]) -> None:
    """On the device, and on the host too: the second request computes the states that the first did not keep."""
    engine = Engine(pages=24, host=24)
    engine.answer(PROMPT, 12, states={8})
    assert engine.answer(PROMPT, 12)[1] == {"device": 2, "host": 0}
    assert engine.answer(PROMPT, 12)[1] == {"device": PAGES, "host": 0}
    forgotten(engine)
    tokens, found = engine.answer(PROMPT, 12)
    assert (tokens, found) == (right, {"device": 0, "host": PAGES})
    for index in (engine.tiers.device, engine.tiers.host):
        index.evict(24)
        assert index.slots.free == 24, "every slot comes back, those of replaced pages too"
    engine.close()


def test_a_state_that_is_off_by_one_page_is_noticed(right: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pages=16, host=16)
    engine.answer(PROMPT, 12)
    real = Engine.state_before

    def off(self: Engine, layer: int, at: int, slots: Sequence[int]) -> Floats:
        return real(self, layer, at - PAGE if at == PAGES * PAGE else at, slots)

    monkeypatch.setattr(Engine, "state_before", off)
    tokens, found = engine.answer(PROMPT, 12)
    assert found["device"] == PAGES
    assert tokens != right
    engine.close()


def without_states(routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> Pair:
    """A copy that leaves the states out."""
    return Pair(tuple(route for route in routes if route.group == 0), source, sink)


@pytest.mark.parametrize("ways", [(without_states, Pair), (Pair, without_states)], ids=["to the host", "from the host"])
def test_states_that_are_dropped_on_their_way_are_noticed(
    right: list[int], monkeypatch: pytest.MonkeyPatch, ways: tuple[Callable[..., Pair], ...]
) -> None:
    made = iter(ways)
    monkeypatch.setattr(host_copies, "Pair", lambda *given: next(made)(*given))
    engine = Engine(pages=16, host=16)
    engine.answer(PROMPT, 12)
    forgotten(engine)
    tokens, found = engine.answer(PROMPT, 12)
    assert found["host"] == PAGES
    assert tokens != right
    engine.close()


def test_turns_of_conversations_that_do_not_fit(tmp_path: Path) -> None:
    """Prompts that begin alike, states kept here and there, little room: all tokens are right, all slots come back."""
    rng = random.Random(1)
    small, large = Engine(pages=14, host=20, storage=tmp_path), Engine(pages=400, host=1)
    begins, hits = [[rng.randrange(64) for _ in range(9)] for _ in range(2)], 0
    for _ in range(25):
        prompt = rng.choice(begins) + [rng.randrange(4) for _ in range(rng.randrange(12))]
        kept = None if rng.random() < 0.5 else {PAGE * n for n in range(10) if rng.random() < 0.4}
        tokens, found = small.answer(prompt, 5, kept)
        assert tokens == large.answer(prompt, 5)[0]
        hits += sum(found.values())
        if rng.random() < 0.3:
            forgotten(small)
    assert hits > 20
    for index in (small.tiers.device, small.tiers.host):
        index.evict(index.slots.count)
        assert index.slots.free == index.slots.count
    small.close()
    large.close()


def test_scratch_rows_of_a_state_stay_where_they_are() -> None:
    """Three live rows of two heads are kept of items of five; heads lie before rows or after them."""
    spec = Group.state("state", [0, 1], parts={"s": (DType.F32, 2, 12)}, rows=3, scratch_rows=2)
    geometry = lay_out([Group.gqa("kv", 1, kv_heads=1, head_dim=2, page=4), spec], Parallel())
    for heads_first in (False, True):
        columns, length = columns_without_gaps(geometry, 0, {0: 6, 1: 6}, heads_first)
        memory, layout = allocate(length), page_layout(geometry, 0, 4)
        made = HostCopies(layout, RankLayout(geometry, 0, columns), {0: memory}, 6, HostPager())
        seen = np.from_dlpack(memory).view(np.uint8)
        seen[:] = before = np.random.default_rng(1).integers(0, 256, length, np.uint8)
        made.to_host([4, 1], [0, 5])
        seen[:] = 0
        made.to_pool([5, 0], [1, 4])
        column = columns[1]
        states = []
        for data in (before, seen):
            strides = [int(each[0]) for each in (column.item_stride, column.row_stride, column.lane_stride)]
            views = [np.ndarray((6, 5, 2, 12), np.uint8, data, int(at), (*strides, 1)) for at in column.offset]
            states.append(np.stack(views))
        assert np.array_equal(states[1][:, [1, 4], :3], states[0][:, [1, 4], :3])
        assert not states[1][:, [0, 2, 3, 5]].any()
        assert not states[1][:, :, 3:].any(), "scratch is no part of a page"
        assert layout.component(1).length == 2 * 3 * 2 * 12


def hybrid(tp: int) -> Geometry:
    state = Group.state("state", [0, 2], parts={"s": (DType.F32, 4, 8)}, rows=2)
    return lay_out([Group.gqa("kv", [1], kv_heads=4, head_dim=3, page=4), state], Parallel(tp=tp))


def test_a_stage_with_states_alone_stores_the_pages_that_have_one(tmp_path: Path) -> None:
    """Of two stages one has the attention, the other the recurrent layer, and so nothing of a page without a state."""
    caches = [
        Group.gqa("kv", [1], kv_heads=2, head_dim=8, page=PAGE, dtype=DType.F32),
        Group.state("state", [0], parts={"s": (DType.F32, 4, 64)}),
    ]
    pool = Pool.allocate(lay_out(caches, Parallel(pp=2)), {"state": 16}, rank=0)
    tiers = Tiers(pool, NAMES, page=PAGE, host=8, storage=tmp_path)
    lease = tiers.open(tiers.chain(range(3 * PAGE)), 4)
    assert lease is not None
    lease.leave(3 * PAGE, {3 * PAGE})
    tiers.drain()
    assert (tiers.counts["stored"], tiers.counts["not stored"]) == (1, 0)
    tiers.close()


def coordinates(geometry: Geometry, rank: int, layout: PageLayout, i: int) -> dict[int, bytes]:
    """The bytes of page i; what a byte is depends on its layer, row, lane and token alone, not on who has it."""
    (own,) = (r for r in geometry.ranks if r.rank == rank)
    made = {}
    for part, share in zip(layout.components, own.owns, strict=True):
        (group,) = (g for g in geometry.groups if g.id == part.group)
        tokens = range(i * layout.page, (i + 1) * layout.page)
        rows = tokens if part.group == 0 else [1000 + 2 * (tokens.stop) + row for row in range(2)]
        made[part.group] = bytes(
            (((layer * 5 + p) * 1999 + row) * 1009 + at) * 2654435761 >> 20 & 255
            for layer in share.layers.tolist() for p, spec in enumerate(group.parts) for row in rows
            for span in share.lanes if span.part == p for at in range(span.lo * spec.lane_bytes, span.hi * spec.lane_bytes)
        )  # fmt: skip
    return made


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 1), (1, 2)])
@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (8, 16), (16, 8)])
def test_states_are_found_by_ranks_of_other_sizes(writers: int, readers: int, theirs: int, ours: int) -> None:
    """Where a page of both ends; of their pages, the third has no state."""
    store, chain = Memory(), Chain(bytes(32), theirs)
    chain.extend(range(65))
    for rank in range(writers):
        layout = page_layout(hybrid(writers), rank, theirs)
        RelayoutReader(store, hybrid(writers), rank, layout).publish_geometry()
        page_store = PageStore(store, layout)
        for i in range(64 // theirs):
            data = coordinates(hybrid(writers), rank, layout, i)
            assert page_store.write(chain, i, {0: data[0]} if i == 2 else data)
    for rank in range(readers):
        layout = page_layout(hybrid(readers), rank, ours)
        came = RelayoutReader(store, hybrid(readers), rank, layout).read(chain.with_page(ours), 0)
        assert len(came) == 64 // ours
        for i, data in enumerate(came):
            right = coordinates(hybrid(readers), rank, layout, i)
            ends = (i + 1) * ours
            there = ends % theirs == 0 and ends != 3 * theirs
            assert data == (right if there else {0: right[0]})
        page_store = PageStore(store, layout)
        for i, data in enumerate(came):
            page_store.write(chain.with_page(ours), i, data)
        assert stored(page_store, chain.with_page(ours)) == 64 // ours
