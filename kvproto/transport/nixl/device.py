"""A GPU's memory for transport `nixl`: pools, staging slots, and the packing between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvproto.copying.program import CopyProgram
from kvproto.errors import LocalError
from kvproto.transport.base import Memory, Regions
from kvproto.transport.cuda.direct import is_done
from kvproto.transport.cuda.driver import current, uuid
from kvproto.transport.cuda.kernel import SUMMED
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.packer import DevicePacker, DeviceStream
from kvproto.transport.nixl.backend import MemoryBackend
from kvproto.transport.nixl.handle import ByteRange
from kvproto.transport.staging.packed import Side
from kvproto.wire.enums import ErrorCode, MemoryKind

__all__ = ["DeviceBackend"]


class DeviceBackend(MemoryBackend):
    """One GPU of this process, by CUDA ordinal, packed by the copy kernel."""

    slot_bytes, eager, summed_at_once = 64 << 20, True, SUMMED

    def __init__(self, device: int, blocks: int | None = None) -> None:
        self.device = device
        self._packer = DevicePacker(device, blocks)
        self.copier = self._packer.copier
        self.device_name = uuid(device)
        self._allocated: dict[int, DeviceMemory] = {}

    def allocate(self, length: int) -> ByteRange:
        """`length` bytes in one cuMemAlloc, which UCX can share."""
        made = DeviceMemory(length, self.device)
        self._allocated[made.address] = made
        return self.of(made)

    def free(self, memory: ByteRange) -> None:
        """Release staging memory, once what is being packed or unpacked is done."""
        self._allocated.pop(memory.address).close()

    def of(self, memory: Memory) -> ByteRange:
        own = self._own(memory)
        return ByteRange(own.address, own.length, MemoryKind.CUDA, own.device)

    def mappable(self, memory: Memory) -> bool:
        """Whether cuda_ipc can open it, as it can memory of cuMemAlloc but not virtual memory."""
        return self._own(memory).legacy

    def prepare(self, program: CopyProgram, side: Side, memory: Regions) -> None:
        """Make tables of operations, and load the kernels that they need."""
        self._packer.prepare(program, side, {i: self._own(m) for i, m in memory.items()})

    def packer(self, program: CopyProgram, side: Side, memory: Regions, after: Sequence[int] = ()) -> DeviceStream:
        return self._packer.stream(program, side, {i: self._own(m) for i, m in memory.items()}, after)

    def happened(self, events: Sequence[int]) -> bool:
        if events:
            current(self.device)
        return all(is_done(event) for event in events)

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        own = {i: self._own(m) for i, m in memory.items()}
        for each in own.values():
            each.check()
        return self.copier.begin_checksums(program, {i: m.address for i, m in own.items()}, sink)

    def settle(self) -> None:
        self.copier.settle()

    def close(self) -> None:
        self.settle()
        for made in self._allocated.values():
            made.close()
        self._allocated.clear()

    def _own(self, memory: Memory) -> DeviceMemory:
        if not isinstance(memory, DeviceMemory) or memory.device != self.device:
            what = f"GPU {memory.device}" if isinstance(memory, DeviceMemory) else type(memory).__name__
            advice = "give NixlTransport the pool's device"
            raise LocalError(ErrorCode.NO_TRANSPORT, "", f"memory of GPU {self.device}", what, advice)
        return memory
