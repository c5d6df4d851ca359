"""Pools of families that no table of K and V describes, handed over between engines of other page sizes and other numbers
of ranks.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto import Cache, Options, Pool, Prompt, Sink, Source, lay_out
from kvproto.planning.geometry import Geometry, Group
from kvproto.wire.enums import ItemKind
from kvproto_sglang import metadata
from kvproto_sglang.sending import Sending
from kvproto_sglang.tickets import ticket_of
from tests.cases import sampled
from tests.sglang.families import FAMILIES
from tests.sglang.handover import TOKENS, Side, buffers, hand_over, write
from tests.sglang.kinds import Standins

SIZES = [((64, 1), (16, 1)), ((128, 2), (256, 1)), ((256, 1), (32, 2)), ((64, 1), (64, 2))]


def side(family: str, page: int, ranks: int) -> Side:
    return FAMILIES[family].side(page, ranks, Standins())


@pytest.mark.parametrize(("family", "sizes"), sampled(FAMILIES, SIZES, every=3))
def test_every_byte_is_where_the_other_engine_looks(family: str, sizes: Any, tmp_path: Path) -> None:
    one, two = (side(family, page, ranks) for page, ranks in sizes)
    assert hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bit_that_flips_shows_in_each_part(family: str, tmp_path: Path) -> None:
    one, two = side(family, 128, 1), side(family, 64, 1)
    assert one.rows is not None
    keys = {rows.key[2]: rows.key for rows in one.rows(one, 0)}

    def spoil(source: Side) -> None:
        assert source.rows is not None
        for rows in source.rows(source, 0):
            if rows.key in keys.values():
                whole, at = rows.place
                whole[at[-1, 0, 0]] ^= 1

    assert two.rows is not None
    found = hand_over(one, two, f"ipc://{tmp_path}/p-{{rank}}", spoil=spoil)
    assert found == [f"rank 0, {rows.key}" for rows in two.rows(two, 0) if rows.key in keys.values()]


PLAIN = (
    "DeepSeek V4",
    "DeepSeek V4.1",
    "MiniMax-M3",
    "GLM-5-Next",
    "MXFP8",
    "FP4",
    "MLA in FP4",
    "MTP of three layers",
)
"""Families whose caches are all of tokens."""
RINGS = {"compress_state": 3, "index_compress_state": 3, "pending_index": 2, "sglang.pending_score": 2}
"""Parts that an engine with rings of a request has in these, in rows of SGLang's pages."""


def plain(geometry: Geometry) -> Iterator[Cache]:
    """The same caches as another engine has them: other pages, and rings of a request."""
    layers = {own.group: own.layers.tolist() for own in geometry.ranks[0].owns}
    for group in (each for each in geometry.groups if each.kind == ItemKind.PAGE):
        parts = {part.name: (part.dtype, part.lanes, part.lane_bytes) for part in group.parts}
        common: dict[str, Any] = {"parts": parts, "model": group.model}
        name, ids, rows = group.name, layers[group.id], group.tokens_per_row
        if times := RINGS.get(group.parts[0].name):
            yield Cache.ring(name, ids, ring_rows=times * group.rows, **common)
        else:
            yield Cache.paged(name, ids, page=8 * rows, tokens_per_row=rows, **common)


def rows_of(pool: Pool, group: Group, table: list[int], layer: int, part: str, rows: range) -> np.ndarray[Any, Any]:
    """Rows of a part in the pages, or the ring, of a plain engine."""
    at = np.array(rows)
    items = np.array(table)[at // group.rows] if group.kind == ItemKind.PAGE else np.full(len(at), table[0])
    return pool.array(group.name, layer, part)[items, at % group.rows]


@pytest.mark.parametrize("family", PLAIN)
def test_another_engine_finds_every_byte_in_pages_and_rings_of_its_own(family: str, tmp_path: Path) -> None:
    one, place, options = side(family, 128, 1), f"ipc://{tmp_path}/p", Options(thread=False)
    one.buffers = buffers()
    opened, prompt, ticket = one.opened(0, options), Prompt(range(TOKENS)), ticket_of(77, "p")
    write(one, 0)
    facts = {fact.name: fact.value for fact in opened.pool.geometry.facts}
    geometry = lay_out(list(plain(opened.pool.geometry)), facts=facts, depth=5)
    pool, tables, first = Pool.allocate(geometry, pages=400), {}, {}
    for group in geometry.groups:
        count = -(-TOKENS // (group.rows * group.tokens_per_row)) if group.kind == ItemKind.PAGE else 1
        tables[group.name] = [7 * n % 397 + 1 for n in range(count)]
        first[group.name] = opened.tables[group.name].wanted(one.components(), TOKENS, 0)
    with Source("p", opened.pool, place, options) as source, Sink("d", pool, {"p": place}, options) as sink:
        sending = Sending(source, opened.tables)
        sending.begin(ticket, prompt, TOKENS)
        fetch = sink.fetch(ticket, prompt, tables, cached=first)
        sending.send(one.pages, TOKENS, lambda: metadata.read(one.buffers, 1, opened.parts), one.components())
        until = time.monotonic() + 60
        while not fetch.done and time.monotonic() < until:
            source.step(0.001)
            sink.step(0.001)
        assert fetch.result
    assert one.rows is not None
    layers = {own.group: set(own.layers.tolist()) for own in geometry.ranks[0].owns}
    for rows in one.rows(one, 0):
        model, layer, part = rows.key
        held = [each for each in geometry.groups if layer in layers[each.id] and part in [x.name for x in each.parts]]
        (group,) = [each for each in held if each.model == model]
        where = range(rows.first, rows.first + len(rows.at))
        found = rows_of(pool, group, tables[group.name], layer, part, where)
        assert np.array_equal(found, rows.content.numpy()), rows.key
