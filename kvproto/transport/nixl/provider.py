"""Entry point of transport `nixl`."""

from __future__ import annotations

from collections.abc import Mapping

from kvproto.errors import LocalError
from kvproto.transport.base import Memory, Provider, Transport
from kvproto.transport.shm.memory import SharedMemory
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["PROVIDER"]


class _Nixl(Provider):
    name = "nixl"
    requires = ("nixl",)
    install = "pip install 'kvproto[nixl]'"

    def preference(self, memory: Memory) -> int:
        return int(isinstance(memory, SharedMemory) or memory.kind == MemoryKind.CUDA)

    def open(self, memory: Mapping[int, Memory]) -> Transport:
        from kvproto.transport.nixl.transport import NixlTransport

        return NixlTransport(device=one_place(memory))


def one_place(memory: Mapping[int, Memory]) -> int | None:
    """The GPU that all regions are on, None for the host; raises LocalError(NO_TRANSPORT)."""
    devices = {m.device for m in memory.values()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no region"
        raise LocalError(ErrorCode.NO_TRANSPORT, "pool", "regions of one GPU, or of the host", found, "part the pool")
    return devices.pop()


PROVIDER = _Nixl()
