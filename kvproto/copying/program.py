"""Copy programs: strided copies over shared index arrays, without a Python object for a page or a layer.

A program is a table of operations (one row for each layer, part and lane piece of a rank pair, made at registration)
and row maps (which rows of which items, made for each request). An operation runs once over all runs of its map.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from operator import add, itemgetter
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.planning.geometry import Geometry, Group, Owns
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns, Grants

IntArray = npt.NDArray[np.int64]
UIntArray = npt.NDArray[np.uint64]
Side = Literal["source", "sink"]
_NONE = np.empty(0, np.int64)

PLACE = ("region", "offset", "item_stride", "row_stride", "lane_stride", "items", "rows")
OP = np.dtype(
    [(name, np.int64) for name in ("map", "group", "model", "layer", "part", "lo", "lanes", "lane_bytes")]
    + [(f"{side}_{name}", np.int64) for side in ("source", "sink") for name in PLACE]
    + [("seed", np.uint64)]
)
"""One operation: `lanes` lanes of `lane_bytes` bytes of one layer and part, for every run of a map.

A lane's bytes are at offset + item*item_stride + row*row_stride + lane*lane_stride of the region. `lo` is the first
byte on the part's lane axis; `group` is the sink's. `items` and `rows` are the extents of the pool: if items touch
(item_stride = rows * row_stride in all layers of the group), a pool is one item of items * rows rows, and runs continue
across items. `seed` is that of the row weights of its checksum.
"""
CONVERTING_OP = np.dtype(
    [*((name, OP[name]) for name in OP.names or ())]
    + [(name, np.int64) for name in ("made", "source_bytes", "blocks", "stated", *(f"scale_{name}" for name in PLACE))]
)
"""An operation of a table in which some convert (`made` of `kvproto.planning.conversion.Made`; 0: bytes as they are).

Lanes have `source_bytes` bytes at the source. Scales are read at the source from the places `scale_...` with `blocks`
float32 a lane, or are the bits `stated`, or are made.
"""
_FIELDS = list(OP.names or ())
_SEED = _FIELDS.index("seed")
_ALIKE = itemgetter(*map(_FIELDS.index, ("map", "group", "lo", "lanes", "lane_bytes")))
"""The fields that operations which are summed together share."""
_PLACED = {
    side: itemgetter(*map(_FIELDS.index, ["map", "lanes", "lane_bytes", *(f"{side}_{name}" for name in PLACE)]))
    for side in ("source", "sink")
}
"""An operation's map and lanes, and where it lies on each side."""
_Place = tuple[int, int, int, int, int, int, int]
"""Map, region, offset, item stride, bytes of a row, and the extents of the pool in items and rows."""


@attrs.frozen(eq=False)
class Operations:
    """The operations of a rank pair, and what every program of theirs has to know of them."""

    table: npt.NDArray[np.void]
    """Table [operations] of dtype OP."""

    @property
    def converts(self) -> bool:
        """Whether some operations convert, so that their bytes differ on the two sides."""
        return self.table.dtype == CONVERTING_OP

    @cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of a row in all operations of a map, for each map up to the last one that has any."""
        ops = self.table
        sizes: list[int] = np.bincount(ops["map"], ops["lanes"] * ops["lane_bytes"]).astype(np.int64).tolist()
        return sizes

    @cached_property
    def groups(self) -> dict[int, int]:
        """The sink's group of each map that has operations."""
        return dict(zip(self.table["map"].tolist(), self.table["group"].tolist(), strict=True))

    @cached_property
    def places(self) -> dict[Side, list[_Place] | None]:
        """Places of the operations on each side; None if the rows of one of them are not contiguous there."""
        return {"source": self._places("source"), "sink": self._places("sink")}

    def _places(self, side: Side) -> list[_Place] | None:
        if side == "source" and self.converts:
            return None
        places = []
        for map, lanes, lane_bytes, *place in (_PLACED[side](op) for op in self.table.tolist()):
            region, offset, item_stride, row_stride, lane_stride, items, rows = place
            if row_stride != lanes * lane_bytes or (lane_stride != lane_bytes and lanes != 1):
                return None
            places.append((map, region, offset, item_stride, row_stride, items, rows))
        return places

    @cached_property
    def alike(self) -> list[tuple[int, int, int, int, UIntArray]]:
        """Operations summed together: map, sink's group, first byte on the lane axis, bytes of a row, seeds [n, 1]."""
        return [
            (map, group, lo, lanes * lane_bytes, np.array([op[_SEED] for op in ops], np.uint64)[:, None])
            for (map, group, lo, lanes, lane_bytes), ops in groupby(self.table.tolist(), _ALIKE)
        ]


