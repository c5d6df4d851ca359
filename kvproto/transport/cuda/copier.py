"""Runs copy programs on one GPU: an upload, an expansion of runs into rows, and the copy kernel."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
from cuda import core
from cuda.core import Event, Kernel, Stream, StreamOptions

from kvproto.copying.program import CopyProgram, RowMap
from kvproto.errors import DeviceFault, LocalError
from kvproto.transport.base import Copying
from kvproto.transport.cuda import direct, kernel
from kvproto.transport.cuda.direct import Mark, is_done
from kvproto.transport.cuda.driver import call, copy_all, current, driver
from kvproto.transport.cuda.kernel import SumTable, sum_table
from kvproto.transport.cuda.stream import PART, ChunkCopies
from kvproto.wire.enums import ErrorCode, Proof

__all__ = ["Copier", "CopyJob", "DeviceBytes", "DeviceCopy", "LaunchBuffers", "Prepared", "Series"]


class DeviceBytes:
    """`size` bytes of device memory, freed with this object; raises LocalError(TRANSPORT_FAILED)."""

    def __init__(self, size: int) -> None:
        self.address, self.size = int(call(driver.cuMemAlloc(size), f"{size} bytes")), size

    def __del__(self) -> None:
        driver.cuMemFree(self.address)


@attrs.frozen(eq=False)
class Prepared:
    """A rank pair's table of operations on the device; valid while both sides' regions stay mapped."""

    table: kernel.Table
    memory: DeviceBytes


@attrs.frozen
class CopyJob:
    """A request's maps for one rank pair; only layers [lo, hi) if given."""

    prepared: Prepared
    maps: Sequence[RowMap]
    layers: tuple[int, int] | None = None


@attrs.define(eq=False)
class LaunchBuffers:
    """Memory of one launch: pinned memory for an image, its place on the device, and expanded rows."""

    host: core.Buffer
    view: npt.NDArray[np.uint8]
    image: DeviceBytes
    rows: DeviceBytes
    event: Event | Mark
    """The event after which they may be used again."""
    ends: list[Mark] = attrs.field(factory=list)
    """Events of the ends of chunks, recorded in turn."""
    chunks: int = 0

    def holds(self, image: int, rows: int) -> bool:
        """Whether an image and rows of these sizes in bytes fit."""
        return self.view.size >= image and self.rows.size >= rows


