"""Lowers the routes of a rank pair to copies (spec/v1/lowering.md).

A `Pair` is made once, at registration, with the table of operations, whose length is layers x parts x lane pieces.
`Pair.lower` makes the row maps of one request (`kvproto.copying.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.execute import seeds
from kvproto.copying.program import EMPTY_MAP, OP, CopyProgram, IntArray, RankLayout, Side, Window
from kvproto.copying.rows import MapSpec, row_map
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.planning.geometry import Group, lane_bytes
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Box, Route
from kvproto.wire.messages import Columns

__all__ = ["Pair", "lower"]


class Pair:
    """The routes of one rank pair over its two layouts, without hand-off groups; made once, at registration."""

    def __init__(self, routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> None:
        self.routes, self.source, self.sink = routes, source, sink
        numbers: dict[tuple[int, int, int, int], int] = {}
        parts: dict[tuple[int, int, int, int], _PartPair] = {}
        self._maps: list[MapSpec] = []
        tables: list[npt.NDArray[np.void]] = []
        for route in routes:
            dst = sink.groups[route.group]
            for box in route.boxes if KINDS[dst.kind].has_memory else ():
                src = source.groups[box.source_group]
                key = (src.id, dst.id, box.source_class, box.sink_class)
                if key not in numbers:
                    numbers[key] = len(self._maps)
                    self._maps.append(self._map_spec(src, dst, box))
                number = numbers[key]
                place = (number, box.part, box.layer_lo, box.layer_hi)
                if place not in parts:
                    parts[place] = _PartPair.of(source, sink, self._maps[number], box)
                tables += _operations(parts[place], box, number)
        self._ops = np.empty(sum(table.size for table in tables), OP)
        np.concatenate([table.view(_WORDS) for table in tables] or [np.empty(0, _WORDS)], out=self._ops.view(_WORDS))
        self._ops["seed"] = seeds(self._ops)
        self._steps = tuple(m.sink.tokens_per_row for m in self._maps)
        self._others = frozenset(i for i, m in enumerate(self._maps) if axis_of(m.sink) != TOKENS)

    def _map_spec(self, src: Group, dst: Group, box: Box) -> MapSpec:
        whole = any(part.encoding for part in dst.parts)
        source_flat = not whole and _flat(self.source.columns[src.id], src)
        sink_flat = not whole and _flat(self.sink.columns[dst.id], dst)
        return MapSpec(src, dst, box.source_class, box.sink_class, source_flat, sink_flat, whole)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of a token in all rows that may move before prefill is over, if no tokens are dealt."""
        early, ops = self.nothing.early, self._ops
        moved = zip(ops["map"].tolist(), (ops["lanes"] * ops["lane_bytes"]).tolist(), strict=True)
        return sum(size // self._steps[m] for m, size in moved if m in early)

    @cached_property
    def nothing(self) -> CopyProgram:
        """The copy program of a request without rows."""
        maps = tuple(attrs.evolve(EMPTY_MAP, whole=m.whole) for m in self._maps)
        ends = tuple(0 if KINDS[m.sink.kind].is_state else None for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends, self._others)

    def lower(self, sources: Mapping[int, Window], sinks: Mapping[int, Window]) -> CopyProgram:
        """Make the copy program of one request from the windows of each side, by that side's group ids.

        Nothing is copied of a sink's group without a window. Raises BAD_GRANT for windows that lack items.
        """
        maps, ends = list(self.nothing.maps), list(self.nothing.state_after)
        for i, m in enumerate(self._maps):
            if (window := sinks.get(m.sink.id)) is not None:
                maps[i] = row_map(m, sources[m.source.id], window)
                if ends[i] is not None:
                    ends[i] = window.first + window.count
        return CopyProgram(tuple(maps), self._ops, self._steps, tuple(ends), self._others)


def lower(
    routes: tuple[Route, ...],
    source: RankLayout,
    sink: RankLayout,
    sources: Mapping[int, Window],
    sinks: Mapping[int, Window],
) -> CopyProgram:
    """Make the copy program of one rank pair for one request; `Pair` is for callers that make several."""
    return Pair(routes, source, sink).lower(sources, sinks)


def _flat(columns: Columns, group: Group) -> bool:
    """Whether the items of a paged group touch in every column."""
    if not KINDS[group.kind].paged:
        return False
    rows = columns.row_stride.astype(np.int64) * group.rows
    return bool((columns.item_stride == rows).all())


_WORDS = np.dtype((np.void, OP.itemsize))
"""An operation as bytes, since numpy would compare the fields of all tables that it joins."""
_STRIDES = ("item_stride", "row_stride", "lane_stride")
_PLACE = ("region", "offset", "item_stride", "row_stride", "items")
_LayerColumn = dict[str, IntArray]
"""Where the layers of a column lie: arrays [layers] by field."""


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
    """Where one side stores some layers of a part: its column, or a column for each of its sections."""

    side: Side
    layout: RankLayout
    group: Group
    flat: bool
    """Whether the items touch, so that the pool counts as one item."""
    columns: dict[int, _LayerColumn]
    """By part index."""

    @classmethod
    def of(cls, side: Side, layout: RankLayout, m: MapSpec, box: Box) -> _StoredPart:
        group, flat = (m.source, m.source_flat) if side == "source" else (m.sink, m.sink_flat)
        name, layers = m.sink.parts[box.part].name, np.arange(box.layer_lo, box.layer_hi)
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

    def _column_pieces(self, p: int, stride: int, box: Box, fine: int) -> Iterator[_LanePiece]:
        """The lane bytes of a box that one column stores."""
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
            touching, cut = stride == size, x
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
    """Bytes of the smaller lane."""

    @classmethod
    def of(cls, source: RankLayout, sink: RankLayout, m: MapSpec, box: Box) -> _PartPair:
        from_, to = _StoredPart.of("source", source, m, box), _StoredPart.of("sink", sink, m, box)
        columns = *from_.columns.values(), *to.columns.values()
        strides = np.stack([column[name] for column in columns for name in _STRIDES])
        alike = [np.arange(strides.shape[1])]
        if (strides != strides[:, :1]).any():  # only in odd pools
            _, kind = np.unique(strides, axis=1, return_inverse=True)
            alike = [np.flatnonzero(kind.reshape(-1) == k) for k in range(kind.max() + 1)]
        return cls(from_, to, alike, min(from_.lane_bytes, to.lane_bytes))


def _operations(parts: _PartPair, box: Box, number: int) -> Iterator[npt.NDArray[np.void]]:
    """Operations of a box over the map of that number, without seeds: tables of layers that share their lane pieces."""
    for layers in parts.alike:
        ours, theirs = (stored.pieces(box, layers[0], parts.fine) for stored in (parts.source, parts.sink))
        both = list(_cut_alike(ours, theirs, parts.fine))
        if not both:
            continue
        from_, to = zip(*both, strict=True)
        lo, hi = (np.array([getattr(piece, end) for piece in from_])[:, None] for end in ("lo", "hi"))
        touching = np.array([a.stride == b.stride == 0 for a, b in both])[:, None]
        unit = np.where(touching, hi - lo, parts.fine)
        ops = np.zeros((len(both), layers.size), OP)
        ops["map"], ops["group"], ops["model"], ops["part"] = number, parts.sink.group.id, box.model, box.part
        ops["layer"], ops["lo"], ops["lanes"], ops["lane_bytes"] = layers + box.layer_lo, lo, (hi - lo) // unit, unit
        parts.source.place(ops, from_, layers, unit)
        parts.sink.place(ops, to, layers, unit)
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
