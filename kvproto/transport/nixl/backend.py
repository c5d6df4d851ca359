"""Memory of one kind for transport `nixl`: the host's here, a GPU's in `kvproto.transport.nixl.device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from kvproto.copying.execute import checksums
from kvproto.copying.program import CopyProgram
from kvproto.errors import LocalError
from kvproto.transport.base import Memory
from kvproto.transport.nixl.handle import Memory as Bytes
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.staging.packed import PackedStream, Packer
from kvproto.wire.enums import ErrorCode

__all__ = ["HostBackend", "MemoryBackend", "backend_of"]


class MemoryBackend(Protocol):
    """Memory of one kind: pools, staging slots, and what packs from the one into the other."""

    slot_bytes: int
    """Bytes of a staging slot by default."""
    eager: bool
    """Whether callers that ask after a write advance NIXL themselves: where writes end sooner than a thread wakes."""
    device_name: str | None
    """UUID of the GPU, as regions state it; None on the host."""

    def allocate(self, length: int) -> Bytes:
        """Staging memory, until `free` or `close`."""

    def free(self, memory: Bytes) -> None:
        """Give it back; no write of it may be under way."""

    def of(self, memory: Memory) -> Bytes:
        """A pool; raises NO_TRANSPORT for one of another place."""

    def mappable(self, memory: Memory) -> bool:
        """Whether UCX takes its short way into a pool that a peer writes directly."""

    def prepare(self, program: CopyProgram, side: Literal["source", "sink"], memory: Mapping[int, Memory]) -> None:
        """What all streams of a rank pair share, so that no request waits for it; `program` is any of the pair's."""

    def packer(
        self,
        program: CopyProgram,
        side: Literal["source", "sink"],
        memory: Mapping[int, Memory],
        after: Sequence[int] = (),
    ) -> Packer:
        """One side's end of a program's stream; what is packed is read after these device events."""

    def happened(self, events: Sequence[int]) -> bool:
        """Whether device events are complete; waits for nothing."""

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`."""

    def close(self) -> None:
        """Give back what was allocated."""


class HostBackend:
    """Shared memory of this host."""

    slot_bytes, eager = 1 << 20, False
    device_name: str | None = None

    def allocate(self, length: int) -> Bytes:
        """A buffer that lives as long as what is returned."""
        return Bytes.of(bytearray(length))

    def free(self, memory: Bytes) -> None:
        """Nothing is held."""

    def of(self, memory: Memory) -> Bytes:
        """Its buffer."""
        return Bytes.of(_buffer(memory))

    def mappable(self, memory: Memory) -> bool:
        """Any."""
        return True

    def prepare(self, program: CopyProgram, side: Literal["source", "sink"], memory: Mapping[int, Memory]) -> None:
        """There is nothing to prepare."""

    def packer(
        self,
        program: CopyProgram,
        side: Literal["source", "sink"],
        memory: Mapping[int, Memory],
        after: Sequence[int] = (),
    ) -> Packer:
        """By numpy."""
        return PackedStream(program, side, {i: _buffer(m) for i, m in memory.items()})

    def happened(self, events: Sequence[int]) -> bool:
        """The host's rows are there."""
        return True

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """By numpy."""
        return checksums(program, {i: _buffer(m) for i, m in memory.items()}, sink)

    def close(self) -> None:
        """Nothing is held."""


def backend_of(device: int | None) -> MemoryBackend:
    """A GPU, or the host; raises NO_TRANSPORT where there is no such GPU."""
    if device is None:
        return HostBackend()
    from kvproto.transport.nixl.device import DeviceBackend

    return DeviceBackend(device)


def _buffer(memory: Memory) -> memoryview:
    if not isinstance(memory, SharedMemory):
        advice = "give NixlTransport the device of the pool"
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "host memory", type(memory).__name__, advice)
    return memory.buffer
