"""Packs and unpacks streams of device memory: `kvproto.transport.staging.packed.Packer` by the copy kernel."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Layer
from kvproto.transport.cuda.cache import PerProgramCache
from kvproto.transport.cuda.copier import Copier, Copy, LaunchBuffers
from kvproto.transport.cuda.driver import is_done
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.cuda.stream import StreamSide, StreamTable

__all__ = ["DevicePacker", "DeviceStream"]


RankLayout = Literal["source", "sink"]


class DevicePacker:
    """Makes the streams of one GPU; they share a copier and what it needs on the device."""

    def __init__(self, device: int = 0, blocks: int | None = None) -> None:
        self.copier = Copier(device, blocks)
        self._idle: list[LaunchBuffers] = []
        self._sides = PerProgramCache[StreamSide]()

    def prepare(self, program: CopyProgram, side: RankLayout, memory: Mapping[int, DeviceMemory]) -> StreamSide:
        """What no request of a rank pair changes, made once; memory by region id. Raises OUT_OF_REGION, POOL_MOVED."""
        for each in memory.values():
            each.check()
        places = tuple((i, m.address, m.length) for i, m in sorted(memory.items()))

        def make() -> StreamSide:
            made = StreamSide(program, side, {i: at for i, at, _ in places}, {i: n for i, _, n in places})
            self.copier.load(made.words)
            return made

        return self._sides.get(program.ops, (side, places), make)

    def stream(
        self, program: CopyProgram, side: RankLayout, memory: Mapping[int, DeviceMemory], after: Sequence[int] = ()
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


class DeviceStream:
    """A stream of one program; chunks go to and from device memory, `nixl.Memory`."""

    def __init__(self, copier: Copier, table: StreamTable, buffers: LaunchBuffers, after: Sequence[int]) -> None:
        self._copier, self._table, self._buffers, self._after = copier, table, buffers, tuple(after)

    @property
    def length(self) -> int:
        """Bytes of the stream."""
        return self._table.order.length

    def chunk_size(self, offset: int, most: int) -> int:
        """To the end of a record, so that the kernel alone copies."""
        return self._table.chunk_size(offset, most)

    def prefix_bytes(self, layers: Collection[Layer]) -> int:
        """As `Order.prefix_bytes`."""
        return self._table.order.prefix_bytes(layers)

    def pack(self, offset: int, out: Any) -> Copy:
        """Begin to write stream bytes [offset, offset + out.length) to `out`; raises OUT_OF_RANGE beyond the end."""
        return self._run(offset, out)

    def unpack(self, offset: int, data: Any) -> Copy:
        """Begin to write stream bytes [offset, offset + data.length) to where they belong; raises OUT_OF_RANGE."""
        return self._run(offset, data)

    def _run(self, offset: int, slot: Any) -> Copy:
        chunk = self._table.chunk(offset, slot.length, slot.address)
        after, self._after = self._after, ()
        self._copier.follow(after)
        return self._copier.chunk(chunk, self._buffers, slot.length)
