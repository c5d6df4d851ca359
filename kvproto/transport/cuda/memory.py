"""Device memory that peers of one host may map: allocated here, or adopted from an engine.

How an allocation can be shared is read from the driver's pointer attributes, never tried: a failed attempt can leave a
sticky error in the process.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import msgpack
from cuda.core import Buffer, Device

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.cuda import direct, virtual
from kvproto.transport.cuda.descriptors import withdraw
from kvproto.transport.cuda.driver import FAULTS, call, current, driver, enable_peer, ordinal_of, uuid
from kvproto.transport.process import boot_id, pid_namespace, start_time
from kvproto.wire.enums import ErrorCode, MemoryKind, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["DeviceMemory", "MappedDeviceMemory", "connect"]

_LEGACY, _VIRTUAL, _FABRIC = 1, 2, 3
"""Kinds of handle: cuIpcGetMemHandle; descriptors of virtual memory; FABRIC handles of it, for other hosts too."""
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


def _one(attribute: driver.CUpointer_attribute, address: int) -> int:
    """An attribute of an address; 0 if the driver knows none.

    It is read without cuda-python, whose wrapper is slower and in some releases gets one attribute wrong.
    """
    known, value = direct.attribute(attribute.value, address)
    if known in FAULTS:  # unlike freed memory, of which the driver knows nothing
        call((driver.CUresult(known),), "pointer attribute")
    return value if known == 0 else 0


def facts(address: int) -> dict[str, int]:
    """The attributes of the allocation at an address; zeros if there is none."""
    names = list(_FACTS.values())
    values = call(driver.cuPointerGetAttributes(len(names), names, address), "pointer attributes")
    found = {name: int(value or 0) for name, value in zip(_FACTS, values, strict=True)}
    return found | {"device": _one(_Attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)}


def allocation_at(address: int) -> int | None:
    """The start of the device allocation that holds `address`; None if there is none."""
    known = facts(address)
    return known["start"] if known["type"] == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE.value else None


class DeviceMemory:
    """A region of device memory of this process.

    If allocated here it is one cuMemAlloc, so that other libraries can register it too; `__dlpack__` gives a framework
    its bytes.
    """

    kind = MemoryKind.CUDA

    def __init__(self, length: int, device: int = 0, id: int = 0) -> None:
        current(device)
        advice = "make the pools smaller"
        address = int(call(driver.cuMemAlloc(length), f"{length} bytes on device {device}", advice))
        self._set(address, length, id, owned=True)

    @classmethod
    def adopt(cls, address: int, length: int, id: int = 0) -> DeviceMemory:
        """An engine's own pool; raises LocalError if [address, address + length) is not in one device allocation."""
        made = cls.__new__(cls)
        made._set(address, length, id, owned=False)
        return made

    def _set(self, address: int, length: int, id: int, owned: bool) -> None:
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
        """Its entry in Register; raises NO_TRANSPORT, with advice, for an allocation that cannot be shared."""
        self.check()
        current(self.device)
        made = []
        allowed = self._known["handles"]
        if self._known["legacy"]:
            ipc = bytes(call(driver.cuIpcGetMemHandle(self.address), "handle").reserved)
            made.append(_handle(_LEGACY, self.address - self._known["start"], self._known["size"], ipc))
        elif allowed & 1:
            pieces = self._pieces()
            if self._shared is None:
                self._shared = virtual.share(pieces)
            body = [self._shared[0], [list(piece) for piece in self._shared[1]]]
            made.append(_handle(_VIRTUAL, self.address - pieces[0].base, sum(p.size for p in pieces), body))
        if allowed & virtual.FABRIC.value and virtual.fabric(self.device):
            pieces = self._pieces()
            size = sum(p.size for p in pieces)
            made.append(_handle(_FABRIC, self.address - pieces[0].base, size, virtual.share_fabric(pieces)))
        if not made:
            raise LocalError(
                ErrorCode.NO_TRANSPORT, "regions.handles", "memory of cuMemAlloc, or with POSIX descriptors",
                "virtual memory or a memory pool without",
                "allocate with kvproto.transport.memory, or turn expandable segments and stream-ordered pools off",
            )  # fmt: skip
        return Region(
            id=self.id, base=self.address, length=self.length, kind=MemoryKind.CUDA, device=uuid(self.device),
            boot=boot_id(), handles=tuple(made), namespace=pid_namespace(),
        )  # fmt: skip

    def _pieces(self) -> list[virtual.VirtualAllocation]:
        """The allocations that the region spans, in order."""
        found: list[virtual.VirtualAllocation] = []
        at = self.address
        while at < self.address + self.length:
            base = _one(_Attribute.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at)
            size = _one(_Attribute.CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at)
            if not base or not size:
                wanted, advice = "mapped device memory", "allocate first"
                raise LocalError(ErrorCode.NO_TRANSPORT, "regions.handles", wanted, "none", advice)
            found.append(virtual.VirtualAllocation(base, size))
            at = base + size
        if len(found) > virtual.MOST_PIECES:
            advice = "allocate the pool at once, with kvproto.transport.memory"
            raise LocalError(
                ErrorCode.NO_TRANSPORT,
                "regions.handles",
                f"at most {virtual.MOST_PIECES} allocations",
                str(len(found)),
                advice,
            )
        return found

    def zero(self) -> None:
        """Fill with zeros, and wait."""
        current(self.device)
        call(driver.cuMemsetD8(self.address, 0, self.length), "fill")
        call(driver.cuCtxSynchronize(), "fill")

    def check(self) -> None:
        """Raise POOL_MOVED if the allocation was freed or replaced."""
        if _one(_Attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, self.address) != self._known["buffer"]:
            raise LocalError(ErrorCode.POOL_MOVED, "regions.base", "the registered allocation", "another, or none")

    def forget(self) -> None:
        """Stop offering its descriptors, which keep its memory alive; what is mapped stays mapped."""
        if self._shared is not None:
            for token, _ in self._shared[1]:
                withdraw(token)
            self._shared = None

    def close(self) -> None:
        """Free it, if it was allocated here; peers must have unmapped it."""
        self.forget()
        if self._owned:
            self._owned = False
            current(self.device)
            call(driver.cuMemFree(self.address), "free")


