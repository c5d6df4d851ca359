"""Virtual device memory (cuMemCreate, as JAX and expandable segments use it): mapped anew by peers.

Between processes of a host it is shared by descriptor; between hosts of one NVLink domain by FABRIC handle, whose bytes
are all that a peer needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.transport.cuda.descriptors import fetch, offer, withdraw
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.wire.enums import ErrorCode

__all__ = [
    "FABRIC",
    "MOST_PIECES",
    "Piece",
    "VirtualMap",
    "by_descriptor",
    "by_fabric",
    "fabric",
    "piece_at",
    "share",
    "share_fabric",
    "unshare",
]

MOST_PIECES = 64
"""Allocations that one region may span."""
_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


@attrs.frozen
class Piece:
    """One allocation, as it is mapped at its owner."""

    base: int
    size: int


def piece_at(base: int, size: int) -> Piece:
    """Where the driver says that an address is mapped; raises NO_TRANSPORT where it says nothing."""
    if not base or not size:
        raise LocalError(ErrorCode.NO_TRANSPORT, "regions.handles", "mapped device memory", "none", "allocate first")
    return Piece(base, size)


def fabric(device: int) -> bool:
    """Whether a GPU can give and take FABRIC handles, by its attribute."""
    known = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    return bool(call(driver.cuDeviceGetAttribute(known, device), "FABRIC"))


def _export(piece: Piece, type_: driver.CUmemAllocationHandleType) -> Any:
    handle = call(driver.cuMemRetainAllocationHandle(piece.base), "allocation")
    try:
        return call(driver.cuMemExportToShareableHandle(handle, type_, 0), "handle to share")
    finally:
        call(driver.cuMemRelease(handle), "release")


def share(pieces: Sequence[Piece]) -> tuple[str, list[tuple[bytes, int]]]:
    """Export allocations: where to fetch them, and for each the bytes that name it and its length."""
    path, made = "", []
    for piece in pieces:
        path, token = offer(int(_export(piece, _FD)))
        made.append((token, piece.size))
    return path, made


def share_fabric(pieces: Sequence[Piece]) -> list[tuple[bytes, int]]:
    """Export allocations to the NVLink domain: for each its handle, 64 bytes, and its length."""
    return [(bytes(_export(piece, FABRIC).data), piece.size) for piece in pieces]


Import = Callable[[], Any]
"""Makes the driver's handle of one allocation of a peer's."""


def by_descriptor(path: str, token: bytes) -> Import:
    """Fetch a descriptor from its owner."""

    def get() -> Any:
        descriptor = fetch(path, token)
        try:
            return call(driver.cuMemImportFromShareableHandle(descriptor, _FD), "import")
        finally:
            os.close(descriptor)

    return get


def by_fabric(data: bytes) -> Import:
    """Take a FABRIC handle."""

    def get() -> Any:
        handle = driver.CUmemFabricHandle()
        handle.data = data
        return call(driver.cuMemImportFromShareableHandle(int(handle.getPtr()), FABRIC), "import")

    return get


def unshare(tokens: Sequence[bytes]) -> None:
    """Offer them no longer; what is mapped stays mapped."""
    for token in tokens:
        withdraw(token)


class VirtualMap:
    """A peer's allocations, one after the other, as kernels of one device see them."""

    def __init__(self, device: int, pieces: Sequence[tuple[Import, int]]) -> None:
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
