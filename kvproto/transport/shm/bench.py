"""Times transport `shm`, which is the numpy executor, between a region and the mapping of another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.transport.bench import HOST, BenchJob, BenchPath, RunOnce
from kvproto.transport.shm.memory import SharedMemory, connect

__all__ = ["job"]


def job(memory: int) -> BenchJob:
    """A job on two regions of at most a third of `memory` bytes each."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        with (
            closing(SharedMemory(memory * 3 // 10)) as theirs,
            closing(SharedMemory(theirs.length)) as own,
            closing(connect(theirs.region, "regions[0]")) as mapped,
        ):

            def prepare(program: CopyProgram) -> RunOnce:
                def copy() -> float:
                    begin = time.perf_counter()
                    execute(program, {0: mapped.buffer}, {0: own.buffer})
                    return time.perf_counter() - begin

                return copy

            # The executor gathers before it scatters: the bytes of a program are in memory three times.
            yield [BenchPath("shm", "copy", HOST, HOST, own.length * 3 // 4, 1 << 16, prepare)]

    return BenchJob("shm", 1, opened)
