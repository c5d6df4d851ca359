"""Joins the shares of pieces into boxes, as long as they can be and so unique (spec/v1/planning.md, step 5)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.planning.arrays import IntArray, distinct_rows, repeated_index, stretch_bounds
from kvproto.planning.election import PieceTable, ShareTable

__all__ = ["LAYER_BITS", "BoxTable", "boxes_of"]

Bytes = npt.NDArray[Any]
"""Places on lane axes, u64."""


@attrs.frozen(eq=False)
class BoxTable:
    """Boxes in ascending order, without what all boxes of a sink group share: columns [n]."""

    source: IntArray
    sink: IntArray
    group: IntArray
    layer_lo: IntArray
    layer_hi: IntArray
    part: IntArray
    lo: Bytes
    hi: Bytes
    source_class: IntArray
    sink_class: IntArray


def boxes_of(pieces: PieceTable, shares: ShareTable) -> BoxTable:
    """Join each layer's pieces into the longest lane intervals, then equal ones of consecutive layers into boxes."""
    p = shares.piece
    cells = shares.source, shares.sink, pieces.group[p], pieces.part[p], pieces.source_class[p], pieces.sink_class[p]
    first, cell = distinct_rows(*cells)
    lo, hi, x, y = pieces.lo[p], pieces.hi[p], shares.layer_lo, shares.layer_hi
    if first.size < cell.size:
        cell, lo, hi, x, y = _joined(*_by_layers(cell, lo, hi, x, y))
    source, sink, group, part, c, d = (column[first[cell]] for column in cells)
    columns: tuple[npt.NDArray[Any], ...] = source, sink, group, x, y, part, lo, hi, c, d
    order = np.lexsort(columns[::-1])
    return BoxTable(*(column[order] for column in columns))


LAYER_BITS = 33
"""Bits of the layer in a key that orders places by cell and layer."""
_Cut = tuple[IntArray, Bytes, Bytes, IntArray, IntArray]
"""Cell, bytes [lo, hi) and layers [x, y) of each row."""


def _by_layers(cell: IntArray, lo: Bytes, hi: Bytes, x: IntArray, y: IntArray) -> _Cut:
    """The same rows, cut at each layer where another row of the cell begins or ends; layers are then equal or apart."""
    from_, to = ((cell << LAYER_BITS) + layer for layer in (x, y))
    places = np.sort(np.concatenate([from_, to]))
    places = places[stretch_bounds(places[1:] == places[:-1])[0]]
    first = np.searchsorted(places, from_)
    row, nth = repeated_index(np.searchsorted(places, to) - first)
    if row.size == cell.size:
        return cell, lo, hi, x, y
    x, y = (places[first[row] + nth + end] - (cell[row] << LAYER_BITS) for end in (0, 1))
    return cell[row], lo[row], hi[row], x, y


def _joined(cell: IntArray, lo: Bytes, hi: Bytes, x: IntArray, y: IntArray) -> _Cut:
    cell, lo, hi, x, y = _sorted((cell, lo, hi, x, y), by=(lo, x, cell))
    begin, end = stretch_bounds((cell[1:] == cell[:-1]) & (x[1:] == x[:-1]) & (lo[1:] == hi[:-1]))
    cell, lo, hi, x, y = cell[begin], lo[begin], hi[end], x[begin], y[begin]
    cell, lo, hi, x, y = _sorted((cell, lo, hi, x, y), by=(x, hi, lo, cell))
    same = (cell[1:] == cell[:-1]) & (lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1])
    begin, end = stretch_bounds(same & (x[1:] == y[:-1]))
    return cell[begin], lo[begin], hi[begin], x[begin], y[end]


def _sorted(rows: _Cut, by: tuple[npt.NDArray[Any], ...]) -> _Cut:
    order = np.lexsort(by)
    cell, lo, hi, x, y = rows
    return cell[order], lo[order], hi[order], x[order], y[order]
