"""The slices of a plan are its boxes, and say where their bytes are on both sides."""

import random

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto import Cache, DType, Parallel, lay_out
from kvproto.cli.slices import Range, Slice, as_json, row, slices
from kvproto.planning.geometry import Geometry, LaneSpan, validate
from kvproto.planning.plan import plan
from tests.plan import oracle
from tests.plan.test_spreading import odd_world
from tests.plan.worlds import caches, side


def numbers(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [n for lo, hi in intervals for n in range(lo, hi)]


def held(geometry: Geometry, rank: int, name: str, model: int, here: Range) -> set[tuple[int, int]]:
    """(layer, byte) of the lane axis at local layers and lanes of a rank, by the shares as stated."""
    groups = {g.id: g for g in geometry.groups}
    (column,) = here.columns
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
            for byte in numbers(column.lanes) if byte < len(stored)
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
        wanted = {(layer, byte) for layer in numbers(one.whole.layers) for byte in numbers(one.whole.columns[0].lanes)}
        # the part of a model may be in several groups of a side: what else is at these places is of another layer
        assert wanted <= held(sink, one.sink, part_name, group.model, one.local)
        assert wanted <= held(source, one.source, part_name, group.model, one.remote)
        lanes = [
            sum(hi - lo for column in r.columns for lo, hi in column.lanes) for r in (one.whole, one.local, one.remote)
        ]
        assert lanes[0] == lanes[1] == lanes[2]
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
    size = found[0].whole.columns[0].lane_bytes
    assert {tuple(r.columns[0].lanes for r in (s.whole, s.local, s.remote)) for s in found} == {
        (((3 * size, 4 * size),), ((0, size),), ((size, 2 * size),))
    }


def test_each_section_has_lanes_of_its_own() -> None:
    """A latent whose rotary part is in a buffer apart, on both sides, and four lanes of it by two ranks."""
    apart, joint = (Cache.paged("kv", 2, parts={"latent": (DType.U8, 4, n)}, page=4) for n in ((8, 4), 12))
    source, sink = lay_out([apart], Parallel(tp=2)), lay_out([joint], Parallel(tp=4))
    found = {s.sink: s for s in slices(source, sink, plan(source, sink))}
    assert row(found[3])[1:] == (
        "kv.latent", "P1", "layers 0-1; lanes 3", "layers 0-1; lanes 0",
        "layers 0-1; latent[0:8] lanes 1, latent[8:12] lanes 1",
    )  # fmt: skip
    cut = lay_out([Cache.paged("kv", 2, parts={"latent": (DType.U8, 4, (6, 6))}, page=4)])
    (one, *_) = slices(source, cut, plan(source, cut))
    assert [c.name for c in one.local.columns] == ["latent[0:6]", "latent[6:12]"]


def test_ranks_may_own_other_lanes_of_each_section() -> None:
    """Rank 0 has the latent of lane 0 and the rotary part of lane 1, and rank 1 the other two."""
    apart, joint = (
        lay_out([Cache.paged("kv", 1, parts={"latent": (DType.U8, 2, n)}, page=4)], Parallel(tp=2)) for n in ((4, 2), 6)
    )
    spans = [(LaneSpan(part=0, lo=r, hi=r + 1), LaneSpan(part=1, lo=1 - r, hi=2 - r)) for r in range(2)]
    ranks = [attrs.evolve(r, owns=(attrs.evolve(r.owns[0], lanes=spans[r.rank]),)) for r in apart.ranks]
    source = attrs.evolve(apart, ranks=tuple(ranks))
    validate(source)
    found = [row(s)[2:] for s in slices(source, joint, plan(source, joint)) if s.sink == 0]
    assert found == [
        ("P0", "layers 0; bytes 0-3", "layers 0; bytes 0-3", "layers 0; latent[0:4] lanes 0"),
        ("P1", "layers 0; bytes 4-5", "layers 0; bytes 4-5", "layers 0; latent[4:6] lanes 0"),
    ]


def test_a_share_of_the_tokens_says_how_they_are_dealt() -> None:
    cache = [Cache.mla("kv", 1, latent=4, rope=2, page=4)]
    source = lay_out(cache, Parallel(tp=3, dcp=3, interleave=16, origin=32, deal=(0, 1, 1, 2)))
    sink = lay_out(cache, Parallel(tp=2, dcp=2, interleave=64))
    one = next(s for s in slices(source, sink, plan(source, sink)) if (s.source, s.sink) == (1, 0))
    assert row(one)[3:] == (
        "layers 0; lanes 0",
        "layers 0; lanes 0; token share 0 of 2, runs of 64",
        "layers 0; lanes 0; token share 1 of 3, runs of 16 from token 32, dealt 0, 1, 1, 2",
    )
    (said, *_) = as_json([one])
    assert (said["remote"]["interleave"], said["remote"]["origin"], said["remote"]["order"]) == (16, 32, (0, 1, 1, 2))
