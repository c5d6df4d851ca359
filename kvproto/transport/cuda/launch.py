"""Launches of the copy kernel: what the host writes for each of them, once the table of operations is uploaded.

A launch of many works is uploaded as an image of maps, classes and runs; a small one fits into the kernel's parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import ge

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import RowMap
from kvproto.errors import LocalError
from kvproto.transport.cuda import table as tables
from kvproto.transport.cuda.table import Shape, Table, write_runs
from kvproto.wire.enums import ErrorCode

__all__ = [
    "INLINE_BYTES",
    "InlineLaunch",
    "Launch",
    "LaunchGroup",
    "Long",
    "Work",
    "check",
    "inline_launch",
    "launch",
    "parts",
    "sizes",
]  # fmt: skip


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
        found = np.empty((3, len(self.ops), len(m.rows)), np.uint64)
        for i, (side, item, row) in enumerate(
            (("source", m.source_item, m.source_row), ("sink", m.sink_item, m.sink_row))
        ):
            found[i] = item.astype(np.uint64) * self.ops[f"{side}_item"][:, None] + row.astype(np.uint64) * width
            found[i] += self.ops[side][:, None]
        found[2] = m.rows.astype(np.uint64) * width
        return found.reshape(3, -1)


@attrs.frozen
class LaunchGroup:
    """Launches whose end is one event."""

    classes: tuple[tuple[int, int, int, int], ...]
    """(word, offset of the first class in the image, classes, chunks), one for each copy kernel."""
    long: tuple[Long, ...]
    bytes: int


@attrs.frozen
class Launch:
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
        """Bytes that are written."""
        return sum(group.bytes for group in self.groups)


@attrs.frozen
class Work:
    """A prepared table, where it lies on the device, and one request's maps."""

    table: Table
    address: int
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None
    """Only layers [lo, hi)."""


_FIRST_RUNS, _GROWTH = 8192, 3
"""The host writes 8,192 runs in some 100 us while the GPU copies the part before; each part costs the GPU 40 us."""