@attrs.frozen
class DeviceCopy(Copying):
    """A launch that is under way; also what a packer returns."""

    event: Event | Mark
    bytes: int
    began: Event | Mark | None = None
    """The event before the upload, if the copier is timed."""
    jobs: Sequence[CopyJob] = attrs.field(default=(), repr=False)
    """Held because the launch reads their kernel."""
    stream: None = None

    @property
    def seconds(self) -> float:
        """Device time in seconds from the upload to the last byte; the copier must be timed."""
        assert isinstance(self.began, Event)
        assert isinstance(self.event, Event)
        return float(self.event - self.began) / 1000

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises DeviceFault, whatever caused it."""
        return is_done(self.event.handle)

    def ready(self) -> bool:
        """As `PendingCopy.ready`."""
        return self.done

    def stop(self) -> Proof | None:
        """PROVEN when the launch is done, as it cannot be stopped; raises DeviceFault."""
        return Proof.PROVEN if self.done else None

    def wait(self) -> None:
        """Block until done; raises DeviceFault."""
        call(driver.cuEventSynchronize(self.event.handle), "copy")


@attrs.define(eq=False)
class Series:
    """Copies of one upload, of which the first ones have been started."""

    copier: Copier
    jobs: Sequence[CopyJob]
    made: kernel.UploadedLaunch
    buffers: LaunchBuffers
    copies: list[DeviceCopy] = attrs.field(factory=list)
    held: bool = True
    """Whether other launches may not use the buffers yet."""

    def go_on(self, count: int) -> None:
        """Start copies until the first `count` of them have been started."""
        if count > len(self.copies):
            self.copier.go_on(self, min(count, len(self.jobs)))

    def finish(self) -> DeviceCopy:
        """Start all copies, and return the last one."""
        self.go_on(len(self.jobs))
        return self.copies[-1]


Sums = dict[int, int]
"""Checksums by sink group id."""
_SOURCE = Path(__file__).with_name("kernel.cu")
_NAMES = ("copy", "expand", "checksum", "copy_few", "copy_part")
_EVENTS = 64
"""Chunks of a stream whose ends have separate events: more than the slots that are under way at once."""
_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


@lru_cache
def _kernels(arch: str, word: int, threads: int, depth: int) -> tuple[Kernel, ...]:
    """The kernels for words of one width, compiled once in a process."""
    macros: list[str | tuple[str, str]] = [
        ("WORD", _TYPES[word]), ("THREADS", str(threads)), ("DEPTH", str(depth)),
        ("FEW_CLASSES", str(kernel.FEW_CLASSES)), ("FEW_WORDS", str(kernel.FEW_WORDS)),
    ]  # fmt: skip
    options = core.ProgramOptions(arch=f"sm_{arch}", std="c++17", define_macro=macros)
    module = core.Program(_SOURCE.read_text(), "c++", options).compile("cubin")
    return tuple(module.get_kernel(name) for name in _NAMES)


def _works(jobs: Sequence[CopyJob]) -> list[kernel.Work]:
    """What the jobs copy; raises OUT_OF_RANGE for maps of another program, OUT_OF_REGION for rows beyond the pools."""
    if any(len(j.maps) != len(j.prepared.table.bounds) for j in jobs):
        raise LocalError(ErrorCode.OUT_OF_RANGE, "maps", "as many as the table's program has", "another number")
    works = [kernel.Work(j.prepared.table, j.prepared.memory.address, j.maps, j.layers) for j in jobs]
    kernel.check(works)
    return works


@attrs.frozen
class _Whole:
    """Launches that belong together; if an error interrupts them, waits until those that were made are over."""

    streams: Sequence[Stream]

    def __enter__(self) -> None:
        return

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            for stream in self.streams:
                driver.cuStreamSynchronize(stream.handle)


class Copier:
    """Runs copy programs on one GPU; not for use by several threads at once.

    `blocks`: thread blocks of a launch, one for each multiprocessor that copies may use. `slots`: launches of many runs
    that may be under way at once; a copy of very many runs uses up to half of them. `long`: runs of at least this many
    bytes go by the copy engine, which uses no multiprocessors. `timed`: whether `DeviceCopy.seconds` is known.
    """

    def __init__(
        self, device: int = 0, blocks: int | None = None, slots: int = 8, timed: bool = False, long: int = kernel.LONG
    ) -> None:  # fmt: skip
        if blocks is not None and blocks < 1:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "blocks", "at least 1", str(blocks))
        self._device = current(device)
        self.device, self._long = device, long
        self.stream: Stream = self._device.create_stream()
        self._ahead: Stream = self._device.create_stream()
        """The stream on which rows of a part are expanded while those of the part before move."""
        self.streams = self._ahead, self.stream
        self._aside: Stream = self._device.create_stream(options=StreamOptions(priority=-1))
        """Where checksums are taken, ahead of copies that wait for the device."""
        self._context = int(call(driver.cuCtxGetCurrent(), "context"))
        self._sum_tables = kernel.PerProgramCache[SumTable]()
        self._spare: list[LaunchBuffers] = []
        """Buffers of checksums that have been taken."""
        self._arch = "".join(map(str, self._device.compute_capability))
        self.blocks = blocks or self._device.properties.multiprocessor_count
        self._functions: dict[tuple[int, str], int] = {}
        self._arguments = (ctypes.c_uint64 * 3)()  # little-endian: a kernel's u32 is the lower half
        begin, size = ctypes.addressof(self._arguments), ctypes.sizeof(ctypes.c_uint64)
        self._places = (ctypes.c_void_p * 3)(*(begin + i * size for i in range(3)))
        self._inline = np.zeros(kernel.INLINE_BYTES, np.uint8)
        self._inline_place = (ctypes.c_void_p * 1)(self._inline.ctypes.data)
        self._part = (ctypes.c_uint64 * -(-PART // 8))()
        self._part_place = (ctypes.c_void_p * 1)(ctypes.addressof(self._part))
        self._timing = core.EventOptions(timing_enabled=timed)
        self._timed = timed
        self._slots = slots
        self._buffers: list[LaunchBuffers] = []
        """Buffers of launches, the latest last."""
        self._nothing = DeviceBytes(kernel.MAP.itemsize)
        """A map without rows."""
        self._loaded: set[int] = set()
        self._load(16)

    def load(self, words: Iterable[int]) -> None:
        """Compile and load the kernels for words of these widths."""
        direct.enter(self._context)
        for word in words:
            self._load(word)

    def _load(self, word: int) -> None:
        """Load and launch the kernels of a width, as a first launch may wait for everything that the GPU does."""
        if word in self._loaded:
            return
        nothing = self._nothing
        call(driver.cuMemsetD8Async(nothing.address, 0, nothing.size, self._ahead.handle), "load")
        self._inline[:] = 0
        ctypes.memset(self._part, 0, PART)
        self._run(16, "expand", (1, 1), nothing.address, stream=self._ahead)
        self._run(word, "copy", (1, 1), nothing.address, 0, 0, stream=self._ahead)
        for name, block in (("copy_few", self._inline_place), ("copy_part", self._part_place)):
            self._run(word, name, (1, 1), block=block, stream=self._ahead)
        call(driver.cuStreamSynchronize(self._ahead.handle), "load")
        self._loaded.add(word)

    def check(self) -> None:
        """Raise DeviceFault if the context is lost, as the driver's other errors mean nothing then."""
        direct.enter(self._context)
        direct.idle(int(self.stream.handle))

    def prepare(self, program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]) -> Prepared:
        """Upload the operations of a rank pair; `sources` and `sinks` are addresses of regions as mapped here."""
        direct.enter(self._context)
        made = kernel.table(program, sources, sinks)
        memory = DeviceBytes(max(made.ops.nbytes, 1))
        if made.ops.nbytes:
            ahead = self._ahead.handle  # waits for no producer
            call(driver.cuMemcpyHtoDAsync(memory.address, made.ops.ctypes.data, made.ops.nbytes, ahead), "upload")
            call(driver.cuStreamSynchronize(ahead), "upload")
        self.load({shape.word for shape in made.shapes})
        return Prepared(made, memory)

    def submit(self, jobs: Sequence[CopyJob], after: Sequence[int] = ()) -> DeviceCopy:
        """Copy in stream order, after what is under way here and after the producers' events `after`, by handle.

        Raises LocalError: OUT_OF_REGION for rows beyond the pools, BUSY while all slots are in use, TRANSPORT_FAILED
        if memory is short. After an error nothing is being written, and before the first launch nothing was.
        """
        direct.enter(self._context)
        works = _works(jobs)
        inline = kernel.inline_launch(works, self._inline, 4 * self.blocks, self._long)
        if inline is not None:
            with _Whole(self.streams):
                began = self._record() if self._timed else None
                self.follow(after)
                if inline.chunks:
                    self._run(inline.word, "copy_few", (min(inline.chunks, self.blocks), 1), block=self._inline_place)
                return DeviceCopy(self._record(), inline.bytes, began, jobs)
        parts = kernel.parts(works, max(self._slots // 2, 1))
        all_buffers = self._take([kernel.sizes(part) for part in parts])
        began, total = None, 0
        with _Whole(self.streams):
            for i, (part, buffers) in enumerate(zip(parts, all_buffers, strict=True)):
                made = kernel.launch(part, buffers.view, buffers.image.address, buffers.rows.address, self._long)
                began = began or (self._record() if self._timed else None)
                self._launch(made, buffers, None if i else after)
                buffers.event = self._record()
                self._buffers.append(buffers)
                total += made.bytes
        return DeviceCopy(all_buffers[-1].event, total, began, jobs)

    def series(self, jobs: Sequence[CopyJob], after: Sequence[int] = ()) -> Series:
        """Upload jobs together as copies that `Series.go_on` starts, each of which ends by itself; raises as `submit`.

        Jobs should share their maps, whose rows are then expanded once.
        """
        direct.enter(self._context)
        works = _works(jobs)
        (buffers,) = self._take([kernel.sizes(works)])
        at = buffers.image.address, buffers.rows.address
        made = kernel.launch(works, buffers.view, *at, self._long, each=True)
        with _Whole(self.streams):
            self._prelude(made, buffers, after)
        return Series(self, jobs, made, buffers)

    def go_on(self, series: Series, count: int) -> None:
        """Start copies of a series until there are `count`."""
        direct.enter(self._context)
        with _Whole(self.streams):
            for i in range(len(series.copies), count):
                self._kernels(series.made.groups[i], series.buffers)
                copy = DeviceCopy(self._record(), series.made.groups[i].bytes, None, series.jobs[i : i + 1])
                series.copies.append(copy)
        if count == len(series.jobs) and series.held:
            series.held, series.buffers.event = False, series.copies[-1].event
            self._buffers.append(series.buffers)

    def _launch(self, made: kernel.UploadedLaunch, buffers: LaunchBuffers, after: Sequence[int] | None) -> None:
        self._prelude(made, buffers, after)
        for group in made.groups:
            self._kernels(group, buffers)

    def _prelude(self, made: kernel.UploadedLaunch, buffers: LaunchBuffers, after: Sequence[int] | None) -> None:
        """Expand rows while producers compute (`after` are their events), or if None while the part before moves."""
        stream, ahead = int(self.stream.handle), after is None
        if any(group.classes for group in made.groups):
            self._expand(buffers, made.size, made.n_maps, made.most_rows, self._ahead if ahead else self.stream)
        if ahead:
            expanded = Mark(int(self._ahead.handle))
            direct.follow(stream, expanded.handle)
        self.follow(after or ())

    def _kernels(self, group: kernel.LaunchGroup, buffers: LaunchBuffers) -> None:
        stream = self.stream.handle
        for long in group.long:
            copy_all(long.runs(), int(stream))
        for word, offset, classes, chunks in group.classes:
            self._run(word, "copy", (min(chunks, self.blocks), 1), buffers.image.address + offset, classes, chunks)

    def allocate(self, image: int, rows: int) -> LaunchBuffers:
        """Allocate the buffers of a launch; sizes in bytes."""
        direct.enter(self._context)
        size = 1 << max(image - 1, 4095).bit_length()
        host = core.LegacyPinnedMemoryResource().allocate(size)
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(host.handle)))
        expanded = DeviceBytes(1 << max(rows - 1, 4095).bit_length())
        return LaunchBuffers(host, view, DeviceBytes(size), expanded, self._record())

    def expand(self, buffers: LaunchBuffers, size: int, n_maps: int, most_rows: int) -> None:
        """Upload the image of a stream, which begins with its maps, and expand their rows."""
        direct.enter(self._context)
        self._expand(buffers, size, n_maps, most_rows, self.stream)
        buffers.event = self._record()

    def _expand(self, buffers: LaunchBuffers, size: int, n_maps: int, most_rows: int, stream: Stream) -> None:
        image = buffers.image.address
        direct.upload(image, buffers.view.ctypes.data, size, int(stream.handle))
        tall = min(-(-most_rows // kernel.THREADS), 4 * self.blocks)
        self._run(16, "expand", (tall, n_maps), image, stream=stream)

    def follow(self, events: Sequence[int]) -> None:
        """Make what is submitted from now on wait for these events of producers, given by handle."""
        if events:
            direct.enter(self._context)
        for event in events:
            direct.follow(int(self.stream.handle), event)

    def chunk(self, chunk: ChunkCopies, buffers: LaunchBuffers, bytes_: int) -> DeviceCopy:
        """Copy a chunk of the stream whose maps and operations are in these buffers."""
        direct.enter(self._context)
        stream = self.stream.handle
        with _Whole(self.streams):
            for source, sink, length in chunk.pieces:
                call(driver.cuMemcpyDtoDAsync(sink, source, length, stream), "copy")
            for part in chunk.parts:
                ctypes.memmove(self._part, part.parameters, PART)
                self._run(part.word, "copy_part", (min(part.chunks, self.blocks), 1), block=self._part_place)
            buffers.event = self._end(buffers)
        return DeviceCopy(buffers.event, bytes_)

    def _end(self, buffers: LaunchBuffers) -> Mark:
        """Record the end of a chunk; after `_EVENTS` chunks events are reused, and an earlier chunk may seem late."""
        at, buffers.chunks = buffers.chunks % _EVENTS, buffers.chunks + 1
        if at == len(buffers.ends):
            buffers.ends.append(Mark(int(self.stream.handle)))
        else:
            buffers.ends[at].record(int(self.stream.handle))
        return buffers.ends[at]

    def _record(self) -> Event | Mark:
        return self.stream.record(options=self._timing) if self._timed else Mark(int(self.stream.handle))

    def _run(
        self, word: int, name: str, grid: tuple[int, int], *arguments: int, block: ctypes.Array[Any] | None = None,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel by the driver's own call, which takes a third of the time that cuda-core's does."""
        function = self._functions.get((word, name))
        if function is None:
            function = self._functions[word, name] = _kernels(self._arch, word, kernel.THREADS, kernel.DEPTH)[
                _NAMES.index(name)
            ].handle
            self._functions[word, name] = function = int(function)
        for i, value in enumerate(arguments):
            self._arguments[i] = value
        threads, places = kernel.THREADS, ctypes.addressof(self._places if block is None else block)
        direct.launch(function, grid, threads, int((stream or self.stream).handle), places)

    def begin_checksums(self, program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> Callable[[], Sums]:
        """Start taking checksums of regions at these addresses, whose copies are over; the result waits for them.

        They are those of `kvproto.copying.execute.checksums`, and taken alongside copies that are under way.
        """
        direct.enter(self._context)
        key = sink, *sorted(addresses.items())
        table = self._sum_tables.get(program.ops, key, lambda: sum_table(program, addresses, sink))
        if not any(m.size for m in program.maps):
            return dict
        sizes = table.sizes(program.maps)
        buffers = next((each for each in self._spare if each.holds(*sizes)), None)
        if buffers is None:
            buffers = self.allocate(*sizes)
        else:
            self._spare.remove(buffers)
        at, host, stream = buffers.image.address, buffers.view.ctypes.data, int(self._aside.handle)
        size = table.write(program.maps, buffers.view, at, buffers.rows.address)
        totals = slice(size - 8 * len(table.groups), size)
        with _Whole((self._aside,)):
            self._expand(buffers, size, table.n_maps, max(m.size for m in program.maps), self._aside)
            for word, offset, count in table.launches:
                self._run(word, "checksum", (self.blocks, count), at + offset, stream=self._aside)
            direct.download(host + totals.start, at + totals.start, size - totals.start, stream)
            over = Mark(stream)

        def found() -> Sums:
            if not is_done(over.handle):
                call(driver.cuEventSynchronize(over.handle), "checksum")
            self._spare.append(buffers)
            return table.found(program.maps, buffers.view[totals])

        return found

    def settle(self) -> None:
        """Wait for checksums that are being taken: after this none reads memory, even if nobody collects it."""
        with contextlib.suppress(DeviceFault):  # a lost context reads nothing
            direct.enter(self._context)
            if not direct.idle(int(self._aside.handle)):
                call(driver.cuStreamSynchronize(self._aside.handle), "checksum")

    def checksums(self, program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> Sums:
        """The same at once."""
        return self.begin_checksums(program, addresses, sink)()

    def _take(self, sizes: Sequence[tuple[int, int]]) -> list[LaunchBuffers]:
        """Buffers for launches with these sizes of image and rows, before the first of them begins; raises BUSY."""
        taken = len(self._buffers) + len(sizes) - self._slots
        if taken > 0 and not is_done(self._buffers[taken - 1].event.handle):  # launches end in their order
            raise LocalError(ErrorCode.BUSY, "", f"{self._slots} launches at once", "one more", "wait for one")
        return [self._unused(image, rows, taken) for taken, (image, rows) in enumerate(sizes)]

    def _unused(self, image: int, rows: int, taken: int) -> LaunchBuffers:
        """Buffers that no launch uses: large enough ones, or new ones, in place of the oldest if slots are full."""
        for i, buffers in enumerate(self._buffers):
            if not is_done(buffers.event.handle):
                break
            if buffers.holds(image, rows):
                return self._buffers.pop(i)
        if len(self._buffers) + taken == self._slots:
            self._buffers.pop(0)
        return self.allocate(image, rows)
