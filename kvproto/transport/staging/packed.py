"""The packed stream of a copy program, and the numpy packer (spec/v1/packed.md).

The stream is defined by global coordinates alone, so that a source with its true columns and a sink with a packed
stand-in for them cut the same bytes, however pages lie, runs join or lanes are split into operations:

* a *column* is all operations of one model, layer, part and map (a pair of groups and of token classes);
* columns follow each other by model, then layer, then part (index in the sink's group), then map in the order in which
  the pair's routes name it first, as lowering numbers maps;
* in a column, rows ascend by global row; a row's bytes ascend by their place on the part's lane axis.

A row of a column is therefore one *record* of fixed width, and byte i of a column is in record i // width. Operations
and runs decide only how the bytes are gathered. Whole items (groups with an encoding) are rows like any other.

A chunk may end anywhere, even within a record. Such a record is unpacked by reading it, changing the part that came,
and writing it back: nothing else may write those bytes meanwhile, and no byte outside the program is touched.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.execute import converted_rows
from kvproto.copying.program import CopyProgram, IntArray, RowMap, Side
from kvproto.copying.streams import Piece
from kvproto.errors import KvprotoError, LocalError, RemoteError, bad
from kvproto.wire.enums import CreditKind, ErrorCode

Layer = tuple[int, int]
"""(model, layer): model 0 is the target, 1 and up are the drafts."""
Bytes = npt.NDArray[np.uint8]

_LONG = 64 << 10
"""Runs of at least this many bytes are copied one by one: a slice costs less than a tenth of the copy."""
_BLOCK = 256 << 10
"""Bytes of a temporary array, few enough to stay in the CPU's cache."""


class PendingCopy(Protocol):
    """Packing or unpacking that has been started."""

    def ready(self) -> bool:
        """Whether it is complete; raises KvprotoError if it failed."""


class Packer(Protocol):
    """Packs or unpacks one stream; a GPU's packer launches a kernel and returns its event."""

    @property
    def length(self) -> int:
        """Bytes of the stream."""

    def chunk_size(self, offset: int, most: int) -> int:
        """Bytes of the next chunk, which begins at `offset`: `most`, or fewer if that is faster."""

    def prefix_bytes(self, layers: Collection[Layer]) -> int:
        """Bytes of the stream before the first byte that belongs to a layer outside `layers`."""

    def pack(self, offset: int, out: Any) -> PendingCopy:
        """Begin to write stream bytes [offset, offset + length of `out`) to `out`; raises OUT_OF_RANGE."""

    def unpack(self, offset: int, data: Any) -> PendingCopy:
        """Begin to write stream bytes [offset, offset + length of `data`) to their places; raises OUT_OF_RANGE."""


class PackedLink:
    """At the source: what the streams to one peer share."""

    kind: ClassVar[CreditKind]
    """The unit of the peer's credit."""

    def __init__(self) -> None:
        self.active: set[OutgoingStream] = set()
        """Streams with bytes that are still to be packed or announced."""

    def restart(self) -> None:
        """Forget all credit; streams that have begun fail, as what they sent may be lost."""
        for stream in self.active:
            stream.broken = stream.left < stream.bytes


@attrs.define
class PeerPages:
    """A peer's region whose pages only the peer itself writes, from the streams of a link."""

    path: str
    link: Any = None

    def close(self) -> None:
        """There is nothing to unmap."""


class OutgoingStream:
    """The source's end of a packed stream that is under way: a `Copying`, and its own `Stream`."""

    def __init__(self, link: PackedLink, packer: Packer, grows: bool = False) -> None:
        """With `grows`, nothing is packed before `mark_ready` says that its rows are there."""
        self._packer, self.bytes = packer, packer.length
        self._at, self._allowed = 0, 0 if grows else packer.length
        self.broken = False
        """Whether bytes of it may be lost."""
        self._pieces: list[Piece] = []
        if packer.length:
            link.active.add(self)

    @property
    def stream(self) -> Self:
        return self

    @property
    def left(self) -> int:
        return self.bytes - self._at

    def mark_ready(self, layers: Collection[Layer] | None, after: Sequence[int] = ()) -> None:
        """Allow packing the rows of these layers, or of all."""
        self._allowed = self.bytes if layers is None else max(self._allowed, self._packer.prefix_bytes(layers))

    def take(self) -> Sequence[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _check(self) -> None:
        """Raise PEER_LOST if bytes may be lost."""
        if self.broken:
            yours = f"{self._at} of {self.bytes} bytes sent when the connection broke"
            raise RemoteError(ErrorCode.PEER_LOST, "", "the stream to arrive", yours, "make a new ticket")


@attrs.define
class IncomingStream:
    """The sink's end of a packed stream from one source."""

    packer: Packer
    at: int = 0
    error: KvprotoError | None = None
    """The error that ended unpacking: a fault of ours, not the peer's."""

    def advance(self, offset: int, size: int, last: bool) -> None:
        """Pass the next bytes; raises OUT_OF_RANGE for others, FIELD_CONFLICT for a wrong `last`."""
        end, length = offset + size, self.packer.length
        error = None
        if offset != self.at or end > length:
            error = ErrorCode.OUT_OF_RANGE, "offset", f"{self.at} of {length}", f"{offset} to {end}"
        elif last != (end == length):
            error = ErrorCode.FIELD_CONFLICT, "last", f"{end == length}", f"{last}"
        if error:
            raise RemoteError(*error, "send the bytes of the stream in order, once")
        self.at = end

    def check_end(self) -> None:
        """Raise UNEXPECTED_MESSAGE if bytes are missing when no more come (KVP-STG-EARLY)."""
        if self.at < self.packer.length:
            mine, yours = f"a stream of {self.packer.length}", f"Done after {self.at}"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, yours, "send all bytes before Done")


