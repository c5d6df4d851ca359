"""The suite's own planner and kvproto's find the same routes, digests and refusals in random worlds."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.errors import RemoteError
from kvproto.planning.geometry import Group, Owns, Part, Rank, gqa, mla, owns, validate
from kvproto.planning.plan import plan
from kvproto.wire import to_json
from kvproto.wire.enums import DType, Feature, ItemKind
from kvproto.wire.messages import Geometry
from kvproto_conformance.codec import Refusal, write_struct
from kvproto_conformance.planner import plan as second
from tests.plan.test_spreading import odd_world
from tests.plan.wild_worlds import world
from tests.plan.worlds import caches, side

Made = Callable[[int], tuple[Geometry, Geometry]]
FEATURES = [
    (),
    (Feature.SPREAD_ONE,),
    (Feature.FEW_SOURCES,),
    (Feature.COLD_DRAFT,),
    (Feature.FEW_SOURCES, Feature.SPREAD_ONE, Feature.COLD_DRAFT),
]


def ours(source: Geometry, sink: Geometry, features: tuple[Feature, ...]) -> Any:
    try:
        validate(source), validate(sink)
        made = plan(source, sink, features)
    except RemoteError as error:
        return error.code.name, error.path
    return {
        "plan": made.digest.hex(),
        "routes": [{"source": str(r.source), "sink": str(r.sink), "group": str(r.group), "digest": r.digest.hex()} for r in made.routes],
        "required": {str(r.rank): [str(a) for a in made.required(r.rank)] for r in sink.ranks},
        "cold": [str(m) for m in made.cold],
    }  # fmt: skip


def theirs(source: Geometry, sink: Geometry, features: tuple[Feature, ...]) -> Any:
    sides = to_json(source), to_json(sink)
    try:
        for side_ in sides:
            write_struct("Geometry", side_)
        return second(*sides, [f.name for f in features])
    except Refusal as refusal:
        return refusal.code, refusal.path


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_two_planners_agree(seed: int) -> None:
    rng = random.Random(seed)
    held = caches(rng)
    source, sink = (side(rng, held, rng.randint(0, 3), complete=c) for c in (True, False))
    if rng.random() < 0.3:
        source, sink = opaque(source), opaque(sink)
    if rng.random() < 0.1:
        sink = attrs.evolve(source, replica=sink.replica)
    features = rng.choice(FEATURES)
    assert ours(source, sink, features) == theirs(source, sink, features)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_two_planners_elect_alike(seed: int) -> None:
    """KVP-PLAN-TURN, KVP-PLAN-FEW: virtual stages and odd sets of owners."""
    rng = random.Random(seed)
    source, sink = odd_world(rng)
    features = rng.choice(FEATURES)
    assert ours(source, sink, features) == theirs(source, sink, features)


@pytest.mark.parametrize("seed", range(40))
def test_two_planners_agree_in_wild_worlds(seed: int) -> None:
    made = world(seed)
    assert ours(made.source, made.sink, made.features) == theirs(made.source, made.sink, made.features)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_two_planners_refuse_alike(seed: int) -> None:
    """One thing of one side changed, or a rank, layer or group of the source taken away."""
    rng = random.Random(seed)
    held = caches(rng)
    source, sink = (side(rng, held, rng.randint(0, 3), complete=c) for c in (True, False))
    source = spoilt(rng, source)
    features = rng.choice(FEATURES)
    assert ours(source, sink, features) == theirs(source, sink, features)


def opaque(geometry: Geometry) -> Geometry:
    groups = [attrs.evolve(g, parts=tuple(attrs.evolve(p, encoding="tiled") for p in g.parts)) for g in geometry.groups]
    return attrs.evolve(geometry, groups=tuple(groups))


def spoilt(rng: random.Random, geometry: Geometry) -> Geometry:
    groups = list(geometry.groups)
    at = rng.randrange(len(groups))
    group = groups[at]
    kind = rng.choice(["kind", "dtype", "lanes", "bytes", "step", "encoding", "rank", "layer", "group"])
    if kind == "rank" and len(geometry.ranks) > 1:
        return attrs.evolve(geometry, ranks=tuple(r for r in geometry.ranks if r is not rng.choice(geometry.ranks)))
    if kind == "layer":
        ranks = []
        for rank in geometry.ranks:
            shares = [attrs.evolve(s, layers=s.layers[1:]) if s.group == group.id else s for s in rank.owns]
            ranks.append(attrs.evolve(rank, owns=tuple(s for s in shares if s.layers.size)))
        return attrs.evolve(geometry, ranks=tuple(ranks))
    if kind == "group" and len(groups) > 1:
        ranks = [attrs.evolve(r, owns=tuple(s for s in r.owns if s.group != group.id)) for r in geometry.ranks]
        return attrs.evolve(geometry, groups=tuple(g for g in groups if g is not group), ranks=tuple(ranks))
    parts = list(group.parts)
    p = rng.randrange(len(parts))
    changes: dict[str, dict[str, Any]] = {
        "dtype": {"dtype": DType.I64}, "lanes": {"lanes": parts[p].lanes + 1}, "bytes": {"lane_bytes": parts[p].lane_bytes * 5 + 1},
        "encoding": {"encoding": "tiled"},
    }  # fmt: skip
    parts[p] = attrs.evolve(parts[p], **changes.get(kind, {}))
    groups[at] = attrs.evolve(group, parts=tuple(parts))
    if kind == "kind":
        groups[at] = attrs.evolve(group, kind=ItemKind.RING if group.kind == ItemKind.PAGE else ItemKind.PAGE)
    if kind == "step":
        groups[at] = attrs.evolve(group, tokens_per_row=group.tokens_per_row * 2)
    return attrs.evolve(geometry, groups=tuple(groups))


def stated(groups: Sequence[Group], *ranks: Sequence[Owns]) -> Geometry:
    made = tuple(Rank(rank=r, owns=tuple(some)) for r, some in enumerate(ranks))
    return Geometry(replica=0, facts=(), groups=tuple(groups), ranks=made)


def many_pieces(replicas: int) -> tuple[Geometry, Geometry]:
    group = gqa(0, "target", 0, 128, 8, 4)
    cut = [owns(group, [0], [(n, n + 1) for n in range(0, 128, 2)])]
    return (stated([group], *[[owns(group, [0])]] * replicas, cut),) * 2


def many_tables(groups: int) -> tuple[Geometry, Geometry]:
    """Each group of the source meets each of the sink's in one layer; all deal by tables."""
    order = np.arange(4096, dtype=np.uint32) // 2048
    made = [attrs.evolve(mla(n, f"g{n}", 0, 8, 4), cp_size=2, interleave=1, order=order) for n in range(groups)]
    layers = np.arange(groups * groups).reshape(groups, groups)
    first, second = (
        stated(made, *([owns(g, some, cp_rank=r) for g, some in zip(made, stripes, strict=True)] for r in range(2)))
        for stripes in (layers, layers.T)
    )
    return first, second


