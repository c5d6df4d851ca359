"""Data that the kernels read (kernel.cu): tables of operations, launches of copies and checksums, and their formats.

A table of a rank pair's operations is uploaded once, at registration. A launch of many works is uploaded as an image of
maps, classes and runs; a small one fits into the kernel's parameters. Nothing here touches a device, so all of it is
tested on a host with the kernel's own source.
"""

import struct
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise
from operator import ge
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, RowMap, Side
from kvproto.errors import LocalError
from kvproto.planning.conversion import Made
from kvproto.wire.enums import ErrorCode

T = TypeVar("T")


# formats

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


# tables of operations


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
    """The table of a program's operations, with regions mapped at these addresses, or at each launch if `free`."""
    ops = program.ops
    rows = np.zeros(len(ops), OP)
    width = ops["lanes"] * ops["lane_bytes"]
    touch = np.ones(len(ops), bool)
    for side, bases in (("source", sources), ("sink", sinks)):
        base = np.array([bases[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
        rows[side] = base + ops[f"{side}_offset"].astype(np.uint64)
        for place in PLACES:
            rows[f"{side}_{place}"] = ops[f"{side}_{place}_stride"]
        touch &= (ops[f"{side}_lane_stride"] == ops["lane_bytes"]) | (ops["lanes"] == 1)
    unit = np.where(touch, width, ops["lane_bytes"])
    units = np.where(touch, 1, ops["lanes"])
    for side in ("source", "sink"):
        rows[f"{side}_lane"][touch] = 0
    together = unit.astype(np.uint64)
    for name in set(OP.names or ()) - {free}:
        together = together | rows[name]
    word = np.full(len(ops), 1)
    for size in WORDS[::-1]:
        word[(together & np.uint64(size - 1)) == 0] = size
    kinds = np.stack([ops["map"], -word, unit // word, units])
    order = np.lexsort((ops["layer"], *kinds[::-1]))
    rows, kinds = rows[order], kinds[:, order]
    joined = touch[order] & (rows["source_row"] == unit[order]) & (rows["sink_row"] == unit[order])
    cuts = [0, *(np.flatnonzero((kinds[:, 1:] != kinds[:, :-1]).any(axis=0)) + 1).tolist(), len(ops)]
    firsts = kinds[:, cuts[:-1]].T.tolist() if len(ops) else []
    shapes = tuple(
        Shape(m, -w, words, many, a, b) for (m, w, words, many), (a, b) in zip(firsts, pairwise(cuts), strict=False)
    )
    return Table(rows, ops["layer"][order].astype(np.int64), shapes, joined, _extents(program))


def _extents(program: CopyProgram) -> list[list[int]]:
    """The bounds of a table."""
    ops, extents = program.ops, np.full((len(program.maps), 4), 1 << 32)  # the device counts in 32 bits
    for k, name in enumerate(("source_items", "source_rows", "sink_items", "sink_rows")):
        np.minimum.at(extents[:, k], ops["map"], ops[name])
    bounds: list[list[int]] = extents.tolist()
    return bounds


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
    """Values made once for a rank pair's operations and kept while their array lives, to which they must not refer."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, Hashable], T] = {}

    def get(self, ops: npt.NDArray[np.void], rest: Hashable, make: Callable[[], T]) -> T:
        """The value that `make` returned for this array and `rest`; raises as `make` does, and keeps nothing then."""
        key: tuple[int, Hashable] = id(ops), rest
        if key not in self._made:
            self._made[key] = make()
            weakref.finalize(ops, self._made.pop, key, None).atexit = False
        return self._made[key]

    def clear(self) -> None:
        """Remove everything."""
        self._made.clear()


# launches of copies


@attrs.frozen
class Long:
    """Runs of operations that go by the copy engine."""

    ops: npt.NDArray[np.void]
    map: RowMap
    width: int
    """Bytes of a row."""

    def runs(self) -> npt.NDArray[np.uint64]:
        """[3, operations x runs]: sources, sinks, lengths."""
        m, width = self.map, np.uint64(self.width)
        runs = np.empty((3, len(self.ops), len(m.rows)), np.uint64)
        sides = ("source", m.source_item, m.source_row), ("sink", m.sink_item, m.sink_row)
        for i, (side, item, row) in enumerate(sides):
            runs[i] = item.astype(np.uint64) * self.ops[f"{side}_item"][:, None] + row.astype(np.uint64) * width
            runs[i] += self.ops[side][:, None]
        runs[2] = m.rows.astype(np.uint64) * width
        return runs.reshape(3, -1)


@attrs.frozen
class LaunchGroup:
    """Launches whose end is one event."""

    classes: tuple[tuple[int, int, int, int], ...]
    """(word, offset of the first class in the image, classes, chunks), one for each copy kernel."""
    long: tuple[Long, ...]
    bytes: int


@attrs.frozen
class UploadedLaunch:
    """One upload and its launches."""

    size: int
    """Bytes of the image: maps, then classes, then runs."""
    n_maps: int
    most_rows: int
    """Rows of the longest map."""
    groups: tuple[LaunchGroup, ...]
    """One for all works, or one for each."""

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


@attrs.frozen(eq=False)
class Prepared:
    """A rank pair's table of operations on the device; valid while both sides' regions stay mapped."""

    table: Table
    address: int
    memory: object = None
    """The object that holds it on the device, freed with this one."""


@attrs.frozen
class CopyJob:
    """A request's maps for one rank pair; only layers [lo, hi) if given."""

    prepared: Prepared
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None


_FIRST_RUNS, _GROWTH = 8192, 3
"""The host writes 8,192 runs in some 100 us while the GPU copies the part before; each part costs the GPU 40 us."""


def parts(works: Sequence[CopyJob], most: int) -> list[Sequence[CopyJob]]:
    """The same works, cut between runs into launches: works of many runs become several, at most `most`."""
    runs = sum(len(m.rows) for w in works for m in w.maps)
    cuts, size = [0], _FIRST_RUNS
    while len(cuts) < most and runs - cuts[-1] > 2 * size:
        cuts.append(cuts[-1] + size)
        size *= _GROWTH
    if len(cuts) == 1:
        return [works]
    bounds = pairwise([*cuts, runs])
    return [[attrs.evolve(w, maps=[_share(m, a, b, runs) for m in w.maps]) for w in works] for a, b in bounds]


def _share(m: RowMap, a: int, b: int, of: int) -> RowMap:
    """The same share of a map's runs as [a, b) is of `of`."""
    share = slice(len(m.rows) * a // of, len(m.rows) * b // of)
    names = "source_item", "source_row", "sink_item", "sink_row", "rows"
    return attrs.evolve(m, **{name: getattr(m, name)[share] for name in names})


def check(works: Sequence[CopyJob]) -> None:
    """Raise OUT_OF_REGION if a map names an item or row beyond the pools."""
    for work in _apart(works):
        check_maps(work.maps, work.prepared.table.bounds)


def check_maps(maps: Sequence[RowMap], bounds: list[list[int]]) -> None:
    """Raise OUT_OF_REGION as `check`; `bounds` are those of a table."""
    for m, extents in zip(maps, bounds, strict=True):
        (low, *here), (lowest, *there) = m.source_reach, m.sink_reach
        high = here + there
        if low < 0 or lowest < 0 or any(map(ge, high, extents)):
            for name, place, most, extent in zip(_PLACE_NAMES, m.places, high, extents, strict=True):
                least = int(place.min())
                if least < 0 or most >= extent:
                    mine, yours = f"0 to {extent - 1}", str(most if most >= extent else least)
                    raise LocalError(ErrorCode.OUT_OF_REGION, name, mine, yours, "name items of the pool")


_PLACE_NAMES = ("source item", "source row", "sink item", "sink row")


def sizes(works: Sequence[CopyJob]) -> tuple[int, int]:
    """The most bytes of image and of rows that `launch` needs."""
    apart = _apart(works)
    runs = sum(len(m.rows) for w in apart for m in w.maps)
    maps = sum(len(w.maps) for w in apart)
    cuts = sum(len(w.prepared.table.shapes) * (2 + _cuts(w)) for w in works)
    rows = sum(m.size for w in apart for m in w.maps)
    return up(maps * MAP.itemsize) + up(cuts * CLASS.itemsize) + up(runs * RUN_BYTES + 16), rows * 16 + 16


def _apart(works: Sequence[CopyJob]) -> list[CopyJob]:
    """The works that do not share the maps of the work before."""
    return [w for i, w in enumerate(works) if not i or w.maps is not works[i - 1].maps]


def _cuts(work: CopyJob) -> int:
    most = max((work.maps[s.map].size * s.words * s.units for s in work.prepared.table.shapes), default=0)
    return most // MOST


def launch(
    works: Sequence[CopyJob],
    image: npt.NDArray[np.uint8],
    image_at: int,
    rows_at: int,
    long: int = LONG,
    separate: bool = False,
) -> UploadedLaunch:
    """Write the image of one launch for all works, to be read at address `image_at`; rows are expanded at `rows_at`.

    `image` has room for `sizes`, and the works have passed `check`. Runs of `long` bytes or more go by the copy engine.
    If `separate`, the kernels of each work have their own end. Works that share their maps share their rows.
    """
    maps: list[tuple[int, int, int, int]] = []
    classes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    chunks_of: dict[tuple[int, int], int] = {}
    engine: list[list[Long]] = [[] for _ in (works if separate else works[:1])]
    totals = [0] * len(engine)
    begins: list[int] = []
    row, n_runs, most_rows = rows_at, 0, 0
    apart = _apart(works)
    for k, work in enumerate(works):
        if not k or work.maps is not works[k - 1].maps:
            begins = []
            for m in work.maps:
                maps.append((n_runs, row, len(m.rows), m.size))
                begins.append(row)
                n_runs, row, most_rows = n_runs + len(m.rows), row + 16 * m.size, max(most_rows, m.size)
        group = k if separate else 0
        for shape, lo, hi in _wanted(work):
            m, width = work.maps[shape.map], shape.words * shape.units
            totals[group] += m.size * shape.word * width * (hi - lo)
            if _is_long(work, shape, lo, hi, long):
                engine[group].append(Long(work.prepared.table.ops[lo:hi], m, shape.word * shape.words))
                continue
            ops = work.prepared.address + lo * OP.itemsize
            for skip in range(0, m.size, MOST // width):
                rows = min(MOST // width, m.size - skip)
                chunks = -(-rows * width // (THREADS * DEPTH))
                kernel = group, shape.word
                first, begin = chunks_of.get(kernel, 0), begins[shape.map] + 16 * skip
                numbers = ops, begin, rows, shape.words, shape.units, chunks, first
                classes.setdefault(kernel, []).append(numbers)
                chunks_of[kernel] = first + chunks * (hi - lo)
    classes_at = up(len(maps) * MAP.itemsize)
    runs_at = classes_at + up(sum(map(len, classes.values())) * CLASS.itemsize)
    end = runs_at + RUN_BYTES * n_runs
    runs = image[runs_at:end].view(np.uint32)
    for k, m in enumerate(m for w in apart for m in w.maps):
        at, begin, n, size = maps[k]
        MAP_FIELDS.pack_into(image.data, k * MAP.itemsize, image_at + runs_at + RUN_BYTES * at, begin, n, size)
        write_runs(m, runs[RUN_WORDS * at : RUN_WORDS * (at + n)].reshape(RUN_WORDS, n))
    kernels: list[list[tuple[int, int, int, int]]] = [[] for _ in engine]
    at = classes_at
    for (group, word), of_kernel in classes.items():
        kernels[group].append((word, at, len(of_kernel), chunks_of[group, word]))
        for fields in of_kernel:
            CLASS_FIELDS.pack_into(image.data, at, *fields, 0)
            at += CLASS.itemsize
    groups = (LaunchGroup(tuple(k), tuple(long), b) for k, long, b in zip(kernels, engine, totals, strict=True))
    return UploadedLaunch(end, len(maps), most_rows, tuple(groups))


_HEAD = struct.Struct("<II8x")
_FEW_RUNS_AT = _HEAD.size + FEW_CLASSES * CLASS.itemsize
INLINE_BYTES = _FEW_RUNS_AT + 4 * FEW_WORDS
"""Bytes of a launch that fits into a kernel's parameters."""


@attrs.frozen
class InlineLaunch:
    """A launch that fits into the parameters of `copy_few`."""

    word: int
    chunks: int
    bytes: int


def inline_launch(
    works: Sequence[CopyJob], image: npt.NDArray[np.uint8], most_chunks: int, long: int = LONG
) -> InlineLaunch | None:
    """Write a launch of at most FEW_CLASSES of one word and FEW_RUNS to `image` [INLINE_BYTES]; None if it is larger.

    The works have passed `check`. Nothing is uploaded and nothing expanded, which is most of what a small hand-over
    costs; the rest is numpy calls, so there are few.
    """
    if sum(len(m.rows) for w in works for m in w.maps) > FEW_RUNS:
        return None
    word, number, first, total, data = 0, 0, 0, 0, image.data
    begins = {}
    at = 0
    for k, work in enumerate(works):
        for i, m in enumerate(work.maps):
            begins[k, i] = at
            at += RUN_WORDS * len(m.rows)
        for shape, lo, hi in _wanted(work):
            rows, width = work.maps[shape.map], shape.words * shape.units
            chunks = -(-rows.size * width // (THREADS * DEPTH))
            ops, place = work.prepared.address + lo * OP.itemsize, begins[k, shape.map]
            big = first + chunks * (hi - lo) > most_chunks or _is_long(work, shape, lo, hi, long)
            if number == FEW_CLASSES or big or word not in (0, shape.word) or rows.size * width > MOST:
                return None
            numbers = rows.size, shape.words, shape.units, chunks, first, len(rows.rows)
            CLASS_FIELDS.pack_into(data, _HEAD.size + number * CLASS.itemsize, ops, place, *numbers)
            word, number, first = shape.word, number + 1, first + chunks * (hi - lo)
            total += rows.size * word * width * (hi - lo)
    for k, work in enumerate(works):
        for i, m in enumerate(work.maps):
            place, n = _FEW_RUNS_AT + 4 * begins[k, i], len(m.rows)
            if m.numbers is not None:
                *places, lengths = m.numbers
                firsts = accumulate(lengths[:-1], initial=0) if n else ()
                struct.pack_into(f"<{RUN_WORDS * n}I", data, place, *firsts, *chain(*places))
            else:
                write_runs(m, image[place : place + RUN_BYTES * n].view(np.uint32).reshape(RUN_WORDS, n))
    _HEAD.pack_into(data, 0, number, first)
    return InlineLaunch(word or WORDS[0], first, total)


def _is_long(work: CopyJob, shape: Shape, lo: int, hi: int, long: int) -> bool:
    """Whether the runs are long enough for the copy engine, which starts each of them separately."""
    m, width = work.maps[shape.map], shape.word * shape.words
    if shape.units > 1 or m.size * width < long or not work.prepared.table.joined[lo:hi].all():
        return False
    return int(m.rows.min()) * width >= long


def _wanted(work: CopyJob) -> Iterator[tuple[Shape, int, int]]:
    """Shapes with rows to copy, and their operations for the wanted layers."""
    for shape in work.prepared.table.shapes:
        lo, hi = shape.start, shape.stop
        if work.layers is not None:
            lo, hi = (shape.start + int(np.searchsorted(work.prepared.table.layers[lo:hi], x)) for x in work.layers)
        if hi > lo and work.maps[shape.map].size:
            yield shape, lo, hi


# checksums

SUMMED = 1 << 30
"""Bytes that take about a millisecond."""
MOST_OPS = 65_535
"""Operations of a launch: blocks along the second axis of a grid."""
_ROW_BYTES = 16
"""Bytes of an expanded row."""


@attrs.frozen(eq=False)
class SumTable:
    """One side's operations of a rank pair, sorted by the width of their words and by map."""

    ops: npt.NDArray[np.void]
    """Rows of dtype SUM; `total` is the position of the group among `groups`."""
    spans: tuple[tuple[int, int, int], ...]
    """(map, start, stop) of operations of one map."""
    launches: tuple[tuple[int, int, int], ...]
    """(bytes of a word, offset of the first operation in the image, number of operations)."""
    groups: tuple[int, ...]
    maps: tuple[frozenset[int], ...]
    """Of each group; a group none of whose maps has rows has no checksum."""
    n_maps: int
    """Maps to expand: those of rows, then those of global rows."""

    def sizes(self, maps: Sequence[RowMap]) -> tuple[int, int]:
        """Bytes of an image and of the expanded rows."""
        runs = sum(len(m.rows) + len(m.piece_rows) for m in maps)
        return self._runs + RUN_BYTES * runs + 8 * len(self.groups) + 8, 2 * _ROW_BYTES * sum(
            m.size for m in maps
        ) + _ROW_BYTES

    @property
    def _ops(self) -> int:
        return up(self.n_maps * MAP.itemsize)

    @property
    def _runs(self) -> int:
        return self._ops + up(self.ops.nbytes)

    def write(self, maps: Sequence[RowMap], image: npt.NDArray[np.uint8], image_at: int, rows_at: int) -> int:
        """Write one request's image, to be read at `image_at`, with rows expanded to `rows_at`; the number of bytes."""
        ops = image[self._ops : self._ops + self.ops.nbytes].view(SUM)
        ops.data.cast("B")[:] = self.ops.data.cast("B")
        at, rows = self._runs, [rows_at]
        for n, m in enumerate((*maps, *maps)):
            globals_ = n >= len(maps)
            size = len(m.piece_rows if globals_ else m.rows)
            MAP_FIELDS.pack_into(image.data, n * MAP.itemsize, image_at + at, rows[-1], size, m.size)
            runs = image[at : at + RUN_BYTES * size].view(np.uint32).reshape(RUN_WORDS, size)
            if not globals_:
                write_runs(m, runs)
            elif size:
                runs[:] = 0
                np.cumsum(m.piece_rows[:-1], out=runs[0, 1:], dtype=np.uint32)
                runs[2] = m.piece_first
            at += RUN_BYTES * size
            rows.append(rows[-1] + _ROW_BYTES * m.size)
        at = -(-at // 8) * 8
        for n, start, stop in self.spans:
            span = ops[start:stop]
            span["places"], span["globals"], span["n_rows"] = rows[n], rows[n + len(maps)], maps[n].size
        ops["total"] *= 8
        ops["total"] += np.uint64(image_at + at)
        image[at : at + 8 * len(self.groups)] = 0
        return at + 8 * len(self.groups)

    def sums(self, maps: Sequence[RowMap], totals: npt.NDArray[np.uint8]) -> dict[int, int]:
        """Checksums by sink group id, of the last bytes of the image."""
        with_rows = {n for n, m in enumerate(maps) if m.size}
        values = totals.view(np.uint64).tolist()
        return {g: value for g, of, value in zip(self.groups, self.maps, values, strict=True) if with_rows & of}


def sum_table(program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> SumTable:
    """The table of a program's operations on one side, whose regions are at these addresses."""
    side = "sink" if sink else "source"
    ops = program.ops
    rows = np.zeros(len(ops), SUM)
    rows["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    rows["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in PLACES:
        rows[place] = ops[f"{side}_{place}_stride"]
    together = ops["lane_bytes"].astype(np.uint64)
    for name in ("base", *PLACES):
        together |= rows[name]
    word = np.max([np.where(together & np.uint64(size - 1), 1, size) for size in WORDS], axis=0, initial=1)
    groups = np.unique(ops["group"]).tolist()
    rows["seed"], rows["lo"], rows["sink"] = ops["seed"], ops["lo"], sink
    rows["lanes"], rows["lane_bytes"] = ops["lanes"], ops["lane_bytes"]
    rows["total"] = np.searchsorted(groups, ops["group"])
    order = np.lexsort((ops["map"], -word))
    rows, word, maps = rows[order], word[order], ops["map"][order].tolist()
    firsts = np.flatnonzero(np.diff(word, prepend=0)).tolist()
    cuts = sorted({*firsts, *range(0, len(ops), MOST_OPS), len(ops)})
    n_maps = 2 * len(program.maps)
    begin = up(n_maps * MAP.itemsize)
    spans, at = [], 0
    for number, of_map in groupby(maps):
        spans.append((number, at, at := at + len(list(of_map))))
    launches = ((int(word[a]), begin + a * SUM.itemsize, b - a) for a, b in pairwise(cuts))
    maps_of = (frozenset(ops["map"][ops["group"] == g].tolist()) for g in groups)
    return SumTable(rows, tuple(spans), tuple(launches), tuple(groups), tuple(maps_of), n_maps)


# conversions

GROUP = 16
"""Threads that share a block of a lane."""
STEPS = {8: ("uint4", "uint2"), 1: ("unsigned short", "unsigned char")}
"""Elements that a thread has at once, and the types of so many of two bytes and of one."""
CONVERT = np.dtype(
    [(n, "<u8") for side in ("source", "sink", "scale") for n in (side, *(f"{side}_{place}" for place in PLACES))]
    + [("places", "<u8")]
    + [(n, "<u4") for n in ("n_rows", "lanes", "blocks", "length", "made", "stated")]
)  # fmt: skip


@attrs.frozen(eq=False)
class ConvertTable:
    """The operations of a rank pair that convert, by map, with absolute addresses."""

    ops: npt.NDArray[np.void]
    """Rows of dtype CONVERT."""
    maps: npt.NDArray[np.int64]
    """The map of each operation."""
    step: int
    """Elements that a thread has at once."""
    bounds: list[list[int]]
    """As of `Table`."""

    def sizes(self, maps: Sequence[RowMap]) -> tuple[int, int]:
        """Bytes of an image and of the expanded rows."""
        head = up(len(maps) * MAP.itemsize) + up(self.ops.nbytes)
        return head + RUN_BYTES * sum(len(m.rows) for m in maps), _ROW_BYTES * (sum(m.size for m in maps) + 1)

    def write(self, maps: Sequence[RowMap], image: npt.NDArray[np.uint8], image_at: int, rows_at: int) -> int:
        """Write one request's image, to be read at `image_at`; returns the offset of the operations in it."""
        begin = up(len(maps) * MAP.itemsize)
        at, rows = begin + up(self.ops.nbytes), [rows_at]
        for n, m in enumerate(maps):
            MAP_FIELDS.pack_into(image.data, n * MAP.itemsize, image_at + at, rows[-1], len(m.rows), m.size)
            write_runs(m, image[at : at + RUN_BYTES * len(m.rows)].view(np.uint32).reshape(RUN_WORDS, len(m.rows)))
            at += RUN_BYTES * len(m.rows)
            rows.append(rows[-1] + _ROW_BYTES * m.size)
        ops = image[begin : begin + self.ops.nbytes].view(CONVERT)
        ops[:] = self.ops
        ops["places"] = np.array(rows, np.uint64)[self.maps]
        ops["n_rows"] = np.array([m.size for m in maps])[self.maps]
        return begin


def convert_table(program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]) -> ConvertTable:
    """The table of a program's operations that convert, with regions mapped at these addresses."""
    ops = program.ops[program.ops["made"] > 0]
    rows = np.zeros(len(ops), CONVERT)
    for side, bases in (("source", sources), ("sink", sinks), ("scale", sources)):
        base = np.array([bases[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
        rows[side] = base + ops[f"{side}_offset"].astype(np.uint64)
        for place in PLACES:
            rows[f"{side}_{place}"] = ops[f"{side}_{place}_stride"]
        rows[f"{side}_lane"][ops["lanes"] == 1] = 0
    wide = ops["made"] == Made.WIDE
    rows["blocks"] = np.maximum(ops["blocks"], 1)
    rows["length"] = ops["source_bytes"] // np.where(wide, 1, 2) // rows["blocks"]
    rows["lanes"], rows["made"], rows["stated"] = ops["lanes"], ops["made"], ops["stated"]
    together = rows["length"].astype(np.uint64)
    for side, twice in (("source", ~wide), ("sink", wide)):
        there = rows[side] | rows[f"{side}_item"] | rows[f"{side}_row"] | rows[f"{side}_lane"]
        counted = there // np.where(twice, 2, 1).astype(np.uint64)
        together |= np.where((side == "sink") & (ops["made"] == Made.SCALES), 0, counted)
    step = next(step for step in STEPS if not (together % np.uint64(step)).any())
    return ConvertTable(rows, ops["map"].copy(), step, _extents(program))