class _CompletedCopy(PendingCopy):
    def ready(self) -> bool:
        return True


class StreamColumns:
    """The columns of one side's operations, in order, in regions of these lengths; raises OUT_OF_REGION."""

    def __init__(self, program: CopyProgram, side: Side, lengths: Mapping[int, int]) -> None:
        ops = program.ops[np.lexsort([program.ops[n] for n in ("lo", "map", "part", "layer", "model")])]
        self._check(ops, side, lengths)
        new = np.ones(len(ops), bool)
        if len(ops):
            new[1:] = np.any([ops[n][1:] != ops[n][:-1] for n in ("model", "layer", "part", "map")], axis=0)
        self.side, self.ops = side, ops
        """By column, and in a column in the order of a record's bytes."""
        self.first = np.append(np.flatnonzero(new), len(ops))
        """Operations of column c are [first[c], first[c + 1])."""
        heads = self.first[:-1]
        self.width = np.add.reduceat(ops["lanes"] * ops["lane_bytes"], heads) if len(ops) else np.empty(0, np.int64)
        """Bytes of a record, for each column."""
        self.map = ops["map"][heads]
        self.layers: list[Layer] = list(zip(ops["model"][heads].tolist(), ops["layer"][heads].tolist(), strict=True))
        bounds = np.full((len(program.maps), 2), np.iinfo(np.int64).max)
        for k, name in enumerate(("items", "rows")):
            np.minimum.at(bounds[:, k], ops["map"], ops[f"{side}_{name}"])
        self.bounds: list[list[int]] = bounds.tolist()
        """For each map, items and rows of the pool: the least of any operation."""

    def _check(self, ops: npt.NDArray[np.void], side: str, regions: Mapping[int, int]) -> None:
        converts = side == "source" and "made" in (ops.dtype.names or ())
        size = np.where(ops["made"], ops["source_bytes"], ops["lane_bytes"]) if converts else ops["lane_bytes"]
        reach = ops[f"{side}_offset"] + size
        extents = {"item": ops[f"{side}_items"], "row": ops[f"{side}_rows"], "lane": ops["lanes"]}
        for name, extent in extents.items():
            reach = reach + np.maximum(extent - 1, 0) * ops[f"{side}_{name}_stride"]
        lengths = np.array([regions.get(i, -1) for i in ops[f"{side}_region"].tolist()], np.int64)
        there = extents["item"] > 0  # a pool without items is refused by `bounds`
        for k in np.flatnonzero((reach > lengths) & there)[:1].tolist():
            path = f"layer {ops[k]['layer']}, part {ops[k]['part']}"
            mine, yours = f"{lengths[k]} bytes", f"{reach[k]} bytes"
            raise LocalError(ErrorCode.OUT_OF_REGION, path, mine, yours, "a layout of the region")


