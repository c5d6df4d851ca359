"""Virtual device memory (cuMemCreate, as JAX and expandable segments use it), which peers map for themselves.

It is shared between processes of a host by descriptor, and between hosts of one NVLink domain by FABRIC handle, whose
bytes are all that a peer needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.transport.cuda.descriptors import fetch, offer
from kvproto.transport.cuda.driver import call, current, driver

__all__ = [
    "FABRIC", "MOST_PIECES", "VirtualAllocation", "VirtualMap", "by_descriptor", "by_fabric", "fabric", "share",
    "share_fabric",
]  # fmt: skip

MOST_PIECES = 64
"""Allocations that one region may span."""
_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


@attrs.frozen
class VirtualAllocation:
    """One allocation, as it is mapped at its owner."""

    base: int
    size: int


def fabric(device: int) -> bool:
    """Whether a GPU supports FABRIC handles, by its attribute."""
    known = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    return bool(call(driver.cuDeviceGetAttribute(known, device), "FABRIC"))


def _export(piece: VirtualAllocation, type_: driver.CUmemAllocationHandleType) -> Any:
    handle = call(driver.cuMemRetainAllocationHandle(piece.base), "allocation")
    try:
        return call(driver.cuMemExportToShareableHandle(handle, type_, 0), "handle to share")
    finally:
        call(driver.cuMemRelease(handle), "release")


def share(pieces: Sequence[VirtualAllocation]) -> tuple[str, list[tuple[bytes, int]]]:
    """Offer allocations to peers: where to fetch them, and for each the bytes that name it and its length."""
    path, made = "", []
    for piece in pieces:
        path, token = offer(int(_export(piece, _FD)))
        made.append((token, piece.size))
    return path, made


def share_fabric(pieces: Sequence[VirtualAllocation]) -> list[tuple[bytes, int]]:
    """Export allocations to the NVLink domain: for each its handle, 64 bytes, and its length."""
    return [(bytes(_export(piece, FABRIC).data), piece.size) for piece in pieces]


def by_descriptor(path: str, token: bytes) -> Any:
    """The driver's handle of a peer's allocation, by a descriptor that is fetched from its owner."""
    descriptor = fetch(path, token)
    try:
        return call(driver.cuMemImportFromShareableHandle(descriptor, _FD), "import")
    finally:
        os.close(descriptor)


def by_fabric(data: bytes) -> Any:
    """The driver's handle of a peer's allocation, by a FABRIC handle."""
    handle = driver.CUmemFabricHandle()
    handle.data = data
    return call(driver.cuMemImportFromShareableHandle(int(handle.getPtr()), FABRIC), "import")


class VirtualMap:
    """A peer's allocations, one after the other, as kernels of one device see them.

    `pieces` has for each allocation a function that makes the driver's handle of it, and its length in bytes.
    """

    def __init__(self, device: int, pieces: Sequence[tuple[Callable[[], Any], int]]) -> None:
        current(device)
        self._device, self._mapped = device, 0
        self.size = sum(size for _, size in pieces)
        self.base = int(call(driver.cuMemAddressReserve(self.size, 0, 0, 0), "address range"))
        self._parts: list[tuple[int, int]] = []
        try:
            for get, size in pieces:
                handle = get()
                at = self.base + self._mapped
                try:
                    call(driver.cuMemMap(at, size, 0, handle, 0), "mapping")
                finally:
                    call(driver.cuMemRelease(handle), "release")
                self._parts.append((at, size))
                self._mapped += size
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            call(driver.cuMemSetAccess(self.base, self.size, [access], 1), "access")
        except BaseException:
            with suppress(LocalError):
                self.close()
            raise

    def close(self) -> None:
        """Unmap; no kernel may be running that uses it."""
        current(self._device)
        for at, size in self._parts:
            call(driver.cuMemUnmap(at, size), "unmap")
        self._parts = []
        call(driver.cuMemAddressFree(self.base, self.size), "address range")
