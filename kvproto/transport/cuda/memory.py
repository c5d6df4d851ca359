"""Device memory that peers of one host may map; attributes tell how, as a failed try can leave an error behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import msgpack
from cuda.core import Buffer, Device

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.cuda.descriptors import fetch, offer, withdraw
from kvproto.transport.cuda.driver import call, current, driver, enable_peer, ordinal_of, pointer_attribute, uuid
from kvproto.transport.process import attestations, attested, boot_id, pid_namespace, start_time
from kvproto.wire.enums import ErrorCode, MemoryKind, Transport
from kvproto.wire.messages import Handle, Region

_LEGACY, _VIRTUAL, _FABRIC = 1, 2, 3
"""Kinds of handle: cuIpcGetMemHandle; descriptors of virtual memory; FABRIC handles of it, for other hosts too."""
_MOST_PIECES = 64
"""Allocations that one region may span."""
_DESCRIPTOR_TYPE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FABRIC_TYPE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
_NONCE = secrets.token_bytes(16)
"""Names this process, so that it recognizes its own handles."""
_Attribute = driver.CUpointer_attribute
_FACTS = {
    "type": _Attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    "start": _Attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    "size": _Attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    "buffer": _Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID,
    "legacy": _Attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    "handles": _Attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    "managed": _Attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
}


def facts(address: int) -> dict[str, int]:
    """The attributes of the allocation at an address; zeros if there is none."""
    names = list(_FACTS.values())
    values = call(driver.cuPointerGetAttributes(len(names), names, address), "pointer attributes")
    known = {name: int(value or 0) for name, value in zip(_FACTS, values, strict=True)}
    return known | {"device": pointer_attribute(_Attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)}


def allocation_at(address: int) -> int | None:
    """The start of the device allocation that holds `address`; None if there is none."""
    known = facts(address)
    return known["start"] if known["type"] == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE.value else None


class DeviceMemory:
    """A region of device memory: one cuMemAlloc if allocated here, which other libraries can register too."""

    kind = MemoryKind.CUDA

    def __init__(self, length: int, device: int = 0, id: int = 0) -> None:
        current(device)
        advice = "make the pools smaller"
        address = int(call(driver.cuMemAlloc(length), f"{length} bytes on device {device}", advice))
        self._describe(address, length, id, owned=True)

    @classmethod
    def adopt(cls, address: int, length: int, id: int = 0) -> DeviceMemory:
        """An engine's own pool; raises LocalError if [address, address + length) is not in one device allocation."""
        memory = cls.__new__(cls)
        memory._describe(address, length, id, owned=False)
        return memory

    def _describe(self, address: int, length: int, id: int, owned: bool) -> None:
        """Learn of the allocation at an address; raises LocalError for memory that is not one device allocation."""
        known = facts(address)
        if known["type"] != driver.CUmemorytype.CU_MEMORYTYPE_DEVICE.value or known["managed"]:
            kind = "managed memory" if known["managed"] else "no device memory"
            raise LocalError(ErrorCode.NO_TRANSPORT, "regions", "memory of one device", kind, "allocate on the device")
        start, size = known["start"], known["size"]
        if length < 1 or address + length > start + size:
            room = f"at most {start + size - address} bytes"
            raise LocalError(ErrorCode.OUT_OF_REGION, "regions.length", room, str(length), "register one allocation")
        self.address, self.length, self.id, self.device = address, length, id, known["device"]
        self._owned, self._known = owned, known
        self._shared: tuple[str, list[tuple[bytes, int]]] | None = None
        self._buffer: Buffer | None = None

    @property
    def legacy(self) -> bool:
        """Whether it can be shared by a legacy handle, as UCX does."""
        return bool(self._known["legacy"])

    @property
    def buffer(self) -> Buffer:
        """The bytes, for frameworks."""
        if self._buffer is None:
            self._buffer = Buffer.from_handle(self.address, self.length, owner=self)
        return self._buffer

    def __dlpack__(self, **options: Any) -> Any:
        return self.buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.buffer.__dlpack_device__()
        return int(kind), int(number)

    @property
    def region(self) -> Region:
        self.check()
        current(self.device)
        handles = []
        allowed = self._known["handles"]
        if self._known["legacy"]:
            ipc = bytes(call(driver.cuIpcGetMemHandle(self.address), "handle").reserved)
            handles.append(self._encode(_LEGACY, self.address - self._known["start"], self._known["size"], ipc))
        elif allowed & 1:
            pieces = self._pieces()
            if self._shared is None:
                self._shared = _share(pieces)
            body = [self._shared[0], [list(piece) for piece in self._shared[1]]]
            handles.append(self._encode(_VIRTUAL, self.address - pieces[0][0], sum(size for _, size in pieces), body))
        if allowed & _FABRIC_TYPE.value and has_fabric(self.device):
            pieces = self._pieces()
            fabric = [(bytes(_export(base, _FABRIC_TYPE).data), size) for base, size in pieces]
            handles.append(self._encode(_FABRIC, self.address - pieces[0][0], sum(size for _, size in pieces), fabric))
        if not handles:
            mine, yours = "memory of cuMemAlloc, or with POSIX descriptors", "virtual memory or a memory pool without"
            advice = "allocate with kvproto.transport.memory, or turn expandable segments and stream-ordered pools off"
            raise LocalError(ErrorCode.NO_TRANSPORT, "regions.handles", mine, yours, advice)
        return Region(
            id=self.id,
            base=self.address,
            length=self.length,
            kind=MemoryKind.CUDA,
            device=uuid(self.device),
            boot=boot_id(),
            handles=tuple(handles),
            namespace=pid_namespace(),
        )

    def _pieces(self) -> list[tuple[int, int]]:
        """Address and bytes of the allocations that the region spans, in order, as they are mapped here."""
        pieces: list[tuple[int, int]] = []
        at = self.address
        while at < self.address + self.length:
            base = pointer_attribute(_Attribute.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at)
            size = pointer_attribute(_Attribute.CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at)
            if not base or not size:
                mine = "mapped device memory"
                raise LocalError(ErrorCode.NO_TRANSPORT, "regions.handles", mine, "none", "allocate first")
            pieces.append((base, size))
            at = base + size
        if len(pieces) > _MOST_PIECES:
            mine = f"at most {_MOST_PIECES} allocations"
            advice = "allocate the pool at once, with kvproto.transport.memory"
            raise LocalError(ErrorCode.NO_TRANSPORT, "regions.handles", mine, str(len(pieces)), advice)
        return pieces

    def zero(self) -> None:
        """Fill with zeros, and wait."""
        current(self.device)
        call(driver.cuMemsetD8(self.address, 0, self.length), "fill")
        call(driver.cuCtxSynchronize(), "fill")

    def check(self) -> None:
        """Raise POOL_MOVED if the allocation was freed or replaced."""
        if pointer_attribute(_Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, self.address) != self._known["buffer"]:
            raise LocalError(ErrorCode.POOL_MOVED, "regions.base", "the registered allocation", "another, or none")

    def forget(self) -> None:
        """Stop offering its descriptors, which keep its memory alive; mappings of peers stay."""
        if self._shared is not None:
            for token, _ in self._shared[1]:
                withdraw(token)
            self._shared = None

    def _encode(self, kind: int, offset: int, size: int, body: Any) -> Handle:
        pid = os.getpid()
        data = msgpack.packb([kind, pid, start_time(pid), _NONCE, offset, size, body, attestations.of(self)])
        return Handle(transport=Transport.CUDA, data=data)

    def close(self) -> None:
        """Free it, if it was allocated here; peers must have unmapped it."""
        self.forget()
        attestations.gone(self)
        if self._owned:
            self._owned = False
            current(self.device)
            call(driver.cuMemFree(self.address), "free")


