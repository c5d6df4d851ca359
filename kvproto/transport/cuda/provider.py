"""Entry point of transport `cuda`."""

from __future__ import annotations

from collections.abc import Mapping

from kvproto.errors import LocalError
from kvproto.transport.base import Memory, Provider, Transport
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["PROVIDER"]


class _Cuda(Provider):
    name = "cuda"
    requires = "cuda", "cuda.core"
    install = "pip install 'kvproto[cuda]'"

    def preference(self, memory: Memory) -> int:
        return 2 if memory.kind == MemoryKind.CUDA else 0

    def open(self, memory: Mapping[int, Memory]) -> Transport:
        from kvproto.transport.cuda.transport import CudaTransport

        return CudaTransport(one_device(memory))


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
