"""What the kernel reads (kernel.cu): operations, made at registration; classes and runs, for each launch.

Nothing here touches a device, so all of it is tested on a host with the kernel's own source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.execute import seeds
from kvproto.program import CopyProgram, RowMap
from kvproto.wire.enums import ErrorCode

__all__ = [
    "CLASS",
    "DEPTH",
    "LONG",
    "MAP",
    "OP",
    "SUM",
    "THREADS",
    "WORDS",
    "Launch",
    "Shape",
    "Table",
    "Work",
    "launch",
    "sizes",
    "sums",
    "table",
]

THREADS, DEPTH = 512, 8
WORDS = (16, 8, 4, 2, 1)
"""Bytes of a word, widest first."""

_PLACES = ("item", "row", "lane")
OP = np.dtype([(n, "<u8") for n in ("source", "sink", *(f"{s}_{p}" for s in ("source", "sink") for p in _PLACES))])
CLASS = np.dtype(
    [("ops", "<u8"), ("rows", "<u8")]
    + [(n, "<u4") for n in ("n_rows", "words", "units", "chunks", "first", "unused")]
)  # fmt: skip
MAP = np.dtype([("runs", "<u8"), ("rows", "<u8"), ("n_runs", "<u4"), ("n_rows", "<u4")])
SUM = np.dtype(
    [(n, "<u8") for n in ("base", "item", "row", "lane", "places", "globals", "total", "seed", "lo")]
    + [(n, "<u4") for n in ("n_rows", "lanes", "lane_bytes", "unused")]
)  # fmt: skip

LONG = 8 << 20
"""Bytes of a run from which on the copy engine takes it: 6 % faster there (benchmarks/transfer_gpu.py)."""
_MOST = (1 << 32) - THREADS * DEPTH - 1
"""Words of one operation; one with more is cut into several classes."""


@attrs.frozen
class Shape:
    """Operations [start, stop) of a table: alike in map, word, width of a row; ascending by layer."""

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
    """Of each operation."""
    shapes: tuple[Shape, ...]
    joined: npt.NDArray[np.bool_]
    """Whether the rows of a run touch on both sides."""
    extents: npt.NDArray[np.int64]
    """[map, 4]: items and rows of the source's pool, items and rows of the sink's, the least of any operation."""

    @property
    def n_maps(self) -> int:
        """Maps that a program of this table has."""
        return len(self.extents)


def table(program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]) -> Table:
    """The table of a program's operations; `sources` and `sinks` are the addresses of regions as mapped here."""
    ops = program.ops
    made = np.zeros(len(ops), OP)
    width = ops["lanes"] * ops["lane_bytes"]
    touch = np.ones(len(ops), bool)
    for side, bases in (("source", sources), ("sink", sinks)):
        base = np.array([bases[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
        made[side] = base + ops[f"{side}_offset"].astype(np.uint64)
        for place in _PLACES:
            made[f"{side}_{place}"] = ops[f"{side}_{place}_stride"]
        touch &= (ops[f"{side}_lane_stride"] == ops["lane_bytes"]) | (ops["lanes"] == 1)
    unit = np.where(touch, width, ops["lane_bytes"])
    units = np.where(touch, 1, ops["lanes"])
    for side in ("source", "sink"):
        made[f"{side}_lane"][touch] = 0
    together = unit.astype(np.uint64)
    for name in OP.names or ():
        together = together | made[name]
    word = np.full(len(ops), 1)
    for size in WORDS[::-1]:
        word[(together & np.uint64(size - 1)) == 0] = size
    kinds = np.stack([ops["map"], -word, unit // word, units])
    order = np.lexsort((ops["layer"], *kinds[::-1]))
    made, kinds = made[order], kinds[:, order]
    joined = touch[order] & (made["source_row"] == unit[order]) & (made["sink_row"] == unit[order])
    starts = np.flatnonzero(
        np.concatenate([np.full(min(len(ops), 1), True), (kinds[:, 1:] != kinds[:, :-1]).any(axis=0)])
    )
    stops = [*starts[1:], len(ops)]
    shapes = tuple(
        Shape(int(kinds[0, a]), int(-kinds[1, a]), int(kinds[2, a]), int(kinds[3, a]), int(a), int(b))
        for a, b in zip(starts, stops, strict=False)
    )
    extents = np.full((len(program.maps), 4), np.iinfo(np.int64).max)
    for k, name in enumerate(("source_items", "source_rows", "sink_items", "sink_rows")):
        np.minimum.at(extents[:, k], ops["map"], ops[name])
    return Table(made, ops["layer"][order].astype(np.int64), shapes, joined, extents)


@attrs.frozen
class Launch:
    """One upload and its launches."""

    image: npt.NDArray[np.uint8]
    """Maps, then classes, then runs, as the device reads them at the address that was given."""
    n_maps: int
    most_rows: int
    """Rows of the longest map."""
    classes: tuple[tuple[int, int, int, int], ...]
    """(word, offset of the first class in the image, classes, chunks), one for each copy kernel."""
    bytes: int
    long: tuple[tuple[int, int, int], ...] = ()
    """(source, sink, length) of runs that the copy engine takes."""


@attrs.frozen
class Work:
    """A prepared table, where it lies on the device, and one request's maps."""

    table: Table
    address: int
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None
    """Only layers [lo, hi)."""


def sizes(works: Sequence[Work]) -> tuple[int, int]:
    """Bytes of image and of rows that `launch` needs at most."""
    runs = sum(len(m.rows) for w in works for m in w.maps)
    maps = sum(len(w.maps) for w in works)
    cuts = sum(len(w.table.shapes) * (2 + _cuts(w)) for w in works)
    rows = sum(m.size for w in works for m in w.maps)
    return _up(maps * MAP.itemsize) + _up(cuts * CLASS.itemsize) + _up(runs * 20 + 16), rows * 16 + 16


def _cuts(work: Work) -> int:
    most = max((work.maps[s.map].size * s.words * s.units for s in work.table.shapes), default=0)
    return most // _MOST


def _up(n: int) -> int:
    return -(-n // 256) * 256


def launch(works: Sequence[Work], image_at: int, rows_at: int) -> Launch:
    """The image of one launch for all works, to be read at address `image_at`; rows are expanded at `rows_at`.

    Raises LocalError(OUT_OF_REGION) where a map names an item or row beyond the pools: nothing is launched.
    """
    wholes = [(w, i, m) for w in works for i, m in enumerate(w.maps)]
    n_runs = sum(len(m.rows) for _, _, m in wholes)
    maps = np.zeros(len(wholes), MAP)
    runs = np.empty(n_runs * 5, np.uint32)
    found: list[tuple[int, tuple[int, ...]]] = []
    placed: dict[tuple[int, int], int] = {}
    at, row = 0, rows_at
    offsets = []
    for k, (work, i, m) in enumerate(wholes):
        n = len(m.rows)
        _check(work.table.extents[i], m)
        starts = np.cumsum(m.rows) - m.rows
        for j, column in enumerate((starts, m.source_item, m.source_row, m.sink_item, m.sink_row)):
            runs[5 * at + j * n : 5 * at + (j + 1) * n] = column
        maps[k] = (0, row, n, m.size)
        offsets.append(20 * at)
        placed[id(work), i] = row
        at, row = at + n, row + 16 * m.size
    total = 0
    long: list[tuple[int, int, int]] = []
    for work in works:
        for shape, lo, hi in _wanted(work):
            rows_of = work.maps[shape.map]
            size = rows_of.size
            if _is_long(work, shape, lo, hi):
                long += list(_long(work.table.ops[lo:hi], rows_of, shape.word * shape.words))
                total += size * shape.word * shape.words * (hi - lo)
                continue
            total += size * shape.word * shape.words * shape.units * (hi - lo)
            most = _MOST // (shape.words * shape.units)
            for skip in range(0, size, most):
                rows = min(most, size - skip)
                chunks = -(-rows * shape.words * shape.units // (THREADS * DEPTH))
                ops = work.address + lo * OP.itemsize
                begin = placed[id(work), shape.map] + 16 * skip
                found.append((shape.word, (ops, begin, rows, shape.words, shape.units, chunks, chunks * (hi - lo), 0)))
    found.sort(key=lambda f: -f[0])
    classes = np.array([c for _, c in found], CLASS)
    kernels = []
    classes_at = _up(maps.nbytes)
    for word in sorted({w for w, _ in found}, reverse=True):
        some = [i for i, (w, _) in enumerate(found) if w == word]
        number = classes["first"][some].astype(np.int64)
        classes["first"][some] = np.cumsum(number) - number
        kernels.append((word, classes_at + some[0] * CLASS.itemsize, len(some), int(number.sum())))
    runs_at = classes_at + _up(classes.nbytes)
    maps["runs"] = image_at + runs_at + np.array(offsets, np.uint64)
    image = np.zeros(runs_at + runs.nbytes, np.uint8)
    image[: maps.nbytes] = maps.view(np.uint8)
    image[classes_at : classes_at + classes.nbytes] = classes.view(np.uint8)
    image[runs_at:] = runs.view(np.uint8)
    kept = [k for k in kernels if k[3]]
    return Launch(image, len(wholes), max((m.size for _, _, m in wholes), default=0), tuple(kept), total, tuple(long))


def _is_long(work: Work, shape: Shape, lo: int, hi: int) -> bool:
    """Whether runs are so long that the copy engine, which starts each by itself, is faster than a kernel."""
    rows = work.maps[shape.map].rows
    return bool(work.table.joined[lo:hi].all()) and int(rows.min()) * shape.word * shape.words >= LONG


def _long(ops: npt.NDArray[np.void], m: RowMap, width: int) -> Iterator[tuple[int, int, int]]:
    for op in ops:
        for source_item, source_row, sink_item, sink_row, rows in zip(
            *(c.tolist() for c in (m.source_item, m.source_row, m.sink_item, m.sink_row, m.rows)), strict=True
        ):
            source = int(op["source"]) + source_item * int(op["source_item"]) + source_row * width
            sink = int(op["sink"]) + sink_item * int(op["sink_item"]) + sink_row * width
            yield source, sink, rows * width


def _wanted(work: Work) -> Iterator[tuple[Shape, int, int]]:
    """Shapes that have something to do, and the operations of the layers that are wanted."""
    for shape in work.table.shapes:
        lo, hi = shape.start, shape.stop
        if work.layers is not None:
            lo, hi = (shape.start + int(np.searchsorted(work.table.layers[lo:hi], x)) for x in work.layers)
        if hi > lo and work.maps[shape.map].size:
            yield shape, lo, hi


def _check(extents: npt.NDArray[np.int64], m: RowMap) -> None:
    if not len(m.rows):
        return
    ends = (m.source_item, m.source_row + m.rows - 1, m.sink_item, m.sink_row + m.rows - 1)
    for name, values, extent in zip(("source item", "source row", "sink item", "sink row"), ends, extents, strict=True):
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= extent or high >= 1 << 32:
            raise LocalError(ErrorCode.OUT_OF_REGION, name, f"below {extent}", str(low if low < 0 else high))


def sums(
    program: CopyProgram, addresses: Mapping[int, int], sink: bool, at: int
) -> tuple[npt.NDArray[np.uint8], int, list[int]]:
    """What the checksum kernel reads at address `at`, how many operations it begins with, and the groups in order.

    The totals, one u64 a group, are its last bytes.
    """
    side = "sink" if sink else "source"
    ops = (
        program.ops[[bool(program.maps[m].size) for m in program.ops["map"].tolist()]]
        if len(program.ops)
        else program.ops
    )
    groups = np.unique(ops["group"]).tolist()
    made = np.zeros(len(ops), SUM)
    made["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    made["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in _PLACES:
        made[place] = ops[f"{side}_{place}_stride"]
    made["seed"], made["lo"] = seeds(ops), ops["lo"]
    made["lanes"], made["lane_bytes"] = ops["lanes"], ops["lane_bytes"]
    pieces: list[npt.NDArray[Any]] = [made]
    here = at + made.nbytes
    for i, m in enumerate(program.maps):
        item, first = (m.sink_item, m.sink_row) if sink else (m.source_item, m.source_row)
        rows = np.arange(m.size) - np.repeat(np.cumsum(m.rows) - m.rows, m.rows) + np.repeat(first, m.rows)
        places = np.stack([np.repeat(item, m.rows), rows], axis=1).astype(np.uint32)
        some = ops["map"] == i
        made["places"][some], made["globals"][some] = here, here + places.nbytes
        made["n_rows"][some] = m.size
        pieces += [places, m.global_rows.astype(np.uint64)]
        here += places.nbytes + 8 * m.size
    made["total"] = here + 8 * np.searchsorted(groups, ops["group"]).astype(np.uint64)
    pieces.append(np.zeros(len(groups), np.uint64))
    return np.concatenate([p.reshape(-1).view(np.uint8) for p in pieces]), len(ops), groups
