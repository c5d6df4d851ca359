"""The numpy executor of copy programs, and the checksum of feature VERIFY.

Views are built over the region's own buffer, so numpy refuses places outside it. Numpy releases the GIL for
each index by arrays and each copy of more than 500 elements, and a thread that computes in Python then holds it for
5 ms. So a small program runs as slices of memoryviews, which keep the GIL, and operations that lie equally far apart on
both sides, as the sections of a transposed part do, run as one.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.converting import convert
from kvproto.copying.program import CONVERTING_OP, OP, PLACE, CopyProgram, IntArray, Operations, RowMap, Side
from kvproto.planning.conversion import SIZE, Made
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import DType
from kvproto.wire.messages import Group

Regions = Mapping[int, memoryview]
Bytes = npt.NDArray[np.uint8]


def execute(program: CopyProgram, sources: Regions, sinks: Regions) -> int:
    """Run a program between the regions of both sides, given by id; returns the number of bytes written."""
    here = there = None
    if program.bytes <= _MOST_BYTES:
        here, there = program.source_spans, program.sink_spans
    if here is not None and there is not None and len(here) <= _MOST_SPANS:
        for (source, begin, size), (sink, to, _) in zip(here, there, strict=True):
            sinks[sink][to : to + size] = sources[source][begin : begin + size]
        return program.bytes
    lengths = [list(_by_length(m)) for m in program.maps]
    for batch in _batches(program):
        rows = program.maps[batch.first[0]]
        for length, runs in lengths[batch.first[0]]:
            dst = _view(batch, "sink", length, sinks)
            data = _read(batch, "source", length, sources, rows.source_item[runs], rows.source_row[runs])
            dst[..., rows.sink_item[runs], rows.sink_row[runs], :, :, :] = data
    return program.bytes


@attrs.frozen(eq=False)
class _Batch:
    """Operations that differ only in coordinates and offsets, and lie equally far apart on both sides."""

    first: tuple[int, ...]
    ops: npt.NDArray[np.void]
    steps: dict[str, int]
    """Bytes from one operation to the next, on each side and of its scales."""

    @property
    def converts(self) -> bool:
        return len(self.first) > len(_FIELDS) and self.first[_MADE] > 0


def _batches(program: CopyProgram) -> Iterator[_Batch]:
    """All operations, in batches of at most 64 KiB, by layers or by sections, whichever makes fewer."""
    ops = program.ops
    by_layer = ops[np.argsort(ops["layer"], kind="stable")]
    for stretch, steps in min((_stretches(ops), _stretches(by_layer)), key=len):
        first = stretch[0].item()
        size = program.maps[first[0]].size * first[_LANES][0] * first[_LANES][1]
        most = max(_MOST_TOGETHER // max(size, 1), 1)
        for at in range(0, len(stretch), most):
            part = stretch[at : at + most]
            yield _Batch(part[0].item(), part, steps)


def _stretches(ops: npt.NDArray[np.void]) -> list[tuple[npt.NDArray[np.void], dict[str, int]]]:
    """The longest stretches of operations that lie equally far apart on both sides, and how far."""
    begins, (offsets, same) = [0], _compared(ops.dtype)
    fields = np.ascontiguousarray(ops).view(np.int64).reshape(len(ops), len(ops.dtype.names or ()))
    steps = fields[1:] - fields[:-1]
    apart = (steps[:, same] != 0).any(1)
    bends = apart.copy()
    bends[1:] |= (steps[1:, offsets] != steps[:-1, offsets]).any(1)
    for n in np.flatnonzero(bends).tolist():
        if apart[n] or n > begins[-1]:  # the second of a stretch says how far apart they are
            begins.append(n + 1)
    ends = [*begins[1:], len(ops)]
    return [
        (ops[begin:end], dict(zip(_AT, steps[begin, offsets].tolist() if end - begin > 1 else (), strict=False)))
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]


_MOST_SPANS, _MOST_BYTES = 128, 1 << 20
"""Bounds of a small program. Copying that many bytes takes 100 us, during which no other thread has the GIL."""
_BLOCK = 1 << 17
"""Bytes that a checksum reads at once."""
_EXACT = 1 << 13
"""Products of a byte and 32 bits whose sum a 64-bit float always holds."""
_FLOATS = 1 << 16
"""Floats of one product: they fit into a cache, and BLAS divides only larger ones among threads."""
_NARROW = 8
"""Bytes of a row from which products of floats are the faster ones."""
_KEPT_LOCK = 1 << 15
"""Bytes up to which a checksum does not release the GIL: it takes so long to get it back beside a busy thread."""
_MOST_TOGETHER = 1 << 16
"""Bytes of a batch. More, with a temporary copy and 64-bit words for sums, would not fit into a core's caches."""


