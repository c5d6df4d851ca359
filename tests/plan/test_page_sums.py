"""Checksums of single layers and pages: they add up, and name the byte that was changed. KVP-VERIFY-PAGES."""

from typing import Any

import numpy as np
import pytest

from kvproto.copying.execute import PageSums, checksums, execute, page_sums
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window, windows
from kvproto.planning.geometry import Geometry, Rank, mla, owns
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire import from_json, to_json
from kvproto.wire.enums import DType
from kvproto.wire.messages import Columns, Grants
from kvproto_conformance import lowering
from kvproto_conformance.cases import Case, load
from tests.pools import lower

CACHES = [
    Cache.gqa("kv", [3, 5, 8], kv_heads=2, head_dim=4, page=4),
    Cache.state("state", 2, parts={"ssm": (DType.F32, 2, 8)}),
]


def both() -> tuple[Pair, dict[int, Window], dict[int, Window], bytearray, bytearray]:
    here, there = (lay_out(CACHES, Parallel(), depth=9) for _ in range(2))
    sides, pools = [], []
    for geometry, items in ((here, {0: 8, 1: 3}), (there, {0: 9, 1: 2})):
        columns, length = columns_without_gaps(geometry, 0, items)
        sides.append(RankLayout(geometry, 0, columns))
        pools.append(bytearray(np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()))
    pair = Pair(plan(here, there).between(0, 0), *sides)
    sources = {0: Window(0, 14, np.array([7, 1, 4, 2])), 1: Window(0, 14, np.array([2]))}
    sinks = {0: Window(4, 10, np.array([8, 0, 3])), 1: Window(4, 10, np.array([1]))}
    return pair, sources, sinks, pools[0], pools[1]


def finished(*arguments: Any) -> dict[int, PageSums]:
    """The sums, once every step is done."""
    steps = page_sums(*arguments)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return dict(done.value)


def test_they_add_up_to_the_checksum_and_are_equal_on_both_sides() -> None:
    pair, sources, sinks, source, sink = both()
    program = pair.lower(sources, sinks)
    execute(program, {0: memoryview(source)}, {0: memoryview(sink)})
    groups = {g.id: g for g in pair.sink.geometry.groups}
    sent = finished(program, groups, lambda p: checksums(p, {0: memoryview(source)}, sink=False))
    came = finished(program, groups, lambda p: checksums(p, {0: memoryview(sink)}, sink=True))
    whole = checksums(program, {0: memoryview(source)}, sink=False)
    assert sent.keys() == came.keys() == whole.keys() == {0, 1}
    assert (sent[0].layers, sent[0].pages, sent[1].pages) == ((3, 5, 8), (1, 2, 3), (0,))
    for group, value in whole.items():
        assert int(sent[group].values.sum(dtype=np.uint64)) == value
        assert sent[group].values.tolist() == came[group].values.tolist()
        assert sent[group].first_difference(came[group].values) == "none of its pages differs"


@pytest.mark.parametrize(("layer", "page"), [(0, 1), (1, 2), (2, 3)])
def test_the_first_difference_names_layer_and_page(layer: int, page: int) -> None:
    pair, sources, sinks, source, sink = both()
    program = pair.lower(sources, sinks)
    execute(program, {0: memoryview(source)}, {0: memoryview(sink)})
    columns = pair.sink.columns[0]
    item = int(sinks[0].items[page - 1])
    sink[int(columns.offset[2 * layer + 1]) + item * int(columns.item_stride[2 * layer + 1]) + 5] ^= 4
    groups = {g.id: g for g in pair.sink.geometry.groups}
    sent = finished(program, groups, lambda p: checksums(p, {0: memoryview(source)}, sink=False))
    came = finished(program, groups, lambda p: checksums(p, {0: memoryview(sink)}, sink=True))
    assert came[0].first_difference(sent[0].values) == f"layer {(3, 5, 8)[layer]}, page {page}; 1 of 9 differ"
    assert came[0].first_difference(None) == "9 sums of pages wanted, 0 came"


def of_two_deals() -> tuple[Geometry, Geometry]:
    """A source whose rank 0 has odd pages of layer 0 and even pages of layer 1, and a sink of one rank."""
    dealt = [mla(n, f"layer {n}", 0, 4, 2, dtype=DType.U8, cp_size=2, interleave=2) for n in range(2)]
    ranks = [
        Rank(rank=r, owns=tuple(owns(group, [n], cp_rank=(n + r + 1) % 2) for n, group in enumerate(dealt)))
        for r in range(2)
    ]
    plain = mla(0, "target", 0, 4, 2, dtype=DType.U8)
    sink = Geometry(replica=0, facts=(), groups=(plain,), ranks=(Rank(rank=0, owns=(owns(plain, range(2)),)),))
    return Geometry(replica=0, facts=(), groups=tuple(dealt), ranks=tuple(ranks)), sink


def asked(geometry: Geometry, tokens: int) -> dict[str, Any]:
    """One side of a question of the suite: rank 0, and its items for so many tokens."""
    made, _ = columns_without_gaps(geometry, 0, {g.id: 4 for g in geometry.groups})
    needs = {g.id: items_needed(g, geometry.ranks[0].owns[g.id].cp_rank, 0, tokens) for g in geometry.groups}
    named = [
        Grants(group=id, first=0, count=tokens, valid=tokens, items=np.arange(n, dtype=np.uint32))
        for id, n in needs.items()
    ]
    return {
        "geometry": to_json(geometry), "rank": "0", "columns": [to_json(c) for c in made.values()],
        "windows": [to_json(grant) for grant in named],
    }  # fmt: skip


def ours(question: dict[str, Any]) -> dict[str, list[str]]:
    """What kvproto states of a question of the suite."""
    sides, named = [], []
    for given in (question["source"], question["sink"]):
        columns = [from_json(Columns, columns) for columns in given["columns"]]
        geometry = from_json(Geometry, given["geometry"])
        sides.append(RankLayout(geometry, int(given["rank"]), {c.group: c for c in columns}))
        named.append(windows([from_json(Grants, grant) for grant in given["windows"]]))
    source, sink = sides
    program = lower(plan(source.geometry, sink.geometry).between(source.rank, sink.rank), *sides, *named)
    regions, at = {int(op["source_region"]) for op in program.ops}, np.arange(1 << 16)
    memory = {region: memoryview(((7 * at + region) % 256).astype(np.uint8)) for region in regions}
    found = finished(program, sink.groups, lambda part: checksums(part, memory, sink=False))
    return {str(group): [str(n) for n in sums.values] for group, sums in found.items()}


@pytest.mark.parametrize(
    ("tokens", "moves"), [(8, [False, True, False, True, True, False, True, False]), (2, [False, True])]
)
def test_each_layer_of_two_ranks_has_a_sum_for_each_page_of_any_of_them(tokens: int, moves: list[bool]) -> None:
    """KVP-VERIFY-PAGES: a layer of which nothing moves on a page has 0 there."""
    source, sink = (asked(geometry, tokens) for geometry in of_two_deals())
    question = {"source": source, "sink": sink}
    assert [sum != "0" for sum in ours(question)["0"]] == moves
    assert ours(question) == lowering.page_sums(source, sink)


@pytest.mark.parametrize("case", [case for case in load() if case.suite == "lowering"], ids=lambda case: case.id)
def test_the_suite_finds_the_same_sums_of_pages(case: Case) -> None:
    """KVP-VERIFY-PAGES, of every kind of group."""
    question = case.asks[0].question
    assert ours(question) == lowering.page_sums(question["source"], question["sink"])
