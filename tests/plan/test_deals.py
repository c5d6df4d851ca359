"""Deals in turn and by a table of runs: whose row it is, where it lies, which pairs of cp ranks share one."""

import time
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import PlanError
from kvproto.planning import deals
from kvproto.planning.geometry import Geometry, Group, Part, Rank, decode_geometry, encode_geometry, mla, owns, validate
from kvproto.planning.plan import plan
from kvproto.wire import to_json
from kvproto.wire.enums import DType
from kvproto_conformance.codec import Refusal
from kvproto_conformance.planner import plan as other_plan
from tests.plan import oracle

MLA = mla(0, "target", 0, 1152, 64)


@st.composite
def groups(draw: Any, ranks: int = 5) -> Group:
    """Deals of a few ranks, in turn or in some order, in which each rank occurs."""
    cp, run, step = draw(st.integers(1, ranks)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    order = None
    if draw(st.booleans()):
        more = draw(st.lists(st.integers(0, cp - 1), max_size=5))
        order = np.array(draw(st.permutations([*range(cp), *more])), np.uint32)
    return attrs.evolve(
        MLA, cp_size=cp, interleave=run * step, origin=draw(st.integers(0, 5)) * step, tokens_per_row=step, order=order
    )


@settings(max_examples=100, deadline=None)
@given(groups())
def test_tokens_are_dealt_as_if_one_by_one(group: Group) -> None:
    """KVP-DCP-OWNER, KVP-DCP-LENGTH."""
    validate(Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=()),)))
    start = deals.deal(group)[1]
    rows = np.arange(start, start + 60, dtype=np.int64)
    assert deals.owner(group, rows).tolist() == [oracle.cp_rank_of(group, row) for row in rows.tolist()]
    for rank in range(group.cp_size):
        held = oracle.held(group, rank, (start + 60) * group.tokens_per_row)
        assert deals.local_row(group, np.array(held, np.int64)).tolist() == list(range(len(held)))
        below = [sum(x < row for x in held) for row in range(start + 60)]
        assert [deals.owned_before(group, rank, row) for row in range(start + 60)] == below
        assert deals.owned_before(group, rank, np.arange(start + 60)[None]).ravel().tolist() == below
    assert deals.most_before(group, rows).tolist() == [
        max(deals.owned_before(group, rank, row) for rank in range(group.cp_size)) for row in rows.tolist()
    ]


def spread(first: np.ndarray[Any, Any], length: np.ndarray[Any, Any]) -> list[int]:
    return [row + i for row, n in zip(first.tolist(), length.tolist(), strict=True) for i in range(n)]


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(0, 40), st.integers(0, 30))
def test_intervals_of_rows_are_those_of_the_deal(group: Group, lo: int, count: int) -> None:
    lo += deals.deal(group)[1]
    for rank in range(group.cp_size):
        held = oracle.held(group, rank, (lo + count) * group.tokens_per_row)
        assert spread(*deals.owned_within(group, rank, lo, lo + count)) == [row for row in held if row >= lo]
        assert spread(*deals.global_rows(group, rank, min(3, len(held)), len(held))) == held[3:]


@settings(max_examples=150, deadline=None)
@given(groups(), groups())
def test_cp_ranks_that_share_a_row_are_found_without_looking_at_rows(one: Group, other: Group) -> None:
    other = attrs.evolve(other, tokens_per_row=1, interleave=other.interleave // other.tokens_per_row, origin=0)
    one = attrs.evolve(one, tokens_per_row=1, interleave=one.interleave // one.tokens_per_row)
    period = np.lcm(*(deals.deal(g)[0] * (g.cp_size if g.order is None else g.order.size) for g in (one, other)))
    rows = np.arange(one.origin, one.origin + int(period))
    both = set(zip(deals.owner(one, rows).tolist(), deals.owner(other, rows).tolist(), strict=True))
    assert deals.shared_classes(one, other) == tuple(sorted(both))


def table(order: Any, interleave: int, **more: Any) -> Group:
    return attrs.evolve(
        MLA, cp_size=int(max(order)) + 1, interleave=interleave, order=np.array(order, np.uint32), **more
    )


@pytest.mark.parametrize(
    ("order", "interleave", "path"),
    [
        ([0, 2, 0], 1, "order"), ([0, 1, 2, 3], 1, "order"), ([0, 2, 4], 1, "order"), ([0, 1, 2, 0], (1 << 18) + 1, "order"),
        (None, 1 << 19, "cp_size"),
    ],
)  # fmt: skip
def test_deals_that_are_none_are_refused_by_both_planners(order: Any, interleave: int, path: str) -> None:
    """KVP-GEO-ORDERED, KVP-GEO-DEAL."""
    order = None if order is None else np.array(order, np.uint32)
    group = attrs.evolve(MLA, cp_size=3, interleave=interleave, order=order)
    made = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=()),))
    with pytest.raises(PlanError) as caught:
        validate(made)
    with pytest.raises(Refusal) as other:
        other_plan(to_json(made), to_json(made))
    assert (caught.value.code.name, caught.value.path) == ("BAD_GEOMETRY", f"groups[0].{path}")
    assert (other.value.code, other.value.path) == ("BAD_GEOMETRY", f"groups[0].{path}")