def _by_length(rows: RowMap) -> Iterator[tuple[int, IntArray]]:
    """Each length of run that occurs, and the indices [n] of the runs that have it."""
    for length in np.unique(rows.rows).tolist():
        yield length, np.flatnonzero(rows.rows == length)


def _read(batch: _Batch, side: Side, length: int, regions: Regions, item: IntArray, row: IntArray) -> Bytes:
    """Bytes [operation, run, row, lane, byte] of runs as the sink has them; without the first axis of one operation."""
    runs = (..., item, row, slice(None), slice(None), slice(None))
    data = _view(batch, side, length, regions)[runs]
    if side == "sink" or not batch.converts:
        return data
    made, blocks, stated = Made(batch.first[_MADE]), batch.first[_BLOCKS], batch.ops["stated"].tolist()
    data = np.ascontiguousarray(data)
    if stated[0]:
        layers = data.reshape(len(stated), -1, data.shape[-1])
        done = [convert(made, layer, scale, blocks) for layer, scale in zip(layers, stated, strict=True)]
        return np.concatenate(done).reshape(*data.shape[:-1], -1)
    scales = _view(batch, "scale", length, regions)[runs] if made == Made.WIDE else 0
    return convert(made, data, scales, blocks)


def converted_rows(op: npt.NDArray[np.void], regions: Mapping[int, Any], item: IntArray, row: IntArray) -> Bytes:
    """Bytes [row, byte] that an operation [1] which converts gives of single rows."""
    return _read(_Batch(op[0].item(), op, {}), "source", 1, regions, item, row).reshape(item.size, -1)


def _view(batch: _Batch, side: str, length: int, regions: Regions) -> Bytes:
    """A view [operation, item, first row, row of the run, lane, byte] of a region; [item, ...] of one operation."""
    region, offset, item_stride, row_stride, lane_stride, items, rows = batch.first[_AT[side]]
    lanes, size = batch.first[_LANES]
    if side != "sink" and batch.converts:
        size = batch.first[_SOURCE_BYTES] if side == "source" else batch.first[_BLOCKS] * SIZE[DType.F32]
    shape = [items, rows - length + 1, length, lanes, size]
    strides = [item_stride, row_stride, row_stride, lane_stride, 1]
    if len(batch.ops) > 1:
        shape, strides = [len(batch.ops), *shape], [batch.steps[side], *strides]
    return np.ndarray(shape, np.uint8, regions[region], offset, strides)


def checksums(program: CopyProgram, regions: Regions, sink: bool) -> dict[int, int]:
    """Checksums by sink group id: the sum of byte * A(model, layer, part, row) * B(byte of the lane axis) mod 2^64.

    A and B are odd and depend on the global coordinate only, so both layouts give one value, and one changed byte
    always changes it. Groups that move no row have none. Clauses KVP-VERIFY-SOURCE, KVP-VERIFY-SINK.
    """
    sums: dict[int, int] = {}
    side: Side = "sink" if sink else "source"
    spans = program.sink_spans if sink else program.source_spans
    blocks = _views(program, regions, side) if spans is None else _slices(program, regions, spans)
    for group, los, rows, data in blocks:
        summed = _sum_words if data.size <= _KEPT_LOCK or data.shape[2] < _NARROW or len(set(los)) > 1 else _sum_floats
        sums[group] = sums.get(group, 0) + summed(los, _mix(rows), data)
    return {group: total & (1 << 64) - 1 for group, total in sums.items()}


_Summed = tuple[int, tuple[int, ...], npt.NDArray[np.uint64], Bytes]
"""Sink group, first bytes on the lane axis, arguments of the row weights [first, row], bytes [first, row, width]."""


def _sum_words(los: tuple[int, ...], factors: npt.NDArray[np.uint64], data: Bytes) -> int:
    """The sum of bytes by their weights; `factors` [first, row] are the weights of rows."""
    if data.size > _KEPT_LOCK:
        words = data.astype(np.uint64)
    else:
        wide = bytearray(8 * data.size)  # a cast by numpy would release the GIL
        wide[::8] = data.tobytes()
        words = np.frombuffer(wide, "<u8").reshape(data.shape)
    return int(factors.reshape(-1) @ (words @ _lane_weights(los, data.shape[2])).reshape(-1))


