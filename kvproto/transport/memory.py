"""Pools that transports can share: allocate them here, or adopt an engine's own.

A pool of a GPU is one cuMemAlloc, so that other transfer libraries can register it as it is. `__dlpack__` hands the
bytes to a framework without a copy: `torch.from_dlpack(memory)`, `jax.dlpack.from_dlpack(memory)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from kvproto.errors import LocalError
from kvproto.transport.base import Memory
from kvproto.transport.shm.memory import SharedMemory, owner_of
from kvproto.wire.enums import ErrorCode

__all__ = ["adopt", "adopt_all", "allocate"]


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


class Placed(Protocol):
    """Bytes of a tensor, by DLPack's names of devices."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def device(self) -> tuple[int, int]:
        """Device type and number."""

    @property
    def length(self) -> int:
        """Bytes from the first to the last."""


_CPU, _CUDA = 1, 2
Key = TypeVar("Key")


def adopt_all(tensors: Mapping[Key, Placed]) -> tuple[dict[int, Memory], dict[Key, tuple[int, int]]]:
    """Regions that hold all of these tensors, as few as allocations allow; and of each tensor its region and that's
    address.

    Tensors on the host must lie in memory that `allocate` gave. Raises LocalError: NO_TRANSPORT for memory that cannot
    be shared, with a way out.
    """
    memories: dict[int, Memory] = {}
    homes: dict[Key, tuple[int, int]] = {}
    known: dict[object, int] = {}
    for allocation, members in _by_allocation(tensors).items():
        if isinstance(allocation, SharedMemory):
            region, base = known.setdefault(allocation, len(memories)), allocation.address
            memories[region] = allocation
        else:
            begin = min(tensors[key].address for key in members)
            end = max(tensors[key].address + tensors[key].length for key in members)
            region, base = len(memories), begin
            memories[region] = adopt(begin, end - begin, region)
        homes |= dict.fromkeys(members, (region, base))
    return memories, homes


def _by_allocation(tensors: Mapping[Key, Placed]) -> dict[object, list[Key]]:
    found: dict[object, list[Key]] = {}
    for key, tensor in tensors.items():
        kind = tensor.device[0]
        allocation: object = None
        if kind == _CPU:
            allocation = owner_of(tensor.address, tensor.length)
        elif kind == _CUDA:
            from kvproto.transport.cuda.memory import allocation_at

            allocation = allocation_at(tensor.address)
        if allocation is None:
            what = {_CPU: "private memory of this process", _CUDA: "no allocation of this process"}.get(
                kind, f"DLPack device type {kind}"
            )
            raise LocalError(
                ErrorCode.NO_TRANSPORT, "tensors", "memory of a GPU, or host memory that kvproto.allocate gave", what,
                "allocate the pool by kvproto.allocate(length) and view it: torch.from_dlpack(memory)",
            )  # fmt: skip
        found.setdefault(allocation, []).append(key)
    return found
