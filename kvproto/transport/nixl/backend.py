"""One kind of memory for transport `nixl`: the host's is here, a GPU's in `kvproto.transport.nixl.device`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvproto.copying.execute import checksums
from kvproto.copying.program import CopyProgram, Side
from kvproto.transport.base import SUMMED, Memory, Regions
from kvproto.transport.nixl.handle import ByteRange
from kvproto.transport.shm.memory import SharedMemory, buffers
from kvproto.transport.staging.packed import PackedStream, Packer

_buffers = partial(buffers, wanted="host memory", kinds=(SharedMemory,))


class MemoryBackend(Protocol):
    """One kind of memory: pools, staging slots, and packing between the two."""

    slot_bytes: int
    """Bytes of a staging slot by default."""
    eager: bool
    """Whether callers that poll a write advance NIXL themselves, because writes end sooner than a thread wakes."""
    summed_at_once: int
    """As `Capabilities` say it."""
    converts: bool
    """Whether it packs bytes of another form (feature CONVERT)."""
    device_name: str | None = None
    """UUID of the GPU, as regions state it; None on the host."""

    def allocate(self, length: int) -> ByteRange:
        """Staging memory, until `free` or `close`."""

    def free(self, memory: ByteRange) -> None:
        """Release staging memory; no write of it may be under way."""
        return

    def of(self, memory: Memory) -> ByteRange:
        """The bytes of a pool; raises NO_TRANSPORT for memory of another kind."""

    def mappable(self, memory: Memory) -> bool:
        """Whether UCX can map a pool, so that a peer may write its pages directly."""
        return True

    def prepare(self, program: CopyProgram, side: Side, memory: Regions) -> None:
        """Make what all streams of a rank pair share, so that no request waits for it, from any program of the pair."""
        return

    def packer(self, program: CopyProgram, side: Side, memory: Regions, after: Sequence[int] = ()) -> Packer:
        """One side's end of a program's stream, which is read after these device events."""

    def happened(self, events: Sequence[int]) -> bool:
        """Whether device events are complete, without waiting."""
        return True

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        """As `Transport.begin_checksums`."""

    def settle(self) -> None:
        """Wait for checksums that were not collected: after this none reads a pool."""
        return

    def close(self) -> None:
        """Release what was allocated."""
        return


class HostBackend(MemoryBackend):
    """Shared memory of this host, packed by numpy."""

    slot_bytes, eager, summed_at_once, converts = 1 << 20, False, SUMMED, True

    def allocate(self, length: int) -> ByteRange:
        return ByteRange.of(bytearray(length))

    def of(self, memory: Memory) -> ByteRange:
        return ByteRange.of(_buffers({memory.id: memory})[memory.id])

    def packer(self, program: CopyProgram, side: Side, memory: Regions, after: Sequence[int] = ()) -> Packer:
        return PackedStream(program, side, _buffers(memory))

    def begin_checksums(self, program: CopyProgram, memory: Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return partial(checksums, program, _buffers(memory), sink)
