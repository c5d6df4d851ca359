"""Pools that transports can share, allocated or adopted; `__dlpack__` hands them to frameworks without a copy."""

from collections.abc import Mapping
from typing import TypeVar

from kvproto.errors import LocalError, check_whole
from kvproto.transport.base import Allocation, Memory
from kvproto.transport.loading import find, names, usable
from kvproto.transport.tensors import CPU, CUDA, TensorView
from kvproto.wire.enums import ErrorCode


def allocate(length: int, device: int | None = None, id: int = 0) -> Memory:
    """`length` zeroed bytes of a GPU, or by default of host memory that other processes can map.

    Raises LocalError: OUT_OF_RANGE for an argument that is not a number in its range, TRANSPORT_FAILED if memory is
    short, NO_TRANSPORT if no installed transport knows GPUs.
    """
    length = check_whole("length", length, 1, _MOST)
    device = None if device is None else check_whole("device", device, 0)
    for provider in usable():
        if (memory := provider.allocate(length, device, id)) is not None:
            return memory
    absent = [provider.install for provider in map(find, names()) if provider.missing() is not None]
    mine, yours = "a transport for memory of a GPU", f"none for GPU {device}"
    raise LocalError(ErrorCode.NO_TRANSPORT, "device", mine, yours, " or ".join(absent) or "leave the device out")


def adopt(address: int, length: int) -> Memory:
    """`length` bytes of CUDA memory that an engine continues to own; raises LocalError(NO_TRANSPORT, OUT_OF_REGION)."""
    return _allocation_of((CUDA, 0), address, length, "address").adopt(address, address + length)[0]


Key = TypeVar("Key")


def adopt_all(tensors: Mapping[Key, TensorView]) -> tuple[dict[int, Memory], dict[Key, tuple[int, int]]]:
    """The regions that hold all of these tensors, one for each allocation; and for each tensor (region id, address).

    The address is that of the region. Tensors on the host must lie in memory from `allocate`. Raises
    LocalError(NO_TRANSPORT), with advice, for memory that cannot be shared.
    """
    members: dict[Allocation, list[Key]] = {}
    for key, tensor in tensors.items():
        allocation = _allocation_of(tensor.device, tensor.address, tensor.length, tensor.path)
        members.setdefault(allocation, []).append(key)
    memories: dict[int, Memory] = {}
    homes: dict[Key, tuple[int, int]] = {}
    for region, (allocation, keys) in enumerate(members.items()):
        begin = min(tensors[key].address for key in keys)
        end = max(tensors[key].address + tensors[key].length for key in keys)
        memories[region], base = allocation.adopt(begin, end)
        homes |= dict.fromkeys(keys, (region, base))
    return memories, homes


def _allocation_of(device: tuple[int, int], address: int, length: int, path: str) -> Allocation:
    for provider in usable():
        if (allocation := provider.allocation_of(device, address, length)) is not None:
            return allocation
    kind, number = device
    mine = "memory of a GPU, or host memory that kvproto.allocate gave"
    yours = _KINDS.get(kind, f"DLPack device type {kind}") + (f", device {number}" if kind != CPU else "")
    advice = "allocate the pool by kvproto.allocate(length) and view it: torch.from_dlpack(memory)"
    raise LocalError(ErrorCode.NO_TRANSPORT, path, mine, yours, advice)


_MOST = (1 << 63) - 1
"""The most bytes that any address space has."""
_KINDS = {CPU: "host memory that no other process can map", CUDA: "CUDA memory that no installed transport knows"}
