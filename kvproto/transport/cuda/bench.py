"""Times transport `cuda` by device events: the copy kernel, pull and push, and the copy engine as a ceiling."""

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

from cuda.core import Device, EventOptions

from kvproto.copying.program import CopyProgram
from kvproto.transport.bench import BenchJob, BenchPath, Prepare, RunOnce
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import call, current, driver, enable_peer
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory

_MOST_COPIES = 256


def count() -> int:
    """The number of GPUs that this process sees; 0 without a driver."""
    with contextlib.suppress(RuntimeError):  # cuda-core is installed, but no driver
        if driver.cuInit(0)[0] == driver.CUresult.CUDA_SUCCESS:
            return int(call(driver.cuDeviceGetCount(), "devices"))
    return 0


def names() -> tuple[str, ...]:
    """The names of the GPUs, in order."""
    return tuple(Device(i).name for i in range(count()))


def driver_version() -> str:
    """The version of the kernel module, such as 580.95.05, or else the newest CUDA that the driver supports."""
    with contextlib.suppress(OSError):
        if version := re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text()):
            return version[0]
    number = int(call(driver.cuDriverGetVersion(), "version"))
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ordered pairs of GPUs that reach each other, (0, 0) for a single one; and the pairs that do not."""
    ordered = [(a, b) for a in range(count()) for b in range(count()) if a != b]
    peers = [p for p in ordered if Device(p[0]).can_access_peer(p[1]) and Device(p[1]).can_access_peer(p[0])]
    return (peers if ordered else [(0, 0)] * count()), [p for p in ordered if p not in peers]


@lru_cache
def _copier(device: int) -> Copier:
    return Copier(device, timed=True)


def kernel(way: str, source: DeviceMemory, sink: DeviceMemory) -> BenchPath:
    """The gather-scatter kernel on the sink's GPU (pull) or on the source's (push)."""
    copier = _copier((sink if way == "pull" else source).device)

    def prepare(program: CopyProgram) -> RunOnce:
        prepared = copier.prepare(program, {0: source.address}, {0: sink.address})

        def copy() -> float:
            launched = copier.submit([CopyJob(prepared, program.maps)])
            launched.wait()
            return launched.seconds

        return copy

    return _path(way, source, sink, sys.maxsize, prepare)


def _engine(source: DeviceMemory, sink: DeviceMemory) -> BenchPath:
    """One cuMemcpyDtoDAsync for each run."""
    stream, timing = current(sink.device).create_stream(), EventOptions(timing_enabled=True)

    def prepare(program: CopyProgram) -> RunOnce:
        rows = program.maps[0]
        copies = [
            (
                sink.address + int(op["sink_offset"] + to * op["sink_row_stride"]),
                source.address + int(op["source_offset"] + start * op["source_row_stride"]),
                int(length * op["lane_bytes"]),
            )
            for op in program.ops
            for start, to, length in zip(rows.source_row, rows.sink_row, rows.rows, strict=True)
        ]

        def copy() -> float:
            current(sink.device)
            began = stream.record(options=timing)
            for to, start, length in copies:
                call(driver.cuMemcpyDtoDAsync(to, start, length, stream.handle), "copy")
            ended = stream.record(options=timing)
            ended.sync()
            return float(ended - began) / 1000

        return copy

    return _path("engine", source, sink, _MOST_COPIES, prepare)


def _path(way: str, source: DeviceMemory, sink: DeviceMemory, most: int, prepare: Prepare) -> BenchPath:
    return BenchPath("cuda", way, f"gpu{source.device}", f"gpu{sink.device}", source.length, most, prepare)


def job(memory: int, source: int, sink: int) -> BenchJob:
    """The job of pull, push and the copy engine between two GPUs, or within one, in `memory` bytes in all."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        enable_peer(source, sink)
        enable_peer(sink, source)
        length = memory * 4 // 10 // 4096 * 4096
        with closing(DeviceMemory(length, source)) as here, closing(DeviceMemory(length, sink)) as there:
            yield [kernel("pull", here, there), kernel("push", here, there), _engine(here, there)]

    return BenchJob(f"cuda gpu{source} to gpu{sink}", 3, opened)
