"""Data that the kernels read (kernel.cu): tables of operations, launches of copies and checksums, and their formats.

A table of a rank pair's operations is uploaded once, at registration. A launch of many works is uploaded as an image of
maps, classes and runs; a small one fits into the kernel's parameters. Nothing here touches a device, so all of it is
tested on a host with the kernel's own source.
"""

import struct
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from operator import ge
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, RowMap, Side
from kvproto.errors import LocalError, bad
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
    """The table of operations that do not convert, with regions mapped at these addresses, or at launch if `free`."""
    ops = _as_they_are(program)
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


def _as_they_are(program: CopyProgram) -> npt.NDArray[np.void]:
    """The operations of a program that do not convert."""
    return program.ops[program.ops["made"] == 0] if program.operations.converts else program.ops


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
    conversions: tuple[tuple[int, int, int, int], ...]
    """(kind of step, offset of the first operation in the image, operations, chunks), one for each kernel."""
    long: tuple[Long, ...]
    bytes: int


@attrs.frozen
class UploadedLaunch:
    """One upload and its launches."""

    size: int
    """Bytes of the image: maps, then classes, then conversions, then runs."""
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
    conversions: "ConvertTable | None" = None
    """Operations that convert, which each launch uploads; None if there are none."""

    @cached_property
    def most_blocks(self) -> int:
        """The most blocks of a row that an operation converts."""
        ops = NO_CONVERSIONS.ops if self.conversions is None else self.conversions.ops
        return int((ops["lanes"].astype(np.int64) * ops["blocks"]).max(initial=0))


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
    """Raise OUT_OF_REGION if a map names an item or row beyond the pools, OUT_OF_RANGE for too many blocks."""
    for work in _apart(works):
        for m, extents in zip(work.maps, work.prepared.table.bounds, strict=True):
            (low, *here), (lowest, *there) = m.source_reach, m.sink_reach
            high = here + there
            if low < 0 or lowest < 0 or any(map(ge, high, extents)):
                for name, place, most, extent in zip(_PLACE_NAMES, m.places, high, extents, strict=True):
                    least = int(place.min())
                    if least < 0 or most >= extent:
                        mine, yours = f"0 to {extent - 1}", str(most if most >= extent else least)
                        raise LocalError(ErrorCode.OUT_OF_REGION, name, mine, yours, "name items of the pool")
        most, rows = work.prepared.most_blocks, max((m.size for m in work.maps), default=0)
        if most * rows > MOST:
            raise bad("rows", f"{MOST} blocks of an operation that converts", most * rows, "hand over in parts")


_PLACE_NAMES = ("source item", "source row", "sink item", "sink row")


def sizes(works: Sequence[CopyJob]) -> tuple[int, int]:
    """The most bytes of image and of rows that `launch` needs."""
    apart = _apart(works)
    runs = sum(len(m.rows) for w in apart for m in w.maps)
    maps = sum(len(w.maps) for w in apart)
    cuts = sum(len(w.prepared.table.shapes) * (2 + _cuts(w)) for w in works)
    rows = sum(m.size for w in apart for m in w.maps)
    converted = sum(w.prepared.conversions.ops.nbytes for w in works if w.prepared.conversions)
    head = up(maps * MAP.itemsize) + up(cuts * CLASS.itemsize) + up(converted)
    return head + up(runs * RUN_BYTES + 16), rows * 16 + 16


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
    conversions, totals = _Conversions(), [0] * len(engine)
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
        if work.prepared.conversions is not None:
            totals[group] += conversions.add(group, work.prepared.conversions, work.maps, begins, work.layers)
    classes_at = up(len(maps) * MAP.itemsize)
    converting_at = classes_at + up(sum(map(len, classes.values())) * CLASS.itemsize)
    runs_at = converting_at + up(conversions.bytes)
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
    converts = conversions.write(image, converting_at)
    groups = (
        LaunchGroup(tuple(k), tuple(converts.get(n, ())), tuple(long), b)
        for n, (k, long, b) in enumerate(zip(kernels, engine, totals, strict=True))
    )
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
    if any(w.prepared.conversions for w in works) or sum(len(m.rows) for w in works for m in w.maps) > FEW_RUNS:
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
    conversions: "ConvertTable"
    """The source's operations that convert, whose `total` is that too."""
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
        size = self._runs + RUN_BYTES * runs + 8 * len(self.groups) + 8
        return size, 2 * _ROW_BYTES * sum(m.size for m in maps) + _ROW_BYTES

    @property
    def _ops(self) -> int:
        return up(self.n_maps * MAP.itemsize)

    @property
    def _converting(self) -> int:
        return self._ops + up(self.ops.nbytes)

    @property
    def _runs(self) -> int:
        return self._converting + up(self.conversions.ops.nbytes)

    def write(
        self, maps: Sequence[RowMap], image: npt.NDArray[np.uint8], image_at: int, rows_at: int
    ) -> tuple[int, list[tuple[int, int, int, int]]]:
        """Write one request's image, to be read at `image_at`, with rows expanded to `rows_at`.

        Returns the number of bytes, and the launches of conversions as of `LaunchGroup`.
        """
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
        conversions = _Conversions()
        conversions.add(0, self.conversions, maps, rows, None, image_at + at)
        return at + 8 * len(self.groups), conversions.write(image, self._converting).get(0, [])

    def sums(self, maps: Sequence[RowMap], totals: npt.NDArray[np.uint8]) -> dict[int, int]:
        """Checksums by sink group id, of the last bytes of the image."""
        with_rows = {n for n, m in enumerate(maps) if m.size}
        values = totals.view(np.uint64).tolist()
        return {g: value for g, of, value in zip(self.groups, self.maps, values, strict=True) if with_rows & of}


