"""The planner against brute force, concrete plans, and refusals."""

import itertools
import random
import time
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.copying.program import RankLayout
from kvproto.errors import PlanError
from kvproto.planning.arrays import merged_intervals
from kvproto.planning.geometry import (
    Geometry,
    Group,
    Part,
    Rank,
    decode_geometry,
    encode_geometry,
    facts,
    gqa,
    handoff,
    mla,
    owns,
)
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import Plan, differences, plan
from kvproto.wire.enums import DType, ErrorCode, FactRule, Feature, ItemKind
from kvproto.wire.messages import Fact
from tests.errors import raises
from tests.plan import oracle
from tests.plan.worlds import caches, side
from tests.pools import lower


def rows_of(made: Plan, ordinal: int) -> list[oracle.Row]:
    """The routes' boxes as the digest sees them."""
    return sorted(
        (
            r.source,
            r.sink,
            r.group,
            b.model,
            b.layer_lo,
            b.layer_hi,
            b.part,
            b.lo,
            b.hi,
            b.source_class,
            b.sink_class,
            ordinal,
        )
        for r in made.routes
        for b in r.boxes
    )


def cells(rows: list[oracle.Row]) -> list[tuple[int, ...]]:
    """Each layer and byte apart."""
    return sorted(
        (a, b, group, model, layer, part, byte, c, d)
        for a, b, group, model, x, y, part, lo, hi, c, d, _ in rows
        for layer in range(x, y)
        for byte in range(lo, hi)
    )


def one_group_each(geometry: Geometry) -> bool:
    names = [(g.model, g.parts[0].name) for g in geometry.groups]
    return len(set(names)) == len(names)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_plan_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    cached = caches(rng)
    source, sink = (
        side(rng, cached, rng.randint(0, 3), complete=True),
        side(rng, cached, rng.randint(0, 3), complete=False),
    )
    made, wanted = plan(source, sink), oracle.boxes(source, sink)
    got = rows_of(made, sink.replica)
    assert cells(got) == cells(wanted)
    if one_group_each(source):
        assert got == wanted
    assert made.digest == oracle.digest(wanted)
    assert [(r.source, r.sink, r.group) for r in made.routes] == sorted({row[:3] for row in wanted})
    for route in made.routes:
        assert (
            route.digest
            == route.ref.digest
            == oracle.digest([w for w in wanted if w[:3] == (route.source, route.sink, route.group)])
        )
    exactly_once(made, source, sink)
    for d in sink.ranks:
        assert made.required(d.rank) == tuple(sorted({w[0] for w in wanted if w[1] == d.rank}))
        for s in source.ranks:
            flags = made.send_flags(s.rank, d.rank)
            assert flags == tuple(sorted({w[2] for w in wanted if w[:2] == (s.rank, d.rank)}))
            assert bool(flags) == (d.rank in made.served(s.rank)) == (s.rank in made.required(d.rank))
    # what identity and order of objects could change, does not
    again = plan(attrs.evolve(source, groups=tuple(attrs.evolve(g) for g in source.groups)), attrs.evolve(sink))
    assert again == made


def exactly_once(made: Plan, source: Geometry, sink: Geometry) -> None:
    """Every byte of the lane axis of every row has one route, from a rank that owns it."""
    have, want = oracle.owners(source), oracle.owners(sink)
    sources, sinks = oracle.group_of(source), oracle.group_of(sink)
    expected = [
        (rank, sinks[key[:3]].id, *key, c, d)
        for key, ranks in want.items()
        for rank, d in ranks.items()
        for c, other in oracle.meeting(sources[key[:3]], sinks[key[:3]])
        if other == d
    ]
    got = []
    names = {(g.id, i): p.name for g in sink.groups for i, p in enumerate(g.parts)}
    for a, b, group, model, layer, part, byte, c, d in cells(rows_of(made, sink.replica)):
        key = (model, names[group, part], layer, byte)
        assert have[key][a] == c
        got.append((b, group, *key, c, d))
    assert sorted(got) == sorted(expected)


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


