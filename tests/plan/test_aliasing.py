"""Items of one transfer share no byte (KVP-GRANT-ALIAS), held to a model that paints every byte."""

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvproto.copying.columns import Overlaps, check_columns
from kvproto.copying.grants import check_grants
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry, Group, Rank, gqa, mla, owns
from kvproto.planning.limits import MAX_ITEMS, MAX_SPANS
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns, Grants
from tests.errors import raises
from tests.plan.programs import regions

ITEMS, LENGTH = 5, 1 << 12


def engine(*groups: tuple[Group, int]) -> Geometry:
    """One rank that owns all lanes of each group, and layers 0, 1, ... of it."""
    owned = tuple(owns(group, range(layers)) for group, layers in groups)
    return Geometry(replica=0, facts=(), groups=tuple(g for g, _ in groups), ranks=(Rank(rank=0, owns=owned),))


def column(group: int, items: int, **arrays: list[int]) -> Columns:
    size = len(arrays["offset"])
    made: dict[str, Any] = {k: np.array(v if len(v) == size else v * size, np.uint64) for k, v in arrays.items()}
    return Columns(group=group, items=items, region=np.zeros(size, np.uint32), **made)


def granted(group: Group, items: list[int]) -> Grants:
    tokens = group.rows * len(items)
    return Grants(group=group.id, first=0, count=tokens, valid=tokens, items=np.array(items, np.uint32))


def refused(geometry: Geometry, columns: tuple[Columns, ...], grants: tuple[Grants, ...]) -> RemoteError | None:
    check_columns(geometry, 0, regions({0: LENGTH}), columns)
    return told(geometry, columns, grants)


def told(geometry: Geometry, columns: tuple[Columns, ...], grants: tuple[Grants, ...]) -> RemoteError | None:
    try:
        check_grants(geometry, 0, {c.group: c for c in columns}, tuple(c.group for c in columns), grants)
    except RemoteError as error:
        return error
    return None


def valid(geometry: Geometry, columns: tuple[Columns, ...]) -> bool:
    try:
        check_columns(geometry, 0, regions({0: LENGTH}), columns)
    except RemoteError:
        return False
    return True


def painted(geometry: Geometry, columns: tuple[Columns, ...], grants: tuple[Grants, ...]) -> bool:
    """Whether a byte is claimed twice, byte by byte."""
    seen: set[int] = set()
    for group, own, grant in zip(geometry.groups, columns, grants, strict=True):
        assert grant.items is not None
        for k in range(own.offset.size):
            part = group.parts[k % len(group.parts)]
            places = [
                int(own.offset[k] + i * own.item_stride[k] + r * own.row_stride[k] + lane * own.lane_stride[k]) + b
                for i in grant.items.tolist()
                for r in range(group.rows)
                for lane in range(part.lanes)
                for b in range(part.lane_bytes)
            ]
            if seen & set(places):
                return True
            seen.update(places)
    return False


def strides(draw: Any, group: Group) -> list[int]:
    """Item, row and lane strides without overlap in one column, in any order of the axes, with and without gaps."""
    reach, found = group.parts[0].lane_bytes, {}
    for axis in draw(st.permutations(range(3))):
        extent = (ITEMS, group.rows, group.parts[0].lanes)[axis]
        found[axis] = reach + draw(st.sampled_from([0, 0, 0, 1, 4, 12]))
        reach += found[axis] * (extent - 1)
    return [found[axis] for axis in range(3)]


@st.composite
def worlds(draw: Any) -> tuple[Geometry, tuple[Columns, ...], tuple[Grants, ...]]:
    groups = [
        gqa(n, f"g{n}", n, draw(st.integers(1, 2)), draw(st.sampled_from([4, 8])), draw(st.integers(1, 3)))
        for n in range(draw(st.integers(1, 2)))
    ]
    layers = [draw(st.integers(1, 2)) for _ in groups]
    columns, grants = [], []
    shared = strides(draw, groups[0])
    for group, number in zip(groups, layers, strict=True):
        size = number * len(group.parts)
        some = [shared if draw(st.booleans()) else strides(draw, group) for _ in range(size)]
        places = [draw(st.sampled_from([0, 4, 8, 16, 24, 32, 64, 100, 160, 400])) for _ in range(size)]
        item, row, lane = (list(axis) for axis in zip(*some, strict=True))
        columns.append(column(group.id, ITEMS, offset=places, item_stride=item, row_stride=row, lane_stride=lane))
        ids = draw(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=3, unique=True))
        grants.append(granted(group, ids))
    return engine(*zip(groups, layers, strict=True)), tuple(columns), tuple(grants)


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_items_are_refused_exactly_if_a_byte_is_claimed_twice(world: Any) -> None:
    geometry, columns, grants = world
    assume(valid(geometry, columns))  # strides of the first group may not suit the second
    error = refused(geometry, columns, grants)
    assert (error is not None) == painted(geometry, columns, grants)
    assert error is None or error.code == ErrorCode.ITEM_ALIAS


