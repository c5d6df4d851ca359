"""A GPU's memory for transport `nixl`: pools, staging slots, and the packing between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kvproto.copying.program import CopyProgram
from kvproto.errors import LocalError
from kvproto.transport.base import Memory
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.driver import current, is_done, uuid
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.packer import DevicePacker, DeviceStream
from kvproto.transport.nixl.handle import Memory as Bytes
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["DeviceBackend"]


class DeviceBackend:
    """One GPU of this process, by CUDA ordinal; `kvproto.transport.nixl.backend.MemoryBackend`."""

    slot_bytes, eager = 64 << 20, True

    def __init__(self, device: int, blocks: int | None = None) -> None:
        self.device = device
        self._packer = DevicePacker(device, blocks)
        self.device_name: str | None = uuid(device)
        self._allocated: dict[int, DeviceMemory] = {}

    @property
    def copier(self) -> Copier:
        """Packs and unpacks."""
        return self._packer.copier

    def allocate(self, length: int) -> Bytes:
        """One cuMemAlloc, which UCX can share."""
        made = DeviceMemory(length, self.device)
        self._allocated[made.address] = made
        return Bytes(made.address, length, MemoryKind.CUDA, self.device)

    def free(self, memory: Bytes) -> None:
        """Waits for what is packed or unpacked."""
        self._allocated.pop(memory.address).close()

    def of(self, memory: Memory) -> Bytes:
        """Its addresses."""
        own = self._own(memory)
        return Bytes(own.address, own.length, MemoryKind.CUDA, own.device)

    def mappable(self, memory: Memory) -> bool:
        """What cuda_ipc opens: memory of cuMemAlloc, not virtual memory."""
        return self._own(memory).legacy

    def prepare(self, program: CopyProgram, side: Literal["source", "sink"], memory: Mapping[int, Memory]) -> None:
        """Tables of operations, and the kernels that they ask for."""
        self._packer.prepare(program, side, {i: self._own(m) for i, m in memory.items()})

    def packer(
        self,
        program: CopyProgram,
        side: Literal["source", "sink"],
        memory: Mapping[int, Memory],
        after: Sequence[int] = (),
    ) -> DeviceStream:
        """By the copy kernel."""
        return self._packer.stream(program, side, {i: self._own(m) for i, m in memory.items()}, after)

    def happened(self, events: Sequence[int]) -> bool:
        """By a query of each."""
        if events:
            current(self.device)
        return all(is_done(event) for event in events)

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """By a kernel."""
        own = {i: self._own(m) for i, m in memory.items()}
        for each in own.values():
            each.check()
        return self.copier.checksums(program, {i: m.address for i, m in own.items()}, sink)

    def close(self) -> None:
        """Free the staging memory."""
        for made in self._allocated.values():
            made.close()
        self._allocated.clear()

    def _own(self, memory: Memory) -> DeviceMemory:
        if not isinstance(memory, DeviceMemory) or memory.device != self.device:
            what = f"GPU {memory.device}" if isinstance(memory, DeviceMemory) else type(memory).__name__
            advice = "give NixlTransport the pool's device"
            raise LocalError(ErrorCode.NO_TRANSPORT, "", f"memory of GPU {self.device}", what, advice)
        return memory