def test_mla_2_to_1_deals_layers_alternately() -> None:
    made = plan(engine(2, [MLA], [5]), engine(1, [MLA], [5]))
    assert [(r.source, [b.layer_lo for b in r.boxes]) for r in made.routes] == [(0, [0, 2, 4]), (1, [1, 3])]
    other = plan(engine(2, [MLA], [5]), engine(1, [MLA], [5], replica=1))
    assert [(r.source, [b.layer_lo for b in r.boxes]) for r in other.routes] == [(0, [1, 3]), (1, [0, 2, 4])]


@pytest.mark.parametrize(
    ("heads_", "source", "sink", "wanted"),
    [
        (8, 2, 1, [(0, 0, 0, 4), (1, 0, 4, 8)]),
        (8, 1, 2, [(0, 0, 0, 4), (0, 1, 4, 8)]),
        (6, 3, 2, [(0, 0, 0, 2), (1, 0, 2, 3), (1, 1, 3, 4), (2, 1, 4, 6)]),
        (2, 4, 2, [(0, 0, 0, 1), (2, 1, 1, 2)]),  # each head on two source ranks, one layer: the first of them
        (2, 2, 4, [(0, 0, 0, 1), (0, 1, 0, 1), (1, 2, 1, 2), (1, 3, 1, 2)]),
    ],
)
def test_heads_go_where_they_are_wanted(heads_: int, source: int, sink: int, wanted: list[tuple[int, ...]]) -> None:
    group = gqa(1, "target", 0, heads_, 16, 4)
    made = plan(engine(source, [group], [1]), engine(sink, [group], [1]))
    for p in (0, 1):
        assert [
            (r.source, r.sink, b.lo // 16, b.hi // 16) for r in made.routes for b in r.boxes if b.part == p
        ] == wanted


def test_layers_of_unlike_owners_join_into_one_box() -> None:
    whole = [owns(MLA, [0, 1])], [owns(MLA, [0])]
    ranks = tuple(Rank(rank=r, owns=tuple(o)) for r, o in enumerate(whole))
    source = Geometry(replica=0, facts=(), groups=(MLA,), ranks=ranks)
    sink = engine(1, [MLA], [2])
    # layer 0 has two candidates and layer 1 one: rank 0 both times, so one box
    (route,) = plan(source, sink).routes
    assert [(b.layer_lo, b.layer_hi) for b in route.boxes] == [(0, 2)]


def test_source_groups_split_boxes_but_not_the_digest() -> None:
    first, second = mla(0, "even", 0, 8, 4), mla(1, "odd", 0, 8, 2)
    split = Geometry(
        replica=0, facts=(), groups=(first, second), ranks=(Rank(rank=0, owns=(owns(first, [0]), owns(second, [1]))),)
    )
    sink = engine(1, [mla(5, "all", 0, 8, 4)], [2])
    made = plan(split, sink)
    assert [(b.layer_lo, b.layer_hi, b.source_group) for b in made.routes[0].boxes] == [(0, 1, 0), (1, 2, 1)]
    assert made.digest == plan(engine(1, [first], [2]), sink).digest


def test_the_first_misfit_is_that_of_the_first_sink_group() -> None:
    groups = [MLA, GQA]
    ranks = (Rank(rank=0, owns=(owns(GQA, [0]),)), Rank(rank=1, owns=(owns(MLA, [0]),)))  # rank 0 has the second group
    sink = Geometry(replica=0, facts=(), groups=tuple(groups), ranks=ranks)
    with raises(PlanError, code=ErrorCode.PART_MISSING, path="groups[target].parts[latent]"):
        plan(Geometry(replica=0, facts=(), groups=(), ranks=()), sink)


def test_an_undealt_side_may_state_any_interleave_and_origin() -> None:
    dealt = attrs.evolve(MLA, cp_size=2, interleave=16)
    ranks = tuple(Rank(rank=r, owns=(owns(dealt, [0], cp_rank=r),)) for r in range(2))
    source = Geometry(replica=0, facts=(), groups=(dealt,), ranks=ranks)
    for interleave, origin in ((1, 0), (2**32 - 5, 0), (7, 2**64 - 1)):
        sink = engine(1, [attrs.evolve(MLA, interleave=interleave, origin=origin)], [1])
        assert plan(source, sink).required(0) == plan(sink, source).served(0) == (0, 1)


@pytest.mark.parametrize("origin", [2**63, 2**64 - 16])
def test_an_origin_beyond_all_tokens_is_planned(origin: int) -> None:
    def dealt(group: Group) -> Geometry:
        ranks = tuple(Rank(rank=r, owns=(owns(group, [0], cp_rank=r),)) for r in range(2))
        return Geometry(replica=0, facts=(), groups=(group,), ranks=ranks)

    near, far = (dealt(attrs.evolve(MLA, cp_size=2, interleave=16, origin=o)) for o in (0, origin))
    wanted = [(0, 0, 0, 0), (1, 1, 1, 1)] if origin % 32 == 0 else [(0, 1, 0, 1), (1, 0, 1, 0)]
    assert [(r.source, r.sink, b.source_class, b.sink_class) for r in plan(near, far).routes for b in r.boxes] == wanted


def test_what_a_sink_leaves_out_of_a_model_that_it_takes_is_named() -> None:
    """By registered names, over all ranks; a draft of which it takes nothing is its own choice."""
    kv = Cache.gqa("kv", [3, 7], kv_heads=2, head_dim=8, page=4)
    index = Cache.paged("i", [3, 7], parts={"index": (DType.BF16, 1, 8)}, page=4)
    draft = Cache.gqa("draft", 1, model=1, kv_heads=2, head_dim=8, page=4)
    source = lay_out([kv, index, draft], Parallel(tp=2))

    def left_out(*caches: Cache) -> list[tuple[str, str, str]]:
        return differences(source, lay_out(list(caches), Parallel(tp=2)))

    assert left_out(kv, index, draft) == left_out(kv, index) == []
    assert left_out(kv) == [("groups[i].parts[index]", "2 layers, from 3 on", "none of them")]
    assert left_out(Cache.gqa("kv", [7], kv_heads=2, head_dim=8, page=4), index) == [
        (f"groups[kv].parts[{part}]", "1 of 2 layers, from 3 on", "none of them") for part in ("k", "v")
    ]
    alias = Cache.paged("mine", [3, 7], parts={"key": (DType.BF16, 2, 8), "value": (DType.BF16, 2, 8)}, page=4)
    assert left_out(alias, index) == []


def test_facts_that_warn_and_facts_that_nobody_compares() -> None:
    a, b = ((Fact(name="a", value=v, rule=FactRule.IGNORE), Fact(name="b", value=v, rule=FactRule.WARN)) for v in "xy")
    source, sink = attrs.evolve(PAGED, facts=a), attrs.evolve(PAGED, facts=b)
    plan(source, sink)
    assert differences(source, sink) == [("facts[b]", "x", "y")]
    stricter = attrs.evolve(sink, facts=(attrs.evolve(b[0], rule=FactRule.EQUAL), b[1]))
    for pair, values in (((source, stricter), ("x", "y")), ((stricter, source), ("y", "x"))):
        with pytest.raises(PlanError) as caught:
            plan(*pair)
        assert (caught.value.path, caught.value.mine, caught.value.yours) == ("facts[a]", *values)


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
    "fact of the value (absent)": (attrs.evolve(PAGED, facts=facts({"rope": "(absent)"})), PAGED, ErrorCode.IDENTITY_MISMATCH, "facts[rope]", "(absent)", "(absent)"),
    "absent fact": (attrs.evolve(PAGED, facts=facts({"rope": "1e6"})), PAGED, ErrorCode.IDENTITY_MISMATCH, "facts[rope]", "1e6", "(absent)"),
    "dtype": (PAGED, changed(parts=part(dtype=DType.BF16)), ErrorCode.DTYPE_MISMATCH, "groups[draft].parts[k].dtype", "F32", "BF16"),
    "extent": (PAGED, changed(parts=part(lane_bytes=128)), ErrorCode.LANE_MISMATCH, "groups[draft].parts[k].lanes",
               "8 lanes of 256 bytes", "8 lanes of 128 bytes"),
    "kind": (PAGED, changed(kind=ItemKind.SLOT), ErrorCode.KIND_MISMATCH, "groups[draft].kind", "PAGE", "SLOT"),
    "rows": (PAGED, changed(tokens_per_row=4), ErrorCode.ROW_MISMATCH, "groups[draft].tokens_per_row", "1", "4"),
    "layer": (PAGED, engine(2, [GQA], [3]), ErrorCode.LAYER_MISSING, "groups[draft].parts[k]", "no layer 2", "layer 2 of model 1"),
    "part": (engine(2, [MLA], [2]), PAGED, ErrorCode.PART_MISSING, "groups[draft].parts[k]", "(absent)", "k of model 1"),
    "opaque": (changed(parts=part(encoding="tiled")), PAGED, ErrorCode.LAYOUT_OPAQUE, "groups[draft].parts[k].encoding", "tiled", "None"),
    "factor": (changed(parts=part(lanes=12, lane_bytes=100)), changed(parts=part(lanes=8, lane_bytes=150)), ErrorCode.LANE_MISMATCH,
               "groups[draft].parts[k].lane_bytes", "100", "150"),
    "live rows": (changed(kind=ItemKind.SLOT, live_rows=3), changed(kind=ItemKind.SLOT, live_rows=4), ErrorCode.ROW_MISMATCH,
               "groups[draft].live_rows", "3", "4"),
    "all rows live": (changed(kind=ItemKind.SLOT, live_rows=3), changed(kind=ItemKind.SLOT), ErrorCode.ROW_MISMATCH,
               "groups[draft].live_rows", "3", "64"),
    "opaque pages": (changed(parts=part(encoding="tiled")), changed(parts=part(encoding="tiled"), rows=32), ErrorCode.LAYOUT_OPAQUE,
               "groups[draft].rows", "64 rows of 256 bytes a lane", "32 rows of 256 bytes a lane"),
    "pairs of cp ranks": (changed(cp_size=257), changed(cp_size=256), ErrorCode.ROW_MISMATCH, "groups[draft].cp_size", "257", "256"),  # KVP-PLAN-DEALS
    "nobody": (attrs.evolve(PAGED, ranks=PAGED.ranks[:1]), PAGED, ErrorCode.COVERAGE, "groups[draft].parts[k]",
               "no rank of cp rank 0 owns bytes 1024..2048 of layers 0-1", "rank 1 needs them"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_misfit(misfit: str) -> None:
    source, sink, code, path, mine, yours = MISFITS[misfit]
    with raises(PlanError, code=code, path=path, mine=mine, yours=yours):
        plan(source, sink)


def test_sinks_of_replicas_may_read_from_the_lowest() -> None:
    """Feature SPREAD_ONE: no layer is dealt; with one sink that is rank 0, as engines have it today."""
    source = engine(8, [MLA], [61])
    dealt, lowest = (plan(source, engine(1, [MLA], [61]), f) for f in ((), (Feature.SPREAD_ONE,)))
    assert dealt.required(0) == tuple(range(8))
    assert lowest.required(0) == (0,)
    assert plan(source, engine(4, [MLA], [61]), (Feature.SPREAD_ONE,)).required(3) == (6,)
    assert dealt.digest != lowest.digest


def test_draft_that_prefill_lacks_starts_cold_if_both_agreed() -> None:
    source, sink = engine(2, [MLA], [2]), engine(1, [MLA, GQA], [2, 1])
    with raises(PlanError, code=ErrorCode.PART_MISSING):
        plan(source, sink)
    made = plan(source, sink, (Feature.COLD_DRAFT,))
    assert made.cold == (1,)
    assert made.routes == plan(source, engine(1, [MLA], [2])).routes
    # a target is never cold, and neither is a draft of which something is there
    with pytest.raises(PlanError):
        plan(engine(2, [GQA], [1]), sink, (Feature.COLD_DRAFT,))
    with pytest.raises(PlanError):
        plan(engine(2, [MLA, GQA], [2, 1]), engine(1, [MLA, GQA], [2, 2]), (Feature.COLD_DRAFT,))


def test_a_draft_that_the_source_states_and_no_rank_owns_is_lacked() -> None:
    """KVP-PLAN-COLD: the group is in the Description, but nobody has a layer of it."""
    nobody = attrs.evolve(engine(2, [MLA], [2]), groups=(MLA, GQA))
    sink = engine(1, [MLA, GQA], [2, 1])
    with raises(PlanError, code=ErrorCode.PART_MISSING):
        plan(nobody, sink)
    assert plan(nobody, sink, (Feature.COLD_DRAFT,)).cold == (1,)
    # a draft that no rank of the sink owns is not started, cold or warm
    assert plan(nobody, attrs.evolve(sink, ranks=nobody.ranks[:1]), (Feature.COLD_DRAFT,)).cold == ()


def test_a_draft_that_nobody_wants_is_not_sent() -> None:
    made: Plan = plan(engine(2, [MLA, GQA], [2, 1]), engine(1, [MLA], [2]))
    assert {r.group for r in made.routes} == {0}


def test_handoff_makes_routes_and_no_copies() -> None:
    first = handoff(0, "first token", {"token": (DType.U32, 4)})
    side = engine(1, [first], [1])
    made = plan(side, side)
    assert made.send_flags(0, 0) == (0,)
    assert lower(made.routes, RankLayout(side, 0, {}), RankLayout(side, 0, {}), {}, {}).bytes == 0


def tiled(number: int, ranks: int, swap: bool = False) -> Geometry:
    """GQA heads in a layout that strides do not describe."""
    group = gqa(0, "tiled", 0, number, 32, 4)
    group = attrs.evolve(group, parts=tuple(attrs.evolve(p, encoding="tiled.4") for p in group.parts))
    made = []
    for rank in range(ranks):
        lo = number * rank // ranks
        spans = [(lo, max(number * (rank + 1) // ranks, lo + 1))]
        if swap:
            half = (spans[0][0] + spans[0][1]) // 2
            spans = [(half, spans[0][1]), (spans[0][0], half)]
        made.append(Rank(rank=rank, owns=(owns(group, range(4), spans),)))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(made))


def test_a_pair_of_descriptions_that_would_take_minutes_to_plan_is_refused() -> None:
    """KVP-PLAN-SIZE: a few kilobytes cut 600 replicas of the lanes into 2,048 pieces each."""
    group = gqa(0, "target", 0, 2048, 8, 4)
    whole = [Rank(rank=r, owns=(owns(group, [0]),)) for r in range(600)]
    cut = Rank(rank=600, owns=(owns(group, [0], [(n, n + 1) for n in range(0, 2048, 2)]),))
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(*whole, cut))
    with raises(PlanError, code=ErrorCode.TOO_LARGE, path="groups[target].parts[k]"):
        plan(geometry, geometry)


def test_pieces_count_over_all_parts_layers_and_ranks() -> None:
    """KVP-PLAN-SIZE: k is planned, k and v are not, for the pieces of all layers of all parts."""
    group = gqa(0, "target", 0, 512, 8, 4)
    cut = [Rank(rank=r, owns=(owns(group, range(r, 18, 2), [(n, n + 1) for n in range(512)]),)) for r in range(2)]
    whole = [Rank(rank=r, owns=(owns(group, range(18)),)) for r in range(2, 12)]
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(*cut, *whole))
    with raises(PlanError, code=ErrorCode.TOO_LARGE, mine="at most 262144 pieces") as caught:
        plan(geometry, attrs.evolve(geometry, ranks=tuple(whole)))
    of_layers = 2 * 9 + 18 * 10 + 18 * 10
    """Ranks times layers, of the source's two kinds and of the sink's."""
    assert (caught.value.path, caught.value.yours) == ("groups[target].parts[v]", str(2 * 512 * of_layers))
    fewer = attrs.evolve(geometry, ranks=(*cut, *whole[:5]))
    assert plan(fewer, attrs.evolve(fewer, ranks=fewer.ranks[2:])).routes


@pytest.mark.parametrize(
    ("ranks", "more", "code"),
    [(66, 0, ErrorCode.COVERAGE), (200, 0, ErrorCode.TOO_LARGE), (200, 1, ErrorCode.LAYER_MISSING)],
)
def test_layers_are_compared_before_pieces_are_counted_and_these_before_bytes_are_missed(
    ranks: int, more: int, code: ErrorCode
) -> None:
    """KVP-PLAN-SIZE, KVP-PLAN-COVER: nobody at the source has the last lane."""
    group = gqa(0, "target", 0, 512, 8, 4)
    cut = owns(group, [0, 1], [(n, n + 1) for n in range(511)])
    source, sink = (
        Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(Rank(rank=r, owns=(own,)) for r in range(number)))
        for own, number in ((cut, 64), (owns(group, range(2 + more)), ranks))
    )
    with raises(PlanError, code=code):
        plan(source, sink)


def test_intervals_that_touch_are_one() -> None:
    """A set of layers is stated by its runs."""
    assert merged_intervals([(0, 1), (1, 3), (4, 5)]) == [(0, 3), (4, 5)]
    assert merged_intervals([]) == []


def test_many_groups_and_many_runs_of_layers_take_no_longer_than_what_they_state() -> None:
    """Each of these took a minute when work grew by their square."""
    part = (Part(name="p", dtype=DType.U8, lanes=1, lane_bytes=16),)
    groups = tuple(attrs.evolve(mla(n, f"g{n}", 0, 16, 4), parts=part) for n in range(4000))
    apart = Rank(rank=0, owns=tuple(owns(g, [n]) for n, g in enumerate(groups)))
    for made in (
        Geometry(replica=0, facts=(), groups=groups, ranks=(apart,)),
        Geometry(
            replica=0, facts=(), groups=groups[:1], ranks=(Rank(rank=0, owns=(owns(groups[0], range(0, 16000, 2)),)),)
        ),
    ):
        began = time.process_time()
        assert plan(decode_geometry(encode_geometry(made)), made).routes
        assert time.process_time() - began < 10


def test_opaque_parts_move_between_ranks_that_divide_alike() -> None:
    assert [plan(tiled(4, 2), tiled(4, 2)).required(d) for d in (0, 1)] == [(0,), (1,)]
    # two heads on four ranks: the replicas of a head are the family that its one sink is dealt over
    made = plan(tiled(2, 4), tiled(2, 2))
    assert [made.required(d) for d in (0, 1)] == [(0, 1), (2, 3)]
    for source, sink in ((tiled(4, 2), tiled(4, 1)), (tiled(4, 1), tiled(4, 2)), (tiled(4, 2), tiled(4, 2, swap=True))):
        with raises(PlanError, code=ErrorCode.LAYOUT_OPAQUE, path="groups[tiled].parts[k]"):
            plan(source, sink)
