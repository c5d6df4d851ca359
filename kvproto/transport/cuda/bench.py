"""Times transport `cuda` by device events: the copy kernel, pull and push, and the copy engine as a ceiling."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from cuda.core import Device, EventOptions

from kvproto.transport.bench import BenchJob, BenchPath, RunOnce, program
from kvproto.transport.cuda.copier import Copier, CopyJob
from kvproto.transport.cuda.driver import call, current, driver, enable_peer
from kvproto.transport.cuda.memory import DeviceMemory

__all__ = ["Kernel", "count", "driver_version", "job", "names", "pairs"]

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
        found = re.search(r"\d+\.\d+[.\d]*", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[0]
    number = int(call(driver.cuDriverGetVersion(), "version"))
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ordered pairs of GPUs that reach each other, (0, 0) for a single one; and the pairs that do not."""
    some = [(a, b) for a in range(count()) for b in range(count()) if a != b]
    peers = [p for p in some if Device(p[0]).can_access_peer(p[1]) and Device(p[1]).can_access_peer(p[0])]
    return (peers if some else [(0, 0)] * count()), [p for p in some if p not in peers]


@lru_cache
def _copier(device: int) -> Copier:
    return Copier(device, timed=True)


class Kernel(BenchPath):
    """The gather-scatter kernel on the sink's GPU (pull) or on the source's (push)."""

    transport = "cuda"

    def __init__(self, way: str, source: DeviceMemory, sink: DeviceMemory) -> None:
        self.way, self.source, self.sink = way, f"gpu{source.device}", f"gpu{sink.device}"
        self._copier = _copier((sink if way == "pull" else source).device)
        self.pools = source, sink

    def most_runs(self, run: int) -> int:
        return self.pools[0].length // run

    def runner(self, run: int, runs: int) -> RunOnce:
        here, there = self.pools
        made = program(run, runs, here.length)
        prepared = self._copier.prepare(made, {0: here.address}, {0: there.address})

        def go() -> float:
            copy = self._copier.submit([CopyJob(prepared, made.maps)])
            copy.wait()
            return copy.seconds

        return go


class _Engine(BenchPath):
    """One cuMemcpyDtoDAsync for each run."""

    transport, way = "cuda", "engine"

    def __init__(self, source: DeviceMemory, sink: DeviceMemory) -> None:
        self.source, self.sink = f"gpu{source.device}", f"gpu{sink.device}"
        self._from, self._to = source, sink
        self._stream = current(sink.device).create_stream()

    def most_runs(self, run: int) -> int:
        return min(self._from.length // run, _MOST_COPIES)

    def runner(self, run: int, runs: int) -> RunOnce:
        dice = np.random.default_rng(run)
        places = [(dice.permutation(self._from.length // run)[:runs] * run).tolist() for _ in range(2)]
        copies = [(self._to.address + b, self._from.address + a) for a, b in zip(*places, strict=True)]
        timing = EventOptions(timing_enabled=True)

        def go() -> float:
            current(self._to.device)
            began = self._stream.record(options=timing)
            for to, from_ in copies:
                call(driver.cuMemcpyDtoDAsync(to, from_, run, self._stream.handle), "copy")
            ended = self._stream.record(options=timing)
            ended.sync()
            return float(ended - began) / 1000

        return go


def job(memory: int, source: int, sink: int) -> BenchJob:
    """The job of pull, push and the copy engine between two GPUs, or within one, in `memory` bytes in all."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        enable_peer(source, sink)
        enable_peer(sink, source)
        length = memory * 4 // 10 // 4096 * 4096
        with closing(DeviceMemory(length, source)) as here, closing(DeviceMemory(length, sink)) as there:
            yield [Kernel("pull", here, there), Kernel("push", here, there), _Engine(here, there)]

    return BenchJob(f"cuda gpu{source} to gpu{sink}", 3, opened)
