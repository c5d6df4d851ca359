"""The numpy executor of copy programs, and the checksum of feature VERIFY.

Views are built over the region's own buffer, so numpy refuses whatever would lie outside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, IntArray, RowMap

__all__ = ["checksums", "execute", "seeds"]

Regions = Mapping[int, memoryview]
Bytes = npt.NDArray[np.uint8]


def execute(program: CopyProgram, sources: Regions, sinks: Regions) -> int:
    """Copy everything with numpy, between regions by id; return the number of bytes written."""
    lengths = [list(_by_length(m)) for m in program.maps]
    for op in program.ops:
        rows = program.maps[op["map"]]
        for length, runs in lengths[op["map"]]:
            src, dst = (_view(op, side, length, regions) for side, regions in (("source", sources), ("sink", sinks)))
            dst[rows.sink_item[runs], rows.sink_row[runs]] = src[rows.source_item[runs], rows.source_row[runs]]
    return program.bytes


def _by_length(rows: RowMap) -> Iterator[tuple[int, IntArray]]:
    """Each length of run that occurs, and the indices [n] of the runs that have it."""
    for length in np.unique(rows.rows).tolist():
        yield length, np.flatnonzero(rows.rows == length)


def _view(op: Any, side: str, length: int, regions: Regions) -> Bytes:
    """A view [item, first row, row of the run, lane, byte] of a region."""
    items, rows, item_stride, row_stride, lane_stride, offset, region = (
        int(op[f"{side}_{name}"])
        for name in ("items", "rows", "item_stride", "row_stride", "lane_stride", "offset", "region")
    )
    shape = (items, rows - length + 1, length, int(op["lanes"]), int(op["lane_bytes"]))
    return np.ndarray(shape, np.uint8, regions[region], offset, (item_stride, row_stride, row_stride, lane_stride, 1))


def checksums(program: CopyProgram, regions: Regions, sink: bool) -> dict[int, int]:
    """Checksums by sink group id: the sum of byte * A(model, layer, part, row) * B(byte of the lane axis) mod 2^64.

    A and B are odd and depend on the global coordinate only, so both layouts give one value, and one changed byte
    always changes it. Groups that move no row have none. Clauses KVP-VERIFY-SOURCE, KVP-VERIFY-SINK.
    """
    found: dict[int, int] = {}
    weights: dict[tuple[int, int], npt.NDArray[np.uint64]] = {}
    runs = [list(_global_rows(rows)) for rows in program.maps]
    for op, seed in zip(program.ops, seeds(program.ops), strict=True):
        rows = program.maps[op["map"]]
        if not rows.size:
            continue
        lo, width, group = int(op["lo"]), int(op["lanes"] * op["lane_bytes"]), int(op["group"])
        if (lo, width) not in weights:
            weights[lo, width] = _mix(np.arange(lo, lo + width, dtype=np.uint64))
        weight, total = weights[lo, width], found.get(group, 0)
        for length, some, index in runs[op["map"]]:
            data = _gather(op, rows, length, some, regions, sink)
            tall = data.reshape(-1, width).astype(np.uint64)
            total += int((_mix(index.reshape(-1) + seed) * (tall @ weight)).sum(dtype=np.uint64))
        found[group] = total & (1 << 64) - 1
    return found


def _global_rows(rows: RowMap) -> Iterator[tuple[int, IntArray, npt.NDArray[np.uint64]]]:
    """For each length of run, the indices [n] of the runs that have it, and their global rows [n, length]."""
    start = rows.ends - rows.rows
    for length, runs in _by_length(rows):
        yield length, runs, rows.global_rows[start[runs, None] + np.arange(length)].astype(np.uint64)


def _gather(op: Any, rows: RowMap, length: int, runs: IntArray, regions: Regions, sink: bool) -> Bytes:
    """The bytes of runs of one length, [runs, length, lane, byte]."""
    item, row = (rows.sink_item, rows.sink_row) if sink else (rows.source_item, rows.source_row)
    return _view(op, "sink" if sink else "source", length, regions)[item[runs], row[runs]]


def seeds(ops: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Seeds [operations] of the row weights, from model, layer and part."""
    model, layer, part = (ops[n].astype(np.uint64) for n in ("model", "layer", "part"))
    return _mix((model << np.uint64(48)) + (layer << np.uint64(16)) + part)


def _mix(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """splitmix64, made odd."""
    z = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
