"""Descriptions: their constructors, their invariants, and where tokens go."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import PlanError, RemoteError
from kvproto.planning import geometry as geo
from kvproto.planning import limits
from kvproto.planning.compare import first_difference
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.wire.enums import DType, ErrorCode, FactRule, ItemKind
from kvproto.wire.messages import Fact, Part
from tests.errors import raises

MLA, GQA = geo.mla(0, "target", 0, 1152, 64), geo.gqa(1, "draft", 1, 8, 256, 64)


def test_facts_are_in_canonical_order() -> None:
    assert [(f.name, f.rule) for f in geo.facts({"b": "1", "a": "2"}, {"aa": "3"})] == [
        ("a", FactRule.EQUAL), ("aa", FactRule.WARN), ("b", FactRule.EQUAL),
    ]  # fmt: skip


def test_order_of_dictionaries_changes_no_byte() -> None:
    a, b = ({"x": "1", "y": "2"}, {"y": "2", "x": "1"})
    first, second = (geo.encode_geometry(attrs.evolve(good(), facts=geo.facts(f))) for f in (a, b))
    assert first == second
    assert geo.digest(first) == geo.digest(second)
    assert geo.decode_geometry(memoryview(first)) == attrs.evolve(good(), facts=geo.facts(a))


def good() -> geo.Geometry:
    ranks = [geo.Rank(rank=r, owns=(geo.owns(MLA, [0, 1]), geo.owns(GQA, [0], [(4 * r, 4 * r + 4)]))) for r in range(2)]
    return geo.Geometry(replica=0, facts=(), groups=(MLA, GQA), ranks=tuple(ranks))


def test_where_two_descriptions_first_differ_is_shown() -> None:
    """Whichever of the two has more; lists of numbers as they are written in JSON."""
    one = good()
    other, absent, stated = attrs.evolve(one, groups=(MLA,)), "(absent)", "(stated)"
    assert first_difference(one, other) == ("groups[draft]", stated, absent)
    assert first_difference(other, one) == ("groups[draft]", absent, stated)
    ranks = (attrs.evolve(one.ranks[0], owns=(geo.owns(MLA, [0, 2]), *one.ranks[0].owns[1:])), *one.ranks[1:])
    found = first_difference(one, attrs.evolve(one, ranks=ranks))
    assert found == ("ranks[0].owns[0].layers", "[0, 1]", "[0, 2]")


def with_group(group: geo.Group, **changes: Any) -> geo.Geometry:
    return geo.Geometry(
        replica=0, facts=(), groups=(attrs.evolve(group, **changes),), ranks=(geo.Rank(rank=0, owns=()),)
    )


def sections(*some: tuple[int, int, dict[str, Any] | None]) -> geo.Geometry:
    """A latent of 12 bytes in sections: where each begins, its bytes, and what else it states."""
    parts = [attrs.evolve(MLA.parts[0], at=at, lane_bytes=n, **({"whole": 12} | (more or {}))) for at, n, more in some]
    group = attrs.evolve(MLA, parts=tuple(parts))
    return geo.Geometry(replica=0, facts=(), groups=(group,), ranks=(geo.Rank(rank=0, owns=(geo.owns(group, [0]),)),))


def two_sections(part: Part) -> tuple[Part, ...]:
    half = part.lane_bytes // 2
    return tuple(attrs.evolve(part, at=at, whole=2 * half, lane_bytes=half) for at in (0, half))


def with_owns(geometry: geo.Geometry, which: int = 0, **changes: Any) -> geo.Geometry:
    first, *rest = geometry.ranks
    shares = [attrs.evolve(s, **changes) if i == which else s for i, s in enumerate(first.owns)]
    return attrs.evolve(geometry, ranks=(attrs.evolve(first, owns=tuple(shares)), *rest))


def spans(*bounds: tuple[int, int, int]) -> tuple[geo.LaneSpan, ...]:
    return tuple(geo.LaneSpan(part=p, lo=lo, hi=hi) for p, lo, hi in bounds)


def runs(*ranks: int) -> Any:
    return np.array(ranks, np.uint32)


def twins(ranks: tuple[tuple[int, ...], ...]) -> geo.Geometry:
    """Two groups that hold one model's latent, and which of them each rank owns."""
    groups = MLA, geo.mla(3, "other", 0, 1152, 16)
    made = [geo.Rank(rank=r, owns=tuple(geo.owns(groups[g], [0]) for g in own)) for r, own in enumerate(ranks)]
    return geo.Geometry(replica=0, facts=(), groups=groups, ranks=tuple(made))


