"""Entry point of transport `cuda`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvproto.errors import LocalError
from kvproto.transport.base import Allocation, Memory, Provider, Transport
from kvproto.transport.bench import Absent, BenchJob, CostedWays, Floor, Measured
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["PROVIDER"]

_DLPACK_CUDA = 2


class _Cuda(Provider):
    name = "cuda"
    requires = "cuda", "cuda.core"
    install = "pip install 'kvproto[cuda]'"

    def allocate(self, length: int, device: int | None, id: int) -> Memory | None:
        if device is None:
            return None
        from kvproto.transport.cuda.memory import DeviceMemory

        made = DeviceMemory(length, device, id)
        made.zero()
        return made

    def allocation_of(self, device: tuple[int, int], address: int, length: int) -> Allocation | None:
        if device[0] != _DLPACK_CUDA:
            return None
        from kvproto.transport.cuda.memory import DeviceMemory, allocation_at

        start = allocation_at(address)
        if start is None:
            return None
        return Allocation(("cuda", start), lambda begin, end: (DeviceMemory.adopt(begin, end - begin), begin))

    def preference(self, memory: Memory) -> int:
        return 2 if memory.kind == MemoryKind.CUDA else 0

    def open(self, memory: Mapping[int, Memory], measured: Sequence[Measured] = ()) -> Transport:
        device = one_device(memory)
        from kvproto.transport.cuda.transport import CudaTransport
        from kvproto.transport.cuda.tuning import long_runs

        return CudaTransport(device, long=long_runs(measured))

    floors = (
        Floor(
            "cuda", ("pull", "push", "engine"), True, 10e9,
            "less than PCIe 3.0 x16 gives: see `nvidia-smi topo -m`, the slot's width, IOMMU, ACS, others on the GPU",
        ),
    )  # fmt: skip
    costs: ClassVar[CostedWays] = {"pull": ("kernel", "copy"), "push": ("kernel, push", "copy")}

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


def one_device(memory: Mapping[int, Memory]) -> int:
    """The GPU that all regions are on; raises LocalError(NO_TRANSPORT)."""
    devices = {m.device for m in memory.values()}
    device = devices.pop() if len(devices) == 1 else None
    if device is None:
        found = ", ".join(f"region {id} on {_place(m)}" for id, m in memory.items()) or "no region"
        advice = "give each rank pools of one GPU"
        raise LocalError(ErrorCode.NO_TRANSPORT, "pool", "regions of one GPU", found, advice)
    return device


def _place(memory: Memory) -> str:
    return "the host" if memory.device is None else f"GPU {memory.device}"


PROVIDER = _Cuda()
