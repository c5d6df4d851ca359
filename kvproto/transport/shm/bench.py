"""Times transport `shm`, which is the numpy executor, between a region and the mapping of another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kvproto.copying.execute import execute
from kvproto.transport.bench import HOST, BenchJob, BenchPath, RunOnce, program
from kvproto.transport.shm.memory import SharedMapping, SharedMemory, connect

__all__ = ["job"]

_MOST_RUNS = 1 << 16


class _Copy(BenchPath):
    transport, way, source, sink = "shm", "copy", HOST, HOST

    def __init__(self, mapped: SharedMapping, own: SharedMemory) -> None:
        self._mapped, self._own = mapped, own

    def most_runs(self, run: int) -> int:
        # the executor gathers before it scatters: what is moved is in memory three times
        return min(self._own.length * 3 // 4 // run, _MOST_RUNS)

    def runner(self, run: int, runs: int) -> RunOnce:
        made = program(run, runs, self._own.length)

        def go() -> float:
            begin = time.perf_counter()
            execute(made, {0: self._mapped.buffer}, {0: self._own.buffer})
            return time.perf_counter() - begin

        return go


def job(memory: int) -> BenchJob:
    """A job on two regions of at most a third of `memory` bytes each."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        with (
            closing(SharedMemory(memory * 3 // 10)) as theirs, closing(SharedMemory(theirs.length)) as own,
            closing(connect(theirs.region, "regions[0]")) as mapped,
        ):  # fmt: skip
            yield [_Copy(mapped, own)]

    return BenchJob("shm", 1, opened)