class Order:
    """The places of the columns in the stream of one request; raises OUT_OF_REGION if its maps leave the pools."""

    def __init__(self, columns: StreamColumns, maps: Sequence[RowMap]) -> None:
        self.columns, self.maps = columns, maps
        self.most = 0
        """The greatest number that any map names as an item or as the end of a run of rows."""
        for i, (m, (items, rows)) in enumerate(zip(maps, columns.bounds, strict=True)):
            least, item, row = m.source_reach if columns.side == "source" else m.sink_reach
            if least < 0 or item >= items or row >= rows:
                model, layer = columns.layers[int(np.flatnonzero(columns.map == i)[0])]
                path, mine = f"model {model}, layer {layer}", f"{items} items of {rows} rows"
                advice = "name items of the pool"
                raise LocalError(ErrorCode.OUT_OF_REGION, path, mine, f"item {item}, row {row}", advice)
            self.most = max(self.most, item, row + 1)
        bytes_ = columns.width * np.array([m.size for m in maps], np.int64)[columns.map]
        self.end = np.cumsum(bytes_)
        """The end of each column in the stream, in bytes."""
        self.start = self.end - bytes_
        self.length = int(bytes_.sum())

    def prefix_bytes(self, layers: Collection[Layer]) -> int:
        """As `Packer.prefix_bytes`."""
        other = (c for c, layer in enumerate(self.columns.layers) if layer not in layers)
        return next((int(self.start[c]) for c in other if self.start[c] < self.end[c]), self.length)

    def check(self, offset: int, end: int) -> None:
        """Raise OUT_OF_RANGE if the stream does not have bytes [offset, end)."""
        if not 0 <= offset <= end <= self.length:
            raise bad("", f"{self.length} bytes of stream", f"{offset} to {end}", "keep to its length")

    def runs(self, which: int) -> tuple[IntArray, IntArray, IntArray]:
        """Items, first rows and numbers of rows of a map's runs on this side."""
        m = self.maps[which]
        item, row = (m.source_item, m.source_row) if self.columns.side == "source" else (m.sink_item, m.sink_row)
        return item, row, m.rows


