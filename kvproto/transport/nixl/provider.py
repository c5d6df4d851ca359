"""Entry point of transport `nixl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from kvproto.errors import LocalError
from kvproto.transport.base import Memory, Provider, Transport
from kvproto.transport.bench import Absent, BenchJob, CostedWays, Floor, Measured
from kvproto.transport.nixl.direct import DEVICE_FLOOR, WriteMode
from kvproto.transport.shm.memory import SharedMemory
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["PROVIDER"]


class _Nixl(Provider):
    name = "nixl"
    requires = ("nixl",)
    install = "pip install 'kvproto[nixl]'"

    def preference(self, memory: Memory) -> int:
        return int(isinstance(memory, SharedMemory) or memory.kind == MemoryKind.CUDA)

    def open(self, memory: Mapping[int, Memory], measured: Sequence[Measured] = ()) -> Transport:
        device = one_place(memory)
        from kvproto.transport.nixl.transport import NixlTransport
        from kvproto.transport.nixl.tuning import costs_of

        return NixlTransport(costs_of(measured, device is not None) or WriteMode.PACKED, device=device)

    floors = (
        Floor("nixl", ("direct",), False, 0.5e9, "UCX does not use shared memory: see UCX_TLS, and limits of /dev/shm"),
        Floor(
            "nixl", ("direct",), True, DEVICE_FLOOR,
            "UCX goes by sockets or through the host: see UCX_TLS, UCX_NET_DEVICES, and whether UCX knows CUDA",
        ),
    )  # fmt: skip
    costs: ClassVar[CostedWays] = {
        "packed": ("pack + copy + unpack", "packed"),
        "direct": ("descriptors", "direct"),
    }

    def bench(self, memory: int, gpus: int) -> tuple[list[BenchJob], list[Absent]]:
        from kvproto.transport.nixl.bench import job

        return [job(memory), *([job(memory, "gpu0", "gpu1")] if gpus > 1 else [])], []


def one_place(memory: Mapping[int, Memory]) -> int | None:
    """The GPU that all regions are on, None for the host; raises LocalError(NO_TRANSPORT)."""
    devices = {m.device for m in memory.values()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no region"
        raise LocalError(ErrorCode.NO_TRANSPORT, "pool", "regions of one GPU, or of the host", found, "part the pool")
    return devices.pop()


PROVIDER = _Nixl()
