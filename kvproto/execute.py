"""The numpy executor of copy programs, and the checksum of feature VERIFY.

Views are built over the region's own buffer, so numpy refuses whatever would lie outside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto.program import CopyProgram, Op, Place, RowMap

__all__ = ["checksums", "execute"]

Regions = Mapping[int, memoryview]
Bytes = npt.NDArray[np.uint8]


def execute(program: CopyProgram, sources: Regions, sinks: Regions) -> int:
    """Run every operation; returns the bytes written."""
    for op in program.ops:
        rows = program.maps[op.map]
        for length, part in rows.by_length():
            src = _view(op.source, op, length, sources[op.source.region])
            dst = _view(op.sink, op, length, sinks[op.sink.region])
            dst[rows.sink_item[part], rows.sink_row[part]] = src[rows.source_item[part], rows.source_row[part]]
    return program.bytes


def _view(place: Place, op: Op, length: int, region: memoryview) -> Bytes:
    """[item, first row, row of the run, lane, byte]"""
    shape = (place.items, place.rows - length + 1, length, op.lanes, op.lane_bytes)
    strides = (place.item_stride, place.row_stride, place.row_stride, place.lane_stride, 1)
    return np.ndarray(shape, np.uint8, region, place.offset, strides)


def checksums(program: CopyProgram, regions: Regions, sink: bool) -> dict[int, int]:
    """Sum over every byte of byte * A(model, layer, part, row) * B(byte on the lane axis) mod 2^64, by sink group.

    A and B are odd and depend on the global coordinate only, so both layouts give one value, and one changed byte
    always changes it. Clause KVP-VERIFY-SUM.
    """
    found: dict[int, int] = {}
    for op in program.ops:
        rows = program.maps[op.map]
        weight = _mix(np.arange(op.lo, op.lo + op.lanes * op.lane_bytes, dtype=np.uint64))
        total = found.get(op.group, 0)
        for index, data in _gather(op, rows, regions, sink):
            tall = data.reshape(-1, op.lanes * op.lane_bytes).astype(np.uint64)
            seed = _mix(np.array([(op.model << 48 | op.layer << 16 | op.part) & (1 << 64) - 1], np.uint64))
            total += int((_mix(index.reshape(-1) + seed) * (tall @ weight)).sum(dtype=np.uint64))
        found[op.group] = total & (1 << 64) - 1
    return found


def _gather(op: Op, rows: RowMap, regions: Regions, sink: bool) -> Iterator[tuple[npt.NDArray[np.uint64], Bytes]]:
    place = op.sink if sink else op.source
    item, row = (rows.sink_item, rows.sink_row) if sink else (rows.source_item, rows.source_row)
    for length, part in rows.by_length():
        index = rows.row[rows.start[part, None] + np.arange(length)].astype(np.uint64)
        yield index, _view(place, op, length, regions[place.region])[item[part], row[part]]


def _mix(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """splitmix64, made odd."""
    z = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
