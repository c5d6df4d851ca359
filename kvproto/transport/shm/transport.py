"""Transport `shm`: numpy strided copies between shared memory of one host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from kvproto.copying.execute import checksums, execute
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import LocalError
from kvproto.transport.base import Capabilities, Connection, Exposure, Mapped, Memory, Move, connect_each
from kvproto.transport.shm import memory as shared
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Region

__all__ = ["ShmCopy", "ShmTransport"]


@attrs.frozen
class ShmCopy:
    """A copy that was over when `start` returned."""

    bytes: int
    stream: None = None
    done: bool = True

    def stop(self) -> Proof:
        """PROVEN: nothing is under way."""
        return Proof.PROVEN


class ShmTransport:
    """Runs copy programs between shared memory of one host, within `start`."""

    capabilities = Capabilities(
        code=TransportCode.SHM, reads=True, death_is_proof=True, batches=True, incremental=True, poll_interval=None
    )

    def expose(
        self, memory: Mapping[int, Memory], next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> Exposure:
        """Name each region's file; raises NO_TRANSPORT for memory other than `SharedMemory`."""
        _buffers(memory)
        return Exposure({id: each.region.handles for id, each in memory.items()})

    def connect(self, regions: Sequence[Region], used: Collection[int], writes: bool, staged: bool) -> Connection:
        """As `kvproto.transport.shm.memory.connect`, of each region."""
        return connect_each(regions, used, shared.connect)

    def prepare(self, move: Move) -> None:
        """There is nothing to prepare."""

    def start(self, moves: Sequence[Move]) -> ShmCopy:
        """Run them; every byte is there on return."""
        return ShmCopy(sum(execute(_program(m), _buffers(m.sources), _buffers(m.sinks)) for m in moves))

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`."""
        return checksums(program, _buffers(memory), sink)

    def fileno(self) -> None:
        """No copy is ever under way."""

    def acknowledge(self) -> None:
        """Nothing is announced."""

    def close(self) -> None:
        """Nothing is held."""


def _program(move: Move) -> CopyProgram:
    return move.program if move.layers is None else move.program.select(layers=range(*move.layers))


def _buffers(side: Mapping[int, Memory | Mapped]) -> dict[int, memoryview]:
    found = {}
    for id, memory in side.items():
        if not isinstance(memory, shared.SharedMemory | shared.Mapping):
            raise LocalError(
                ErrorCode.NO_TRANSPORT, f"regions[{id}]", "memory that SHM can share", type(memory).__name__,
                "allocate it with kvproto.transport.memory.allocate and let the engine's tensors use it",
            )  # fmt: skip
        found[id] = memory.buffer
    return found