def _handle(kind: int, offset: int, size: int, body: Any) -> Handle:
    pid = os.getpid()
    data = msgpack.packb([kind, pid, start_time(pid), _NONCE, offset, size, body])
    return Handle(transport=Transport.CUDA, data=data)


@attrs.define
class _Opened:
    base: int
    size: int
    close: Callable[[], None]
    users: int = 0


_opened: dict[tuple[int, bytes], _Opened] = {}
"""Allocations by device and handle: a context opens one only once, however many regions lie in it."""
_Read = tuple[int, int, int, bytes, int, int, Any]
"""The fields of a handle: kind, process, its start, nonce, offset, size, and what opens the allocation."""


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
        opened = _opened[key]
        opened.users -= 1
        if not opened.users:
            del _opened[key]
            opened.close()


def connect(region: Region, path: str, device: int) -> MappedDeviceMemory:
    """Map a peer's region for kernels on `device`; raises RemoteError, NO_TRANSPORT or TRANSPORT_FAILED."""
    here = region.boot == boot_id()
    try:
        read = [_read(bytes(h.data)) for h in region.handles if h.transport == Transport.CUDA]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _failed(path, "a handle", "other bytes") from error
    # a handle for this host first; other hosts and namespaces are reached by FABRIC alone
    near = here and region.namespace == pid_namespace()
    found = next((each for each in read if near or each[0] == _FABRIC), read[0] if here and read else None)
    if found is None:
        raise _no(f"{path}.handles", "CUDA on this host, or a FABRIC handle", "none", "use a common transport")
    kind, pid, began, nonce, *_ = found
    if kind == _FABRIC and not virtual.fabric(device):
        advice = "run IMEX on both hosts of one NVLink domain, or use transport NIXL"
        raise _no(f"{path}.handles", f"no FABRIC handles at {uuid(device)}", "a FABRIC handle", advice)
    if not here:
        return _mapped(region, path, device, found)
    current(device)
    owner = ordinal_of(region.device or "")
    if owner is None:
        advice = "let CUDA_VISIBLE_DEVICES name the GPUs of both sides"
        raise _no(f"{path}.device", "a GPU that this process sees", str(region.device), advice)
    if not Device(device).can_access_peer(owner) and device != owner:
        raise _no(f"{path}.device", f"a peer of {uuid(device)}", str(region.device), "use transport NIXL")
    if nonce == _NONCE and (kind == _LEGACY or device == owner):
        known = facts(region.base)
        if not known["type"] or known["device"] != owner or not enable_peer(device, owner):
            raise _failed(path, "memory of this process", "freed memory")
        return MappedDeviceMemory(region.base, region.length, device, pid)
    if kind == _FABRIC:
        return _mapped(region, path, device, found)
    if not near:
        advice = "run both engines in one PID namespace, or use transport NIXL"
        raise _no(f"{path}.namespace", str(pid_namespace()), str(region.namespace), advice)
    if start_time(pid) != began:
        raise _failed(path, "a live process", f"process {pid} has ended")
    return _mapped(region, path, device, found)


