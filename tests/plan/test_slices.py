"""The slices of a plan are its boxes, and say where their bytes are on both sides."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto import Cache, Parallel, lay_out
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.planning.slices import Range, Slice, slices
from tests.plan import oracle
from tests.plan.test_spreading import odd_world
from tests.plan.worlds import caches, side


def numbers(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [n for lo, hi in intervals for n in range(lo, hi)]


def held(geometry: Geometry, rank: int, name: str, model: int, here: Range) -> set[tuple[int, int]]:
    """(layer, byte) of the lane axis at local layers and lanes of a rank, by the shares as stated."""
    groups = {g.id: g for g in geometry.groups}
    found = set()
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        names = [p.name for p in group.parts]
        if group.model != model or name not in names or share.cp_rank != here.cp_rank:
            continue
        part = names.index(name)
        size = group.parts[part].lane_bytes
        stored = [lane * size + byte for lane in oracle.lanes_of(share, part) for byte in range(size)]
        found |= {
            (int(share.layers[layer]), stored[byte])
            for layer in numbers(here.layers) if layer < share.layers.size
            for byte in numbers(here.lanes) if byte < len(stored)
        }  # fmt: skip
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_slices_say_where_their_bytes_are(seed: int) -> None:
    rng = random.Random(seed)
    cached = caches(rng)
    pair = odd_world(rng) if seed % 2 else tuple(side(rng, cached, 0, complete=c) for c in (True, False))
    source, sink = pair
    made = plan(source, sink)
    cells = {
        (r.sink, r.source, r.group, box.part, box.source_class, layer, byte)
        for r in made.routes for box in r.boxes
        for layer in range(box.layer_lo, box.layer_hi) for byte in range(box.lo, box.hi)
    }  # fmt: skip
    groups = {g.name: g for g in sink.groups}
    told = set()
    for one in slices(source, sink, made):
        group_name, part_name = one.cache.split(".")
        group = groups[group_name]
        wanted = {(layer, byte) for layer in numbers(one.whole.layers) for byte in numbers(one.whole.lanes)}
        # the part of a model may be in several groups of a side: what else is at these places is of another layer
        assert wanted <= held(sink, one.sink, part_name, group.model, one.local)
        assert wanted <= held(source, one.source, part_name, group.model, one.remote)
        assert all(sum(hi - lo for lo, hi in r.lanes) == len(numbers(one.whole.lanes)) for r in (one.local, one.remote))
        part = [p.name for p in group.parts].index(part_name)
        told |= {(one.sink, one.source, group.id, part, one.remote.cp_rank, *at) for at in wanted}
    assert told == cells


def test_a_rank_counts_its_own_layers_and_lanes() -> None:
    """Stage 1 of a source has layers 4 to 7 as its layers 0 to 3."""
    cache = [Cache.gqa("target", 8, kv_heads=4, head_dim=8, page=4)]
    source, sink = lay_out(cache, Parallel(tp=2, pp=2)), lay_out(cache, Parallel(tp=4))
    found: list[Slice] = [s for s in slices(source, sink, plan(source, sink)) if (s.sink, s.cache) == (3, "target.v")]
    assert [(s.source, s.whole.layers, s.local.layers, s.remote.layers) for s in found] == [
        (1, ((0, 4),), ((0, 4),), ((0, 4),)), (3, ((4, 8),), ((4, 8),), ((0, 4),)),
    ]  # fmt: skip
    size = found[0].whole.lane_bytes
    assert {(s.whole.lanes, s.local.lanes, s.remote.lanes) for s in found} == {
        (((3 * size, 4 * size),), ((0, size),), ((size, 2 * size),))
    }