@attrs.define
class _OpenAllocation:
    base: int
    size: int
    close: Callable[[], None]
    users: int = 0


_open_allocations: dict[tuple[int, bytes], _OpenAllocation] = {}
"""Allocations by device and handle: a context opens one only once, however many regions lie in it."""
_HandleFields = tuple[int, int, int, bytes, int, int, Any, int]
"""Kind, process, its start, nonce, offset, size, what opens the allocation, and the descriptor of attestations."""


@attrs.define
class MappedDeviceMemory:
    """A peer's region as kernels of one device of this process see it."""

    address: int
    length: int
    device: int
    owner: int
    """PID of the process that owns it, which may be this one."""
    _key: tuple[int, bytes] | None = None

    def close(self) -> None:
        """Unmap; no kernel may be running that uses it."""
        key, self._key = self._key, None
        if key is None:
            return
        opened = _open_allocations[key]
        opened.users -= 1
        if not opened.users:
            del _open_allocations[key]
            opened.close()


def connect(region: Region, path: str, device: int, attestation: bytes | None = None) -> MappedDeviceMemory:
    """Map a peer's region for kernels on `device`; raises RemoteError, NO_TRANSPORT or TRANSPORT_FAILED.

    An owner on this host has to have written `attestation`, if one is passed (KVP-REG-ATTEST).
    """
    here = region.boot == boot_id()
    try:
        read = [_decode(bytes(h.data)) for h in region.handles if h.transport == Transport.CUDA]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _failed(path, "a handle", "other bytes") from error
    # a handle for this host first; other hosts and namespaces are reached by FABRIC alone
    near = here and region.namespace == pid_namespace()
    usable = next((handle for handle in read if near or handle[0] == _FABRIC), read[0] if here and read else None)
    if usable is None:
        raise _unreachable(f"{path}.handles", "CUDA on this host, or a FABRIC handle", "none", "use a common transport")
    kind, pid, began, nonce, *_, attested_fd = usable
    if kind == _FABRIC and not has_fabric(device):
        advice = "run IMEX on both hosts of one NVLink domain, or use transport NIXL"
        raise _unreachable(f"{path}.handles", f"no FABRIC handles at {uuid(device)}", "a FABRIC handle", advice)
    if not here:
        return _mapped(region, path, device, usable)
    if kind != _FABRIC and not near:
        advice = "run both engines in one PID namespace, or use transport NIXL"
        raise _unreachable(f"{path}.namespace", str(pid_namespace()), str(region.namespace), advice)
    if near and attestation is not None:
        _check_attested(path, pid, attested_fd, attestation)
    current(device)
    owner = ordinal_of(region.device or "")
    if owner is None:
        advice = "let CUDA_VISIBLE_DEVICES name the GPUs of both sides"
        raise _unreachable(f"{path}.device", "a GPU that this process sees", str(region.device), advice)
    if not Device(device).can_access_peer(owner) and device != owner:
        raise _unreachable(f"{path}.device", f"a peer of {uuid(device)}", str(region.device), "use transport NIXL")
    if near and nonce == _NONCE and (kind == _LEGACY or device == owner):
        known = facts(region.base)
        if not known["type"] or known["device"] != owner or not enable_peer(device, owner):
            raise _failed(path, "memory of this process", "freed memory")
        return MappedDeviceMemory(region.base, region.length, device, pid)
    if kind == _FABRIC:
        return _mapped(region, path, device, usable)
    if start_time(pid) != began:
        raise _failed(path, "a live process", f"process {pid} has ended")
    return _mapped(region, path, device, usable)


