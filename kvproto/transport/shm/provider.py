"""Entry point of transport `shm`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Allocation, Memory, Provider, Regions
from kvproto.transport.bench import HOST, Absent, BenchJob, BenchPath, CostedWay, Floor, Measured, RunOnce
from kvproto.transport.shm.memory import SharedMemory, connect, owner_of
from kvproto.transport.shm.transport import HostPager, ShmTransport
from kvproto.transport.tensors import CPU


class _ShmProvider(Provider):
    name = "shm"

    def allocate(self, length: int, device: int | None, id: int) -> SharedMemory | None:
        return SharedMemory(length, id) if device is None else None

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        owner = owner_of(address, length) if device[0] == CPU else None
        return None if owner is None else Allocation(owner, lambda begin, end: (owner, owner.address))

    def preference(self, memory: Memory) -> int:
        return 2 if isinstance(memory, SharedMemory) else 0

    def open(self, memory: Regions, measured: Sequence[Measured] = ()) -> ShmTransport:
        return ShmTransport()

    def pager(self, memory: Regions, stream: int) -> HostPager:
        return HostPager()

    floors = (Floor("shm", ("copy",), False, 0.5e9, "the cores are busy, or memory is swapped or on another node"),)
    costs = (CostedWay("copy", "numpy copy", "copy"),)

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        return [_job(memory)], []


def _job(memory: int) -> BenchJob:
    """The job of the numpy executor, between a region and the mapping of another, of a third of `memory` bytes each."""

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


PROVIDER = _ShmProvider()