class PackedStream(Packer):
    """One side's end of the packed stream of a program; raises OUT_OF_REGION if it leaves pools or `regions`."""

    def __init__(self, program: CopyProgram, side: Side, regions: Mapping[int, memoryview]) -> None:
        self._side, self._converts = side, side == "source" and program.operations.converts
        self._memory = {i: _flat(m) for i, m in regions.items()}
        self._order = Order(StreamColumns(program, side, {i: m.size for i, m in self._memory.items()}), program.maps)

    @property
    def length(self) -> int:
        return self._order.length

    def chunk_size(self, offset: int, most: int) -> int:
        return most  # cutting a record costs nothing here

    def prefix_bytes(self, layers: Collection[Layer]) -> int:
        return self._order.prefix_bytes(layers)

    def pack(self, offset: int, out: Any) -> PendingCopy:
        return self._run(offset, _flat(out), into=False)

    def unpack(self, offset: int, data: Any) -> PendingCopy:
        return self._run(offset, _flat(data), into=True)

    def _run(self, offset: int, data: Bytes, into: bool) -> PendingCopy:
        order, end = self._order, offset + data.size
        order.check(offset, end)
        at = offset
        c = int(np.searchsorted(order.end, offset, "right"))
        while at < end:
            stop = min(end, int(order.end[c]))
            if at < stop:
                self._copy_column(c, at - int(order.start[c]), data[at - offset : stop - offset], into)
            at, c = stop, c + 1
        return _CompletedCopy()

    def _copy_column(self, c: int, at: int, data: Bytes, into: bool) -> None:
        """Bytes [at, at + data.size) of a column: the rest of a record, whole records, and the beginning of another."""
        width = int(self._order.columns.width[c])
        row, skip = divmod(at, width)
        done = 0
        if skip or data.size < width:
            done = min(width - skip, data.size)
            self._cut_record(c, row, skip, data[:done], into)
            row += 1
        whole = (data.size - done) // width
        if whole:
            self._records(c, row, whole, data[done : done + whole * width], into)
            done += whole * width
        if done < data.size:
            self._cut_record(c, row + whole, 0, data[done:], into)

    def _cut_record(self, c: int, row: int, skip: int, data: Bytes, into: bool) -> None:
        """Bytes [skip, skip + data.size) of one record, which is read and written whole."""
        record = np.empty(int(self._order.columns.width[c]), np.uint8)
        self._records(c, row, 1, record, into=False)
        if into:
            record[skip : skip + data.size] = data
            self._records(c, row, 1, record, into=True)
        else:
            data[:] = record[skip : skip + data.size]

    def _records(self, c: int, first: int, number: int, data: Bytes, into: bool) -> None:
        """Records [first, first + number) of a column."""
        order, columns = self._order, self._order.columns
        ops = columns.ops[columns.first[c] : columns.first[c + 1]]
        which = int(ops[0]["map"])
        rows = order.maps[which]
        ends = rows.ends
        lo = int(np.searchsorted(ends, first, "right"))
        hi = int(np.searchsorted(ends, first + number, "left")) + 1
        item, row = (a[lo:hi] for a in order.runs(which)[:2])
        length = rows.rows[lo:hi].astype(np.int64)
        begin = ends[lo:hi] - length
        cut = np.maximum(first - begin, 0)
        row, length = row + cut, np.minimum(ends[lo:hi], first + number) - (begin + cut)
        width, place = int(columns.width[c]), 0
        for k, op in enumerate(ops):
            piece = int(op["lanes"] * op["lane_bytes"])
            records = data.reshape(number, width)[:, place : place + piece]
            if self._converts and op["made"]:
                item_of_row, row_in_item = np.repeat(item, length), _row_places(row, length, 1)
                step = max(_BLOCK // width, 1)
                for a in range(0, number, step):
                    block = slice(a, a + step)
                    records[block] = converted_rows(
                        ops[k : k + 1], self._memory, item_of_row[block], row_in_item[block]
                    )
            else:
                self._operation(op, item, row, length, records, into)
            place += piece

    def _operation(self, op: Any, item: IntArray, row: IntArray, length: IntArray, data: Bytes, into: bool) -> None:
        """One operation over some runs; `data` [row, byte] is not contiguous if a record has several pieces."""
        items, rows, item_stride, row_stride, lane_stride, offset, region = (
            int(op[f"{self._side}_{n}"])
            for n in ("items", "rows", "item_stride", "row_stride", "lane_stride", "offset", "region")
        )
        memory, width, size = self._memory[region][offset:], data.shape[1], int(op["lane_bytes"])
        lanes = width // size
        if lanes > 1 and lane_stride != size:
            shape, strides = (items, rows, lanes, size), (item_stride, row_stride, lane_stride, 1)
            view = np.ndarray(shape, np.uint8, memory, 0, strides)
            item_of_row, row_in_item = np.repeat(item, length), _row_places(row, length, 1)
            step = max(_BLOCK // width, 1)
            for a in range(0, len(data), step):
                index, block = (item_of_row[a : a + step], row_in_item[a : a + step]), data[a : a + step]
                if into:
                    view[index] = block.reshape(-1, lanes, size)
                else:
                    block[:] = view[index].reshape(block.shape)
            return
        at = item * item_stride + row * row_stride
        if row_stride == width and data.flags.c_contiguous:
            # consecutive runs of equal length are copied together
            cuts = [0, *(np.flatnonzero(length[1:] != length[:-1]) + 1).tolist(), len(length)]
            if len(cuts) * 8 <= len(length) + 16:
                flat, done = data.reshape(-1), 0
                for a, b in pairwise(cuts):
                    run = int(length[a]) * width
                    end = done + run * (b - a)
                    _copy_elements(memory, at[a:b], run, flat[done:end], into)
                    done = end
                return
        at = _row_places(at, length, row_stride)
        if data.flags.c_contiguous:
            _copy_elements(memory, at, width, data.reshape(-1), into)
            return
        step = max(_BLOCK // width, 1)
        for a in range(0, len(data), step):
            strided = data[a : a + step]
            block = np.ascontiguousarray(strided) if into else np.empty(strided.shape, np.uint8)
            _copy_elements(memory, at[a : a + step], width, block.reshape(-1), into)
            if not into:
                strided[:] = block


def _flat(data: Any) -> Bytes:
    data = getattr(data, "buffer", data)  # registered memory has one
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1:
        return data
    return np.ndarray(memoryview(data).nbytes, np.uint8, data)


def _row_places(start: IntArray, length: IntArray, stride: int) -> IntArray:
    """The places of every row: start, start + stride, ... for each run."""
    if len(length) == int(length.sum()):
        return start
    before = np.cumsum(length) - length
    places: IntArray = np.repeat(start - before * stride, length) + np.arange(int(length.sum())) * stride
    return places


def _copy_elements(memory: Bytes, at: IntArray, size: int, data: Bytes, into: bool) -> None:
    """Copy `size` bytes at each place of memory to `data` in order, or with `into` from it."""
    if size >= _LONG:
        for i, a in enumerate(at.tolist()):
            here, there = memory[a : a + size], data[i * size : (i + 1) * size]
            if into:
                here[:] = there
            else:
                there[:] = here
        return
    kind = np.dtype((np.void, size))
    packed = data.view(kind)
    index, rest = np.divmod(at, size)
    if not rest.any():
        step, places = size, memory[: memory.size // size * size].view(kind)
    else:  # elements of a view that overlap, on the coarsest grid that has all places
        step = int(np.gcd.reduce(at))
        index, places = at // step, np.ndarray(((memory.size - size) // step + 1,), kind, memory, 0, (step,))
    if into:
        places[index] = packed
    elif step == size:
        np.take(places, index, out=packed, mode="clip")  # in bounds by construction; this mode writes without a copy
    else:
        block = max(_BLOCK // size, 1)
        for a in range(0, len(index), block):
            packed[a : a + block] = places[index[a : a + block]]