def many(layers: Sequence[Sequence[int]], groups: int = 1) -> geo.Geometry:
    """The layers of each rank of the first of so many groups."""
    latent = [geo.mla(n, f"group {n}", n, 1152, 64) for n in range(groups)]
    ranks = (geo.Rank(rank=r, owns=(geo.owns(latent[0], some),)) for r, some in enumerate(layers))
    return geo.Geometry(replica=0, facts=(), groups=tuple(latent), ranks=tuple(ranks))


HANDED = geo.handoff(0, "first token", {"token": (DType.I32, 4), "score": (DType.F32, 4)})


def handing(layers: Sequence[int] = (0,), **changes: Any) -> geo.Geometry:
    """One rank that owns hand-off data."""
    group = attrs.evolve(HANDED, **changes)
    return geo.Geometry(
        replica=0, facts=(), groups=(group,), ranks=(geo.Rank(rank=0, owns=(geo.owns(group, layers),)),)
    )


BROKEN: dict[str, tuple[str, Callable[[], geo.Geometry], str]] = {
    # what is wrong, the clause, a Description, the path
    "groups": ("KVP-RULE-BREAK", lambda: attrs.evolve(good(), groups=good().groups[::-1]), "groups[1].id"),
    "ranks": ("KVP-RULE-BREAK", lambda: attrs.evolve(good(), ranks=good().ranks[::-1]), "ranks[1].rank"),
    "rank twice": ("KVP-RULE-BREAK", lambda: attrs.evolve(good(), ranks=good().ranks[:1] * 2), "ranks[1].rank"),
    "facts": ("KVP-RULE-BREAK", lambda: attrs.evolve(good(), facts=tuple(Fact(name=n, value="", rule=FactRule.EQUAL) for n in "ba")), "facts[1].name"),
    "owns": ("KVP-RULE-BREAK", lambda: attrs.evolve(good(), ranks=(attrs.evolve(good().ranks[0], owns=good().ranks[0].owns[::-1]),)), "ranks[0].owns[1].group"),
    "unknown group": ("KVP-GEO-GROUP", lambda: with_owns(good(), 1, group=7), "ranks[0].owns[1].group"),
    "layers": ("KVP-RULE-BREAK", lambda: with_owns(good(), layers=np.array([1, 0], np.uint32)), "ranks[0].owns[0].layers[1]"),
    "layer twice": ("KVP-RULE-BREAK", lambda: with_owns(good(), layers=np.array([1, 1], np.uint32)), "ranks[0].owns[0].layers[1]"),
    "cp rank": ("KVP-GEO-CP", lambda: with_owns(good(), cp_rank=1), "ranks[0].owns[0].cp_rank"),
    "lanes beyond": ("KVP-GEO-LANES", lambda: with_owns(good(), lanes=spans((0, 0, 2))), "ranks[0].owns[0].lanes[0].hi"),
    "no lane": ("KVP-RULE-BREAK", lambda: with_owns(good(), 1, lanes=spans((0, 3, 3), (1, 0, 8))), "ranks[0].owns[1].lanes[0].hi"),
    "no span of a part": ("KVP-GEO-LANES", lambda: with_owns(good(), 1, lanes=spans((0, 0, 8))), "ranks[0].owns[1].lanes"),
    "overlap": ("KVP-GEO-LANES", lambda: with_owns(good(), 1, lanes=spans((0, 2, 5), (0, 0, 3), (1, 0, 8))), "ranks[0].owns[1].lanes"),
    "part order": ("KVP-RULE-BREAK", lambda: with_owns(good(), 1, lanes=spans((1, 0, 8), (0, 0, 8))), "ranks[0].owns[1].lanes[1].part"),
    "unknown part": ("KVP-GEO-LANES", lambda: with_owns(good(), 1, lanes=spans((0, 0, 8), (2, 0, 8))), "ranks[0].owns[1].lanes[1].part"),
    "part twice": ("KVP-GEO-PARTS", lambda: with_group(GQA, parts=GQA.parts[:1] * 2), "groups[0].parts[1].at"),
    "a section that begins late": ("KVP-GEO-SECTIONS", lambda: sections((4, 8, None)), "groups[0].parts[0].at"),
    "a gap between sections": ("KVP-GEO-SECTIONS", lambda: sections((0, 4, None), (8, 4, None)), "groups[0].parts[1].at"),
    "sections that overlap": ("KVP-GEO-SECTIONS", lambda: sections((0, 8, None), (4, 8, None)), "groups[0].parts[1].at"),
    "sections beyond the lane": ("KVP-GEO-SECTIONS", lambda: sections((0, 8, None), (8, 8, None)), "groups[0].parts[1].whole"),
    "sections out of order": ("KVP-GEO-SECTIONS", lambda: sections((4, 8, None), (0, 4, None)), "groups[0].parts[0].at"),
    "sections of other wholes": ("KVP-GEO-SECTIONS", lambda: sections((0, 4, None), (4, 12, {"whole": 16})), "groups[0].parts[1].whole"),
    "sections of other types": ("KVP-GEO-SECTIONS", lambda: sections((0, 4, None), (4, 8, {"dtype": DType.I8})), "groups[0].parts[1].dtype"),
    "sections of other lanes": ("KVP-GEO-SECTIONS", lambda: sections((0, 4, None), (4, 8, {"lanes": 2})), "groups[0].parts[1].lanes"),
    "an opaque section": ("KVP-GEO-SECTIONS", lambda: sections((0, 4, None), (4, 8, {"encoding": "tiled"})), "groups[0].parts[1].encoding"),
    "sections of hand-off data": ("KVP-GEO-SECTIONS", lambda: handing(parts=two_sections(HANDED.parts[0])), "groups[0].kind"),
    "more lanes of sections than may be": ("KVP-GEO-SIZE", lambda: with_owns(sections((0, 4, {"lanes": 1 << 20}), (4, 8, {"lanes": 1 << 20})), lanes=spans((0, 0, 1 << 20), (1, 0, 1))), "ranks"),
    "live rows": ("KVP-RULE-BREAK", lambda: with_group(MLA, kind=ItemKind.SLOT, live_rows=65), "groups[0].rows"),
    "live rows of pages": ("KVP-RULE-BREAK", lambda: with_group(MLA, live_rows=64), "groups[0].live_rows"),
    "partial slots": ("KVP-GEO-PARTIAL", lambda: with_group(MLA, kind=ItemKind.SLOT, partial=True), "groups[0].partial"),
    "partial hand-off": ("KVP-GEO-PARTIAL", lambda: handing(partial=True), "groups[0].partial"),
    "dealt slots": ("KVP-GEO-DEAL", lambda: with_group(MLA, kind=ItemKind.SLOT, cp_size=2), "groups[0].interleave"),
    "cut rows": ("KVP-GEO-DEAL", lambda: with_group(MLA, cp_size=2, tokens_per_row=4, interleave=6), "groups[0].interleave"),
    "cut rows, bits": ("KVP-GEO-DEAL", lambda: with_group(MLA, cp_size=2, tokens_per_row=3, interleave=1, origin=2), "groups[0].interleave"),
    "cut origin": ("KVP-GEO-DEAL", lambda: with_group(MLA, cp_size=2, tokens_per_row=4, interleave=4, origin=2), "groups[0].interleave"),
    "long deal": ("KVP-GEO-DEAL", lambda: with_group(MLA, cp_size=2, interleave=1 << 20), "groups[0].cp_size"),
    "a rank without a run": ("KVP-GEO-ORDERED", lambda: with_group(MLA, cp_size=3, order=runs(0, 2, 0)), "groups[0].order"),
    "a run of nobody": ("KVP-GEO-ORDERED", lambda: with_group(MLA, cp_size=2, order=runs(0, 2, 1)), "groups[0].order"),
    "a run of another rank": ("KVP-GEO-ORDERED", lambda: with_group(MLA, cp_size=2, order=runs(0, 2)), "groups[0].order"),
    "long order": ("KVP-GEO-DEAL", lambda: with_group(MLA, cp_size=2, interleave=1 << 19, order=runs(0, 1, 0)), "groups[0].order"),
    "too many runs": ("KVP-GEO-SIZE", lambda: attrs.evolve(good(), groups=tuple(
        attrs.evolve(MLA, id=i, name=f"g{i}", cp_size=2, order=runs(*[0, 1] * 2048)) for i in range(17)), ranks=(geo.Rank(rank=0, owns=()),)), "groups"),
    "hand-off of a draft": ("KVP-HND-SHAPE", lambda: handing(model=1), "groups[0].kind"),
    "hand-off of two rows": ("KVP-HND-SHAPE", lambda: handing(rows=2), "groups[0].kind"),
    "hand-off of two lanes": ("KVP-HND-SHAPE", lambda: handing(parts=(attrs.evolve(HANDED.parts[0], lanes=2),)), "groups[0].kind"),
    "hand-off of another layer": ("KVP-HND-SHAPE", lambda: handing([1]), "ranks[0].owns[0].layers"),
    "two groups in a rank": ("KVP-GEO-DISJOINT", lambda: twins(((0, 1),)), "ranks[0].owns[1].layers"),
    "two groups, a rank each": ("KVP-GEO-DISJOINT", lambda: twins(((0,), (1,))), "ranks[1].owns[0].layers"),
    "an axis of slots": ("KVP-RULE-BREAK", lambda: with_group(MLA, kind=ItemKind.SLOT, axis="image"), "groups[0].axis"),
    "a part by two names": ("KVP-PART-TWICE", lambda: with_group(MLA, parts=tuple(attrs.evolve(MLA.parts[0], name=n) for n in ("latent", "ckv"))), "groups[0].parts"),
    "too many bytes": ("KVP-GEO-SIZE", lambda: attrs.evolve(good(), facts=geo.facts({f"fact {n:05}": "v" * 4000 for n in range(270)})), "geometry"),
    "too many parts": ("KVP-GEO-SIZE", lambda: many([[0]], limits.MAX_PARTS + 1), "groups"),
    "too many ranks": ("KVP-GEO-SIZE", lambda: many([[0]] * (limits.MAX_RANKS + 1)), "ranks"),
    "too many claims": ("KVP-GEO-SIZE", lambda: many([*[range(64)] * (limits.MAX_CLAIMS // 64), [0]]), "ranks"),
    "too many claims of a rank": ("KVP-GEO-SIZE", lambda: many([range(limits.MAX_RANK_CLAIMS + 1)]), "ranks"),
    "too many layers of two ranks": ("KVP-GEO-SIZE", lambda: many([range(limits.MAX_LAYERS), [limits.MAX_LAYERS]]), "ranks[1].owns[0].layers"),
}  # fmt: skip

EMPTY: dict[str, tuple[Callable[[], geo.Geometry], str]] = {
    "no layers": (lambda: with_owns(good(), layers=np.array([], np.uint32)), "ranks[0].owns[0].layers"),
    "no span": (lambda: with_owns(good(), lanes=()), "ranks[0].owns[0].lanes"),
    "no parts": (lambda: with_group(MLA, parts=()), "groups[0].parts"),
}  # fmt: skip


def refusals(geometry: geo.Geometry) -> Iterator[RemoteError]:
    """What is said of a Description where it is made, and where it is read."""
    for check in (lambda: geo.validate(geometry), lambda: geo.decode_geometry(geo.encode_geometry(geometry))):
        with pytest.raises(RemoteError) as caught:
            check()
        yield caught.value


@pytest.mark.parametrize("case", [case for case in BROKEN if case != "too many bytes"])
def test_description_that_contradicts_itself(case: str) -> None:
    _, make, path = BROKEN[case]
    assert [(e.code, e.path) for e in refusals(make())] == [(ErrorCode.BAD_GEOMETRY, path)] * 2


@pytest.mark.parametrize("case", EMPTY)
def test_description_that_leaves_something_out(case: str) -> None:
    make, path = EMPTY[case]
    assert [(e.code, e.path) for e in refusals(make())] == [(ErrorCode.OUT_OF_RANGE, path)] * 2


def test_each_path_is_that_of_the_table() -> None:
    """model.md: what refuses a Description, and where."""
    prose = (Path(__file__).parents[2] / "spec/v1/model.md").read_text()
    table = re.search(r"\| clause \| what is wrong \| path \|\n[|-]+\n((?:\|.*\n)+)", prose)
    assert table is not None
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")] for line in table[1].splitlines()]
    stated = [(clause, path) for clauses, _, paths in rows for clause in clauses for path in paths]
    broken = {(clause, with_letters(path)) for clause, _, path in BROKEN.values()}
    met = {(clause, path) for clause, path in broken if clause != "KVP-RULE-BREAK"}  # these the registry states
    assert len(stated) == len(set(stated)), "a row that another one makes needless"
    assert met <= set(stated)
    assert {clause for clause, _ in met} == {clause for clause, _ in stated}
    assert {path for _, path in met} == {path for _, path in stated}


def with_letters(path: str) -> str:
    letters = iter("ijk")
    return re.sub(r"\d+", lambda _: next(letters), path)


@pytest.mark.parametrize(
    "made",
    [
        lambda: many([[0]], limits.MAX_PARTS),
        lambda: many([[0]] * limits.MAX_RANKS),
        lambda: many([range(limits.MAX_RANK_CLAIMS)] * (limits.MAX_CLAIMS // limits.MAX_RANK_CLAIMS)),
        lambda: many([range(limits.MAX_LAYERS - 1), [limits.MAX_LAYERS]]),
        lambda: with_group(MLA, cp_size=2, interleave=limits.MAX_DEAL // 2),
    ],
    ids=["parts", "ranks", "claims", "layers", "deal"],
)
def test_as_much_as_may_be(made: Callable[[], geo.Geometry]) -> None:
    """KVP-GEO-SIZE, KVP-GEO-DEAL."""
    geo.validate(made())


@pytest.mark.parametrize(
    ("changes", "path"),
    [({name: 0}, name) for name in ("rows", "tokens_per_row", "cp_size", "interleave")]
    + [({"parts": (attrs.evolve(MLA.parts[0], **{name: 0}),)}, f"parts[0].{name}") for name in ("lanes", "lane_bytes")]
    + [({"live_rows": 0, "kind": ItemKind.SLOT}, "live_rows")],
)
def test_zero_sizes_are_refused(changes: dict[str, Any], path: str) -> None:
    with raises(RemoteError, code=ErrorCode.OUT_OF_RANGE, path=f"groups[0].{path}"):
        geo.validate(with_group(MLA, **changes))


@pytest.mark.parametrize("deal", [(1, 0), (9, 6), (3, 3)])
def test_rows_of_three_tokens_may_be_dealt(deal: tuple[int, int]) -> None:
    cp = 1 if deal[0] == 1 else 2
    geo.validate(with_group(MLA, cp_size=cp, tokens_per_row=3, interleave=deal[0], origin=deal[1]))


def test_sections_that_tile_a_lane() -> None:
    geo.validate(sections((0, 4, None), (4, 8, None)))
    geo.validate(sections((0, 12, None)))


def test_a_description_of_more_bytes_than_any_fleet_has() -> None:
    """KVP-GEO-SIZE: refused before it is read."""
    named = BROKEN["too many bytes"][1]()
    geo.validate(named)
    with raises(PlanError, code=ErrorCode.BAD_GEOMETRY, path="geometry", mine=f"at most {limits.MAX_GEOMETRY} bytes"):
        geo.decode_geometry(geo.encode_geometry(named))


def test_the_largest_fleet_of_the_benchmark_is_within_the_limits() -> None:
    """512 ranks, 80 layers of keys and values."""
    group = geo.gqa(0, "target", 0, 8, 256, 64)
    geo.validate(many_of(group, 512))


def many_of(group: geo.Group, ranks: int) -> geo.Geometry:
    made = (
        geo.Rank(rank=r, owns=(geo.owns(group, range(80), [(r * 8 // ranks, r * 8 // ranks + 1)]),))
        for r in range(ranks)
    )
    return geo.Geometry(replica=0, facts=(), groups=(group,), ranks=tuple(made))


def test_hand_off_data_as_it_should_be() -> None:
    geo.validate(handing())


def test_a_geometry_states_every_rank_even_one_that_owns_nothing() -> None:
    """KVP-GEO-W-COMPLETE: what is left out of a rank is COVERAGE for the peer, not a smaller engine."""
    stages = lay_out([Cache.mla("target", 4, latent=24, rope=8, page=16)], Parallel(tp=2, pp=2))
    assert [r.rank for r in stages.ranks] == [0, 1, 2, 3]
    short = attrs.evolve(stages, ranks=stages.ranks[:2])
    with raises(PlanError, code=ErrorCode.LAYER_MISSING):
        plan(short, stages)


def test_an_encoding_is_for_bytes_that_strides_do_not_describe() -> None:
    """KVP-GEO-W-BYTES: scales are lanes like any others, of a token or of a page; a tiled layout is not."""
    scales = Cache.page_scales("scales", 1, kv_heads=2, page=16)
    heads = Cache.gqa("target", 1, kv_heads=2, head_dim=16, page=16, scale_block=8)
    assert {part.encoding for cache in (scales, heads) for part in cache.group.parts} == {None}
    assert (scales.group.partial, heads.group.partial) == (True, None)
    tiled, plain = (lay_out([cache]) for cache in (with_encoding(heads, "tiled.16x64"), heads))
    with raises(PlanError, code=ErrorCode.LAYOUT_OPAQUE):
        plan(tiled, plain)


def with_encoding(cache: Cache, name: str) -> Cache:
    parts = tuple(attrs.evolve(part, encoding=name) for part in cache.group.parts)
    return attrs.evolve(cache, group=attrs.evolve(cache.group, parts=parts))


def test_a_rank_may_own_nothing() -> None:
    geo.validate(attrs.evolve(good(), ranks=(*good().ranks, geo.Rank(rank=9, owns=()))))