def test_rows_of_two_parts_in_pages_with_a_gap_behind_are_no_alias() -> None:
    """Pages of 2 rows of k and v, one byte each, 5 bytes apart: no stride separates them all."""
    group = gqa(0, "index", 0, 1, 1, 2)
    own = column(0, ITEMS, offset=[0, 1], item_stride=[5], row_stride=[2], lane_stride=[1])
    geometry = engine((group, 1))
    assert Overlaps.of(geometry, 0, {0: own}).clusters == ()
    assert refused(geometry, (own,), (granted(group, [0, 3, 1]),)) is None


def joint(stride: int, layers: int = 3) -> tuple[Geometry, tuple[Columns, ...]]:
    """A joint page: K and V of all layers of an item lie side by side; NHD, 2 heads of 8 bytes, 4 rows."""
    group = gqa(0, "target", 0, 2, 8, 4)
    offsets = [64 * k for k in range(2 * layers)]
    own = column(0, ITEMS, offset=offsets, item_stride=[stride], row_stride=[16], lane_stride=[8])
    return engine((group, layers)), (own,)


@pytest.mark.parametrize("items", [[0, 1, 2, 3, 4], [3, 1], [4]])
def test_a_joint_page_is_no_alias(items: list[int]) -> None:
    geometry, columns = joint(6 * 64)
    assert refused(geometry, columns, (granted(geometry.groups[0], items),)) is None
    assert Overlaps.of(geometry, 0, {0: columns[0]}).clusters == ()


def test_keys_and_values_in_turn_by_row_and_by_head_are_no_alias() -> None:
    group = gqa(0, "target", 0, 2, 8, 4)
    by_row = column(0, ITEMS, offset=[0, 16], item_stride=[128], row_stride=[32], lane_stride=[8])
    by_head = column(0, ITEMS, offset=[0, 8], item_stride=[128], row_stride=[32], lane_stride=[16])
    for own in (by_row, by_head):
        assert refused(engine((group, 1)), (own,), (granted(group, [0, 1, 2]),)) is None


def test_keys_and_values_in_turn_by_head_in_pages_of_all_layers_are_no_alias() -> None:
    """Layers differ modulo a page, K and V modulo a head: no stride tells all of them apart."""
    group = gqa(0, "target", 0, 2, 8, 4)
    offsets = [128 * layer + 8 * part for layer in range(3) for part in range(2)]
    own = column(0, ITEMS, offset=offsets, item_stride=[384], row_stride=[32], lane_stride=[16])
    assert refused(engine((group, 3)), (own,), (granted(group, [0, 1, 2]),)) is None
    assert Overlaps.of(engine((group, 3)), 0, {0: own}).clusters == ()


def test_a_stride_one_item_too_long_lays_a_layer_over_the_next_one() -> None:
    """One layer of a joint page states the stride of another pool: its items run into the pages of the others."""
    geometry, (own,) = joint(6 * 64)
    wrong = own.item_stride.copy()
    wrong[0] += 64
    error = refused(geometry, (attrs.evolve(own, item_stride=wrong),), (granted(geometry.groups[0], [0, 1]),))
    assert error is not None
    assert (error.code, error.path) == (ErrorCode.ITEM_ALIAS, "grants[0].items")
    assert "column 0 of group 0" in error.yours
    assert "stride" in error.advice


def test_layers_one_after_the_other_with_a_stride_one_byte_too_long() -> None:
    """The last item of layer 0 ends in layer 1; transfers that do not name both are served."""
    group = mla(0, "target", 0, 16, 4)
    own = column(0, ITEMS, offset=[0, ITEMS * 64], item_stride=[65], row_stride=[16], lane_stride=[16])
    geometry = engine((group, 2))
    assert refused(geometry, (own,), (granted(group, [0, 1]),)) is None
    error = refused(geometry, (own,), (granted(group, [4, 0]),))
    assert error is not None
    assert error.code == ErrorCode.ITEM_ALIAS


def test_layers_of_a_unified_pool_are_judged_once() -> None:
    """Two groups share the bytes of 32 layers in the same way: one shape, compared once for each transfer."""
    layers = 32
    a, b = mla(0, "full", 0, 16, 4), mla(1, "window", 0, 16, 4)
    geometry = Geometry(
        replica=0, facts=(), groups=(a, b),
        ranks=(Rank(rank=0, owns=(owns(a, range(layers)), owns(b, range(layers, 2 * layers)))),),
    )  # fmt: skip
    offsets = [ITEMS * 64 * k for k in range(layers)]
    columns = {g: column(g, ITEMS, offset=offsets, item_stride=[64], row_stride=[16], lane_stride=[16]) for g in (0, 1)}
    overlaps = Overlaps.of(geometry, 0, columns)
    assert [len(c) for c in overlaps.clusters] == [2]
    overlaps.check((granted(a, [0, 1]), granted(b, [2, 4])))
    with raises(RemoteError, code=ErrorCode.ITEM_ALIAS, path="grants[1].items"):
        overlaps.check((granted(a, [0, 1]), granted(b, [2, 1])))


