"""Packs and unpacks streams of device memory: `kvproto.transport.staging.packed.Packer` by the copy kernel."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvproto.copying.program import CopyProgram
from kvproto.transport.cuda.copier import Copier, DeviceCopy, LaunchBuffers
from kvproto.transport.cuda.direct import is_done
from kvproto.transport.cuda.kernel import PerProgramCache
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.stream import StreamSide, StreamTable
from kvproto.transport.staging.packed import Layer, Packer, Side

__all__ = ["DevicePacker", "DeviceStream"]


class DevicePacker:
    """Makes the streams of one GPU, which share a copier and buffers on the device."""

    def __init__(self, device: int = 0, blocks: int | None = None) -> None:
        self.copier = Copier(device, blocks)
        self._idle: list[LaunchBuffers] = []
        self._sides = PerProgramCache[StreamSide]()

    def prepare(self, program: CopyProgram, side: Side, memory: Mapping[int, DeviceMemory]) -> StreamSide:
        """What a rank pair's requests share, made once, over memory by region id. Raises OUT_OF_REGION, POOL_MOVED."""
        for each in memory.values():
            each.check()
        places = tuple((i, m.address, m.length) for i, m in sorted(memory.items()))

        def make() -> StreamSide:
            made = StreamSide(program, side, {i: at for i, at, _ in places}, {i: n for i, _, n in places})
            self.copier.load(made.words)
            return made

        return self._sides.get(program.ops, (side, places), make)

    def stream(
        self, program: CopyProgram, side: Side, memory: Mapping[int, DeviceMemory], after: Sequence[int] = ()
    ) -> DeviceStream:
        """One side's end of a program's stream; the first chunk waits for the events `after`.

        Raises OUT_OF_REGION, POOL_MOVED.
        """
        made = StreamTable(self.prepare(program, side, memory), program.maps)
        buffers = self._unused(*made.sizes)
        size = made.write(buffers.view, buffers.image.address, buffers.rows.address)
        if made.most_rows:
            self.copier.expand(buffers, size, made.n_maps, made.most_rows)
        stream = DeviceStream(self.copier, made, buffers, after)
        weakref.finalize(stream, self._idle.append, buffers)
        return stream

    def _unused(self, image: int, rows: int) -> LaunchBuffers:
        for buffers in self._idle:
            if buffers.holds(image, rows) and is_done(buffers.event.handle):
                self._idle.remove(buffers)
                return buffers
        return self.copier.allocate(image, rows)


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
