"""A GPU's memory for transport `nixl`: pools, staging slots, and the packing between them by the copy kernel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvproto.copying.program import CopyProgram, Side
from kvproto.errors import LocalError
from kvproto.transport.base import Memory, Regions
from kvproto.transport.cuda.copier import Copier, DeviceCopy, LaunchBuffers
from kvproto.transport.cuda.driver import current, is_done, uuid
from kvproto.transport.cuda.kernel import SUMMED, PerProgramCache
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.stream import StreamSide, StreamTable
from kvproto.transport.nixl.backend import MemoryBackend
from kvproto.transport.nixl.handle import ByteRange
from kvproto.transport.staging.packed import Layer, Packer
from kvproto.wire.enums import ErrorCode, MemoryKind


class DeviceBackend(MemoryBackend):
    """One GPU of this process, by CUDA ordinal; all of its streams share a copier and buffers on the device."""

    slot_bytes, eager, summed_at_once, converts = 64 << 20, True, SUMMED, False

    def __init__(self, device: int, blocks: int | None = None) -> None:
        self.device = device
        self.copier = Copier(device, blocks)
        self.device_name = uuid(device)
        self._allocated: dict[int, DeviceMemory] = {}
        self._idle: list[LaunchBuffers] = []
        self._sides = PerProgramCache[StreamSide]()

    def allocate(self, length: int) -> ByteRange:
        """`length` bytes in one cuMemAlloc, which UCX can share."""
        staging = DeviceMemory(length, self.device)
        self._allocated[staging.address] = staging
        return self.of(staging)

    def free(self, memory: ByteRange) -> None:
        """Release staging memory, once its packing or unpacking is done."""
        self._allocated.pop(memory.address).close()

    def of(self, memory: Memory) -> ByteRange:
        own = self._own(memory)
        return ByteRange(own.address, own.length, MemoryKind.CUDA, own.device)

    def mappable(self, memory: Memory) -> bool:
        """Whether cuda_ipc can open it, as it can memory of cuMemAlloc but not virtual memory."""
        return self._own(memory).legacy

    def prepare(self, program: CopyProgram, side: Side, memory: Regions) -> None:
        """Make tables of operations, and load the kernels that they need. Raises OUT_OF_REGION, POOL_MOVED."""
        self._side(program, side, memory)

    def packer(self, program: CopyProgram, side: Side, memory: Regions, after: Sequence[int] = ()) -> DeviceStream:
        """One side's end of a program's stream, which begins after events; raises OUT_OF_REGION, POOL_MOVED."""
        table = StreamTable(self._side(program, side, memory), program.maps)
        buffers = self._unused(*table.sizes)
        size = table.write(buffers.view, buffers.image.address, buffers.rows.address)
        if table.most_rows:
            self.copier.expand(buffers, size, table.n_maps, table.most_rows)
        stream = DeviceStream(self.copier, table, buffers, after)
        weakref.finalize(stream, self._idle.append, buffers)
        return stream

    def _side(self, program: CopyProgram, side: Side, memory: Regions) -> StreamSide:
        """The table that a rank pair's requests share, made once."""
        own = self._checked(memory)
        places = tuple((i, m.address, m.length) for i, m in sorted(own.items()))

        def make() -> StreamSide:
            shared = StreamSide(program, side, {i: at for i, at, _ in places}, {i: n for i, _, n in places})
            self.copier.load(shared.words)
            return shared

        return self._sides.get(program.ops, (side, places), make)

    def _unused(self, image: int, rows: int) -> LaunchBuffers:
        for buffers in self._idle:
            if buffers.holds(image, rows) and is_done(buffers.event.handle):
                self._idle.remove(buffers)
                return buffers
        return self.copier.allocate(image, rows)

    def happened(self, events: Sequence[int]) -> bool:
        if events:
            current(self.device)
        return all(is_done(event) for event in events)

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        addresses = {i: m.address for i, m in self._checked(memory).items()}
        return self.copier.begin_checksums(program, addresses, sink)

    def settle(self) -> None:
        self.copier.settle()

    def close(self) -> None:
        self.settle()
        for staging in self._allocated.values():
            staging.close()
        self._allocated.clear()

    def _own(self, memory: Memory) -> DeviceMemory:
        if not isinstance(memory, DeviceMemory) or memory.device != self.device:
            what = f"GPU {memory.device}" if isinstance(memory, DeviceMemory) else type(memory).__name__
            advice = "give NixlTransport the pool's device"
            raise LocalError(ErrorCode.NO_TRANSPORT, "", f"memory of GPU {self.device}", what, advice)
        return memory

    def _checked(self, memory: Regions) -> Mapping[int, DeviceMemory]:
        own = {i: self._own(m) for i, m in memory.items()}
        for region in own.values():
            region.check()
        return own


class DeviceStream(Packer):
    """A stream of one program; chunks lie in device memory, given by `address` and `length`."""

    def __init__(self, copier: Copier, table: StreamTable, buffers: LaunchBuffers, after: Sequence[int]) -> None:
        self._copier, self._table, self._buffers, self._after = copier, table, buffers, tuple(after)

    @property
    def length(self) -> int:
        return self._table.order.length

    def chunk_size(self, offset: int, most: int) -> int:
        """Up to the end of a record, so that the kernel copies everything."""
        return self._table.chunk_size(offset, most)

    def prefix_bytes(self, layers: Collection[Layer]) -> int:
        return self._table.order.prefix_bytes(layers)

    def pack(self, offset: int, out: Any) -> DeviceCopy:
        chunk = self._table.chunk(offset, out.length, out.address)
        after, self._after = self._after, ()
        self._copier.follow(after)
        return self._copier.chunk(chunk, self._buffers, out.length)

    def unpack(self, offset: int, data: Any) -> DeviceCopy:
        return self.pack(offset, data)  # a stream's table knows the direction
