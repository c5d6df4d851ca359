"""Copy programs: strided copies over shared index arrays.

`lower` turns the routes of a rank pair and one request into a few operations (one for each layer, part and lane piece)
that share row maps. The number of Python objects does not depend on the number of pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import RemoteError
from kvproto.geometry import Geometry, Group, Owns, local_row, owned_before, owner
from kvproto.plan import Box, Route
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Columns, Grants, Region

__all__ = [
    "CopyProgram",
    "Op",
    "RowMap",
    "Side",
    "Window",
    "check_columns",
    "check_grants",
    "items_needed",
    "lower",
    "windows",
]

IntArray = npt.NDArray[np.int64]


@attrs.frozen
class Window:
    """Tokens [first, first + count) of one group and the items that hold them at one rank, first owned row first."""

    first: int
    count: int
    items: IntArray


def windows(grants: Iterable[Grants]) -> dict[int, Window]:
    """The windows of grants that were checked, by group."""
    made = {}
    for grant in grants:
        items = np.empty(0) if grant.items is None else grant.items
        made[grant.group] = Window(grant.first, grant.count, items.astype(np.int64))
    return made


@attrs.frozen
class Side:
    """One rank's view: what it owns and where that lies."""

    geometry: Geometry
    rank: int
    columns: Mapping[int, Columns]
    """By group id of this side."""

    def group(self, id: int) -> Group:
        """The group of that id."""
        return next(g for g in self.geometry.groups if g.id == id)

    def owns(self, id: int) -> Owns:
        """This rank's share of the group."""
        rank = next(r for r in self.geometry.ranks if r.rank == self.rank)
        return next(o for o in rank.owns if o.group == id)


@attrs.frozen(eq=False)
class RowMap:
    """Runs of rows that lie one after the other on both sides; arrays of equal length but for `row`, by run length."""

    row: IntArray
    """Every global row, ascending; those of a run need not be consecutive where tokens are dealt over ranks."""
    start: IntArray
    """Index into `row` of the first row of each run."""
    source_item: IntArray
    source_row: IntArray
    sink_item: IntArray
    sink_row: IntArray
    rows: IntArray
    """Rows of each run."""

    def by_length(self) -> Iterator[tuple[int, slice]]:
        """Run length and the slice of the arrays that has it."""
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1))
        for lo, hi in zip(starts, [*starts[1:], len(self.rows)], strict=False):
            yield int(self.rows[lo]), slice(int(lo), int(hi))


@attrs.frozen
class Place:
    """One side of an operation: byte address = offset + item*item_stride + row*row_stride + lane*lane_stride."""

    region: int
    offset: int
    item_stride: int
    row_stride: int
    lane_stride: int
    items: int
    rows: int


@attrs.frozen
class Op:
    """`lanes` lanes of `lane_bytes` bytes of one layer and part, for every row of a map."""

    map: int
    source: Place
    sink: Place
    lanes: int
    lane_bytes: int
    group: int
    model: int
    layer: int
    part: int
    lo: int
    """First byte on the part's lane axis."""


@attrs.frozen
class CopyProgram:
    """Operations over shared row maps."""

    maps: tuple[RowMap, ...]
    ops: tuple[Op, ...]

    @property
    def bytes(self) -> int:
        """Bytes that the program writes."""
        rows = [int(m.rows.sum()) for m in self.maps]
        return sum(rows[op.map] * op.lanes * op.lane_bytes for op in self.ops)

    def bytes_by_group(self) -> dict[int, int]:
        """The same, by sink group."""
        rows = [int(m.rows.sum()) for m in self.maps]
        found: dict[int, int] = {}
        for op in self.ops:
            found[op.group] = found.get(op.group, 0) + rows[op.map] * op.lanes * op.lane_bytes
        return found


def items_needed(group: Group, cp_rank: int, first: int, count: int) -> int:
    """Items that a rank needs for tokens [first, first + count)."""
    if group.kind != ItemKind.PAGE:
        return 0 if group.kind == ItemKind.HANDOFF else 1
    lo, hi = (owned_before(group, cp_rank, row) for row in _rows(group, first, count))
    return (hi - 1) // group.rows - lo // group.rows + 1 if hi > lo else 0


def lower(
    routes: tuple[Route, ...], source: Side, sink: Side, sources: Mapping[int, Window], sinks: Mapping[int, Window]
) -> CopyProgram:
    """Copy program of one rank pair for one request; windows by group id of their own side, no hand-off groups."""
    maps: list[RowMap] = []
    index: dict[tuple[int, int, int, int], int] = {}
    ops: list[Op] = []
    for route in routes:
        dst = sink.group(route.group)
        if dst.kind == ItemKind.HANDOFF:
            continue
        for box in route.boxes:
            src = source.group(box.source_group)
            key = (src.id, dst.id, box.source_class, box.sink_class)
            if key not in index:
                index[key] = len(maps)
                maps.append(_row_map(src, dst, box, sources[src.id], sinks[dst.id]))
            if maps[index[key]].rows.size:
                ops += _ops(source, sink, src, dst, box, index[key])
    return CopyProgram(tuple(maps), tuple(ops))