def test_the_check_of_a_large_transfer_does_not_look_at_columns() -> None:
    """131,072 items of 122 columns of a joint page: nothing is left to compare for a transfer."""
    number, layers = 1 << 17, 61
    group = gqa(0, "target", 0, 2, 8, 4)
    offsets = [64 * k for k in range(2 * layers)]
    own = {0: column(0, number, offset=offsets, item_stride=[128 * layers], row_stride=[16], lane_stride=[8])}
    geometry = engine((group, layers))
    grants = (granted(group, list(range(number))),)
    assert Overlaps.of(geometry, 0, own).clusters == ()
    check_grants(geometry, 0, own, (0,), grants)


def test_a_registration_of_too_many_kinds_of_overlap_is_refused() -> None:
    """Thousands of columns that overlap each in its own way would make every transfer slow."""
    layers = 2100
    group = mla(0, "target", 0, 8, 1)
    geometry = engine((group, layers))
    offsets = [k * 4096 + (k % 2) * -4090 for k in range(layers)]
    item = [100 + k // 2 for k in range(layers)]
    own = column(0, 2, offset=offsets, item_stride=item, row_stride=[8], lane_stride=[8])
    with raises(RemoteError, code=ErrorCode.BAD_COLUMNS, path="columns"):
        check_columns(geometry, 0, regions({0: 4096 * (layers + 1)}), (own,))


@pytest.mark.parametrize("written", [True, False])
def test_layers_that_share_a_cache_are_read_but_not_written(written: bool) -> None:
    """KVP-GRANT-ALIAS: two layers at one place, and an item that a table names twice."""
    group = mla(0, "target", 0, 16, 4)
    own = {0: column(0, ITEMS, offset=[0, 0], item_stride=[64], row_stride=[16], lane_stride=[16])}
    geometry = engine((group, 2))
    for items in ([0, 1], [2, 2]):
        if not written:
            check_grants(geometry, 0, own, (0,), (granted(group, items),), written=False)
            continue
        with raises(RemoteError, code=ErrorCode.ITEM_ALIAS) as caught:
            check_grants(geometry, 0, own, (0,), (granted(group, items),))
        assert "state only the one that writes it" in caught.value.advice or items == [2, 2]


def in_turn(layers: int, items: int, groups: int = 2) -> tuple[Geometry, tuple[Columns, ...], tuple[Grants, ...]]:
    """Groups that take turns in joint pages of some layers, each with pages of its own."""
    held = [mla(n, f"g{n}", n, 8, 1) for n in range(groups)]
    offset = [8 * layer for layer in range(layers)]
    columns = tuple(
        column(g.id, groups * items, offset=offset, item_stride=[8 * layers], row_stride=[8], lane_stride=[8])
        for g in held
    )
    pages = np.random.default_rng(0).permutation(groups * items).reshape(groups, items)
    grants = tuple(granted(g, some.tolist()) for g, some in zip(held, pages, strict=True))
    return engine(*((g, layers) for g in held)), columns, grants


def test_columns_that_lie_together_are_compared_as_one() -> None:
    """A page of 100 layers is one span, so pages of two groups that take turns are within the limit."""
    geometry, columns, grants = in_turn(layers=100, items=20000)
    assert told(geometry, columns, grants) is None
    assert grants[0].items is not None
    assert grants[1].items is not None
    twice = attrs.evolve(grants[1], items=np.r_[grants[1].items[:-1], grants[0].items[:1]].astype(np.uint32))
    error = told(geometry, columns, (grants[0], twice))
    assert error is not None
    assert (error.code, error.path, error.yours) == (
        ErrorCode.ITEM_ALIAS,
        "grants[1].items",
        "items of group 0 and group 1 overlap",
    )


def test_more_spans_than_may_be_compared_are_refused() -> None:
    error = told(*in_turn(layers=1, items=MAX_SPANS // 2 + 1))
    assert error is not None
    assert (error.code, error.yours) == (ErrorCode.ITEM_ALIAS, f"more than {MAX_SPANS} spans to compare")


def test_a_transfer_of_more_items_than_may_be_is_refused() -> None:
    """KVP-GRANT-SIZE: over all groups, before the items are looked at."""
    group, items = mla(0, "kv", 0, 8, 1), MAX_ITEMS
    geometry = engine((group, 1))
    one = column(0, items + 1, offset=[0], item_stride=[8], row_stride=[8], lane_stride=[8])
    assert told(geometry, (one,), (granted(group, list(range(items))),)) is None
    error = told(geometry, (one,), (granted(group, list(range(items + 1))),))
    assert error is not None
    assert (error.code, error.path, error.yours) == (ErrorCode.BAD_GRANT, "grants[0].items", str(items + 1))
