"""Transports: they map memory and run copy programs."""

from kvproto.transport.base import Memory, Mover
from kvproto.wire.enums import MemoryKind

__all__ = ["mover_of"]


def mover_of(memory: Memory) -> Mover:
    """The mover of a kind of memory: one GPU's kernel, or the host."""
    if memory.region.kind == MemoryKind.CUDA:
        from kvproto.transport.cuda.mover import DeviceMover

        return DeviceMover(memory.__dlpack_device__()[1])
    from kvproto.transport.shm.mover import HostMover

    return HostMover()
