"""Lowers the routes of a rank pair to copies (spec/v1/lowering.md).

A `Pair` is made once, at registration, with the table of operations, whose length is layers x parts x lane pieces.
`Pair.lower` makes the row maps of one request. Both sides' items and deals are intervals on the axis of rows, and runs
are their intersections. So the cost of a map depends on its runs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.execute import seeds
from kvproto.copying.grants import rows_of
from kvproto.copying.program import (
    CONVERTING_OP,
    EMPTY_MAP,
    OP,
    CopyProgram,
    IntArray,
    Operations,
    RankLayout,
    RowMap,
    Side,
    Window,
)
from kvproto.errors import RemoteError
from kvproto.planning.arrays import repeated_index
from kvproto.planning.conversion import Conversion, conversion
from kvproto.planning.deals import deal, global_rows, local_row, owned_before, owned_within
from kvproto.planning.geometry import Group, lane_bytes
from kvproto.planning.kinds import KINDS, TOKENS, axis_of
from kvproto.planning.plan import Box, Route
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns


class Pair:
    """The routes of one rank pair over its two layouts, without hand-off groups; made once, at registration."""

    def __init__(self, routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> None:
        self.routes, self.source, self.sink = routes, source, sink
        numbers: dict[tuple[int, int, int, int], int] = {}
        parts: dict[tuple[int, int, int, int], _PartPair] = {}
        self._maps: list[MapSpec] = []
        boxes: list[tuple[_PartPair, Box, int]] = []
        for route in routes:
            dst = sink.groups[route.group]
            for box in route.boxes if KINDS[dst.kind].has_memory else ():
                src = source.groups[box.source_group]
                key = (src.id, dst.id, box.source_class, box.sink_class)
                if key not in numbers:
                    numbers[key] = len(self._maps)
                    whole = any(part.encoding for part in dst.parts)
                    ours, theirs = (not whole and _flat(x.columns[g.id], g) for x, g in ((source, src), (sink, dst)))
                    self._maps.append(MapSpec(src, dst, box.source_class, box.sink_class, ours, theirs, whole))
                number = numbers[key]
                place = (number, box.part, box.layer_lo, box.layer_hi)
                if place not in parts:
                    parts[place] = _PartPair.of(source, sink, self._maps[number], box)
                boxes.append((parts[place], box, number))
        kind = CONVERTING_OP if any(part.conversion for part in parts.values()) else OP
        tables = [table for part, box, number in boxes for table in _operations(part, box, number, kind)]
        words = np.dtype((np.void, kind.itemsize))  # as numpy would compare the fields of all tables that it joins
        ops = np.empty(sum(table.size for table in tables), kind)
        np.concatenate([table.view(words) for table in tables] or [np.empty(0, words)], out=ops.view(words))
        ops["seed"] = seeds(ops)
        maps = tuple(attrs.evolve(EMPTY_MAP, whole=m.whole) for m in self._maps)
        steps = tuple(m.sink.tokens_per_row for m in self._maps)
        ends = tuple(0 if KINDS[m.sink.kind].is_state else None for m in self._maps)
        others = frozenset(i for i, m in enumerate(self._maps) if axis_of(m.sink) != TOKENS)
        self.nothing = CopyProgram(maps, Operations(ops), steps, ends, others)
        """The copy program of a request without rows."""

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in all rows that may move before prefill is over, if no tokens are dealt."""
        early, ops, steps = self.nothing.early, self.nothing.ops, self.nothing.tokens_per_row
        moved = zip(ops["map"].tolist(), (ops["lanes"] * ops["lane_bytes"]).tolist(), strict=True)
        return sum(size // steps[m] for m, size in moved if m in early)

    def lower(self, sources: Mapping[int, Window], sinks: Mapping[int, Window]) -> CopyProgram:
        """The copy program of one request, from windows by group id; raises BAD_GRANT for windows that lack items."""
        nothing = self.nothing
        maps, ends = list(nothing.maps), list(nothing.state_after)
        for i, m in enumerate(self._maps):
            if (window := sinks.get(m.sink.id)) is not None:
                maps[i] = row_map(m, sources[m.source.id], window)
                if ends[i] is not None:
                    ends[i] = window.first + window.count
        return CopyProgram(tuple(maps), nothing.operations, nothing.tokens_per_row, tuple(ends), nothing.others)


def _flat(columns: Columns, group: Group) -> bool:
    """Whether the items of a paged group touch in every column."""
    if not KINDS[group.kind].paged:
        return False
    rows = columns.row_stride.astype(np.int64) * group.rows
    return bool((columns.item_stride == rows).all())


_STRIDES = ("item_stride", "row_stride", "lane_stride")
_PLACE = ("region", "offset", "item_stride", "row_stride", "items")
_LayerColumn = dict[str, IntArray]
"""Places of the layers of a column: arrays [layers] by field."""


@attrs.frozen
class _LanePiece:
    """Bytes [lo, hi) of the lane axis, at an offset from a column; stride from lane to lane, 0 where bytes touch."""

    lo: int
    hi: int
    part: int
    """The part whose column it lies in."""
    offset: int
    stride: int


@attrs.frozen
class _StoredPart:
    """The place where one side stores some layers of a part: its column, or a column for each of its sections."""

    side: Side | Literal["scale"]
    layout: RankLayout
    group: Group
    flat: bool
    """Whether the items touch, so that the pool counts as one item."""
    columns: dict[int, _LayerColumn]
    """By part index."""

    @classmethod
    def of(cls, side: Side | Literal["scale"], layout: RankLayout, m: MapSpec, name: str, box: Box) -> _StoredPart:
        group, flat = (m.sink, m.sink_flat) if side == "sink" else (m.source, m.source_flat)
        layers = np.arange(box.layer_lo, box.layer_hi)
        parts = [p for p, part in enumerate(group.parts) if part.name == name]
        return cls(side, layout, group, flat, {p: _layer_column(layout, group, p, layers) for p in parts})

    @property
    def lane_bytes(self) -> int:
        return lane_bytes(self.group.parts[next(iter(self.columns))])

    def pieces(self, box: Box, layer: int, fine: int) -> list[_LanePiece]:
        """The lane bytes of a box as this side stores them in the box's layer of that index, ascending."""
        pieces = [
            piece
            for part, column in self.columns.items()
            for piece in self._column_pieces(part, int(column["lane_stride"][layer]), box, fine)
        ]
        return sorted(pieces, key=lambda piece: piece.lo)

    def whole_lanes(self, box: Box, layer: int, lane: int) -> list[_LanePiece]:
        """The same of whole lanes, which have `lane` bytes at the sink and are places there: each lane apart."""
        size = self.lane_bytes
        own = box._replace(lo=box.lo // lane * size, hi=box.hi // lane * size)
        ((part, column),) = self.columns.items()
        pieces = self._column_pieces(part, int(column["lane_stride"][layer]), own, size, join=False)
        return [attrs.evolve(piece, lo=piece.lo // size * lane, hi=piece.hi // size * lane) for piece in pieces]

    def _column_pieces(self, p: int, stride: int, box: Box, fine: int, join: bool = True) -> Iterator[_LanePiece]:
        """The lane bytes of a box that one column stores; `join`: whether lanes that touch are one."""
        part = self.group.parts[p]
        size, whole, at = part.lane_bytes, lane_bytes(part), part.at or 0
        for first, last, local in self.layout.spans(self.group.id, p, box.lo // whole, -(-box.hi // whole)):
            x, y = max(box.lo, first * whole), min(box.hi, last * whole)
            if size != whole:  # a section of each lane, by itself
                for lane in range(x // whole, -(-y // whole)):
                    begin = lane * whole + at
                    cut, end = max(x, begin), min(y, begin + size)
                    while cut < end:
                        stop = min(end, cut + fine - cut % fine)
                        yield _LanePiece(cut, stop, p, (local + lane - first) * stride + cut - begin, 0)
                        cut = stop
                continue
            touching, cut = join and stride == size, x
            while cut < y:
                lane, within = divmod(cut - first * size, size)
                if touching:
                    end = y
                elif within or size != fine or y - cut < size:  # in one lane
                    end = min(y, cut + size - within)
                else:
                    end = y - y % size
                single = touching or end - cut <= size
                yield _LanePiece(cut, end, p, (local + lane) * stride + within, 0 if single else stride)
                cut = end

    def place(
        self, ops: npt.NDArray[np.void], pieces: Sequence[_LanePiece], layers: IntArray, unit: npt.NDArray[Any]
    ) -> None:
        """Write into operations [pieces, layers] where they lie on this side; lanes have `unit` [pieces, 1] bytes."""
        columns = [*self.columns.values()]
        column = {field: columns[0][field][layers] for field in _PLACE}
        if len(columns) > 1:  # each piece lies in the column of its section
            section = [[*self.columns].index(piece.part) for piece in pieces]
            column = {field: np.stack([stored[field][layers] for stored in columns])[section] for field in _PLACE}
        offset = np.array([piece.offset for piece in pieces])[:, None]
        stride = np.array([piece.stride for piece in pieces])[:, None]
        for field in ("region", "item_stride", "row_stride"):
            ops[f"{self.side}_{field}"] = column[field]
        ops[f"{self.side}_offset"] = column["offset"] + offset
        # a side whose lanes touch steps from unit to unit
        ops[f"{self.side}_lane_stride"] = np.where(stride, stride, unit)
        ops[f"{self.side}_items"] = 1 if self.flat else column["items"]
        ops[f"{self.side}_rows"] = column["items"] * self.group.rows if self.flat else self.group.rows


def _layer_column(side: RankLayout, group: Group, part: int, layers: IntArray) -> _LayerColumn:
    share, columns = side.shares[group.id], side.columns[group.id]
    at = np.searchsorted(share.layers, layers) * len(group.parts) + part
    place = {field: getattr(columns, field)[at].astype(np.int64) for field in ("region", "offset", *_STRIDES)}
    return place | {"items": np.full(layers.size, columns.items)}


@attrs.frozen
class _PartPair:
    """Some layers of a part on both sides."""

    source: _StoredPart
    sink: _StoredPart
    alike: list[IntArray]
    """Indices of layers whose columns have equal strides."""
    fine: int
    """Bytes of the smaller lane; of the sink's, if lanes are converted."""
    conversion: Conversion | None
    scales: _StoredPart | None
    """The source's scales that are read too."""

    @classmethod
    def of(cls, source: RankLayout, sink: RankLayout, m: MapSpec, box: Box) -> _PartPair:
        name, rule = m.sink.parts[box.part].name, conversion(m.source, m.sink, box.part)
        of = m.source.parts[rule.part].name if rule else name
        from_, to = _StoredPart.of("source", source, m, of, box), _StoredPart.of("sink", sink, m, name, box)
        scales = None
        if rule is not None and rule.scales is not None:
            scales = _StoredPart.of("scale", source, m, m.source.parts[rule.scales].name, box)
        columns = [column for stored in (from_, to, scales) if stored for column in stored.columns.values()]
        strides = np.stack([column[name] for column in columns for name in _STRIDES])
        alike = [np.arange(strides.shape[1])]
        if (strides != strides[:, :1]).any():  # only in odd pools
            _, kind = np.unique(strides, axis=1, return_inverse=True)
            alike = [np.flatnonzero(kind.reshape(-1) == k) for k in range(kind.max() + 1)]
        fine = to.lane_bytes if rule else min(from_.lane_bytes, to.lane_bytes)
        return cls(from_, to, alike, fine, rule, scales)


def _operations(parts: _PartPair, box: Box, number: int, kind: np.dtype[np.void]) -> Iterator[npt.NDArray[np.void]]:
    """Operations of a box over the map of that number, without seeds: tables of layers that share their lane pieces."""
    for layers in parts.alike:
        theirs = parts.sink.pieces(box, layers[0], parts.fine)
        if parts.conversion:
            ours = parts.source.whole_lanes(box, layers[0], parts.fine)
        else:
            ours = parts.source.pieces(box, layers[0], parts.fine)
        both = list(_cut_alike(ours, theirs, parts.fine))
        if not both:
            continue
        from_, to = zip(*both, strict=True)
        lo, hi = (np.array([getattr(piece, end) for piece in from_])[:, None] for end in ("lo", "hi"))
        touching = np.array([a.stride == b.stride == 0 for a, b in both])[:, None]
        unit = np.where(touching, hi - lo, parts.fine)
        ops = np.zeros((len(both), layers.size), kind)
        ops["map"], ops["group"], ops["model"], ops["part"] = number, parts.sink.group.id, box.model, box.part
        ops["layer"], ops["lo"], ops["lanes"], ops["lane_bytes"] = layers + box.layer_lo, lo, (hi - lo) // unit, unit
        parts.source.place(ops, from_, layers, unit)
        parts.sink.place(ops, to, layers, unit)
        if (rule := parts.conversion) is not None:
            ops["made"], ops["source_bytes"], ops["blocks"] = rule.made, parts.source.lane_bytes, rule.blocks
            if rule.stated is not None:
                ops["stated"] = rule.stated[layers + box.layer_lo if rule.stated.size > 1 else 0]
        if parts.scales is not None:
            scales = parts.scales.whole_lanes(box, layers[0], parts.fine)
            parts.scales.place(ops, [piece for piece, _ in _cut_alike(scales, theirs, parts.fine)], layers, unit)
        yield ops.ravel()


def _cut_alike(ours: list[_LanePiece], theirs: list[_LanePiece], fine: int) -> Iterator[tuple[_LanePiece, _LanePiece]]:
    """The pieces of both sides, ascending, cut where either side is cut."""
    i = j = 0
    while i < len(ours) and j < len(theirs):
        a, b = ours[i], theirs[j]
        lo, hi = max(a.lo, b.lo), min(a.hi, b.hi)
        yield _advance(a, lo, hi, fine), _advance(b, lo, hi, fine)
        i, j = i + (a.hi == hi), j + (b.hi == hi)


def _advance(piece: _LanePiece, lo: int, hi: int, fine: int) -> _LanePiece:
    """Bytes [lo, hi) of a piece, whose lanes are `fine` bytes long unless all of its bytes touch."""
    if not piece.stride:
        return _LanePiece(lo, hi, piece.part, piece.offset + lo - piece.lo, 0)
    lanes, within = divmod(lo - piece.lo, fine)
    stride = piece.stride if hi - lo > fine else 0
    return _LanePiece(lo, hi, piece.part, piece.offset + lanes * piece.stride + within, stride)


_FURTHEST = 1 << 62
"""Rows beyond this are refused, so that no sum of them leaves 64 bits."""


@attrs.frozen
class MapSpec:
    """The part of a row map that is known at registration: a pair of groups and a pair of token classes."""

    source: Group
    sink: Group
    source_class: int
    sink_class: int
    source_flat: bool
    """Whether the source's items touch in every column, so that runs continue across them."""
    sink_flat: bool
    whole: bool
    """Whether a part of the group is opaque, so that items move whole."""

    @cached_property
    def plain(self) -> bool:
        """Whether rows move from page to page in their order."""
        paged = KINDS[self.source.kind].paged and KINDS[self.sink.kind].paged
        return paged and not self.whole and self.source.cp_size == self.sink.cp_size == 1


def row_map(m: MapSpec, source: Window, sink: Window) -> RowMap:
    """The rows of the sink's window, at both sides; raises BAD_GRANT if a window lacks the items that hold them."""
    if m.whole:
        return _whole_items(m, source, sink)
    if KINDS[m.sink.kind].is_state:
        lo, hi = 0, m.sink.live_rows or m.sink.rows
    else:
        lo, hi = rows_of(m.sink, sink.first, sink.count)
    if hi > _FURTHEST:
        raise _short(m.sink, sink.items.size, f"rows {lo} to {hi}")
    if m.plain and 0 < hi - lo <= _FEW * min(m.source.rows, m.sink.rows):
        return _few_pages(m, source, sink, lo, hi)
    first, length = _owned(m.source, m.source_class, lo, hi)
    if m.sink.cp_size > 1:
        first, length = _meet(first, length, *_owned(m.sink, m.sink_class, lo, hi))
    moved = _MovedRows.of(m, first, length)
    ours = _segments(m.source, m.source_class, source, moved, m.source_flat)
    theirs = _segments(m.sink, m.sink_class, sink, moved, m.sink_flat)
    if ours.at is not theirs.at and not np.array_equal(ours.at, theirs.at):
        cuts = np.union1d(ours.at, theirs.at)
        ours, theirs = ours.cut(cuts), theirs.cut(cuts)
    rows = _lengths(ours.at, moved.total)
    if rows.size > 1:
        goes_on = ours.continues(rows)
        if goes_on.any():
            goes_on &= theirs.continues(rows)
            kept = np.flatnonzero(np.concatenate([[True], ~goes_on]))
            if kept.size < rows.size:
                ours, theirs = ours.keep(kept), theirs.keep(kept)
                rows = _lengths(ours.at, moved.total)
    zero = np.broadcast_to(_ZERO, rows.shape)
    source_item, sink_item = (zero if side.item is None else side.item for side in (ours, theirs))
    return RowMap(source_item, ours.row, sink_item, theirs.row, rows, first, length)


@attrs.define(eq=False)
class _MovedRows:
    """The global rows that move, as intervals [n], and as one axis on which these follow each other."""

    first: IntArray
    length: IntArray
    starts: IntArray
    """Beginnings of the intervals on the axis [n]."""
    total: int
    """The length of the axis."""
    places: IntArray
    """Every place of the axis [total], if an item of either side is a row."""

    @classmethod
    def of(cls, m: MapSpec, first: IntArray, length: IntArray) -> _MovedRows:
        starts, total = np.cumsum(length) - length, int(length.sum())
        places = np.arange(total) if m.source.rows == 1 or m.sink.rows == 1 else starts
        return cls(first, length, starts, total, places)


@attrs.define(eq=False)
class _Segments:
    """One side's segments of the axis of rows, each in one item."""

    at: IntArray
    """Beginnings of the segments on the axis [segments]."""
    item: IntArray | None
    """None if the pool counts as one item."""
    row: IntArray
    """The first row of each within its item."""

    def cut(self, cuts: IntArray) -> _Segments:
        """The same rows in segments that begin at `cuts`, among them all of these."""
        i = np.searchsorted(self.at, cuts, "right") - 1
        return _Segments(cuts, None if self.item is None else self.item[i], self.row[i] + cuts - self.at[i])

    def keep(self, index: IntArray) -> _Segments:
        """The segments of these indices; each goes on to the next one kept."""
        return _Segments(self.at[index], None if self.item is None else self.item[index], self.row[index])

    def continues(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each segment but the first begins where the one before it ends; `rows` are their lengths."""
        touch: npt.NDArray[np.bool_] = self.row[:-1] + rows[:-1] == self.row[1:]
        return touch if self.item is None else touch & (self.item[1:] == self.item[:-1])


_FEW = 32
"""Pages up to which Python's integers are faster than numpy calls."""


def _few_pages(m: MapSpec, source: Window, sink: Window, lo: int, hi: int) -> RowMap:
    step, other = m.source.rows, m.sink.rows
    ours, theirs = _pages(m.source, source, m.source_flat, lo, hi), _pages(m.sink, sink, m.sink_flat, lo, hi)
    begins, places = list[int](), list[tuple[_Page, _Page]]()
    for row in sorted({lo, *range(lo - lo % step + step, hi, step), *range(lo - lo % other + other, hi, other)}):
        place = ours[row // step - lo // step], theirs[row // other - lo // other]
        if not places or place != places[-1]:
            begins.append(row)
            places.append(place)
    runs = [
        (item, row + add, to, row + plus, end - row)
        for row, end, ((item, add), (to, plus)) in zip(begins, [*begins[1:], hi], places, strict=True)
    ]
    si, sr, di, dr, rows = np.array(runs, np.int64).T.copy()
    return RowMap(si, sr, di, dr, rows, np.array([lo]), np.array([hi - lo]))


_Page = tuple[int, int]
"""An item, or 0 if the pool counts as one, and what to add to a global row for its place in there."""


def _pages(group: Group, window: Window, flat: bool, lo: int, hi: int) -> list[_Page]:
    """The pages that hold rows [lo, hi)."""
    base = -(-window.first // group.tokens_per_row) // group.rows
    rows, first = group.rows, lo // group.rows
    low, high = first - base, (hi - 1) // rows - base
    if low < 0 or high >= window.items.size:
        raise _short(group, window.items.size, f"items {low} to {high} of the window")
    items = window.items[low : high + 1].tolist()
    if flat:
        return [(0, (item - page) * rows) for page, item in enumerate(items, first)]
    return [(item, -page * rows) for page, item in enumerate(items, first)]


def _whole_items(m: MapSpec, source: Window, sink: Window) -> RowMap:
    """The map of opaque parts, whose items move whole: both sides deal and page alike, windows begin with an item."""
    group = m.sink
    if not KINDS[group.kind].paged:
        ours, theirs = source.items[:1], sink.items[:1]
        lo, forgotten = rows_of(group, sink.first, 0)[0], rows_of(m.source, source.first, source.count)[1] - group.rows
        if KINDS[group.kind].wraps and lo < forgotten:
            raise _short(group, ours.size, f"rows from {lo}")
        first, length = np.zeros(ours.size, np.int64), np.full(ours.size, group.rows)
    else:
        if sink.count and sink.first % group.tokens_per_row:
            raise _short(group, sink.items.size, f"token {sink.first}, in the middle of an opaque row")
        lo, hi = rows_of(group, sink.first, sink.count)
        if hi > _FURTHEST:
            raise _short(group, sink.items.size, f"rows {lo} to {hi}")
        begin, end = (owned_before(group, m.sink_class, row) for row in (lo, hi))
        skip = owned_before(group, m.source_class, rows_of(m.source, source.first, source.count)[0]) // group.rows
        number = -(-end // group.rows) - begin // group.rows if end > begin else 0
        if number and begin % group.rows:
            raise _short(group, sink.items.size, f"row {begin}, in the middle of an opaque item")
        at = begin // group.rows - skip
        ours, theirs = source.items[max(at, 0) : at + number], sink.items[:number]
        if at < 0 or ours.size < number or theirs.size < number:
            raise _short(group, source.items.size, f"items {at} to {at + number - 1} of the window")
        first, length = global_rows(group, m.sink_class, begin, begin + number * group.rows)
    rows = np.full(ours.size, group.rows)
    zero = np.broadcast_to(_ZERO, rows.shape)
    return RowMap(ours.astype(np.int64), zero, theirs.astype(np.int64), zero, rows, first, length, whole=True)


_ZERO = np.zeros(1, np.int64)


def _lengths(at: IntArray, total: int) -> IntArray:
    """The length of each of the segments that begin at these places of an axis of `total` rows."""
    lengths = np.empty(at.size, np.int64)
    if at.size:
        np.subtract(at[1:], at[:-1], out=lengths[:-1])
        lengths[-1] = total - at[-1]
    return lengths


def _owned(group: Group, cp_rank: int, lo: int, hi: int) -> tuple[IntArray, IntArray]:
    """Intervals of global rows in [lo, hi) that a cp rank owns; raises BAD_GRANT below the origin of their deal."""
    origin = deal(group)[1]
    if lo < min(origin, hi):
        raise _short(group, 0, f"rows {lo} to {origin - 1}")
    return owned_within(group, cp_rank, lo, hi)


def _meet(a: IntArray, a_rows: IntArray, b: IntArray, b_rows: IntArray) -> tuple[IntArray, IntArray]:
    """The intersection of two ascending lists of intervals."""
    from_, to = np.searchsorted(b + b_rows, a, "right"), np.searchsorted(b, a + a_rows, "left")
    i, nth = repeated_index(np.maximum(to - from_, 0))
    j = from_[i] + nth
    lo = np.maximum(a[i], b[j])
    return lo, np.minimum(a[i] + a_rows[i], b[j] + b_rows[j]) - lo


def _segments(group: Group, cp_rank: int, window: Window, moved: _MovedRows, flat: bool) -> _Segments:
    """The segments of one side; raises BAD_GRANT if its window lacks an item."""
    first, length, starts, kind = moved.first, moved.length, moved.starts, KINDS[group.kind]
    if not first.size:
        return _Segments(starts, starts, starts)
    items = window.items.astype(np.int64, copy=False)
    begin, end = rows_of(group, window.first, window.count)
    if kind.paged:
        local = local_row(group, first) if group.cp_size > 1 else first
        base = owned_before(group, cp_rank, begin) // group.rows
    else:
        forgotten = end - group.rows
        if not items.size or (kind.wraps and (moved.total > group.rows or int(first[0]) < forgotten)):
            raise _short(group, items.size, f"{moved.total} rows from {first[0]}")
        if not kind.wraps:
            return _Segments(starts, np.full(starts.size, items[0]), first)
        local, base = first % group.rows, 0
    head, row = np.divmod(local, group.rows)
    low, high = int(head[0]) - base, int((local[-1] + length[-1] - 1) // group.rows) - base
    if kind.paged and (low < 0 or high >= items.size):
        raise _short(group, items.size, f"items {low} to {high} of the window")
    if group.rows == 1 and first.size == 1:  # each row is an item
        at, picked = moved.places, items[low : high + 1] if kind.paged else None
        row = np.broadcast_to(_ZERO, at.shape)
    else:
        many = (row + length - 1) // group.rows + 1
        if first.size == 1:  # the row within the first item, then whole items
            nth = np.arange(int(many[0]))
            at = nth * group.rows - row[0]
            at[0] = 0
            row = np.where(nth, 0, row[0])
            picked = items[low : high + 1]
        elif int(many.sum()) == many.size:
            at, picked = starts, items[head - base]
        else:
            which, nth = repeated_index(many)
            at = starts[which] + np.maximum(nth * group.rows - row[which], 0)
            row = np.where(nth, 0, row[which])
            picked = items[head[which] - base + nth] if kind.paged else None
    if kind.wraps:  # one item, which wraps
        return _Segments(at, np.full(at.size, items[0]), row)
    if flat and picked is not None:
        return _Segments(at, None, picked * group.rows + row if group.rows > 1 else picked)
    return _Segments(at, picked, row)


def _short(group: Group, items: int, asked: str) -> RemoteError:
    return RemoteError(ErrorCode.BAD_GRANT, f"groups[{group.name}]", f"{items} items", asked)
