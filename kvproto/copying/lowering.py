"""Lowers the routes of a rank pair to copies (spec/v1/lowering.md).

A `Pair` is made once, at registration, with the table of operations, whose length is layers x parts x lane pieces.
`Pair.lower` makes the row maps of one request (`kvproto.copying.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.execute import seeds
from kvproto.copying.program import EMPTY_MAP, OP, CopyProgram, IntArray, RankLayout, Window
from kvproto.copying.rows import Deals, row_map
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.planning.geometry import Group, lane_bytes
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Box, Route
from kvproto.wire.messages import Columns

__all__ = ["Pair", "lower"]


class Pair:
    """The routes of one rank pair over its two layouts, without hand-off groups; made once, at registration."""

    def __init__(self, routes: tuple[Route, ...], source: RankLayout, sink: RankLayout) -> None:
        self.routes, self.source, self.sink = routes, source, sink
        self._maps: list[Deals] = []
        keys: dict[tuple[int, int, int, int], int] = {}
        layers: dict[tuple[int, int, int, int], _Layers] = {}
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
                    self._maps.append(Deals(src, dst, box.source_class, box.sink_class, from_, to, whole))
                m, place = self._maps[keys[key]], (keys[key], box.part, box.layer_lo, box.layer_hi)
                if place not in layers:
                    layers[place] = _Layers.of(source, sink, m, box)
                tables += list(_ops(source, sink, m, box, keys[key], layers[place]))
        self._ops = np.empty(sum(some.size for some in tables), OP)
        np.concatenate([some.view(_WORDS) for some in tables] or [np.empty(0, _WORDS)], out=self._ops.view(_WORDS))
        self._ops["seed"] = seeds(self._ops)
        self._steps = tuple(m.sink.tokens_per_row for m in self._maps)
        self._others = frozenset(i for i, m in enumerate(self._maps) if axis_of(m.sink) != TOKENS)

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
        ends = tuple(0 if kind_of(m.sink).is_state else None for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends, self._others)

    def lower(self, sources: Mapping[int, Window], sinks: Mapping[int, Window]) -> CopyProgram:
        """Make the copy program of one request from the windows of each side, by that side's group ids.

        Nothing is copied of a sink's group without a window. Raises BAD_GRANT for windows that lack items.
        """
        maps = tuple(
            row_map(m, sources[m.source.id], sinks[m.sink.id]) if m.sink.id in sinks else nothing
            for m, nothing in zip(self._maps, self.nothing.maps, strict=True)
        )
        ends = tuple(_state_after(m.sink, sinks.get(m.sink.id)) for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends, self._others)


def lower(
    routes: tuple[Route, ...],
    source: RankLayout,
    sink: RankLayout,
    sources: Mapping[int, Window],
    sinks: Mapping[int, Window],
) -> CopyProgram:
    """Make the copy program of one rank pair for one request; `Pair` is for callers that make several."""
    return Pair(routes, source, sink).lower(sources, sinks)


def _state_after(group: Group, window: Window | None) -> int | None:
    return (window.first + window.count if window is not None else 0) if kind_of(group).is_state else None


def _flat(columns: Columns, group: Group) -> bool:
    if not kind_of(group).paged:
        return False
    rows = columns.row_stride.astype(np.int64) * group.rows
    return bool((columns.item_stride == rows).all())


_Column = dict[str, IntArray]
"""Where the layers of a column lie: arrays [layers] by field."""


@attrs.frozen
class _Layers:
    """Some layers of a part on both sides: the columns of its sections, and sets of layers with equal strides."""

    here: dict[int, _Column]
    """At the source, by part index."""
    there: dict[int, _Column]
    alike: list[IntArray]
    fine: int
    """Bytes of the smaller lane."""

    @classmethod
    def of(cls, source: RankLayout, sink: RankLayout, m: Deals, box: Box) -> _Layers:
        name = m.sink.parts[box.part].name
        parts = [[p for p, part in enumerate(group.parts) if part.name == name] for group in (m.source, m.sink)]
        fine = min(lane_bytes(group.parts[some[0]]) for group, some in zip((m.source, m.sink), parts, strict=True))
        layers = np.arange(box.layer_lo, box.layer_hi)
        here = {p: _column(source, m.source, p, layers) for p in parts[0]}
        there = {p: _column(sink, m.sink, p, layers) for p in parts[1]}
        strides = np.stack([c[n] for c in (*here.values(), *there.values()) for n in _STRIDES])
        if (strides == strides[:, :1]).all():  # as in all but odd pools
            return cls(here, there, [np.arange(layers.size)], fine)
        kinds, kind = np.unique(strides, axis=1, return_inverse=True)
        return cls(here, there, [np.flatnonzero(kind.reshape(-1) == k) for k in range(kinds.shape[1])], fine)


_STRIDES = ("item_stride", "row_stride", "lane_stride")


def _column(side: RankLayout, group: Group, part: int, layers: IntArray) -> _Column:
    share, columns = side.owns(group.id), side.columns[group.id]
    at = np.searchsorted(share.layers, layers) * len(group.parts) + part
    found = {n: getattr(columns, n)[at].astype(np.int64) for n in ("region", "offset", *_STRIDES)}
    return found | {"items": np.full(layers.size, columns.items)}


def _ops(
    source: RankLayout, sink: RankLayout, m: Deals, box: Box, at: int, columns: _Layers
) -> Iterator[npt.NDArray[np.void]]:
    """Operations of a box, without their seeds: layers with equal strides share their lane pieces."""
    fine = columns.fine
    for some in columns.alike:
        a, b = (
            [
                piece
                for p, column in found.items()
                for piece in _pieces(side, group, p, int(column["lane_stride"][some[0]]), box, fine)
            ]
            for side, group, found in ((source, m.source, columns.here), (sink, m.sink, columns.there))
        )
        both = list(_both(a, b, fine))
        if not both:
            continue
        lo, hi = (np.array([piece[end] for piece in both])[:, None] for end in (0, 1))
        whole = np.array([left.stride == right.stride == 0 for _, _, left, right in both])[:, None]
        unit = np.where(whole, hi - lo, fine)
        ops = np.zeros((len(both), some.size), OP)
        ops["map"], ops["group"], ops["model"], ops["part"] = at, m.sink.id, box.model, box.part
        ops["layer"], ops["lo"], ops["lanes"], ops["lane_bytes"] = some + box.layer_lo, lo, (hi - lo) // unit, unit
        for name, found, pieces, flat, group in (
            ("source", columns.here, [piece[2] for piece in both], m.source_flat, m.source),
            ("sink", columns.there, [piece[3] for piece in both], m.sink_flat, m.sink),
        ):
            held = {field: next(iter(found.values()))[field][some] for field in _PLACE}
            if len(found) > 1:  # sections
                of = [list(found).index(piece.part) for piece in pieces]
                held = {field: np.stack([column[field][some] for column in found.values()])[of] for field in _PLACE}
            for field in ("region", "item_stride", "row_stride"):
                ops[f"{name}_{field}"] = held[field]
            offset, stride = (
                np.array([getattr(p, of_piece) for p in pieces])[:, None] for of_piece in ("offset", "stride")
            )
            ops[f"{name}_offset"] = held["offset"] + offset
            # a side whose lanes touch steps from unit to unit
            ops[f"{name}_lane_stride"] = np.where(stride, stride, unit)
            ops[f"{name}_items"] = 1 if flat else held["items"]
            ops[f"{name}_rows"] = held["items"] * group.rows if flat else group.rows
        yield ops.ravel()


_WORDS = np.dtype((np.void, OP.itemsize))
"""An operation as bytes, since numpy would compare the fields of all tables that it joins."""
_PLACE = ("region", "offset", "item_stride", "row_stride", "items")


@attrs.frozen
class _LanePiece:
    """Bytes [lo, hi) of the lane axis, at an offset from a column; stride from lane to lane, 0 where bytes touch."""

    lo: int
    hi: int
    part: int
    """The part whose column it lies in."""
    offset: int
    stride: int


def _pieces(side: RankLayout, group: Group, p: int, stride: int, box: Box, fine: int) -> Iterator[_LanePiece]:
    """What one column of this side stores of the lane bytes of a box."""
    part = group.parts[p]
    size, whole, at = part.lane_bytes, lane_bytes(part), part.at or 0
    for first, last, local in side.spans(group.id, p, box.lo // whole, -(-box.hi // whole)):
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


def _both(a: list[_LanePiece], b: list[_LanePiece], fine: int) -> Iterator[tuple[int, int, _LanePiece, _LanePiece]]:
    """Pieces cut where either side is cut."""
    a, b = sorted(a, key=lambda p: p.lo), sorted(b, key=lambda p: p.lo)
    i = j = 0
    while i < len(a) and j < len(b):
        lo, hi = max(a[i].lo, b[j].lo), min(a[i].hi, b[j].hi)
        yield lo, hi, _advance(a[i], lo, hi, fine), _advance(b[j], lo, hi, fine)
        i, j = i + (a[i].hi == hi), j + (b[j].hi == hi)


def _advance(piece: _LanePiece, lo: int, hi: int, fine: int) -> _LanePiece:
    """Bytes [lo, hi) of a piece, whose lanes are `fine` bytes long unless all of its bytes touch."""
    if not piece.stride:
        return _LanePiece(lo, hi, piece.part, piece.offset + lo - piece.lo, 0)
    lanes, within = divmod(lo - piece.lo, fine)
    return _LanePiece(
        lo, hi, piece.part, piece.offset + lanes * piece.stride + within, piece.stride if hi - lo > fine else 0
    )
