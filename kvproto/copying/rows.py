"""Row maps: which rows of which items move for one request, for a pair of groups and a pair of token classes.

Both sides' items and deals are intervals on the axis of rows, and runs are their intersections. So the cost of a map
depends on its runs alone.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.grants import rows_of
from kvproto.copying.program import IntArray, RowMap, Window
from kvproto.errors import RemoteError
from kvproto.planning.arrays import repeated_index
from kvproto.planning.deals import deal, global_rows, local_row, owned_before, owned_within
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import ErrorCode

__all__ = ["MapSpec", "row_map"]

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
    if m.plain and hi - lo <= _FEW * min(m.source.rows, m.sink.rows):
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
    """Where each interval begins on the axis [n]."""
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
    """Where each begins on the axis [segments]."""
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
    ours, theirs = _pages(m.source, source, lo, hi), _pages(m.sink, sink, lo, hi)
    runs: list[list[int]] = []
    row, goes_on = lo, None
    while row < hi:
        (i, at), (j, to) = divmod(row, m.source.rows), divmod(row, m.sink.rows)
        rows = min(m.source.rows - at, m.sink.rows - to, hi - row)
        item, other = ours[i - lo // m.source.rows], theirs[j - lo // m.sink.rows]
        here = (0, item * m.source.rows + at) if m.source_flat else (item, at)
        there = (0, other * m.sink.rows + to) if m.sink_flat else (other, to)
        if (here, there) == goes_on:
            runs[-1][4] += rows
        else:
            runs.append([*here, *there, rows])
        goes_on = (here[0], here[1] + rows), (there[0], there[1] + rows)
        row += rows
    first, length = np.array([lo] * (hi > lo), np.int64), np.array([hi - lo] * (hi > lo), np.int64)
    si, sr, di, dr, rows_of_run = np.array(runs, np.int64).reshape(-1, 5).T.copy()
    return RowMap(si, sr, di, dr, rows_of_run, first, length)


def _pages(group: Group, window: Window, lo: int, hi: int) -> list[int]:
    """The items that hold rows [lo, hi)."""
    base = -(-window.first // group.tokens_per_row) // group.rows
    low, high = lo // group.rows - base, (hi - 1) // group.rows - base
    if lo < hi and (low < 0 or high >= window.items.size):
        raise _short(group, window.items.size, f"items {low} to {high} of the window")
    items: list[int] = window.items[low : high + 1].tolist()
    return items


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
