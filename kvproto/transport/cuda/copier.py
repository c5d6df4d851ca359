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

from kvproto.copying.program import CopyProgram
from kvproto.errors import DeviceFault, LocalError, bad
from kvproto.transport.base import Copying
from kvproto.transport.cuda import kernel
from kvproto.transport.cuda.driver import Mark, call, copy_all, current, driver, enter, is_done, is_idle, run
from kvproto.transport.cuda.kernel import (
    ConvertTable,
    CopyJob,
    LaunchGroup,
    PerProgramCache,
    Prepared,
    SumTable,
    UploadedLaunch,
)
from kvproto.transport.cuda.stream import PART, ChunkCopies, PartLaunch
from kvproto.wire.enums import ErrorCode, Proof

Sums = dict[int, int]
"""Checksums by sink group id."""


# what copiers are given and return


class DeviceBytes:
    """`size` bytes of device memory, freed with this object; raises LocalError(TRANSPORT_FAILED)."""

    def __init__(self, size: int) -> None:
        self.address, self.size = int(call(driver.cuMemAlloc(size), f"{size} bytes")), size

    def __del__(self) -> None:
        driver.cuMemFree(self.address)


@attrs.frozen
class DeviceCopy(Copying):
    """A launch that is under way; also what a packer returns."""

    event: Event | Mark
    bytes: int
    began: Event | Mark | None = None
    """The event before the upload, if the copier is timed."""
    jobs: Sequence[CopyJob] = attrs.field(default=(), repr=False)
    """Held because the launch reads their tables."""
    stream: None = None

    @property
    def seconds(self) -> float:
        """Device time in seconds from the upload to the last byte; the copier must be timed."""
        assert isinstance(self.began, Event)
        assert isinstance(self.event, Event)
        return float(self.event - self.began) / 1000

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises DeviceFault once the device has failed, even if another copy was the cause."""
        return is_done(self.event.handle)

    def ready(self) -> bool:
        return self.done

    def stop(self) -> Proof | None:
        """PROVEN when the launch is done, as it cannot be stopped; raises DeviceFault."""
        return Proof.PROVEN if self.done else None

    def wait(self) -> None:
        """Block until done; raises DeviceFault."""
        call(driver.cuEventSynchronize(self.event.handle), "copy")


@attrs.define(eq=False)
class Series:
    """Copies of one upload, which are started one after the other."""

    copier: Copier
    jobs: Sequence[CopyJob]
    launch: UploadedLaunch
    buffers: LaunchBuffers
    copies: list[DeviceCopy] = attrs.field(factory=list)

    def go_on(self, count: int) -> None:
        """Start copies until the first `count` of them have been started."""
        copier, count = self.copier, min(count, len(self.jobs))
        if count <= len(self.copies):
            return
        enter(copier._context)
        with _Whole(copier.streams):
            for i in range(len(self.copies), count):
                group = self.launch.groups[i]
                copier._copy(group, self.buffers)
                self.copies.append(DeviceCopy(copier._record(), group.bytes, None, self.jobs[i : i + 1]))
        if count == len(self.jobs):  # so other launches may use the buffers once it is done
            self.buffers.event = self.copies[-1].event
            copier._buffers.append(self.buffers)

    def finish(self) -> DeviceCopy:
        """Start all copies, and return the last one."""
        self.go_on(len(self.jobs))
        return self.copies[-1]


# what launches use


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


_FOLDER = Path(__file__).parent
_NAMES = ("copy", "expand", "checksum", "copy_few", "copy_part")
_CONVERTING = ("convert", "sum_converted")
_EVENTS = 64
"""Chunks of a stream whose ends have separate events: more than the slots that are under way at once."""
_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


def _compiled(arch: str, file: str, names: Sequence[str], macros: Mapping[str, object]) -> tuple[Kernel, ...]:
    """Kernels of a source file of this folder."""
    define: list[str | tuple[str, str]] = [(name, str(value)) for name, value in macros.items()]
    options = core.ProgramOptions(arch=f"sm_{arch}", std="c++17", define_macro=define, include_path=str(_FOLDER))
    module = core.Program((_FOLDER / file).read_text(), "c++", options).compile("cubin")
    return tuple(module.get_kernel(name) for name in names)


@lru_cache
def _copying(arch: str, word: int) -> tuple[Kernel, ...]:
    """The kernels for words of one width, compiled once in a process."""
    macros = {"WORD": _TYPES[word], "THREADS": kernel.THREADS, "DEPTH": kernel.DEPTH}
    few = {"FEW_CLASSES": kernel.FEW_CLASSES, "FEW_WORDS": kernel.FEW_WORDS}
    return _compiled(arch, "kernel.cu", _NAMES, macros | few)


@lru_cache
def _converting(arch: str, step: int) -> tuple[Kernel, ...]:
    """The kernels of conversions that have so many elements at once, compiled once in a process."""
    words, load, store, scale = kernel.STEPS[step]
    launch = {"THREADS": kernel.CONVERT_THREADS, "RESIDENT": kernel.CONVERT_RESIDENT, "DEPTH": kernel.CONVERT_DEPTH}
    macros = launch | {"STEP": max(step, 1), "WORDS": words, "LOAD": load, "STORE": store, "SCALE": scale}
    return _compiled(arch, "convert.cu", _CONVERTING, macros)


class _Kernels:
    """The kernels of one GPU, and memory for the parameters of the next launch, which the driver copies."""

    def __init__(self, arch: str, stream: Stream) -> None:
        """Kernels are loaded in `stream`."""
        self._arch, self._stream = arch, stream
        self._functions: dict[tuple[int, str], int] = {}
        self._numbers = (ctypes.c_uint64 * 3)()  # little-endian: a kernel's u32 is the lower half
        begin, size = ctypes.addressof(self._numbers), ctypes.sizeof(ctypes.c_uint64)
        self._number_places = (ctypes.c_void_p * 3)(*(begin + i * size for i in range(3)))
        self.few = np.zeros(kernel.INLINE_BYTES, np.uint8)
        """The parameters of `copy_few`."""
        self._few_place = (ctypes.c_void_p * 1)(self.few.ctypes.data)
        self._part = (ctypes.c_uint64 * -(-PART // 8))()
        self._part_place = (ctypes.c_void_p * 1)(ctypes.addressof(self._part))
        self._nothing = DeviceBytes(kernel.MAP.itemsize)
        """A map without rows."""
        self._loaded: set[int] = set()
        self._converting: set[int] = set()
        """Steps of conversions whose kernels are loaded."""

    def load(self, word: int) -> None:
        """Load and launch the kernels of a width, as a first launch may wait for everything that the GPU does."""
        if word in self._loaded:
            return
        nothing = self._nothing
        call(driver.cuMemsetD8Async(nothing.address, 0, nothing.size, self._stream.handle), "load")
        self.few[:] = 0
        self.run(self._stream, 16, "expand", (1, 1), nothing.address)
        self.run(self._stream, word, "copy", (1, 1), nothing.address, 0, 0)
        self.run_few(self._stream, word, 1)
        self.run_part(self._stream, PartLaunch(word, 1, bytes(PART)), 1)
        call(driver.cuStreamSynchronize(self._stream.handle), "load")
        self._loaded.add(word)

    def load_converting(self, step: int) -> None:
        """The same for the kernels of conversions that have so many elements at once."""
        if step in self._converting:
            return
        for name in _CONVERTING:
            self.run(self._stream, step, name, (1, 1), self._nothing.address, 0, 0)
        call(driver.cuStreamSynchronize(self._stream.handle), "load")
        self._converting.add(step)

    def run(self, stream: Stream, word: int, name: str, grid: tuple[int, int], *numbers: int) -> None:
        """Launch a kernel whose parameters are at most three numbers."""
        for i, number in enumerate(numbers):
            self._numbers[i] = number
        self._launch(stream, word, name, grid, self._number_places)

    def run_few(self, stream: Stream, word: int, blocks: int) -> None:
        """Launch `copy_few` with the parameters in `few`."""
        self._launch(stream, word, "copy_few", (blocks, 1), self._few_place)

    def run_part(self, stream: Stream, part: PartLaunch, blocks: int) -> None:
        ctypes.memmove(self._part, part.parameters, PART)
        self._launch(stream, part.word, "copy_part", (blocks, 1), self._part_place)

    def _launch(self, stream: Stream, word: int, name: str, grid: tuple[int, int], places: ctypes.Array[Any]) -> None:
        """Launch a kernel by the driver's own call, which takes a third of the time that cuda-core's does."""
        function = self._functions.get((word, name))
        if function is None:
            if name in _CONVERTING:
                compiled = _converting(self._arch, word)[_CONVERTING.index(name)]
            else:
                compiled = _copying(self._arch, word)[_NAMES.index(name)]
            function = self._functions[word, name] = int(compiled.handle)
        threads = kernel.CONVERT_THREADS if name in _CONVERTING else kernel.THREADS
        where = 0, int(stream.handle), ctypes.addressof(places), None  # no shared memory, no further options
        run("cuLaunchKernel", function, *grid, 1, threads, 1, 1, *where)


def _check(jobs: Sequence[CopyJob]) -> None:
    """Raise OUT_OF_RANGE for maps of another program, OUT_OF_REGION for rows beyond the pools."""
    if any(len(job.maps) != len(job.prepared.table.bounds) for job in jobs):
        raise bad("maps", "as many as the table's program has", "another number")
    kernel.check(jobs)


@attrs.frozen
class _Whole:
    """Launches that belong together; if an error interrupts them, waits for the launches so far."""

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
    ) -> None:
        if blocks is not None and blocks < 1:
            raise bad("blocks", "at least 1", blocks)
        gpu = current(device)
        self.device, self._long = device, long
        self.stream: Stream = gpu.create_stream()
        self._ahead: Stream = gpu.create_stream()
        """The stream on which rows of a part are expanded while those of the part before move."""
        self.streams = self._ahead, self.stream
        self._aside: Stream = gpu.create_stream(options=StreamOptions(priority=-1))
        """The stream of checksums, ahead of copies that wait for the device."""
        self._context = int(call(driver.cuCtxGetCurrent(), "context"))
        self.blocks = blocks or gpu.properties.multiprocessor_count
        self._timing = core.EventOptions(timing_enabled=True) if timed else None
        self._sum_tables = PerProgramCache[SumTable]()
        self._spare: list[LaunchBuffers] = []
        """Buffers of checksums that have been taken."""
        self._slots = slots
        self._buffers: list[LaunchBuffers] = []
        """Buffers of launches, the latest last."""
        self._kernels = _Kernels("".join(map(str, gpu.compute_capability)), self._ahead)
        self._kernels.load(16)

    def load(self, words: Iterable[int]) -> None:
        """Compile and load the kernels for words of these widths."""
        enter(self._context)
        for word in words:
            self._kernels.load(word)

    def check(self) -> None:
        """Raise DeviceFault if the context is lost, as the driver's other errors mean nothing then."""
        enter(self._context)
        is_idle(int(self.stream.handle))

    def prepare(self, program: CopyProgram, sources: Mapping[int, int], sinks: Mapping[int, int]) -> Prepared:
        """Upload the operations of a rank pair; `sources` and `sinks` are addresses of regions as mapped here."""
        enter(self._context)
        table = kernel.table(program, sources, sinks)
        memory = DeviceBytes(max(table.ops.nbytes, 1))
        if table.ops.nbytes:
            ahead = self._ahead.handle  # waits for no producer
            call(driver.cuMemcpyHtoDAsync(memory.address, table.ops.ctypes.data, table.ops.nbytes, ahead), "upload")
            call(driver.cuStreamSynchronize(ahead), "upload")
        self.load({shape.word for shape in table.shapes})
        if not program.operations.converts:
            return Prepared(table, memory.address, memory)
        conversions = kernel.convert_table(program, sources, sinks)
        self._load_converting(conversions)
        return Prepared(table, memory.address, memory, conversions)

    def _load_converting(self, conversions: ConvertTable) -> None:
        for step in set(conversions.steps.tolist()):
            self._kernels.load_converting(step)

    # copies of whole programs

    def submit(self, jobs: Sequence[CopyJob], after: Sequence[int] = ()) -> DeviceCopy:
        """Copy in stream order, after earlier copies and after the producers' events `after`, by handle.

        Raises LocalError: OUT_OF_REGION for rows beyond the pools, BUSY while all slots are in use, TRANSPORT_FAILED
        if memory is short. After an error nothing is being written, and before the first launch nothing was.
        """
        enter(self._context)
        _check(jobs)
        few = kernel.inline_launch(jobs, self._kernels.few, 4 * self.blocks, self._long)
        if few is not None:
            with _Whole(self.streams):
                began = self._record() if self._timing else None
                self.follow(after)
                if few.chunks:
                    self._kernels.run_few(self.stream, few.word, min(few.chunks, self.blocks))
                return DeviceCopy(self._record(), few.bytes, began, jobs)
        parts = kernel.parts(jobs, max(self._slots // 2, 1))
        all_buffers = self._take([kernel.sizes(part) for part in parts])
        began, total = None, 0
        with _Whole(self.streams):
            for i, (part, buffers) in enumerate(zip(parts, all_buffers, strict=True)):
                launch = self._write(part, buffers)
                began = began or (self._record() if self._timing else None)
                self._prelude(launch, buffers, None if i else after)
                for group in launch.groups:
                    self._copy(group, buffers)
                buffers.event = self._record()
                self._buffers.append(buffers)
                total += launch.bytes
        return DeviceCopy(all_buffers[-1].event, total, began, jobs)

    def series(self, jobs: Sequence[CopyJob], after: Sequence[int] = ()) -> Series:
        """Upload jobs, best with shared maps, as copies that `Series.go_on` starts one by one; raises as `submit`."""
        enter(self._context)
        _check(jobs)
        (buffers,) = self._take([kernel.sizes(jobs)])
        launch = self._write(jobs, buffers, separate=True)
        with _Whole(self.streams):
            self._prelude(launch, buffers, after)
        return Series(self, jobs, launch, buffers)

    def _write(self, jobs: Sequence[CopyJob], buffers: LaunchBuffers, separate: bool = False) -> UploadedLaunch:
        return kernel.launch(jobs, buffers.view, buffers.image.address, buffers.rows.address, self._long, separate)

    def _prelude(self, launch: UploadedLaunch, buffers: LaunchBuffers, after: Sequence[int] | None) -> None:
        """Expand rows while producers compute (`after` are their events), or if None while the part before moves."""
        ahead = after is None
        if any(group.classes or group.conversions for group in launch.groups):
            stream = self._ahead if ahead else self.stream
            self._expand(buffers, launch.size, launch.n_maps, launch.most_rows, stream)
        if ahead:
            expanded = Mark(int(self._ahead.handle))  # held, as it is destroyed with its last reference
            run("cuStreamWaitEvent", int(self.stream.handle), expanded.handle, 0)
        self.follow(after or ())

    def _copy(self, group: LaunchGroup, buffers: LaunchBuffers) -> None:
        for long in group.long:
            copy_all(long.runs(), int(self.stream.handle))
        for word, offset, classes, chunks in group.classes:
            grid = min(chunks, self.blocks), 1
            self._kernels.run(self.stream, word, "copy", grid, buffers.image.address + offset, classes, chunks)
        for step, offset, ops, chunks in group.conversions:
            grid = min(chunks, kernel.CONVERT_RESIDENT * self.blocks), 1
            self._kernels.run(self.stream, step, "convert", grid, buffers.image.address + offset, ops, chunks)

    def _expand(self, buffers: LaunchBuffers, size: int, n_maps: int, most_rows: int, stream: Stream) -> None:
        image = buffers.image.address
        run("cuMemcpyHtoDAsync_v2", image, buffers.view.ctypes.data, size, int(stream.handle))
        tall = min(-(-most_rows // kernel.THREADS), 4 * self.blocks)
        self._kernels.run(stream, 16, "expand", (tall, n_maps), image)

    def follow(self, events: Sequence[int]) -> None:
        """Make later copies wait for these events of producers, given by handle."""
        if events:
            enter(self._context)
        for event in events:
            run("cuStreamWaitEvent", int(self.stream.handle), event, 0)

    def _record(self) -> Event | Mark:
        return self.stream.record(options=self._timing) if self._timing else Mark(int(self.stream.handle))

    # chunks of streams

    def expand(self, buffers: LaunchBuffers, size: int, n_maps: int, most_rows: int) -> None:
        """Upload the image of a stream, which begins with its maps, and expand their rows."""
        enter(self._context)
        self._expand(buffers, size, n_maps, most_rows, self.stream)
        buffers.event = self._record()

    def chunk(self, chunk: ChunkCopies, buffers: LaunchBuffers, bytes_: int) -> DeviceCopy:
        """Copy a chunk of the stream whose maps and operations are in these buffers."""
        enter(self._context)
        with _Whole(self.streams):
            for source, sink, length in chunk.pieces:
                call(driver.cuMemcpyDtoDAsync(sink, source, length, self.stream.handle), "copy")
            for part in chunk.parts:
                self._kernels.run_part(self.stream, part, min(part.chunks, self.blocks))
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

    # checksums

    def begin_checksums(self, program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> Callable[[], Sums]:
        """Start `kvproto.copying.execute.checksums` of regions alongside other copies; the result waits for them."""
        enter(self._context)
        key = sink, *sorted(addresses.items())
        table = self._sum_tables.get(program.ops, key, lambda: self._sum_table(program, addresses, sink))
        if not any(m.size for m in program.maps):
            return dict
        sizes = table.sizes(program.maps)
        buffers = next((spare for spare in self._spare if spare.holds(*sizes)), None)
        if buffers is None:
            buffers = self.allocate(*sizes)
        else:
            self._spare.remove(buffers)
        at, host, stream = buffers.image.address, buffers.view.ctypes.data, int(self._aside.handle)
        size, conversions = table.write(program.maps, buffers.view, at, buffers.rows.address)
        totals = slice(size - 8 * len(table.groups), size)
        with _Whole((self._aside,)):
            self._expand(buffers, size, table.n_maps, max(m.size for m in program.maps), self._aside)
            for word, offset, count in table.launches:
                self._kernels.run(self._aside, word, "checksum", (self.blocks, count), at + offset)
            for step, offset, ops, chunks in conversions:
                grid = min(chunks, kernel.CONVERT_RESIDENT * self.blocks), 1
                self._kernels.run(self._aside, step, "sum_converted", grid, at + offset, ops, chunks)
            run("cuMemcpyDtoHAsync_v2", host + totals.start, at + totals.start, size - totals.start, stream)
            over = Mark(stream)

        def sums() -> Sums:
            if not is_done(over.handle):
                call(driver.cuEventSynchronize(over.handle), "checksum")
            self._spare.append(buffers)
            return table.sums(program.maps, buffers.view[totals])

        return sums

    def _sum_table(self, program: CopyProgram, addresses: Mapping[int, int], sink: bool) -> SumTable:
        table = kernel.sum_table(program, addresses, sink)
        self._load_converting(table.conversions)
        return table

    def settle(self) -> None:
        """Wait for checksums that are being taken, collected or not: after this none reads memory."""
        with contextlib.suppress(DeviceFault):  # a lost context reads nothing
            enter(self._context)
            if not is_idle(int(self._aside.handle)):
                call(driver.cuStreamSynchronize(self._aside.handle), "checksum")

    # buffers

    def allocate(self, image: int, rows: int) -> LaunchBuffers:
        """Allocate the buffers of a launch; sizes in bytes."""
        enter(self._context)
        size = 1 << max(image - 1, 4095).bit_length()
        host = core.LegacyPinnedMemoryResource().allocate(size)
        view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(host.handle)))
        expanded = DeviceBytes(1 << max(rows - 1, 4095).bit_length())
        return LaunchBuffers(host, view, DeviceBytes(size), expanded, self._record())

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
