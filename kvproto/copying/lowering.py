"""From the routes of a rank pair to copies (spec/v1/lowering.md).

A `Pair` is made once, at registration: the table of operations, whose length is layers x parts x lane pieces. `lower`
makes the row maps of one request, whose cost depends on its runs alone: both sides' items and deals are intervals on
the axis of rows, and a run is what is left where they are laid over each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.grants import rows_of
from kvproto.copying.program import EMPTY_MAP, OP, CopyProgram, IntArray, RankLayout, RowMap, Window
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Group, local_row, owned_before
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Box, Route
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns

__all__ = ["Pair", "lower"]


_FURTHEST = 1 << 62
"""Rows beyond this are refused: no sum of them may leave 64 bits."""


@attrs.frozen
class _Map:
    """What a row map depends on at registration: a pair of groups and a pair of token classes."""

    source: Group
    sink: Group
    source_class: int
    sink_class: int
    source_flat: bool
    """Whether the items of the side touch, in every column, so that runs go on across them."""
    sink_flat: bool
    whole: bool
    """Whether a part of the group is opaque, so that items move whole."""


class Pair:
    """The routes of one rank pair over its two layouts, without hand-off groups; made once, at registration."""

    def __init__(self, routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> None:
        self.routes, self.source, self.sink = routes, source, sink
        self._maps: list[_Map] = []
        keys: dict[tuple[int, int, int, int], int] = {}
        tables = []
        for route in routes:
            dst = sink.group(route.group)
            if not kind_of(dst).has_memory:
                continue
            for box in route.boxes:
                src = source.group(box.source_group)
                key = (src.id, dst.id, box.source_class, box.sink_class)
                if key not in keys:
                    keys[key] = len(self._maps)
                    whole = any(p.encoding for p in dst.parts)
                    from_, to = (not whole and _flat(s.columns[g.id], g) for s, g in ((source, src), (sink, dst)))
                    self._maps.append(_Map(src, dst, box.source_class, box.sink_class, from_, to, whole))
                tables += list(_ops(source, sink, self._maps[keys[key]], box, keys[key]))
        self._ops = np.concatenate(tables) if tables else np.empty(0, OP)
        self._steps = tuple(m.sink.tokens_per_row for m in self._maps)

    @property
    def nothing(self) -> CopyProgram:
        """The copy program of a request without rows."""
        maps = tuple(attrs.evolve(EMPTY_MAP, whole=m.whole) for m in self._maps)
        ends = tuple(0 if kind_of(m.sink).is_state else None for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends)

    def lower(self, sources: Mapping[int, Window], sinks: Mapping[int, Window]) -> CopyProgram:
        """Make the copy program of one request from windows by group id, each of its own side. Raises BAD_GRANT."""
        maps = tuple(_row_map(m, sources[m.source.id], sinks[m.sink.id]) for m in self._maps)
        ends = tuple(_state_after(m.sink, sinks[m.sink.id]) for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends)


def lower(
    routes: tuple[Route, ...],
    source: RankLayout,
    sink: RankLayout,
    sources: Mapping[int, Window],
    sinks: Mapping[int, Window],
) -> CopyProgram:
    """Make the copy program of one rank pair for one request, by a `Pair` that is used once."""
    return Pair(routes, source, sink).lower(sources, sinks)


def _state_after(group: Group, window: Window) -> int | None:
    return window.first + window.count if kind_of(group).is_state else None


def _flat(columns: Columns, group: Group) -> bool:
    if not kind_of(group).paged:
        return False
    rows = columns.row_stride.astype(np.int64) * group.rows
    return bool((columns.item_stride == rows).all())


# rows


def _row_map(m: _Map, source: Window, sink: Window) -> RowMap:
    if m.whole:
        return _whole_items(m, source, sink)
    if kind_of(m.sink).is_state:
        lo, hi = 0, m.sink.live_rows or m.sink.rows
    else:
        lo, hi = rows_of(m.sink, sink.first, sink.count)
    if hi > _FURTHEST:
        raise _short(m.sink, sink.items.size, f"rows {lo} to {hi}")
    first, length = _owned(m.source, m.source_class, lo, hi)
    if m.sink.cp_size > 1:
        first, length = _meet(first, length, *_owned(m.sink, m.sink_class, lo, hi))
    starts = np.cumsum(length) - length
    total = int(length.sum())
    axis = np.arange(total) if m.source.rows == 1 or m.sink.rows == 1 else starts
    (at, si, sr), (other, di, dr) = (
        _segments(group, cp_rank, window, first, length, starts, axis, flat)
        for group, cp_rank, window, flat in (
            (m.source, m.source_class, source, m.source_flat),
            (m.sink, m.sink_class, sink, m.sink_flat),
        )
    )
    if at is not other and not np.array_equal(at, other):
        cuts = np.union1d(at, other)
        i, j = np.searchsorted(at, cuts, "right") - 1, np.searchsorted(other, cuts, "right") - 1
        sr, dr = sr[i] + cuts - at[i], dr[j] + cuts - other[j]
        si, di = None if si is None else si[i], None if di is None else di[j]
        at = cuts
    rows = _lengths(at, total)
    if at.size > 1:
        goes_on = _next(si, sr, rows)
        if goes_on.any():
            goes_on &= _next(di, dr, rows)
            keep = np.flatnonzero(np.concatenate([[True], ~goes_on]))
            if keep.size < at.size:
                sr, dr, rows = sr[keep], dr[keep], _lengths(at[keep], total)
                si, di = None if si is None else si[keep], None if di is None else di[keep]
    zero = np.broadcast_to(_ZERO, rows.shape)
    return RowMap(zero if si is None else si, sr, zero if di is None else di, dr, rows, first, length)


def _whole_items(m: _Map, source: Window, sink: Window) -> RowMap:
    """Opaque parts: items as they are, whole; both sides deal and page alike. A window begins where an item does."""
    group = m.sink
    if not kind_of(group).paged:
        ours, theirs = source.items[:1], sink.items[:1]
        lo, forgotten = rows_of(group, sink.first, 0)[0], rows_of(m.source, source.first, source.count)[1] - group.rows
        if kind_of(group).wraps and lo < forgotten:
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
        first, length = _global(group, m.sink_class, begin, begin + number * group.rows)
    rows = np.full(ours.size, group.rows)
    zero = np.broadcast_to(_ZERO, rows.shape)
    return RowMap(ours.astype(np.int64), zero, theirs.astype(np.int64), zero, rows, first, length, whole=True)


def _global(group: Group, cp_rank: int, lo: int, hi: int) -> tuple[IntArray, IntArray]:
    """Local rows [lo, hi) of a cp rank as intervals of global rows: first rows and lengths."""
    if hi <= lo:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if group.cp_size == 1:
        return np.array([lo]), np.array([hi - lo])
    run, origin = group.interleave // group.tokens_per_row, group.origin // group.tokens_per_row
    turn = np.arange(lo // run, -(-hi // run), dtype=np.int64)
    a, b = np.maximum(turn * run, lo), np.minimum(turn * run + run, hi)
    return origin + (turn * group.cp_size + cp_rank) * run + a - turn * run, b - a


_ZERO = np.zeros(1, np.int64)


def _lengths(at: IntArray, total: int) -> IntArray:
    """How long each segment is that begins at these places of an axis."""
    made = np.empty(at.size, np.int64)
    if at.size:
        np.subtract(at[1:], at[:-1], out=made[:-1])
        made[-1] = total - at[-1]
    return made


def _next(item: IntArray | None, row: IntArray, rows: IntArray) -> npt.NDArray[np.bool_]:
    """Whether each segment but the first goes on where the one before ends."""
    touch: npt.NDArray[np.bool_] = row[:-1] + rows[:-1] == row[1:]
    return touch if item is None else touch & (item[1:] == item[:-1])


def _owned(group: Group, cp_rank: int, lo: int, hi: int) -> tuple[IntArray, IntArray]:
    """Intervals of global rows in [lo, hi) that a cp rank owns: first rows and lengths."""
    if hi <= lo:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if group.cp_size == 1:
        return np.array([lo]), np.array([hi - lo])
    run, origin = group.interleave // group.tokens_per_row, group.origin // group.tokens_per_row
    if lo < origin:
        raise _short(group, 0, f"rows {lo} to {origin - 1}")
    turn = run * group.cp_size
    a = np.arange((lo - origin) // turn, -(-(hi - origin) // turn), dtype=np.int64) * turn + origin + cp_rank * run
    b = np.minimum(a + run, hi)
    a = np.maximum(a, lo)
    kept = b > a
    return a[kept], (b - a)[kept]


def _meet(a: IntArray, a_rows: IntArray, b: IntArray, b_rows: IntArray) -> tuple[IntArray, IntArray]:
    """The intersection of two ascending lists of intervals."""
    from_, to = np.searchsorted(b + b_rows, a, "right"), np.searchsorted(b, a + a_rows, "left")
    many = np.maximum(to - from_, 0)
    i = np.repeat(np.arange(a.size), many)
    j = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many, many) + np.repeat(from_, many)
    lo = np.maximum(a[i], b[j])
    return lo, np.minimum(a[i] + a_rows[i], b[j] + b_rows[j]) - lo


def _segments(
    group: Group,
    cp_rank: int,
    window: Window,
    first: IntArray,
    length: IntArray,
    starts: IntArray,
    axis: IntArray,
    flat: bool,
) -> tuple[IntArray, IntArray | None, IntArray]:
    """Where on the axis of all rows a new item begins, with the item (None: the pool is one) and the row within it."""
    if not first.size:
        return starts, starts, starts
    items = window.items.astype(np.int64, copy=False)
    if not kind_of(group).paged:
        ring = kind_of(group).wraps
        total = int(length.sum())
        forgotten = rows_of(group, window.first, window.count)[1] - group.rows
        if not items.size or (ring and (total > group.rows or int(first[0]) < forgotten)):
            raise _short(group, items.size, f"{total} rows from {first[0]}")
        if not ring:
            return starts, np.full(starts.size, items[0]), first
        local, base = first % group.rows, 0
    else:
        local = local_row(group, first) if group.cp_size > 1 else first
        base = owned_before(group, cp_rank, rows_of(group, window.first, window.count)[0]) // group.rows
    head, row = np.divmod(local, group.rows)
    low, high = int(head[0]) - base, int((local[-1] + length[-1] - 1) // group.rows) - base
    if kind_of(group).paged and (low < 0 or high >= items.size):
        raise _short(group, items.size, f"items {low} to {high} of the window")
    if group.rows == 1 and first.size == 1:  # every row its own item
        at, picked = axis, items[low : high + 1] if kind_of(group).paged else None
        row = np.broadcast_to(_ZERO, axis.shape)
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
            which = np.repeat(np.arange(many.size), many)
            nth = np.arange(which.size) - np.repeat(np.cumsum(many) - many, many)
            at = starts[which] + np.maximum(nth * group.rows - row[which], 0)
            row = np.where(nth, 0, row[which])
            picked = items[head[which] - base + nth] if kind_of(group).paged else None
    if kind_of(group).wraps:  # one item, whose rows begin again
        return at, np.full(at.size, items[0]), row
    if flat and picked is not None:
        return at, None, picked * group.rows + row if group.rows > 1 else picked
    return at, picked, row


def _short(group: Group, items: int, asked: str) -> RemoteError:
    return RemoteError(ErrorCode.BAD_GRANT, f"groups[{group.name}]", f"{items} items", asked)


# lanes


def _ops(source: RankLayout, sink: RankLayout, m: _Map, box: Box, at: int) -> Iterator[npt.NDArray[np.void]]:
    """Operations of a box: layers with equal strides share their lane pieces."""
    name = m.sink.parts[box.part].name
    src_part = [p.name for p in m.source.parts].index(name)
    fine = min(m.source.parts[src_part].lane_bytes, m.sink.parts[box.part].lane_bytes)
    layers = np.arange(box.layer_lo, box.layer_hi)
    here = _column(source, m.source, src_part, layers), _column(sink, m.sink, box.part, layers)
    strides = np.stack([c[n] for c in here for n in ("item_stride", "row_stride", "lane_stride")])
    kinds, kind = np.unique(strides, axis=1, return_inverse=True)
    for k in range(kinds.shape[1]):
        some = np.flatnonzero(kind.reshape(-1) == k)
        lane_strides = int(kinds[2, k]), int(kinds[5, k])
        a = list(_pieces(source, m.source, src_part, lane_strides[0], box.lo, box.hi, fine))
        b = list(_pieces(sink, m.sink, box.part, lane_strides[1], box.lo, box.hi, fine))
        for lo, hi, left, right in _both(a, b, fine):
            whole = left.stride == right.stride == 0
            unit = hi - lo if whole else fine
            ops = np.zeros(some.size, OP)
            ops["map"], ops["group"], ops["model"], ops["part"] = at, m.sink.id, box.model, box.part
            ops["layer"], ops["lo"], ops["lanes"], ops["lane_bytes"] = layers[some], lo, (hi - lo) // unit, unit
            flats = (m.source_flat, m.source), (m.sink_flat, m.sink)
            for side, columns, piece, (flat, group) in zip(("source", "sink"), here, (left, right), flats, strict=True):
                for field in ("region", "item_stride", "row_stride"):
                    ops[f"{side}_{field}"] = columns[field][some]
                ops[f"{side}_offset"] = columns["offset"][some] + piece.offset
                # a side whose lanes touch steps from unit to unit
                ops[f"{side}_lane_stride"] = piece.stride or unit
                items = columns["items"][some]
                ops[f"{side}_items"] = 1 if flat else items
                ops[f"{side}_rows"] = items * group.rows if flat else group.rows
            yield ops


def _column(side: RankLayout, group: Group, part: int, layers: IntArray) -> dict[str, IntArray]:
    """The columns of some layers, as arrays over the layers."""
    share, columns = side.owns(group.id), side.columns[group.id]
    at = np.searchsorted(share.layers, layers) * len(group.parts) + part
    found = {
        n: getattr(columns, n)[at].astype(np.int64)
        for n in ("region", "offset", "item_stride", "row_stride", "lane_stride")
    }
    return found | {"items": np.full(layers.size, columns.items)}


@attrs.frozen
class _Piece:
    """Bytes [lo, hi) of the lane axis, at an offset from the column; stride from lane to lane, 0 where bytes touch."""

    lo: int
    hi: int
    offset: int
    stride: int


def _pieces(side: RankLayout, group: Group, part: int, stride: int, lo: int, hi: int, fine: int) -> Iterator[_Piece]:
    """Lane bytes [lo, hi) as this side stores them."""
    size = group.parts[part].lane_bytes
    local = 0
    for span in side.owns(group.id).lanes:
        if span.part != part:
            continue
        x, y = max(lo, span.lo * size), min(hi, span.hi * size)
        touching = stride == size
        cut = x
        while cut < y:
            step = y - x if touching or size == fine else size
            end = min(y, cut + step - (cut % size if step == size else 0))
            lane, within = divmod(cut - span.lo * size, size)
            single = touching or end - cut <= size
            yield _Piece(cut, end, (local + lane) * stride + within, 0 if single else stride)
            cut = end
        local += span.hi - span.lo


def _both(a: list[_Piece], b: list[_Piece], fine: int) -> Iterator[tuple[int, int, _Piece, _Piece]]:
    """Pieces cut where either side is cut."""
    a, b = sorted(a, key=lambda p: p.lo), sorted(b, key=lambda p: p.lo)
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i].lo, b[j].lo), min(a[i].hi, b[j].hi)
        yield lo, hi, _advance(a[i], lo, hi, fine), _advance(b[j], lo, hi, fine)
        i, j = i + (a[i].hi == hi), j + (b[j].hi == hi)


def _advance(piece: _Piece, lo: int, hi: int, fine: int) -> _Piece:
    """Bytes [lo, hi) of a piece. Bytes that touch step byte by byte, others by whole lanes, `fine` long."""
    if not piece.stride:
        return _Piece(lo, hi, piece.offset + lo - piece.lo, 0)
    offset = piece.offset + (lo - piece.lo) // fine * piece.stride
    return _Piece(lo, hi, offset, piece.stride if hi - lo > fine else 0)
