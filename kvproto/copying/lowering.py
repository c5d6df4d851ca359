"""From the routes of a rank pair to copies (spec/v1/lowering.md).

A `Pair` is made once, at registration: the table of operations, whose length is layers x parts x lane pieces. `lower`
makes the row maps of one request (`kvproto.copying.rows`).
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
from kvproto.planning.geometry import Group
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
                tables += list(_ops(source, sink, self._maps[keys[key]], box, keys[key]))
        self._ops = np.concatenate(tables) if tables else np.empty(0, OP)
        self._steps = tuple(m.sink.tokens_per_row for m in self._maps)

    @cached_property
    def nothing(self) -> CopyProgram:
        """The copy program of a request without rows."""
        maps = tuple(attrs.evolve(EMPTY_MAP, whole=m.whole) for m in self._maps)
        ends = tuple(0 if kind_of(m.sink).is_state else None for m in self._maps)
        return CopyProgram(maps, self._ops, self._steps, ends)

    def lower(self, sources: Mapping[int, Window], sinks: Mapping[int, Window]) -> CopyProgram:
        """Make the copy program of one request from windows by group id, each of its own side. Raises BAD_GRANT."""
        maps = tuple(row_map(m, sources[m.source.id], sinks[m.sink.id]) for m in self._maps)
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


def _ops(source: RankLayout, sink: RankLayout, m: Deals, box: Box, at: int) -> Iterator[npt.NDArray[np.void]]:
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
            ops["seed"] = seeds(ops)
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
