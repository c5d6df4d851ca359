"""Pools that transports can share: allocate them here, or adopt an engine's own.

A pool of a GPU is one cuMemAlloc, so that other transfer libraries can register it as it is. `__dlpack__` hands the
bytes to a framework without a copy: `torch.from_dlpack(memory)`, `jax.dlpack.from_dlpack(memory)`.
"""

from __future__ import annotations

from kvproto.transport.base import Memory
from kvproto.transport.shm.memory import SharedMemory

__all__ = ["adopt", "allocate"]


def allocate(length: int, device: int | None = None, id: int = 0) -> Memory:
    """`length` zeroed bytes of a GPU, or of shared memory of the host; raises LocalError(TRANSPORT_FAILED)."""
    if device is None:
        return SharedMemory(length, id)
    from kvproto.transport.cuda.memory import DeviceMemory

    made = DeviceMemory(length, device, id)
    made.zero()
    return made


def adopt(address: int, length: int, id: int = 0) -> Memory:
    """An engine's own device memory, which stays its own; raises LocalError, NO_TRANSPORT or OUT_OF_REGION."""
    from kvproto.transport.cuda.memory import DeviceMemory

    return DeviceMemory.adopt(address, length, id)