def _check_attested(path: str, pid: int, fd: int, attestation: bytes) -> None:
    try:
        yours = "" if attested(pid, fd, attestation) else "another's"
    except OSError as error:
        yours = error.strerror or type(error).__name__
    if yours:
        raise _failed(path, f"memory that process {pid} has registered in this session", yours)


def _mapped(region: Region, path: str, device: int, handle: _HandleFields) -> MappedDeviceMemory:
    kind, pid, _, _, offset, size, body, _ = handle
    if offset + region.length > size:
        raise _failed(path, "a region inside its allocation", f"{offset} + {region.length} of {size}")
    key = (device, msgpack.packb(body))
    try:
        opened = _open_allocations.get(key) or _OPEN[kind](device, body)
    except (KvprotoError, OSError) as error:
        raise _failed(path, "a handle that opens", getattr(error, "yours", str(error))) from error
    _open_allocations[key] = opened
    opened.users += 1
    mapped = MappedDeviceMemory(opened.base + offset, region.length, device, pid, key)
    if offset + region.length > opened.size:
        mapped.close()
        raise _failed(path, f"an allocation of {opened.size} bytes", f"{offset} + {region.length}")
    return mapped


def _open_legacy(device: int, ipc: bytes) -> _OpenAllocation:
    current(device)
    handle = driver.CUipcMemHandle()
    handle.reserved = ipc
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = int(call(driver.cuIpcOpenMemHandle(handle, lazy.value), "mapping"))
    base, size = call(driver.cuMemGetAddressRange(address), "range")
    return _OpenAllocation(int(base), int(size), lambda: _close(device, int(base)))


def _close(device: int, base: int) -> None:
    current(device)
    call(driver.cuIpcCloseMemHandle(base), "unmap")