def test_a_table_of_one_run_each_is_the_deal_in_turn() -> None:
    assert deals.same_deal(table([0, 1, 2], 4), attrs.evolve(MLA, cp_size=3, interleave=4))
    assert not deals.same_deal(table([0, 2, 1], 4), attrs.evolve(MLA, cp_size=3, interleave=4))
    assert not deals.same_deal(table([0, 1, 1, 0], 4), table([0, 1], 4))
    assert deals.deal_text(table([0, 1, 1, 0], 4)) == ", dealt 2 x 4 from 0 in the order 0 1 1 0"
    assert deals.deal_text(table([*range(40)][::-1], 4)).endswith("25 24 .. (40 runs)")


def test_a_description_without_a_table_has_the_bytes_that_it_had() -> None:
    made = Geometry(replica=0, facts=(), groups=(MLA,), ranks=(Rank(rank=0, owns=()),))
    with_order = attrs.evolve(made, groups=(table([0, 1, 1, 0], 4),))
    assert (
        len(encode_geometry(made)) + len("\x0d") + 4 + 4 > len(encode_geometry(with_order)) > len(encode_geometry(made))
    )
    assert decode_geometry(encode_geometry(with_order)) == with_order


@pytest.mark.parametrize("cp", [2, 256, 4096])
def test_the_longest_tables_are_compared_in_a_moment(cp: int) -> None:
    """4,096 runs on each side, turns without a common divisor or with a large one."""
    dice = np.random.default_rng(cp)
    few = 65536 // cp if cp > 256 else cp
    for run, other_run in ((255, 256), (256, 256), (1, 256), (3, 5)):
        one, other = (
            table(dice.permutation(np.arange(4096) % n), r) for n, r in ((cp, run), (min(few, 4096), other_run))
        )
        began = time.process_time()
        found = deals.shared_classes(one, other)
        assert time.process_time() - began < 10
        assert len(found) <= one.cp_size * other.cp_size
        rows = np.arange(1 << 16)
        seen = set(zip(deals.owner(one, rows).tolist(), deals.owner(other, rows).tolist(), strict=True))
        assert seen <= set(found)


@pytest.mark.parametrize("groups", [2, 4])
def test_many_tables_that_meet_each_other_are_planned_in_a_moment(groups: int) -> None:
    """Each group of the sink has a part of each group of the source; all deal by tables, in orders of their own."""
    dice, cp, parts, runs = np.random.default_rng(groups), 256, 8 // groups, 16384 // groups**2

    def side(names: list[list[str]]) -> Geometry:
        made = []
        for i, some in enumerate(names):
            held = tuple(Part(name=name, dtype=DType.U8, lanes=1, lane_bytes=16) for name in some)
            order = np.concatenate([[0], dice.permutation(cp - 1) + 1])[np.arange(runs) * cp // runs]
            made.append(attrs.evolve(MLA, id=i, name=f"g{i}", parts=held, tokens_per_row=1, cp_size=cp, interleave=1,
                                     order=order.astype(np.uint32)))  # fmt: skip
        ranks = (Rank(rank=0, owns=tuple(owns(group, [0], cp_rank=0) for group in made)),)
        return decode_geometry(encode_geometry(Geometry(replica=0, facts=(), groups=tuple(made), ranks=ranks)))

    have = [[f"{i}-{j}-{k}" for j in range(groups) for k in range(parts)] for i in range(groups)]
    want = [[name for some in have for name in some if name.split("-")[1] == str(j)] for j in range(groups)]
    source, sink = side(have), side(want)
    began = time.process_time()
    made = plan(source, sink)
    assert time.process_time() - began < 10
    assert sum(len(route.boxes) for route in made.routes) == sum(map(len, want))
