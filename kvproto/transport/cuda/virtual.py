"""Virtual device memory (cuMemCreate, as JAX and expandable segments use it): shared by descriptor, mapped anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import attrs

from kvproto.errors import LocalError
from kvproto.transport.cuda.descriptors import fetch, offer, withdraw
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.wire.enums import ErrorCode

__all__ = ["MOST_PIECES", "Piece", "VirtualMap", "piece_at", "share", "unshare"]

MOST_PIECES = 64
"""Allocations that one region may span."""
_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


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


def share(pieces: Sequence[Piece]) -> tuple[str, list[tuple[bytes, int]]]:
    """Export allocations: where to fetch them, and for each the bytes that name it and its length."""
    path, made = "", []
    for piece in pieces:
        handle = call(driver.cuMemRetainAllocationHandle(piece.base), "allocation")
        try:
            descriptor = int(call(driver.cuMemExportToShareableHandle(handle, _FD, 0), "descriptor"))
        finally:
            call(driver.cuMemRelease(handle), "release")
        path, token = offer(descriptor)
        made.append((token, piece.size))
    return path, made


def unshare(tokens: Sequence[bytes]) -> None:
    """Offer them no longer; what is mapped stays mapped."""
    for token in tokens:
        withdraw(token)


class VirtualMap:
    """A peer's allocations, one after the other, as kernels of one device see them."""

    def __init__(self, device: int, path: str, pieces: Sequence[tuple[bytes, int]]) -> None:
        current(device)
        self._device, self._mapped = device, 0
        self.size = sum(size for _, size in pieces)
        self.base = int(call(driver.cuMemAddressReserve(self.size, 0, 0, 0), "address range"))
        self._parts: list[tuple[int, int]] = []
        try:
            for token, size in pieces:
                descriptor = fetch(path, token)
                try:
                    handle = call(driver.cuMemImportFromShareableHandle(descriptor, _FD), "import")
                finally:
                    os.close(descriptor)
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