def _sum_floats(los: tuple[int, ...], factors: npt.NDArray[np.uint64], data: Bytes) -> int:
    """As `_sum_words`, twice as fast in 64-bit floats, exactly: 8,192 products of a byte and 32 bits are below 2^53."""
    width, total = data.shape[2], np.zeros(2, np.uint64)
    rows = data.reshape(-1, width)
    halves, sums = _weight_halves(los[0], width), np.empty((2, len(rows)))
    scratch: npt.NDArray[np.float64] | None = getattr(_scratch, "floats", None)
    if scratch is None:
        scratch = _scratch.floats = np.empty(_FLOATS)
    step = _FLOATS // min(width, _EXACT)
    for at in range(0, width, _EXACT):
        for row in range(0, len(rows), step):
            part = rows[row : row + step, at : at + _EXACT]
            floats = scratch[: part.size].reshape(part.shape)
            floats[:] = part
            for half, of_rows in zip(halves, sums, strict=True):
                np.dot(floats, half[at : at + _EXACT], out=of_rows[row : row + step])
        total += sums.astype(np.uint64) @ factors.reshape(-1)
    return sum(value << 32 * i for i, value in enumerate(total.tolist()))


def _slices(program: CopyProgram, regions: Regions, spans: list[tuple[int, int, int]]) -> Iterator[_Summed]:
    """The bytes of a program that moves contiguous spans; like operations are summed together, in blocks."""
    pending = iter(spans)
    for map, group, lo, width, seeds in program.operations.alike:
        rows = program.maps[map]
        if not rows.size:
            continue
        numbers, most = rows.global_rows.view(np.uint64), max(_BLOCK // (rows.size * width), 1)
        for at in range(0, len(seeds), most):
            of_rows = (numbers + seeds[at : at + most]).reshape(-1)
            count = len(of_rows) // rows.size * len(rows.rows)
            views = [regions[region][begin : begin + size] for region, begin, size in islice(pending, count)]
            for first, data in _blocks(views, width):
                count = len(data) // width
                yield group, (lo,), of_rows[None, first : first + count], data.reshape(1, count, width)


def _blocks(views: list[memoryview], width: int) -> Iterator[tuple[int, Bytes]]:
    """Views joined to blocks, each with the number of its first row of `width` bytes; a long view is divided."""
    parts: list[memoryview] = []
    size = first = 0
    step = max(_BLOCK // width, 1) * width
    for view in views:
        for at in range(0, len(view), step):
            parts.append(view[at : at + step])
            size += len(parts[-1])
            if size >= _BLOCK:
                yield first, _joined(parts)
                first, size, parts = first + size // width, 0, []
    if parts:
        yield first, _joined(parts)


def _joined(parts: list[memoryview]) -> Bytes:
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)


_scratch = threading.local()
"""Floats of each thread that are used again: memory that is fresh costs more to touch than to fill."""


def _views(program: CopyProgram, regions: Regions, side: Side) -> Iterator[_Summed]:
    runs = [list(_global_rows(rows)) for rows in program.maps]
    for batch in _batches(program):
        map, group = batch.first[:2]
        rows, los = program.maps[map], tuple(batch.ops["lo"].tolist())
        item, row = (rows.sink_item, rows.sink_row) if side == "sink" else (rows.source_item, rows.source_row)
        for length, run, index in runs[map]:
            data = _read(batch, side, length, regions, item[run], row[run])
            of_rows = index.reshape(-1) + batch.ops["seed"][:, None]
            yield group, los, of_rows, data.reshape(len(los), index.size, -1)


def _global_rows(rows: RowMap) -> Iterator[tuple[int, IntArray, npt.NDArray[np.uint64]]]:
    """For each length of run, the indices [n] of the runs that have it, and their global rows [n, length]."""
    start = rows.ends - rows.rows
    for length, runs in _by_length(rows):
        yield length, runs, rows.global_rows[start[runs, None] + np.arange(length)].astype(np.uint64)


def seeds(ops: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Seeds [operations] of the row weights, from model, layer and part."""
    model, layer, part = (ops[n].astype(np.uint64) for n in ("model", "layer", "part"))
    return _mix((model << np.uint64(48)) + (layer << np.uint64(16)) + part)


def _lane_weights(los: tuple[int, ...], width: int) -> npt.NDArray[np.uint64]:
    """The lane weights [first, width, 1], or [1, width, 1] if all first bytes are equal."""
    if len(set(los)) == 1:
        return _weights_from(los[0], width)[None, :, None]
    return _mix(np.array(los)[:, None] + np.arange(width))[:, :, None]


@lru_cache(maxsize=16)
def _weights_from(lo: int, width: int) -> npt.NDArray[np.uint64]:
    return _mix(np.arange(lo, lo + width))


@lru_cache(maxsize=16)
def _weight_halves(lo: int, width: int) -> npt.NDArray[np.float64]:
    """The halves [2, width] of the lane weights, the lower first."""
    weights = _weights_from(lo, width)
    return np.stack([weights & _HALF, weights >> np.uint64(32)]).astype(np.float64)


def _mix(x: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """splitmix64, made odd."""
    z = x.astype(np.uint64)
    z += _STEP
    for shift, factor in _ROUNDS:
        z ^= z >> shift
        z *= factor
    z ^= z >> _LAST
    z |= _ONE
    return z


_STEP, _LAST, _ONE, _HALF = map(np.uint64, (0x9E3779B97F4A7C15, 31, 1, 0xFFFFFFFF))
_ROUNDS = tuple((np.uint64(s), np.uint64(f)) for s, f in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)))
_FIELDS = list(OP.names or ())
_ALL = list(CONVERTING_OP.names or ())
_LANES = slice(_FIELDS.index("lanes"), _FIELDS.index("lane_bytes") + 1)
_MADE, _SOURCE_BYTES, _BLOCKS = map(_ALL.index, ("made", "source_bytes", "blocks"))
_AT = {side: slice(at := _ALL.index(f"{side}_region"), at + len(PLACE)) for side in ("source", "sink", "scale")}
"""Positions of the fields of each side, and of the scales, in an operation."""
_DIFFER = ("model", "layer", "part", "lo", "seed", "stated")


@lru_cache(2)
def _compared(kind: np.dtype[np.void]) -> tuple[list[int], list[int]]:
    """The fields of operations of a batch that may lie equally far apart, and those that are equal."""
    names = list(kind.names or ())
    offsets = [names.index(name) for name in (f"{side}_offset" for side in _AT) if name in names]
    return offsets, [n for n, name in enumerate(names) if n not in offsets and name not in _DIFFER]


@attrs.frozen(eq=False)
class PageSums:
    """Checksums of one group's share of a program, layer by layer."""

    layers: tuple[int, ...]
    pages: tuple[int, ...]
    """Numbers of the sink's pages, counted from the one that holds token 0; (0,) if rows cannot be told apart."""
    values: npt.NDArray[np.uint64]
    """Sums [layers * pages]."""

    def first_difference(self, others: npt.NDArray[np.uint64] | None) -> str:
        """The first layer and page whose sum differs from the other side's, in words; a missing sum differs."""
        if others is None or others.size != self.values.size:
            return f"{self.values.size} sums of pages wanted, {0 if others is None else others.size} came"
        wrong = np.flatnonzero(others != self.values)
        if not wrong.size:
            return "none of its pages differs"
        layer, page = divmod(int(wrong[0]), len(self.pages))
        return f"layer {self.layers[layer]}, page {self.pages[page]}; {wrong.size} of {self.values.size} differ"


def page_sums(
    program: CopyProgram, groups: Mapping[int, Group], checksums: Callable[[CopyProgram], Mapping[int, int]]
) -> Generator[None, None, dict[int, PageSums]]:
    """Compute the page sums of each sink group in turn, with `checksums` of each layer and page (KVP-VERIFY-PAGES)."""
    sums = {}
    for id in np.unique(program.ops["group"]).tolist():
        ops = program.ops[program.ops["group"] == id]
        maps = [program.maps[i] for i in np.unique(ops["map"]).tolist()]
        rows = np.concatenate([m.global_rows for m in maps])
        if not rows.size:
            continue
        group, layers = groups[id], tuple(np.unique(ops["layer"]).tolist())
        apart = KINDS[group.kind].paged and not any(m.whole for m in maps)
        pages = tuple(np.unique(rows // group.rows).tolist()) if apart else (0,)
        step = group.rows * group.tokens_per_row
        values = []
        for layer in layers:
            of_layer = attrs.evolve(program, operations=Operations(ops[ops["layer"] == layer]))
            for page in pages:
                part = of_layer.select(tokens=(page * step, (page + 1) * step)) if apart else of_layer
                values.append(checksums(part).get(id, 0))
                yield
        sums[id] = PageSums(layers, pages, np.array(values, np.uint64))
    return sums