def _rows(group: Group, first: int, count: int) -> tuple[int, int]:
    """Rows that the tokens cover wholly."""
    step = group.tokens_per_row
    lo, hi = -(-first // step), (first + count) // step
    return lo, max(lo, hi)


def _row_map(src: Group, dst: Group, box: Box, source: Window, sink: Window) -> RowMap:
    if dst.kind == ItemKind.SLOT:
        rows = np.arange(dst.live_rows or dst.rows, dtype=np.int64)
    else:
        rows = np.arange(*_rows(dst, sink.first, sink.count), dtype=np.int64)
        mine = np.ones(rows.shape, bool)
        for group, which in ((src, box.source_class), (dst, box.sink_class)):
            if group.cp_size > 1:
                mine &= owner(group, rows) == which
        rows = rows[mine]
    places = [_place_rows(g, w, c, rows) for g, w, c in ((src, source, box.source_class), (dst, sink, box.sink_class))]
    (si, sr), (di, dr) = places
    # a run goes on while all four coordinates do
    fresh = np.ones(rows.size, bool)
    fresh[1:] = (np.diff(si) != 0) | (np.diff(di) != 0) | (np.diff(sr) != 1) | (np.diff(dr) != 1)
    starts = np.flatnonzero(fresh)
    lengths = np.diff(starts, append=rows.size)
    starts = starts[np.argsort(lengths, kind="stable")]
    return RowMap(rows, starts, si[starts], sr[starts], di[starts], dr[starts], np.sort(lengths))


def _place_rows(group: Group, window: Window, cp_rank: int, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Item id and row within it of each global row; raises BAD_GRANT where the window does not hold them."""
    if group.kind == ItemKind.PAGE:
        local = local_row(group, rows) if group.cp_size > 1 else rows
        base = owned_before(group, cp_rank, _rows(group, window.first, window.count)[0]) // group.rows
        item, row = np.divmod(local, group.rows)
        item -= base
    else:
        item, row = np.zeros_like(rows), rows if group.kind == ItemKind.SLOT else rows % group.rows
    held = rows.size <= group.rows or group.kind != ItemKind.RING
    if rows.size and not (held and item.min() >= 0 and item.max() < window.items.size):
        asked = f"rows {rows.min()} to {rows.max()}"
        raise RemoteError(ErrorCode.BAD_GRANT, f"groups[{group.name}]", f"{window.items.size} items", asked)
    return window.items[item], row


def _ops(source: Side, sink: Side, src: Group, dst: Group, box: Box, at: int) -> Iterator[Op]:
    name = dst.parts[box.part].name
    src_part = [p.name for p in src.parts].index(name)
    fine = min(src.parts[src_part].lane_bytes, dst.parts[box.part].lane_bytes)
    for layer in range(box.layer_lo, box.layer_hi):
        a = list(_pieces(source, src, src_part, layer, box.lo, box.hi, fine))
        b = list(_pieces(sink, dst, box.part, layer, box.lo, box.hi, fine))
        for lo, hi, left, right in _both(a, b, fine):
            whole = left.lane_stride == right.lane_stride == 0
            unit = hi - lo if whole else fine
            # a side whose lanes touch steps from unit to unit
            left, right = (attrs.evolve(p, lane_stride=p.lane_stride or unit) for p in (left, right))
            yield Op(at, left, right, (hi - lo) // unit, unit, dst.id, box.model, layer, box.part, lo)


_Piece = tuple[int, int, Place]


def _pieces(side: Side, group: Group, part: int, layer: int, lo: int, hi: int, fine: int) -> Iterator[_Piece]:
    """Lane bytes [lo, hi) as this side stores them; lane_stride 0 where the bytes touch."""
    share, columns = side.owns(group.id), side.columns[group.id]
    size = group.parts[part].lane_bytes
    column = int(np.searchsorted(share.layers, layer)) * len(group.parts) + part
    stride = int(columns.lane_stride[column])
    base = int(columns.offset[column])
    local = 0
    for span in share.lanes:
        if span.part != part:
            continue
        x, y = max(lo, span.lo * size), min(hi, span.hi * size)
        if x < y:
            touching = stride == size
            step = y - x if touching or size == fine else size
            cut = x
            while cut < y:
                end = min(y, cut + step - (cut % size if step == size else 0))
                lane, within = divmod(cut - span.lo * size, size)
                offset = base + (local + lane) * stride + within
                single = touching or end - cut <= size
                yield cut, end, Place(
                    int(columns.region[column]), offset, int(columns.item_stride[column]),
                    int(columns.row_stride[column]),
                    0 if single else stride, columns.items, group.rows,
                )  # fmt: skip
                cut = end
        local += span.hi - span.lo


def _both(a: list[_Piece], b: list[_Piece], fine: int) -> Iterator[tuple[int, int, Place, Place]]:
    """Pieces cut where either side is cut."""
    a, b = sorted(a, key=lambda p: p[0]), sorted(b, key=lambda p: p[0])
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        yield lo, hi, _advance(a[i], lo, hi, fine), _advance(b[j], lo, hi, fine)
        i, j = i + (a[i][1] == hi), j + (b[j][1] == hi)


def _advance(piece: _Piece, lo: int, hi: int, fine: int) -> Place:
    """Bytes [lo, hi) of a piece. Bytes that touch step byte by byte, others by whole lanes, `fine` long."""
    start, _, place = piece
    if not place.lane_stride:
        return attrs.evolve(place, offset=place.offset + lo - start)
    place = attrs.evolve(place, offset=place.offset + (lo - start) // fine * place.lane_stride)
    return place if hi - lo > fine else attrs.evolve(place, lane_stride=0)


def check_columns(geometry: Geometry, rank: int, regions: Mapping[int, Region], columns: tuple[Columns, ...]) -> None:
    """Raise BAD_COLUMNS or OUT_OF_REGION where a Register does not fit its Description."""
    groups = {g.id: g for g in geometry.groups}
    shares = [o for r in geometry.ranks if r.rank == rank for o in r.owns if groups[o.group].kind != ItemKind.HANDOFF]
    if [o.group for o in shares] != [c.group for c in columns]:
        raise _bad("columns", f"groups {[o.group for o in shares]}", f"groups {[c.group for c in columns]}")
    for i, (share, own) in enumerate(zip(shares, columns, strict=True)):
        group = groups[share.group]
        number = share.layers.size * len(group.parts)
        arrays = {}
        for name in ("region", "offset", "item_stride", "row_stride", "lane_stride"):
            if getattr(own, name).size != number:
                raise _bad(f"columns[{i}].{name}", f"{number} entries", f"{getattr(own, name).size} entries")
            arrays[name] = getattr(own, name).astype(object)
        for k in range(number):
            p = k % len(group.parts)
            lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
            region = regions.get(arrays["region"][k])
            if region is None:
                raise _bad(f"columns[{i}].region[{k}]", "a region of the Register", str(arrays["region"][k]))
            size = group.parts[p].lane_bytes
            axes = [
                (arrays[n][k], c)
                for n, c in (("item_stride", own.items), ("row_stride", group.rows), ("lane_stride", lanes))
            ]
            if any(stride > region.length for stride, _ in axes):
                raise _bad(f"columns[{i}]", f"strides of at most {region.length}", f"column {k}: {max(axes)[0]}")
            reach = size
            for stride, extent in sorted(a for a in axes if a[1] > 1):
                if stride < reach:
                    raise _bad(f"columns[{i}]", "strides without overlap", f"column {k}: {stride} < {reach}")
                reach += stride * (extent - 1)
            if arrays["offset"][k] + reach > region.length:
                code = ErrorCode.OUT_OF_REGION
                raise RemoteError(
                    code, f"columns[{i}].offset[{k}]", f"end at most {region.length}", str(arrays["offset"][k] + reach)
                )


def check_grants(
    geometry: Geometry, rank: int, columns: Mapping[int, Columns], wanted: tuple[int, ...], grants: tuple[Grants, ...]
) -> None:
    """Raise BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS where a Transfer's grants do not fit the routes of the pair."""
    groups = {g.id: g for g in geometry.groups}
    shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
    if tuple(g.group for g in grants) != wanted:
        raise RemoteError(ErrorCode.BAD_GRANT, "grants", f"groups {wanted}", f"groups {tuple(g.group for g in grants)}")
    for i, grant in enumerate(grants):
        group = groups[grant.group]
        if group.kind == ItemKind.RING:
            lo, hi = _rows(group, grant.first, grant.count)
            if hi - lo > group.rows:
                raise RemoteError(
                    ErrorCode.BAD_GRANT, f"grants[{i}].count", f"at most {group.rows} rows", f"{hi - lo} rows"
                )
        if group.cp_size > 1 and grant.count and grant.first < group.origin:
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].first", f"at least {group.origin}", str(grant.first))
        need = items_needed(group, shares[grant.group].cp_rank, grant.first, grant.count)
        items = grant.items
        if items is None or items.size != need:
            came = "no items" if items is None else f"{items.size} items"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].items", f"{need} items", came)
        if need and int(items.max()) >= columns[grant.group].items:
            raise RemoteError(
                ErrorCode.OUT_OF_REGION,
                f"grants[{i}].items",
                f"below {columns[grant.group].items}",
                str(int(items.max())),
            )
        if np.unique(items).size != items.size:
            raise RemoteError(ErrorCode.ITEM_ALIAS, f"grants[{i}].items", "each item once", "an item twice")


def _bad(path: str, mine: str, yours: str) -> RemoteError:
    return RemoteError(ErrorCode.BAD_COLUMNS, path, mine, yours, "state columns in the order of the Description")