def _open_virtual(device: int, body: tuple[str, list[tuple[bytes, int]]]) -> _OpenAllocation:
    path, pieces = body
    return _map(device, [(partial(_by_descriptor, path, token), size) for token, size in pieces])


def _open_fabric(device: int, body: list[tuple[bytes, int]]) -> _OpenAllocation:
    return _map(device, [(partial(_by_fabric, data), size) for data, size in body])


_OPEN: dict[int, Callable[[int, Any], _OpenAllocation]] = {
    _LEGACY: _open_legacy,
    _VIRTUAL: _open_virtual,
    _FABRIC: _open_fabric,
}


def _decode(data: bytes) -> _HandleFields:
    kind, pid, began, nonce, offset, size, body, attested_fd = msgpack.unpackb(data)
    numbers = kind, pid, began, offset, size, attested_fd
    good = all(type(n) is int and n >= 0 for n in numbers) and type(nonce) is bytes
    if good and kind == _LEGACY:
        good = type(body) is bytes and len(body) == 64
    elif good:
        (path, pieces), name = (body, 16) if kind == _VIRTUAL else (("", body), 64)
        good = kind in _OPEN and type(path) is str and 0 < len(pieces) <= _MOST_PIECES
        for token, length in pieces:
            good &= type(token) is bytes and len(token) == name and type(length) is int and 0 < length < 1 << 48
    if not good:
        raise ValueError("not a handle")
    return kind, pid, began, nonce, offset, size, body, attested_fd


def _unreachable(path: str, mine: str, yours: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.NO_TRANSPORT, path, mine, yours, advice)


def _failed(path: str, mine: str, yours: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", mine, yours, "register again")


# virtual memory (cuMemCreate, as JAX and expandable segments use it), which peers map for themselves: shared between
# processes of a host by descriptor, and between hosts of one NVLink domain by FABRIC handle, whose bytes are all that a
# peer needs


def has_fabric(device: int) -> bool:
    """Whether a GPU supports FABRIC handles, by its attribute."""
    known = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    return bool(call(driver.cuDeviceGetAttribute(known, device), "FABRIC"))


def _export(base: int, type_: driver.CUmemAllocationHandleType) -> Any:
    handle = call(driver.cuMemRetainAllocationHandle(base), "allocation")
    try:
        return call(driver.cuMemExportToShareableHandle(handle, type_, 0), "handle to share")
    finally:
        call(driver.cuMemRelease(handle), "release")


def _share(pieces: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[bytes, int]]]:
    """Offer allocations to peers: the place to fetch them from, and for each the bytes that name it and its length."""
    path, offered = "", []
    for base, size in pieces:
        path, token = offer(int(_export(base, _DESCRIPTOR_TYPE)))
        offered.append((token, size))
    return path, offered


def _by_descriptor(path: str, token: bytes) -> Any:
    """The driver's handle of a peer's allocation, by a descriptor that is fetched from its owner."""
    descriptor = fetch(path, token)
    try:
        return call(driver.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR_TYPE), "import")
    finally:
        os.close(descriptor)


def _by_fabric(data: bytes) -> Any:
    """The driver's handle of a peer's allocation, by a FABRIC handle."""
    handle = driver.CUmemFabricHandle()
    handle.data = data
    return call(driver.cuMemImportFromShareableHandle(int(handle.getPtr()), _FABRIC_TYPE), "import")


def _map(device: int, pieces: Sequence[tuple[Callable[[], Any], int]]) -> _OpenAllocation:
    """Map a peer's allocations in turn for one device; each piece makes the driver's handle, and has a length."""
    current(device)
    size = sum(size for _, size in pieces)
    base = int(call(driver.cuMemAddressReserve(size, 0, 0, 0), "address range"))
    parts: list[tuple[int, int]] = []

    def close() -> None:
        current(device)
        for part in parts:
            call(driver.cuMemUnmap(*part), "unmap")
        parts.clear()
        call(driver.cuMemAddressFree(base, size), "address range")

    try:
        at = base
        for get, length in pieces:
            handle = get()
            try:
                call(driver.cuMemMap(at, length, 0, handle, 0), "mapping")
            finally:
                call(driver.cuMemRelease(handle), "release")
            parts.append((at, length))
            at += length
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(driver.cuMemSetAccess(base, size, [access], 1), "access")
    except BaseException:
        with suppress(LocalError):
            close()
        raise
    return _OpenAllocation(base, size, close)