def sum_table(program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> SumTable:
    """The table of a program's operations on one side, whose regions are at these addresses."""
    side = "sink" if sink else "source"
    ops = program.ops if sink else _as_they_are(program)
    groups = np.unique(program.ops["group"]).tolist()
    rows = np.zeros(len(ops), SUM)
    rows["base"] = np.array([addresses[r] for r in ops[f"{side}_region"].tolist()], np.uint64)
    rows["base"] += ops[f"{side}_offset"].astype(np.uint64)
    for place in PLACES:
        rows[place] = ops[f"{side}_{place}_stride"]
    together = ops["lane_bytes"].astype(np.uint64)
    for name in ("base", *PLACES):
        together |= rows[name]
    word = np.max([np.where(together & np.uint64(size - 1), 1, size) for size in WORDS], axis=0, initial=1)
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
    maps_of = (frozenset(program.ops["map"][program.ops["group"] == g].tolist()) for g in groups)
    conversions = convert_table(program, addresses, {}) if not sink and program.operations.converts else NO_CONVERSIONS
    return SumTable(rows, conversions, tuple(spans), tuple(launches), tuple(groups), tuple(maps_of), n_maps)


# conversions

GROUP = 16
"""Most threads that share a block of a lane: a power of two, at most a warp."""
CONVERT_THREADS, CONVERT_DEPTH = 256, 1
"""Threads of a block of a launch, and blocks of a lane that a thread has in flight."""
CONVERT_RESIDENT = 4
"""Blocks of a launch that a multiprocessor has registers for."""
STEPS = {
    32: (4, "uint4", "uint2", "float"),
    1: (1, "unsigned short", "unsigned char", "float"),
    0: (1, "Two", "unsigned char", "Four"),
}
"""By elements that a thread has at once: words, types of words of two bytes an element and of one, type of a scale.

0 is one element that is not aligned."""
CONVERT = np.dtype(
    [(n, "<u8") for side in ("source", "sink", "scale") for n in (side, *(f"{side}_{place}" for place in PLACES))]
    + [(n, "<u8") for n in ("places", "globals", "total", "seed", "lo")]
    + [(n, "<u4") for n in ("n_rows", "lanes", "blocks", "length", "made", "stated", "first", "shift")]
)  # fmt: skip


@attrs.frozen(eq=False)
class ConvertTable:
    """The operations of a rank pair that convert, with absolute addresses, in ascending order of layers."""

    ops: npt.NDArray[np.void]
    """Rows of dtype CONVERT; `total` is the position of the group among all, if sums are taken."""
    layers: npt.NDArray[np.int64]
    """The layer of each operation."""
    maps: npt.NDArray[np.int64]
    """The map of each operation."""
    steps: npt.NDArray[np.int64]
    """The key of `STEPS` of each operation."""
    row_bytes: npt.NDArray[np.int64]
    """Bytes of a row that each operation writes."""


class _Conversions:
    """The operations of one launch that convert."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], list[npt.NDArray[np.void]]] = {}
        """By group of the launch and step."""
        self.bytes = 0
        """Bytes of the operations."""

    def add(
        self,
        group: int,
        table: ConvertTable,
        maps: Sequence[RowMap],
        rows: Sequence[int],
        layers: tuple[int, int] | None,
        totals: int = 0,
    ) -> int:
        """Add operations over the maps' expanded rows, which begin at `rows`; returns the bytes that they write.

        For sums, `rows` are followed by those of global rows, and `totals` is the place of the first group's sum.
        """
        lo, hi = (0, len(table.ops)) if layers is None else (int(np.searchsorted(table.layers, x)) for x in layers)
        sizes, places = np.array([m.size for m in maps], np.int64), np.array([*rows, 0], np.uint64)
        of_map = table.maps[lo:hi]
        for step in np.unique(table.steps[lo:hi]).tolist():
            wanted = (table.steps[lo:hi] == step) & (sizes[of_map] > 0)
            ops, which = table.ops[lo:hi][wanted], of_map[wanted]
            ops["places"], ops["n_rows"] = places[which], sizes[which]
            if totals:
                ops["globals"] = places[which + len(maps)]
                ops["total"] = ops["total"] * 8 + np.uint64(totals)
            self._of.setdefault((group, step), []).append(ops)
            self.bytes += ops.nbytes
        return int(sizes[of_map] @ table.row_bytes[lo:hi])

    def write(self, image: npt.NDArray[np.uint8], at: int) -> dict[int, list[tuple[int, int, int, int]]]:
        """Write them to a place of an image; returns launches by group, as of `LaunchGroup`."""
        launches: dict[int, list[tuple[int, int, int, int]]] = {}
        for (group, step), parts in self._of.items():
            ops = np.concatenate(parts)
            if not len(ops):
                continue
            units = ops["n_rows"].astype(np.int64) * ops["lanes"] * ops["blocks"]
            ends = np.cumsum(-(-units // ((CONVERT_THREADS >> ops["shift"].astype(np.int64)) * CONVERT_DEPTH)))
            ops["first"][1:] = ends[:-1]
            image[at : at + ops.nbytes].view(CONVERT)[:] = ops
            launches.setdefault(group, []).append((step, at, len(ops), int(ends[-1])))
            at += ops.nbytes
        return launches


def convert_table(program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]) -> ConvertTable:
    """The table of a program's operations that convert, with regions mapped at these addresses; no sinks: for sums.

    Scales that are made of lanes which another operation converts are written by that one.
    """
    ops = program.ops[program.ops["made"] > 0]
    ops = ops[np.argsort(ops["layer"], kind="stable")]
    rows = np.zeros(len(ops), CONVERT)
    for side, bases in (("source", sources), ("sink", sinks), ("scale", sources)):
        base = np.array([bases.get(r, 0) for r in ops[f"{side}_region"].tolist()], np.uint64)
        rows[side] = base + ops[f"{side}_offset"].astype(np.uint64)
        for place in PLACES:
            rows[f"{side}_{place}"] = ops[f"{side}_{place}_stride"]
        rows[f"{side}_lane"][ops["lanes"] == 1] = 0
    made = ops["made"]
    for name in _SCALE:
        rows[name][(made != Made.WIDE) | (ops["stated"] > 0)] = 0
    rows["blocks"] = np.maximum(ops["blocks"], 1)
    rows["length"] = ops["source_bytes"] // np.where(made == Made.WIDE, 1, 2) // rows["blocks"]
    for name in ("lanes", "made", "stated", "seed", "lo"):
        rows[name] = ops[name]
    rows["total"] = np.searchsorted(np.unique(program.ops["group"]), ops["group"])
    row_bytes, kept = ops["lanes"] * ops["lane_bytes"], np.ones(len(ops), bool)
    for scales, values in _pairs(ops, rows) if sinks else ():
        for name, of_sink in zip(_SCALE, _SINK, strict=True):
            rows[name][values] = rows[of_sink][scales]
        row_bytes[values] += row_bytes[scales]
        kept[scales] = False
    rows, ops = rows[kept], ops[kept]
    steps = _steps(rows, bool(sinks))
    words = -(-rows["length"].astype(np.int64) // np.maximum(steps, 1))
    rows["shift"] = np.ceil(np.log2(np.clip(words, 1, GROUP)))
    return ConvertTable(rows, ops["layer"].copy(), ops["map"].copy(), steps, row_bytes[kept])


_SINK = "sink", "sink_item", "sink_row", "sink_lane"
_SCALE = "scale", "scale_item", "scale_row", "scale_lane"


def _pairs(ops: npt.NDArray[np.void], rows: npt.NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Indices of operations that make scales, each with that which converts the same lanes by them."""
    read = ["source", "source_item", "source_row", "source_lane", "lanes", "blocks", "length"]
    keys = [(of_map, *row) for of_map, row in zip(ops["map"].tolist(), rows[read].tolist(), strict=True)]
    values = {key: i for i, key in enumerate(keys) if rows["made"][i] == Made.NARROW and not rows["stated"][i]}
    for i, key in enumerate(keys):
        if rows["made"][i] == Made.SCALES and key in values:
            yield i, values.pop(key)


def _steps(rows: npt.NDArray[np.void], writes: bool) -> npt.NDArray[np.int64]:
    """The widest step of each operation that its places and its blocks allow."""
    wide, narrow, scale = (_together(rows, side) for side in ("source", "sink", "scale"))
    widens, scales = rows["made"] == Made.WIDE, rows["made"] == Made.SCALES
    wide, narrow = np.where(widens, narrow, wide), np.where(widens, wide, narrow)
    if not writes:
        wide, narrow = np.where(widens, 0, wide), np.where(widens, narrow, 0)
    scale, narrow = np.where(scales & writes, narrow, scale), np.where(scales, 0, narrow)
    aligned = (wide % 2 == 0) & (scale % 4 == 0)
    words = aligned & (wide % 16 == 0) & (narrow % 8 == 0) & (rows["length"] % 8 == 0)
    return np.where(words, 32, aligned.astype(np.int64))


def _together(rows: npt.NDArray[np.void], side: str) -> npt.NDArray[np.uint64]:
    """The bits of all addresses and strides of a side."""
    bits: npt.NDArray[np.uint64] = rows[side] | rows[f"{side}_item"] | rows[f"{side}_row"] | rows[f"{side}_lane"]
    return bits


NO_CONVERSIONS = ConvertTable(*(np.empty(0, kind) for kind in (CONVERT, np.int64, np.int64, np.int64, np.int64)))
