"""Entry point of transport `shm`."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.transport.base import Allocation, Memory, Provider, Regions
from kvproto.transport.bench import Absent, BenchJob, CostedWay, Floor, Measured
from kvproto.transport.shm.memory import SharedMemory, owner_of
from kvproto.transport.shm.transport import HostPager, ShmTransport

__all__ = ["PROVIDER"]

_DLPACK_CPU = 1


class _ShmProvider(Provider):
    name = "shm"

    def allocate(self, length: int, device: int | None, id: int) -> SharedMemory | None:
        return SharedMemory(length, id) if device is None else None

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        owner = owner_of(address, length) if device[0] == _DLPACK_CPU else None
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
        from kvproto.transport.shm.bench import job

        return [job(memory)], []


PROVIDER = _ShmProvider()