def few_needy(layers: int) -> tuple[Geometry, Geometry]:
    """Each of 64 lanes of each layer is a unit of each of 32 ranks."""
    group = attrs.evolve(mla(0, "target", 0, 8, 4), parts=(Part(name="k", dtype=DType.U8, lanes=64, lane_bytes=8),))
    cut = [owns(group, range(layers), [(n, n + 1) for n in range(64)])]
    whole = [owns(group, range(layers))]
    return stated([group], *[whole] * 32, cut), stated([group], *[whole] * 32)


def every_class(layers: int) -> tuple[Geometry, Geometry]:
    """All of 64 ranks need all of 32 cp ranks, of every second layer."""
    group = mla(0, "target", 0, 8, 4)
    dealt = attrs.evolve(group, cp_size=32, interleave=1)
    every = range(0, 2 * layers, 2)
    return stated([dealt], *([owns(dealt, every, cp_rank=r)] for r in range(32))), stated(
        [group], *[[owns(group, every)]] * 64
    )


def lanes_by_halves(lanes: int) -> tuple[Geometry, Geometry]:
    group = mla(0, "target", 0, 8, 4)
    first, second = (
        attrs.evolve(group, parts=(Part(name="k", dtype=DType.U8, lanes=lanes * 2 // size, lane_bytes=size),))
        for size in (2, 1)
    )
    return stated([first], [owns(first, [0])]), stated([second], [owns(second, [0])])


def sections_of_lanes(ranks: int) -> tuple[Geometry, Geometry]:
    """A lane of 4 bytes in two sections, which each rank needs in 1,024 layers, as four lanes of a byte."""
    group = mla(0, "target", 0, 8, 4)
    halves = [Part(name="k", dtype=DType.U8, lanes=1, lane_bytes=2, at=at, whole=4) for at in (0, 2)]
    first, second = (
        attrs.evolve(group, parts=tuple(parts))
        for parts in (halves, [Part(name="k", dtype=DType.U8, lanes=4, lane_bytes=1)])
    )
    every = range(1024)
    return stated([first], [owns(first, every)]), stated([second], *[[owns(second, every)]] * ranks)


def families(layers: int) -> tuple[Geometry, Geometry]:
    """A plain part that leaves 4,096 pieces, and a tiled one, of which a source rank is in a family without a sink."""
    group, state = mla(0, "target", 0, 8, 4), mla(1, "tiled", 0, 8, 4)
    plain = attrs.evolve(group, parts=(Part(name="k", dtype=DType.U8, lanes=64, lane_bytes=8),))
    tiled = attrs.evolve(state, parts=(Part(name="s", dtype=DType.U8, lanes=2, lane_bytes=8, encoding="tiled"),))
    cut = owns(plain, range(64), [(n, n + 1) for n in range(64)])
    whole, all_, half = owns(plain, range(64)), owns(tiled, range(layers)), owns(tiled, range(layers), [(0, 1)])
    source = stated([plain, tiled], [cut, all_], [half])
    return source, stated([plain, tiled], [whole, all_], *[[whole]] * 61)


LARGE: dict[Made, tuple[int, int]] = {
    many_pieces: (511, 512),
    many_tables: (2, 3),
    few_needy: (63, 64),
    every_class: (126, 127),
    lanes_by_halves: (65535, 65536),
    sections_of_lanes: (41, 42),
    families: (2048, 2049),
}
"""The greatest world that fits, and the least that does not."""


@pytest.mark.parametrize("made", LARGE, ids=lambda made: made.__name__)
@pytest.mark.parametrize("over", [False, True])
def test_two_planners_know_when_it_is_too_much(made: Made, over: bool) -> None:
    """KVP-PLAN-SIZE, KVP-PLAN-RUNS: pieces, runs of deals, layers, and lanes of other bytes."""
    source, sink = made(LARGE[made][over])
    found = ours(source, sink, ())
    assert found == theirs(source, sink, ())
    assert (found[0] if isinstance(found, tuple) else None) == ("TOO_LARGE" if over else None)
