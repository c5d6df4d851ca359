"""Windows that begin late, against rows counted one by one: KVP-GRANT-HELD, KVP-GRANT-LATE."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.copying.grants import begins_of, cut_to_begins, held_from, items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.planning.deals import owned_before, owner
from kvproto.planning.geometry import Geometry, Group, Part, Rank, owns
from kvproto.planning.plan import Box, Route
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType, ItemKind
from kvproto.wire.messages import Begin, Grants

TOKENS = 160


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Pages of any size, deal and width of rows, opaque or not, and rings."""
    step, run = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    dealt = {"cp_size": draw(st.integers(1, 3)), "interleave": run * step, "origin": draw(st.integers(0, 4)) * step}
    opaque = draw(st.none() | st.just("any"))
    part = Part(name="k", dtype=DType.U8, lanes=1, lane_bytes=1, encoding=opaque)
    rows, ring = draw(st.integers(1, 7)), draw(st.booleans()) and opaque is None
    if ring:
        dealt |= {"cp_size": 1}
    elif draw(st.booleans()):
        size = int(dealt["cp_size"])
        order = draw(st.permutations([*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=4))]))
        dealt |= {"order": np.array(order, np.uint32)}
    kind = ItemKind.RING if ring else ItemKind.PAGE
    more = dealt | {"partial": draw(st.none() | st.just(True))}
    return Group(id=0, name="g", model=0, kind=kind, rows=rows, tokens_per_row=step, parts=(part,), **more)


def route(*source_groups: int) -> Route:
    at = {"model": 0, "part": 0, "lo": 0, "hi": 1, "source_class": 0, "sink_class": 0}
    boxes = tuple(Box(layer_lo=n, layer_hi=n + 1, source_group=g, **at) for n, g in enumerate(source_groups))
    return Route(source=0, sink=0, group=0, boxes=boxes, digest=bytes(32))


@settings(deadline=None)
@given(groups(), st.integers(0, TOKENS), st.integers(0, TOKENS))
def test_a_window_is_cut_to_the_rows_that_are_held(group: Group, since: int, first: int) -> None:
    """Its items are then those that would have been named for the shorter window."""
    origin = group.origin if group.cp_size > 1 else 0
    first = max(first, origin)
    held = held_from([route(3, 4)], {0: group}, {3: since, 4: since // 2, 5: TOKENS})
    begin = held.get(0, 0)
    lowest = rows_of(group, since, 0)[0]
    assert rows_of(group, begin, 0)[0] >= lowest
    assert begin % group.tokens_per_row == 0 or not since
    opaque = any(part.encoding for part in group.parts)
    if not opaque:
        assert rows_of(group, begin, 0)[0] == lowest
    for rank in range(group.cp_size):
        ranks = (Rank(rank=0, owns=(owns(group, [0], None, rank),)),)
        geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=ranks)
        side = RankLayout(geometry, 0, columns_without_gaps(geometry, 0, {0: 200})[0])
        if opaque and begin >= origin:
            assert owned_before(group, rank, begin // group.tokens_per_row) % group.rows == 0
        whole = window(group, rank, first)
        said = begins_of(held, [whole])
        to = min(begin, TOKENS)
        assert said == (() if to <= first else (Begin(group=0, first=to),))
        (cut,) = cut_to_begins(side, (whole,), {each.group: each.first for each in said})
        again = window(group, rank, said[0].first if said else first)
        assert (cut.first, cut.count, cut.valid) == (again.first, again.count, again.valid)
        assert np.array_equal(cut.items, again.items)


def window(group: Group, rank: int, first: int) -> Grants:
    """Tokens [first, TOKENS); item i of the rank is called i, or 0 of a ring."""
    begin, end = rows_of(group, first, TOKENS - first)
    mine = [row for row in range(begin, end) if group.cp_size == 1 or int(owner(group, np.array([row]))[0]) == rank]
    items = sorted({owned_before(group, rank, row) // group.rows for row in mine})
    if group.kind == ItemKind.RING:
        items = [0]
    assert len(items) == items_needed(group, rank, first, TOKENS - first)
    items_ = np.array(items, np.uint32)
    return Grants(group=0, first=first, count=TOKENS - first, valid=TOKENS, items=items_, late=True)
