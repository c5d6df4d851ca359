"""The table of a rank pair's operations, made at registration, and the formats that the kernel reads (kernel.cu).

Nothing here touches a device, so all of it is tested on a host with the kernel's own source.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, RowMap
from kvproto.transport.staging.packed import Side

__all__ = [
    "CLASS", "CLASS_FIELDS", "DEPTH", "FEW_CLASSES", "FEW_RUNS", "FEW_WORDS", "LONG", "MAP", "MAP_FIELDS", "MOST", "OP",
    "RUN_BYTES", "RUN_WORDS", "SUM", "THREADS", "WORDS", "PerProgramCache", "Shape", "Table", "table", "up",
    "write_runs",
]  # fmt: skip

T = TypeVar("T")
THREADS, DEPTH = 1024, 8
WORDS = (16, 8, 4, 2, 1)
"""Bytes of a word, widest first."""
RUN_WORDS = 5
"""A run has this many numbers of 32 bits: its first row, and item and row on both sides."""
FEW_CLASSES, FEW_RUNS = 8, 180
"""The most classes and runs of a launch that fits into a kernel's 4 KiB of parameters: `Few` in kernel.cu."""
FEW_WORDS = FEW_RUNS * RUN_WORDS
RUN_BYTES = 4 * RUN_WORDS

PLACES = ("item", "row", "lane")
OP = np.dtype([(n, "<u8") for n in ("source", "sink", *(f"{s}_{p}" for s in ("source", "sink") for p in PLACES))])
CLASS = np.dtype(
    [("ops", "<u8"), ("rows", "<u8")]
    + [(n, "<u4") for n in ("n_rows", "words", "units", "chunks", "first", "n_runs")]
)  # fmt: skip
MAP = np.dtype([("runs", "<u8"), ("rows", "<u8"), ("n_runs", "<u4"), ("n_rows", "<u4")])
SUM = np.dtype(
    [(n, "<u8") for n in ("base", "item", "row", "lane", "places", "globals", "total", "seed", "lo")]
    + [(n, "<u4") for n in ("n_rows", "lanes", "lane_bytes", "sink")]
)  # fmt: skip

MAP_FIELDS, CLASS_FIELDS = struct.Struct("<QQII"), struct.Struct("<QQIIIIII")
LONG = 16 << 20
"""Runs of at least this many bytes go by the copy engine, which is 6 % faster then (benchmarks/transfer_gpu.py)."""
MOST = (1 << 32) - THREADS * DEPTH - 1
"""Words of an operation; one with more is cut into several classes."""


@attrs.frozen
class Shape:
    """Operations [start, stop) of a table with the same map, word and width of a row, in ascending order of layers."""

    map: int
    word: int
    words: int
    """Words of a unit."""
    units: int
    """Units of a row."""
    start: int
    stop: int


@attrs.frozen(eq=False)
class Table:
    """The operations of a rank pair with absolute addresses, sorted by shape and layer."""

    ops: npt.NDArray[np.void]
    """Rows of dtype OP."""
    layers: npt.NDArray[np.int64]
    """The layer of each operation."""
    shapes: tuple[Shape, ...]
    joined: npt.NDArray[np.bool_]
    """Whether the rows of a run touch on both sides."""
    bounds: list[list[int]]
    """[map, 4]: items and rows of the source's pool, items and rows of the sink's; the least of any operation."""


def table(
    program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int], free: Side | None = None
) -> Table:
    """The table of a program's operations; `sources` and `sinks` are the addresses of regions as mapped here.

    The addresses of a `free` side are known only at each launch, and do not limit how wide words are.
    """
    ops = program.ops
    made = np.zeros(len(ops), OP)
    width = ops["lanes"] * ops["lane_bytes"]
    touch = np.ones(len(ops), bool)
    for side, bases in (("source", sources), ("sink", sinks)):
        base = np.array([bases[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
        made[side] = base + ops[f"{side}_offset"].astype(np.uint64)
        for place in PLACES:
            made[f"{side}_{place}"] = ops[f"{side}_{place}_stride"]
        touch &= (ops[f"{side}_lane_stride"] == ops["lane_bytes"]) | (ops["lanes"] == 1)
    unit = np.where(touch, width, ops["lane_bytes"])
    units = np.where(touch, 1, ops["lanes"])
    for side in ("source", "sink"):
        made[f"{side}_lane"][touch] = 0
    together = unit.astype(np.uint64)
    for name in set(OP.names or ()) - {free}:
        together = together | made[name]
    word = np.full(len(ops), 1)
    for size in WORDS[::-1]:
        word[(together & np.uint64(size - 1)) == 0] = size
    kinds = np.stack([ops["map"], -word, unit // word, units])
    order = np.lexsort((ops["layer"], *kinds[::-1]))
    made, kinds = made[order], kinds[:, order]
    joined = touch[order] & (made["source_row"] == unit[order]) & (made["sink_row"] == unit[order])
    cuts = [0, *(np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1).tolist(), len(ops)]
    firsts = kinds[:, cuts[:-1]].T.tolist() if len(ops) else []
    shapes = tuple(
        Shape(m, -w, words, many, a, b) for (m, w, words, many), (a, b) in zip(firsts, pairwise(cuts), strict=False)
    )
    extents = np.full((len(program.maps), 4), 1 << 32)  # the device counts in 32 bits
    for k, name in enumerate(("source_items", "source_rows", "sink_items", "sink_rows")):
        np.minimum.at(extents[:, k], ops["map"], ops[name])
    return Table(made, ops["layer"][order].astype(np.int64), shapes, joined, extents.tolist())


def up(n: int) -> int:
    """The next multiple of 256."""
    return -(-n // 256) * 256


def write_runs(m: RowMap, runs: npt.NDArray[np.uint32], stream: Side | None = None) -> None:
    """Write runs as the device reads them; on a side that is a stream, rows follow each other in one item."""
    if len(m.rows):
        runs[0, 0] = 0
        if len(m.rows) > 1:
            np.cumsum(m.rows[:-1], out=runs[0, 1:], dtype=np.uint32)
        item, row = {None: (0, 0), "source": (1, 2), "sink": (3, 4)}[stream]
        for i, place in enumerate(m.places, start=1):
            runs[i] = 0 if i == item else runs[0] if i == row else place


class PerProgramCache(Generic[T]):
    """Keeps what is made once for the operations of a rank pair for as long as their array lives.

    What is kept must not refer to the array, which would then live for ever.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], T] = {}

    def __len__(self) -> int:
        return len(self._made)

    def get(self, ops: npt.NDArray[np.void], rest: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for this array and `rest`; raises what `make` raises, and keeps nothing then."""
        key: tuple[int, Hashable] = id(ops), rest
        if key not in self._made:
            self._made[key] = make()
            weakref.finalize(ops, self._made.pop, key, None).atexit = False
        return self._made[key]

    def clear(self) -> None:
        """Remove everything."""
        self._made.clear()