@attrs.frozen
class Window:
    """Tokens [first, first + count) of one group, and the items [n] of a rank from the first row that it owns on."""

    first: int
    count: int
    items: npt.NDArray[Any]


def windows(grants: Iterable[Grants]) -> dict[int, Window]:
    """Windows by group id, of grants that `check_grants` accepted."""
    return {g.group: Window(g.first, g.count, _NONE if g.items is None else g.items) for g in grants}


@attrs.frozen
class RankLayout:
    """One rank's layout: its shares, and their places in its memory."""

    geometry: Geometry
    rank: int
    columns: Mapping[int, Columns]
    """By this side's group id, without hand-off groups."""

    @cached_property
    def groups(self) -> dict[int, Group]:
        return {g.id: g for g in self.geometry.groups}

    @cached_property
    def shares(self) -> dict[int, Owns]:
        return {o.group: o for r in self.geometry.ranks if r.rank == self.rank for o in r.owns}

    def spans(self, id: int, part: int, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        """Intervals of a part's lanes that reach into [lo, hi), ascending, each with the local number of its first."""
        spans = self._spans.get((id, part), ())
        for first, last, local in spans[max(bisect(spans, (lo, hi, 0)) - 1, 0) :]:
            if first >= hi:
                return
            if last > lo:
                yield first, last, local

    @cached_property
    def _spans(self) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
        """By group id and part: first lane, lane after the last, and the local number of the first."""
        by_part: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for share in self.shares.values():
            local: dict[int, int] = {}
            for span in share.lanes:
                before = local.get(span.part, 0)
                by_part.setdefault((share.group, span.part), []).append((span.lo, span.hi, before))
                local[span.part] = before + span.hi - span.lo
        return {key: sorted(spans) for key, spans in by_part.items()}


_SMALL = 32
"""Runs of a map up to which Python's integers are faster than numpy calls."""
_FEW_ROWS = 500
"""Rows that numpy adds up and moves without releasing the GIL."""
_FEW_SPANS = 128
"""Spans that are few for any program."""
_LONG_SPAN = 1 << 11
"""Average bytes of a span from which more of them are few, as indexing by arrays costs more than so many slices."""

Span = tuple[int, int, int]
"""Region, offset and number of bytes."""

Reach = tuple[int, int, int]
"""The lowest number of all items and rows, the highest item, and the highest row; 0, -1 and -1 if there are none."""


@attrs.frozen(eq=False)
class RowMap:
    """Runs of rows that are contiguous on both sides: five arrays [runs], and two [pieces] of global rows."""

    source_item: IntArray
    source_row: IntArray
    sink_item: IntArray
    sink_row: IntArray
    rows: IntArray
    """Rows of each run."""
    piece_first: IntArray
    """First global row of each piece of consecutive rows, in the order of the runs."""
    piece_rows: IntArray
    """Number of rows of each piece. A run may span pieces if both sides deal tokens alike."""
    whole: bool = False
    """Whether items are opaque, so that their rows cannot be separated."""

    @cached_property
    def size(self) -> int:
        """Number of rows of all runs."""
        return int(self.rows.sum()) if self.numbers is None else sum(self.numbers[4])

    @property
    def places(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Source items, source rows, sink items, sink rows."""
        return self.source_item, self.source_row, self.sink_item, self.sink_row

    @cached_property
    def numbers(self) -> tuple[list[int], ...] | None:
        """Places and rows as lists of int if runs are few, since each numpy call delays a small hand-over; or None."""
        return tuple([c.tolist() for c in (*self.places, self.rows)]) if len(self.rows) <= _SMALL else None

    @cached_property
    def ends(self) -> IntArray:
        """Number of rows up to the end of each run [runs]."""
        return np.cumsum(self.rows)

    @cached_property
    def source_reach(self) -> Reach:
        """Extent of the source's places."""
        return self._reach(0)

    @cached_property
    def sink_reach(self) -> Reach:
        """Extent of the sink's places."""
        return self._reach(2)

    def _reach(self, side: int) -> Reach:
        if not len(self.rows):
            return 0, -1, -1
        if self.numbers is None:
            item, row = self.places[side : side + 2]
            return int(min(item.min(), row.min())), int(item.max()), int((row + self.rows).max()) - 1
        items, firsts, lengths = self.numbers[side], self.numbers[side + 1], self.numbers[4]
        return min(min(items), min(firsts)), max(items), max(map(add, firsts, lengths)) - 1

    @cached_property
    def global_rows(self) -> IntArray:
        """Every global row [rows], run after run."""
        if len(self.piece_first) == 1 and self.size <= _FEW_ROWS:
            first = int(self.piece_first[0])
            return np.array(range(first, first + self.size))  # numpy's arange would release the GIL
        starts = np.cumsum(self.piece_rows) - self.piece_rows
        rows: IntArray = np.arange(self.size) + np.repeat(self.piece_first - starts, self.piece_rows)
        return rows

    def between(self, lo: int, hi: int) -> RowMap:
        """Cut the runs down to global rows [lo, hi). Raises LAYOUT_OPAQUE if items are opaque."""
        if self.whole:
            advice = "send groups with an opaque part at once, when the prompt is computed"
            raise LocalError(ErrorCode.LAYOUT_OPAQUE, "tokens", "whole items", f"rows {lo} to {hi}", advice)
        ends = np.cumsum(self.piece_rows)
        # where on the axis of all rows each kept piece begins and ends; pieces ascend, so that is one interval
        a = np.clip(lo - self.piece_first, 0, self.piece_rows) + ends - self.piece_rows
        b = np.clip(hi - self.piece_first, 0, self.piece_rows) + ends - self.piece_rows
        kept = b > a
        if not kept.any():
            return EMPTY_MAP
        begin, end = int(a[kept][0]), int(b[kept][-1])
        stop = self.ends
        start = stop - self.rows
        runs = slice(int(np.searchsorted(stop, begin, "right")), int(np.searchsorted(start, end, "left")))
        skip = np.maximum(begin - start[runs], 0)
        source_item, source_row, sink_item, sink_row = (places[runs] for places in self.places)
        rows = np.minimum(stop[runs], end) - np.maximum(start[runs], begin)
        first = np.maximum(self.piece_first[kept], lo)
        return RowMap(source_item, source_row + skip, sink_item, sink_row + skip, rows, first, (b - a)[kept])


EMPTY_MAP = RowMap(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


@attrs.frozen
class Runs:
    """Number of contiguous runs of bytes, and their total length; the cost of a transport depends on both."""

    count: int
    bytes: int

    @property
    def mean(self) -> float:
        """Average length of a run, in bytes."""
        return self.bytes / self.count if self.count else 0.0


@attrs.frozen(eq=False)
class CopyProgram:
    """The copies of one request of one rank pair: a table of operations over shared row maps."""

    maps: tuple[RowMap, ...]
    operations: Operations
    tokens_per_row: tuple[int, ...]
    """For each map."""
    state_after: tuple[int | None, ...] = ()
    """For each map, the token after which the state is that of the request; None for rows of tokens."""
    others: frozenset[int] = frozenset()
    """Indices of maps whose rows stand for positions of another axis than the tokens."""

    @property
    def ops(self) -> npt.NDArray[np.void]:
        """Table [operations] of dtype OP."""
        return self.operations.table

    @cached_property
    def bytes(self) -> int:
        return sum([m.size * size for m, size in zip(self.maps, self.operations.row_bytes, strict=False)])

    @cached_property
    def source_spans(self) -> list[Span] | None:
        """Every run of every operation in the source's memory; None unless they are contiguous and few."""
        return self._spans("source", 0)

    @cached_property
    def sink_spans(self) -> list[Span] | None:
        """Every run of every operation in the sink's memory; None unless they are contiguous and few."""
        return self._spans("sink", 2)

    def _spans(self, side: Side, at: int) -> list[Span] | None:
        places, most = self.operations.places[side], max(self.bytes // _LONG_SPAN, _FEW_SPANS)
        numbers = [m.numbers for m in self.maps]
        if places is None or None in numbers:
            return None
        runs = [[*zip(*columns[at : at + 2], columns[4], strict=True)] for columns in numbers if columns is not None]
        spans: list[Span] = []
        for map, region, offset, item_stride, row_bytes, items, rows in places:
            if len(spans) > most:
                return None
            for item, row, count in runs[map]:
                if not (0 <= item < items and 0 <= row <= rows - count):
                    raise IndexError(f"item {item}, rows {row} to {row + count} of {items} items of {rows} rows")
                spans.append((region, offset + item * item_stride + row * row_bytes, count * row_bytes))
        return spans

    @property
    def early(self) -> frozenset[int]:
        """Indices of maps whose rows may be copied before prefill ends: those of tokens whose items are not opaque."""
        ends = self.state_after or (None,) * len(self.maps)
        return frozenset(i for i, m in enumerate(self.maps) if not m.whole and ends[i] is None) - self.others

    def bytes_by_group(self) -> dict[int, int]:
        """Bytes that the program writes, by the sink's group id, without groups of 0 bytes."""
        moved: dict[int, int] = {}
        for map, group in self.operations.groups.items():
            if size := self.maps[map].size * self.operations.row_bytes[map]:
                moved[group] = moved.get(group, 0) + size
        return moved

    def runs(self) -> Runs:
        """Runs of bytes that are contiguous on both sides."""
        ops = self.ops
        if not len(ops):
            return Runs(0, 0)
        width = ops["lanes"] * ops["lane_bytes"]
        lanes, rows = np.ones(len(ops), bool), np.ones(len(ops), bool)
        for side in ("source", "sink"):
            lanes &= (ops[f"{side}_lane_stride"] == ops["lane_bytes"]) | (ops["lanes"] == 1)
            rows &= ops[f"{side}_row_stride"] == width
        number, size = np.array([(len(m.rows), m.size) for m in self.maps], np.int64).T[:, ops["map"]]
        count = np.where(lanes & rows, number, np.where(lanes, 1, ops["lanes"]) * size)
        return Runs(int(count.sum()), self.bytes)

    def select(self, layers: Iterable[int] | None = None, tokens: tuple[int, int] | None = None) -> CopyProgram:
        """Select layers, or rows that tokens [first, end) cover, and state at their end; raises LAYOUT_OPAQUE."""
        operations, maps = self.operations, self.maps
        if layers is not None:
            operations = Operations(self.ops[np.isin(self.ops["layer"], np.fromiter(layers, np.int64))])
        if tokens is not None:
            bounds = [(-(-tokens[0] // step), tokens[1] // step) for step in self.tokens_per_row]
            used = operations.groups.keys()
            ends = self.state_after or (None,) * len(maps)
            maps = tuple(
                EMPTY_MAP
                if i not in used or not (end is None or tokens[0] < end <= tokens[1])
                else (m.between(lo, max(lo, hi)) if end is None else m)
                for i, (m, (lo, hi), end) in enumerate(zip(maps, bounds, ends, strict=True))
            )
        return CopyProgram(maps, operations, self.tokens_per_row, self.state_after, self.others)

    def parts(self, most: int) -> list[CopyProgram]:
        """Return this program in parts of whole layers, of about `most` bytes or one layer each."""
        if self.bytes <= most:
            return [self]
        layers = np.unique(self.ops["layer"])
        step = max(len(layers) * most // self.bytes, 1)
        return [self.select(layers=layers[i : i + step].tolist()) for i in range(0, len(layers), step)]

    def slices(self, most: int) -> Iterator[CopyProgram]:
        """Yield this program in disjoint parts of about `most` bytes, by rows of a layer that is not opaque."""
        for part in self.parts(most):
            if part.bytes <= 2 * most:
                yield part
                continue
            for number in np.unique(part.ops["map"]).tolist():
                ops, rows = part.ops[part.ops["map"] == number], part.maps[number]
                width = int((ops["lanes"] * ops["lane_bytes"]).sum())
                if rows.whole or rows.size * width <= most:
                    yield attrs.evolve(part, operations=Operations(ops))
                    continue
                first, end = int(rows.piece_first.min()), int((rows.piece_first + rows.piece_rows).max())
                step = max(most * (end - first) // (rows.size * width), 1)
                operations = Operations(ops)
                for row in range(first, end, step):
                    maps = (*part.maps[:number], rows.between(row, row + step), *part.maps[number + 1 :])
                    yield attrs.evolve(part, maps=maps, operations=operations)

    def since(self, model: int, first: int, end: int | None) -> CopyProgram:
        """Return the rows of a model that `end` tokens complete and `first` tokens do not; all the rest if it is None.

        A row of several tokens is complete with its last token; opaque items, state and rows of other axes are complete
        at the end. The table of operations stays the same array, so that caches keyed by it still apply.
        """
        of_model = set(self.ops["map"][self.ops["model"] == model].tolist())
        early, maps = self.early, []
        for i, (m, step) in enumerate(zip(self.maps, self.tokens_per_row, strict=True)):
            if i not in of_model or (i not in early and end is not None):
                m = EMPTY_MAP
            elif i in early and (first or end is not None):
                m = m.between(first // step, _ALL if end is None else end // step)
            maps.append(m)
        return CopyProgram(tuple(maps), self.operations, self.tokens_per_row, self.state_after, self.others)


_ALL = 1 << 62
"""Greater than any row."""
