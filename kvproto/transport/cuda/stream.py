"""The packed stream as work for the copy kernel: one side's rows at one end, a linear region at the other.

A record is a row of the stream, so the rows of a program's maps are expanded once, and a chunk is a few classes of
operations over an interval of them: its cost on the host does not depend on its runs. The kernel adds the address of
the slot that a chunk lies in. The bytes of a record that is cut are copied piece by piece.

Nothing here touches a device, so all of it is tested on a host with the kernel's own source.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram, Operations, RowMap, Side
from kvproto.errors import LocalError
from kvproto.transport.cuda import kernel
from kvproto.transport.staging.packed import Order, StreamColumns
from kvproto.wire.enums import ErrorCode

_HEAD = struct.Struct("<IIQQ")
PART = _HEAD.size + kernel.FEW_CLASSES * kernel.CLASS.itemsize
"""Bytes of the parameters of `copy_part`."""
_STREAM = -1
"""The region that is the stream."""
_WRAP = 1 << 64
_WIDE = 1 << 32
"""The device counts in 32 bits."""
_Classes = dict[int, list[tuple[int, ...]]]
"""Classes of one chunk by the width of their words, each with its number of operations behind it."""


@attrs.frozen
class PartLaunch:
    """One launch of `copy_part`."""

    word: int
    chunks: int
    parameters: bytes = attrs.field(repr=False)


@attrs.frozen
class ChunkCopies:
    """The copies of a chunk of a stream: launches, and copies of bytes of records that are cut."""

    parts: tuple[PartLaunch, ...]
    pieces: tuple[tuple[int, int, int], ...]
    """(source, sink, length)"""


class StreamSide:
    """One side of a rank pair, shared by its streams, with its regions by id; raises OUT_OF_REGION for operations.

    A source whose operations convert is refused with NO_TRANSPORT; a sink gets bytes that are converted already.
    """

    def __init__(
        self, program: CopyProgram, side: Side, addresses: Mapping[int, int], lengths: Mapping[int, int]
    ) -> None:
        if side == "source" and program.operations.converts:
            mine, advice = "bytes as they are", "use transport CUDA, or INLINE and NIXL from memory of the host"
            raise LocalError(ErrorCode.NO_TRANSPORT, "", mine, "a conversion", advice)
        self.columns = columns = StreamColumns(program, side, lengths)
        self.addresses = addresses
        self.stream: Side = "sink" if side == "source" else "source"
        numbers = np.diff(columns.first)
        bytes_ = columns.ops["lanes"] * columns.ops["lane_bytes"]
        self.place = np.cumsum(bytes_) - bytes_
        """The byte of its record at which each operation begins."""
        self.place -= np.repeat(self.place[columns.first[:-1]], numbers)
        ops = columns.ops.copy()
        ops["layer"] = np.repeat(np.arange(len(numbers)), numbers)  # so that an interval of columns is one of layers
        if program.operations.converts:
            ops["made"] = 0
        linear = {
            "region": _STREAM,
            "offset": self.place,
            "item_stride": 0,
            "row_stride": np.repeat(columns.width, numbers),
            "lane_stride": ops["lane_bytes"],
            "items": 1,
            "rows": 0,
        }
        for name, value in linear.items():
            ops[f"{self.stream}_{name}"] = value
        sources, sinks = (addresses, {_STREAM: 0}) if side == "source" else ({_STREAM: 0}, addresses)
        self.table = kernel.table(CopyProgram(program.maps, Operations(ops), ()), sources, sinks, free=self.stream)
        # lists, as a chunk looks up too few for numpy to pay off
        self.width, self.column = columns.width.tolist(), self.table.layers.tolist()
        """The bytes of a record in each column, and the column of each operation of the table."""

    @property
    def words(self) -> list[int]:
        """Widths of words that chunks may use, as the place of a column in the stream depends on those before it."""
        words = {shape.word for shape in self.table.shapes}
        return [w for w in kernel.WORDS if words and min(words) <= w <= max(words)]


class StreamTable:
    """One request's stream; raises OUT_OF_REGION if its maps leave the pools."""

    def __init__(self, side: StreamSide, maps: Sequence[RowMap]) -> None:
        self._side, self._maps, self._stream = side, maps, side.stream
        self.order = order = Order(side.columns, maps)
        if order.most >= _WIDE:
            raise LocalError(ErrorCode.OUT_OF_REGION, "", f"items and rows below {_WIDE}", str(order.most))
        table = side.table
        self._places = table.ops[self._stream] + order.start.astype(np.uint64)[table.layers]
        """The byte of the stream at which each operation of the table begins."""
        self._ops_at, self._rows_at = 0, [0] * len(maps)
        self._start, self._end, self._sizes = order.start.tolist(), order.end.tolist(), [m.size for m in maps]
        places = self._places % kernel.WORDS[0]
        self._misaligned = [
            int(places[s.start]) if (places[s.start : s.stop] == places[s.start]).all() else None for s in table.shapes
        ]
        """For each shape: the byte of a word at which its operations begin, if it is the same for all."""
        self.n_maps, self.most_rows = len(maps), max(self._sizes, default=0)
        """Maps to expand, and rows of the longest one."""
        self._ops_begin = kernel.up(len(maps) * kernel.MAP.itemsize)
        self._runs_at = self._ops_begin + kernel.up(table.ops.nbytes)
        runs = sum(len(m.rows) for m in maps)
        self.sizes = self._runs_at + kernel.RUN_BYTES * runs + 16, 16 * sum(self._sizes) + 16
        """Bytes of the image and of the expanded rows."""

    def write(self, image: npt.NDArray[np.uint8], image_at: int, rows_at: int) -> int:
        """Write maps, operations and runs, to be read at address `image_at`; returns the number of bytes."""
        ops = self._side.table.ops
        self._ops_at = image_at + self._ops_begin
        here = image[self._ops_begin : self._ops_begin + ops.nbytes].view(kernel.OP)
        here[:] = ops
        here[self._stream] = self._places
        at, row = self._runs_at, rows_at
        for i, m in enumerate(self._maps):
            n = len(m.rows)
            kernel.MAP_FIELDS.pack_into(image.data, i * kernel.MAP.itemsize, image_at + at, row, n, m.size)
            runs = image[at : at + kernel.RUN_BYTES * n].view(np.uint32).reshape(kernel.RUN_WORDS, n)
            kernel.write_runs(m, runs, self._stream)  # the order has checked them
            self._rows_at[i] = row
            at, row = at + kernel.RUN_BYTES * n, row + 16 * m.size
        return at

    def chunk_size(self, offset: int, most: int) -> int:
        """Bytes of a chunk at `offset`: at most `most`, and up to the end of a record if one ends there."""
        order = self.order
        if offset + most >= order.length:
            return most
        c = bisect_right(self._end, offset + most)
        cut = (offset + most - self._start[c]) % self._side.width[c]
        return most - cut if most > cut else most

    def chunk(self, offset: int, length: int, address: int) -> ChunkCopies:
        """The launches that copy stream bytes [offset, offset + length) from or to `address`; raises OUT_OF_RANGE."""
        end = offset + length
        self.order.check(offset, end)
        shift = address - offset
        classes: _Classes = {}
        pieces: list[tuple[int, int, int]] = []
        at = offset
        c = bisect_right(self._end, offset)
        while at < end:
            begin, stop, width = self._start[c], self._end[c], self._side.width[c]
            if at == begin and stop <= end:
                after = bisect_right(self._end, end)
                self._add_classes(classes, shift, c, after, 0, None)
                at, c = self._end[after - 1], after
                continue
            stop = min(stop, end)
            first, last = -(-(at - begin) // width), (stop - begin) // width
            if first > last:  # within one record
                pieces += self._pieces(shift, c, last, at - begin - last * width, stop - at)
            else:
                if at < begin + first * width:
                    skip = at - begin - (first - 1) * width
                    pieces += self._pieces(shift, c, first - 1, skip, width - skip)
                if last > first:
                    self._add_classes(classes, shift, c, c + 1, first, last - first)
                if begin + last * width < stop:
                    pieces += self._pieces(shift, c, last, 0, stop - begin - last * width)
            at, c = stop, c + 1
        return ChunkCopies(tuple(self._parts(classes, shift)), tuple(pieces))

    def _add_classes(self, classes: _Classes, shift: int, first: int, last: int, row: int, rows: int | None) -> None:
        """Add classes for records [row, row + rows), or all, of columns [first, last)."""
        table, columns = self._side.table, self._side.column
        for shape, misaligned in zip(table.shapes, self._misaligned, strict=True):
            lo, hi = (bisect_left(columns, n, shape.start, shape.stop) for n in (first, last))
            if lo == hi:
                continue
            if misaligned is None:
                low = int(np.bitwise_or.reduce(self._places[lo:hi] + np.uint64(shift % _WRAP)))
            else:
                low = (misaligned + shift) % kernel.WORDS[0]
            word = min(shape.word, low & -low or shape.word)
            words = shape.words * (shape.word // word)
            width, number = words * shape.units, self._sizes[shape.map] if rows is None else rows
            of_word = classes.setdefault(word, [])
            for skip in range(0, number, kernel.MOST // width):
                n_rows = min(kernel.MOST // width, number - skip)
                chunks = -(-n_rows * width // (kernel.THREADS * kernel.DEPTH))
                place = self._rows_at[shape.map] + 16 * (row + skip)
                ops = self._ops_at + lo * kernel.OP.itemsize
                of_word.append((ops, place, n_rows, words, shape.units, chunks, hi - lo))

    def _parts(self, classes: _Classes, shift: int) -> Iterator[PartLaunch]:
        shifts = (0, shift % _WRAP) if self._stream == "sink" else (shift % _WRAP, 0)
        for word, of_word in classes.items():
            for k in range(0, len(of_word), kernel.FEW_CLASSES):
                of_launch, first = of_word[k : k + kernel.FEW_CLASSES], 0
                parameters = bytearray(PART)
                for i, (*fields, chunks, number) in enumerate(of_launch):
                    place = _HEAD.size + i * kernel.CLASS.itemsize
                    kernel.CLASS_FIELDS.pack_into(parameters, place, *fields, chunks, first, 0)
                    first += chunks * number
                _HEAD.pack_into(parameters, 0, len(of_launch), first, *shifts)
                yield PartLaunch(word, first, bytes(parameters))

    def _pieces(self, shift: int, c: int, record: int, skip: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Copies of bytes [skip, skip + size) of one record."""
        order, columns = self.order, self._side.columns
        begin, end = int(columns.first[c]), int(columns.first[c + 1])
        which = int(columns.map[c])
        item, row, rows = order.runs(which)
        ends = order.maps[which].ends
        run = int(np.searchsorted(ends, record, "right"))
        row_ = int(row[run]) + record - (int(ends[run]) - int(rows[run]))
        there = shift + self._start[c] + record * self._side.width[c]
        for k in range(begin, end):
            op, place = columns.ops[k], int(self._side.place[k])
            side: dict[str, int] = {n: int(op[f"{columns.side}_{n}"]) for n in _FIELDS}
            here = self._side.addresses[side["region"]] + side["offset"]
            here += int(item[run]) * side["item_stride"] + row_ * side["row_stride"]
            unit, lanes = int(op["lane_bytes"]), int(op["lanes"])
            stride = side["lane_stride"]
            if lanes == 1 or stride == unit:
                unit, lanes = unit * lanes, 1
            for lane in range(lanes):
                lo, hi = max(skip, place + lane * unit), min(skip + size, place + (lane + 1) * unit)
                if lo < hi:
                    own, at = here + lane * stride + lo - place - lane * unit, there + lo
                    yield (own, at, hi - lo) if columns.side == "source" else (at, own, hi - lo)


_FIELDS = ("region", "offset", "item_stride", "row_stride", "lane_stride")
