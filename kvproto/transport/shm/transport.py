"""Transport `shm`: numpy strided copies between shared memory of one host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvproto.copying.execute import checksums, execute
from kvproto.copying.program import CopyProgram, Runs
from kvproto.transport import base
from kvproto.transport.shm import memory as shared
from kvproto.wire.enums import Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Region

__all__ = ["ShmCopy", "ShmTransport"]


@attrs.frozen
class ShmCopy(base.Copying):
    """A copy that was complete when `start` returned."""

    bytes: int
    stream: None = None
    done: bool = True

    def stop(self) -> Proof:
        return Proof.PROVEN


class ShmTransport(base.Transport):
    """Runs copy programs between shared memory of one host, within `start`."""

    capabilities = base.Capabilities(
        code=TransportCode.SHM, reads=True, death_is_proof=True, batches=True, incremental=True, poll_interval=None
    )

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """Name each region's file; raises NO_TRANSPORT for memory other than `SharedMemory`."""
        _buffers(memory)
        return base.Exposure({id: each.region.handles for id, each in memory.items()})

    def connect(
        self, regions: Sequence[Region], used: Collection[int], writes: bool, features: Collection[int]
    ) -> base.Connection:
        """Map each region; raises as `kvproto.transport.shm.memory.connect`."""
        return base.connect_each(regions, used, shared.connect)

    def start(self, moves: Sequence[base.Move]) -> ShmCopy:
        """Run them: every byte is there on return."""
        done = 0
        for move in moves:
            program = move.program if move.layers is None else move.program.select(layers=range(*move.layers))
            done += execute(program, _buffers(move.sources), _buffers(move.sinks))
        return ShmCopy(done)

    def checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> dict[int, int]:
        return checksums(program, _buffers(memory), sink)


def _buffers(side: Mapping[int, base.Memory | base.Mapped]) -> dict[int, memoryview]:
    return shared.buffers(side, "memory that SHM can share", shared.SharedMemory, shared.Mapping)