def _mapped(region: Region, path: str, device: int, found: _Read) -> MappedDeviceMemory:
    kind, pid, _, _, offset, size, body = found
    if offset + region.length > size:
        raise _failed(path, "a region inside its allocation", f"{offset} + {region.length} of {size}")
    key = (device, msgpack.packb(body))
    try:
        opened = _opened.get(key) or _OPEN[kind](device, body)
    except (KvprotoError, OSError) as error:
        raise _failed(path, "a handle that opens", getattr(error, "yours", str(error))) from error
    _opened[key] = opened
    opened.users += 1
    mapped = MappedDeviceMemory(opened.base + offset, region.length, device, pid, key)
    if offset + region.length > opened.size:
        mapped.close()
        raise _failed(path, f"an allocation of {opened.size} bytes", f"{offset} + {region.length}")
    return mapped


def _open(device: int, ipc: bytes) -> _Opened:
    current(device)
    handle = driver.CUipcMemHandle()
    handle.reserved = ipc
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = int(call(driver.cuIpcOpenMemHandle(handle, lazy.value), "mapping"))
    base, size = call(driver.cuMemGetAddressRange(address), "range")
    return _Opened(int(base), int(size), lambda: _close(device, int(base)))


def _close(device: int, base: int) -> None:
    current(device)
    call(driver.cuIpcCloseMemHandle(base), "unmap")


def _map(device: int, body: tuple[str, list[tuple[bytes, int]]]) -> _Opened:
    path, pieces = body
    made = virtual.VirtualMap(device, [(partial(virtual.by_descriptor, path, token), size) for token, size in pieces])
    return _Opened(made.base, made.size, made.close)


def _map_fabric(device: int, body: list[tuple[bytes, int]]) -> _Opened:
    made = virtual.VirtualMap(device, [(partial(virtual.by_fabric, data), size) for data, size in body])
    return _Opened(made.base, made.size, made.close)


_OPEN: dict[int, Callable[[int, Any], _Opened]] = {_LEGACY: _open, _VIRTUAL: _map, _FABRIC: _map_fabric}


def _read(data: bytes) -> _Read:
    kind, pid, began, nonce, offset, size, body = msgpack.unpackb(data)
    good = all(type(n) is int and n >= 0 for n in (kind, pid, began, offset, size)) and type(nonce) is bytes
    if good and kind == _LEGACY:
        good = type(body) is bytes and len(body) == 64
    elif good:
        (path, pieces), name = (body, 16) if kind == _VIRTUAL else (("", body), 64)
        good = kind in _OPEN and type(path) is str and 0 < len(pieces) <= virtual.MOST_PIECES
        for token, length in pieces:
            good &= type(token) is bytes and len(token) == name and type(length) is int and 0 < length < 1 << 48
    if not good:
        raise ValueError("not a handle")
    return kind, pid, began, nonce, offset, size, body


def _no(path: str, mine: str, yours: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.NO_TRANSPORT, path, mine, yours, advice)


def _failed(path: str, mine: str, yours: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", mine, yours, "register again")
