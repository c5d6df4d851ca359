"""Entry point of transport `cuda`."""

import sys
from collections.abc import Sequence

from kvproto.errors import LocalError
from kvproto.transport.base import Allocation, Memory, Pager, Provider, Regions, Transport
from kvproto.transport.bench import Absent, BenchJob, Constants, CostedWay, Floor, Measured, same_path
from kvproto.transport.tensors import CUDA
from kvproto.wire.enums import ErrorCode, MemoryKind

_SLOW = "less than PCIe 3.0 x16 gives: see `nvidia-smi topo -m`, the slot's width, IOMMU, ACS, who uses the GPU"


class _CudaProvider(Provider):
    name = "cuda"
    requires = "cuda", "cuda.core"
    install = "pip install 'kvproto[cuda]'"

    def allocate(self, length: int, device: int | None, id: int) -> Memory | None:
        if device is None:
            return None
        from kvproto.transport.cuda.memory import DeviceMemory

        memory = DeviceMemory(length, device, id)
        memory.zero()
        return memory

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        if device[0] != CUDA:
            return None
        from kvproto.transport.cuda.memory import DeviceMemory, allocation_at

        start = allocation_at(address)
        if start is None:
            return None
        return Allocation(("cuda", start), lambda begin, end: (DeviceMemory.adopt(begin, end - begin), begin))

    def preference(self, memory: Memory) -> int:
        return 2 if memory.kind == MemoryKind.CUDA else 0

    def open(self, memory: Regions, measured: Sequence[Measured] = ()) -> Transport:
        device = self.device_of(memory)
        if device is None:
            advice = "allocate it with kvproto.transport.memory on the GPU"
            raise LocalError(ErrorCode.NO_TRANSPORT, "pool", "regions of one GPU", "memory of the host", advice)
        from kvproto.transport.cuda.transport import CudaTransport

        return CudaTransport(device, long=long_runs(measured))

    def pager(self, memory: Regions, stream: int) -> Pager:
        device = self.device_of(memory)
        assert device is not None
        from kvproto.transport.cuda.pager import CudaPager

        return CudaPager(device, stream)

    floors = (Floor("cuda", ("pull", "push", "engine"), True, 10e9, _SLOW),)
    costs = (
        CostedWay("pull", "kernel", "copy", Constants(370e9, 1.0e-11, 15e-6)),  # gathers and scatters
        CostedWay("push", "kernel, push", "copy"),
    )

    def gpus(self) -> tuple[tuple[str, ...], str | None]:
        if self.missing() is not None:
            return (), None
        from kvproto.transport.cuda import bench

        names = bench.names()
        return names, bench.driver_version() if names else None

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        if not gpus:
            return [], [Absent("cuda", "no GPU")]
        from kvproto.transport.cuda import bench

        reach, apart = bench.pairs()
        advice = "use transport nixl between them; see `nvidia-smi topo -p2p r`"
        absent = [Absent(f"cuda gpu{a} to gpu{b}", "no peer access", advice, slow=True) for a, b in apart]
        return [bench.job(memory, a, b) for a, b in reach], absent


_NEVER = sys.maxsize


def long_runs(measured: Sequence[Measured]) -> int | None:
    """The bytes from which no run is slower by the copy engine, for `CudaTransport(long=...)`; None: not measured."""
    longest = []
    for engine in measured:
        if (engine.transport, engine.way) == ("cuda", "engine") and engine.source != engine.sink:
            longest += [
                _from(engine, kernel) for way in ("pull", "push") for kernel in same_path(engine, measured, way)
            ]
    return max(longest, default=None)


def _from(engine: Measured, kernel: Measured) -> int:
    """The shortest run from which the engine is no slower at any length that both were measured at."""
    of_kernel = {s.run: s.rate for s in kernel.samples}  # for one length the larger program comes last
    of_engine = {s.run: s.rate for s in engine.samples}
    shortest = _NEVER
    for run in sorted(of_kernel.keys() & of_engine.keys(), reverse=True):
        if of_engine[run] < of_kernel[run]:
            break
        shortest = run
    return shortest


PROVIDER = _CudaProvider()