def parts(works: Sequence[Work], most: int) -> list[Sequence[Work]]:
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
    some = slice(len(m.rows) * a // of, len(m.rows) * b // of)
    return attrs.evolve(
        m, source_item=m.source_item[some], source_row=m.source_row[some], sink_item=m.sink_item[some],
        sink_row=m.sink_row[some], rows=m.rows[some],
    )  # fmt: skip


def check(works: Sequence[Work]) -> None:
    """Raise OUT_OF_REGION if a map names an item or row beyond the pools."""
    for work in _apart(works):
        for m, extents in zip(work.maps, work.table.bounds, strict=True):
            (low, *here), (lowest, *there) = m.source_reach, m.sink_reach
            high = here + there
            if low < 0 or lowest < 0 or any(map(ge, high, extents)):
                for name, place, most, extent in zip(_PLACE_NAMES, m.places, high, extents, strict=True):
                    least = int(place.min())
                    if least < 0 or most >= extent:
                        came, pool = str(most if most >= extent else least), f"0 to {extent - 1}"
                        raise LocalError(ErrorCode.OUT_OF_REGION, name, pool, came, "name items of the pool")


_PLACE_NAMES = ("source item", "source row", "sink item", "sink row")


def sizes(works: Sequence[Work]) -> tuple[int, int]:
    """The most bytes of image and of rows that `launch` needs."""
    some = _apart(works)
    runs = sum(len(m.rows) for w in some for m in w.maps)
    maps = sum(len(w.maps) for w in some)
    cuts = sum(len(w.table.shapes) * (2 + _cuts(w)) for w in works)
    rows = sum(m.size for w in some for m in w.maps)
    return tables.up(maps * tables.MAP.itemsize) + tables.up(cuts * tables.CLASS.itemsize) + tables.up(
        runs * tables.RUN_BYTES + 16
    ), rows * 16 + 16


def _apart(works: Sequence[Work]) -> list[Work]:
    """The works that do not share the maps of the work before."""
    return [w for i, w in enumerate(works) if not i or w.maps is not works[i - 1].maps]


def _cuts(work: Work) -> int:
    most = max((work.maps[s.map].size * s.words * s.units for s in work.table.shapes), default=0)
    return most // tables.MOST


def launch(
    works: Sequence[Work], image: npt.NDArray[np.uint8], image_at: int, rows_at: int, long: int = tables.LONG,
    each: bool = False,
) -> Launch:  # fmt: skip
    """Write the image of one launch for all works, to be read at address `image_at`; rows are expanded at `rows_at`.

    `image` has room for `sizes`, and the works have passed `check`. Runs of `long` bytes or more go by the copy engine.
    With `each` the kernels of each work have their own end. Works that share their maps share their rows.
    """
    maps: list[tuple[int, int, int, int]] = []
    classes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    chunks_of: dict[tuple[int, int], int] = {}
    engine: list[list[Long]] = [[] for _ in (works if each else works[:1])]
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
        group = k if each else 0
        for shape, lo, hi in _wanted(work):
            m, width = work.maps[shape.map], shape.words * shape.units
            totals[group] += m.size * shape.word * width * (hi - lo)
            if _is_long(work, shape, lo, hi, long):
                engine[group].append(Long(work.table.ops[lo:hi], m, shape.word * shape.words))
                continue
            ops = work.address + lo * tables.OP.itemsize
            for skip in range(0, m.size, tables.MOST // width):
                rows = min(tables.MOST // width, m.size - skip)
                chunks = -(-rows * width // (tables.THREADS * tables.DEPTH))
                kernel = group, shape.word
                first, begin = chunks_of.get(kernel, 0), begins[shape.map] + 16 * skip
                made = ops, begin, rows, shape.words, shape.units, chunks, first
                classes.setdefault(kernel, []).append(made)
                chunks_of[kernel] = first + chunks * (hi - lo)
    classes_at = tables.up(len(maps) * tables.MAP.itemsize)
    runs_at = classes_at + tables.up(sum(map(len, classes.values())) * tables.CLASS.itemsize)
    end = runs_at + tables.RUN_BYTES * n_runs
    runs = image[runs_at:end].view(np.uint32)
    for k, m in enumerate(m for w in apart for m in w.maps):
        at, begin, n, size = maps[k]
        tables.MAP_FIELDS.pack_into(
            image.data, k * tables.MAP.itemsize, image_at + runs_at + tables.RUN_BYTES * at, begin, n, size
        )
        write_runs(m, runs[tables.RUN_WORDS * at : tables.RUN_WORDS * (at + n)].reshape(tables.RUN_WORDS, n))
    kernels: list[list[tuple[int, int, int, int]]] = [[] for _ in engine]
    at = classes_at
    for (group, word), some in classes.items():
        kernels[group].append((word, at, len(some), chunks_of[group, word]))
        for numbers in some:
            tables.CLASS_FIELDS.pack_into(image.data, at, *numbers, 0)
            at += tables.CLASS.itemsize
    groups = (LaunchGroup(tuple(k), tuple(long), b) for k, long, b in zip(kernels, engine, totals, strict=True))
    return Launch(end, len(maps), most_rows, tuple(groups))


_HEAD = struct.Struct("<II8x")
_FEW_RUNS_AT = _HEAD.size + tables.FEW_CLASSES * tables.CLASS.itemsize
INLINE_BYTES = _FEW_RUNS_AT + 4 * tables.FEW_WORDS
"""Bytes of a launch that fits into a kernel's parameters."""


@attrs.frozen
class InlineLaunch:
    """A launch that fits into the parameters of `copy_few`."""

    word: int
    chunks: int
    bytes: int


def inline_launch(
    works: Sequence[Work], image: npt.NDArray[np.uint8], most_chunks: int, long: int = tables.LONG
) -> InlineLaunch | None:
    """Write a launch of at most FEW_CLASSES of one word and FEW_RUNS to `image` [INLINE_BYTES]; None if it is larger.

    The works have passed `check`. Nothing is uploaded and nothing expanded, which is most of what a small hand-over
    costs; the rest is numpy calls, so there are few.
    """
    if sum(len(m.rows) for w in works for m in w.maps) > tables.FEW_RUNS:
        return None
    word, number, first, total, data = 0, 0, 0, 0, image.data
    begins = {}
    at = 0
    for k, work in enumerate(works):
        for i, m in enumerate(work.maps):
            begins[k, i] = at
            at += tables.RUN_WORDS * len(m.rows)
        for shape, lo, hi in _wanted(work):
            rows, width = work.maps[shape.map], shape.words * shape.units
            chunks = -(-rows.size * width // (tables.THREADS * tables.DEPTH))
            ops, place = work.address + lo * tables.OP.itemsize, begins[k, shape.map]
            big = first + chunks * (hi - lo) > most_chunks or _is_long(work, shape, lo, hi, long)
            if number == tables.FEW_CLASSES or big or word not in (0, shape.word) or rows.size * width > tables.MOST:
                return None
            numbers = rows.size, shape.words, shape.units, chunks, first, len(rows.rows)
            tables.CLASS_FIELDS.pack_into(data, _HEAD.size + number * tables.CLASS.itemsize, ops, place, *numbers)
            word, number, first = shape.word, number + 1, first + chunks * (hi - lo)
            total += rows.size * word * width * (hi - lo)
    for k, work in enumerate(works):
        for i, m in enumerate(work.maps):
            place, n = _FEW_RUNS_AT + 4 * begins[k, i], len(m.rows)
            if m.numbers is not None:
                *places, lengths = m.numbers
                firsts = accumulate(lengths[:-1], initial=0) if n else ()
                struct.pack_into(f"<{tables.RUN_WORDS * n}I", data, place, *firsts, *chain(*places))
            else:
                write_runs(m, image[place : place + tables.RUN_BYTES * n].view(np.uint32).reshape(tables.RUN_WORDS, n))
    _HEAD.pack_into(data, 0, number, first)
    return InlineLaunch(word or tables.WORDS[0], first, total)


def _is_long(work: Work, shape: Shape, lo: int, hi: int, long: int) -> bool:
    """Whether the runs are long enough for the copy engine, which starts each of them separately."""
    m, width = work.maps[shape.map], shape.word * shape.words
    if shape.units > 1 or m.size * width < long or not work.table.joined[lo:hi].all():
        return False
    return int(m.rows.min()) * width >= long


def _wanted(work: Work) -> Iterator[tuple[Shape, int, int]]:
    """Shapes with rows to copy, and their operations for the wanted layers."""
    for shape in work.table.shapes:
        lo, hi = shape.start, shape.stop
        if work.layers is not None:
            lo, hi = (shape.start + int(np.searchsorted(work.table.layers[lo:hi], x)) for x in work.layers)
        if hi > lo and work.maps[shape.map].size:
            yield shape, lo, hi
