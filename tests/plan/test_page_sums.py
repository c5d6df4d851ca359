"""Checksums of single layers and pages: they add up, and name the byte that was changed. KVP-VERIFY-PAGES."""

from typing import Any

import numpy as np
import pytest

from kvproto.copying.execute import PageSums, checksums, execute, page_sums
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType

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
