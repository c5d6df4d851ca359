"""Anonymous shared memory of one host, and mappings of peers'.

A region is a memfd. Its handle names the owner's process, descriptor and a random nonce; a peer opens it through /proc,
checks the nonce in the file's name, and maps it. Byte 0 of the region is offset 0 of the file. Nothing has a name in
the file system, so nothing is left behind, however a process ends. No mapping is inherited by a forked child, where it
would outlive this process, whose end proves that nothing is written any more.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from kvproto.errors import LocalError, RemoteError
from kvproto.transport.base import handle_of
from kvproto.transport.process import attestations, attested, boot_id, pid_namespace
from kvproto.transport.tensors import CPU
from kvproto.wire.enums import ErrorCode, MemoryKind
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

_NAME = "kvproto-"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class SharedMapping:
    """The first `length` bytes of a file, mapped without a descriptor until their last view is gone; raises OSError."""

    def __init__(self, fd: int, length: int) -> None:
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED or _libc.madvise(address, length, mmap.MADV_DONTFORK):
            code = ctypes.get_errno()
            if address != _FAILED:
                _libc.munmap(address, length)
            raise OSError(code, os.strerror(code))
        owner = (ctypes.c_uint8 * length).from_address(address)
        weakref.finalize(owner, _unmap, address, length, os.getpid()).atexit = False
        self._owner = weakref.ref(owner)
        self.address: int = address
        self.buffer: memoryview = np.ctypeslib.as_array(owner).data

    def close(self) -> None:
        """Unmap; raises BufferError, and changes nothing, while arrays use it."""
        self.buffer.release()
        owner = self._owner()
        if owner is not None:
            self.buffer = np.ctypeslib.as_array(owner).data
            raise BufferError("the memory is in use: delete the arrays that view it first")


def _unmap(address: int, length: int, process: int) -> None:
    if process == os.getpid():  # a forked child has no such mapping, and may have another one there
        _libc.munmap(address, length)


_owned: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: _owned.clear())  # a child may have memory of its own at the same addresses


class _Exported:
    """Bytes of a region for DLPack; a tensor made of them keeps the region alive too, so that peers can map it."""

    def __init__(self, memory: "SharedMemory") -> None:
        self._memory, self._bytes = memory, memoryview(memory.buffer)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (memory.length,),
            "data": (memory.address, False),
        }


class SharedMemory:
    """A zeroed region of `length` bytes of this process; raises LocalError(TRANSPORT_FAILED) if memory is short."""

    kind, device = MemoryKind.HOST, None

    def __init__(self, length: int, id: int = 0) -> None:
        left = allocatable_bytes()  # Linux grants shared memory that it lacks, and then kills this process or another
        if left is not None and length > left:
            raise _short(length, f"{left} that could be free", "make the pools smaller")
        self._nonce, self._fd = secrets.token_hex(16), -1
        try:
            self._attested = attestations.of(self)
            self._fd = os.memfd_create(_NAME + self._nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(self._fd, 0, length)
            # truncating it would kill peers that have mapped it
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._bytes = SharedMapping(self._fd, length)
        except OSError as e:
            advice = "raise the limit of open files (ulimit -n)"
            if self._fd >= 0:
                advice = "make the pools smaller"
                os.close(self._fd)
            raise _short(length, e.strerror or str(e), advice) from e
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self.id, self.length = id, length
        self.address = self._bytes.address
        _owned.add(self)

    @property
    def buffer(self) -> memoryview:
        """The bytes."""
        return self._bytes.buffer

    def __dlpack__(self, **options: Any) -> Any:
        return np.asarray(_Exported(self)).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    @property
    def region(self) -> Region:
        data = msgpack.packb([os.getpid(), self._fd, self._nonce, self._attested])
        handle = Handle(transport=TransportCode.SHM, data=data)
        return Region(
            id=self.id,
            base=0,
            length=self.length,
            kind=MemoryKind.HOST,
            boot=boot_id(),
            namespace=pid_namespace(),
            handles=(handle,),
        )

    def close(self) -> None:
        """Release it; peers that have mapped it keep it until they unmap it. Raises BufferError while arrays use it."""
        self._bytes.close()
        _owned.discard(self)
        self._close_file()
        attestations.gone(self)


def _short(length: int, yours: str, advice: str) -> LocalError:
    return LocalError(ErrorCode.TRANSPORT_FAILED, "length", f"{length} bytes of host memory", yours, advice)


def owner_of(address: int, length: int) -> SharedMemory | None:
    """The shared memory of this process that holds [address, address + length), or None."""
    return next((m for m in _owned if m.address <= address and address + length <= m.address + m.length), None)


def connect(region: Region, path: str, attestation: bytes | None = None) -> SharedMapping:
    """Map a peer's region; raises RemoteError, NO_TRANSPORT or TRANSPORT_FAILED, at `path`.

    Its owner has to have written `attestation`, if one is passed (KVP-REG-ATTEST).
    """
    handle = handle_of(region, path, TransportCode.SHM)
    if region.boot != boot_id():
        theirs = bytes(region.boot or b"").hex() or "none"
        advice = "SHM reaches memory of the same host only: use a transport between hosts"
        raise RemoteError(ErrorCode.NO_TRANSPORT, f"{path}.boot", boot_id().hex(), theirs, advice)
    if region.namespace not in (None, pid_namespace()):
        mine, yours = f"PID namespace {pid_namespace()}", f"another, {region.namespace}"
        advice = "share it (in Kubernetes, shareProcessNamespace or hostPID), or offer INLINE or NIXL too"
        raise RemoteError(ErrorCode.NO_TRANSPORT, f"{path}.namespace", mine, yours, advice)
    pid, fd, nonce, attested_fd = _fields(handle, path)
    link = f"/proc/{pid}/fd/{fd}"
    try:
        name = os.readlink(link).split(" ")[0].removeprefix("/memfd:")
        if name != _NAME + nonce:
            raise _failed(path, f"descriptor {fd} of process {pid} to be {_NAME + nonce}", name, _SEND_AGAIN)
        opened = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}"):
            raise _failed(path, f"an open descriptor {fd} of process {pid}", "it was closed", _SEND_AGAIN) from None
        advice = "if it is alive, run both engines in one PID namespace; else connect to its successor"
        raise _failed(path, f"process {pid}", "no such process here", advice) from None
    except OSError as error:
        advice = "run both engines as one user, in one PID namespace, without limits on /proc or ptrace between them"
        raise _failed(path, f"access to {link}", error.strerror or type(error).__name__, advice) from None
    try:
        if not _sealed(opened):
            advice = "use memfd_create with MFD_ALLOW_SEALING and add F_SEAL_SHRINK: else a shorter file kills readers"
            raise _failed(path, "a file sealed with F_SEAL_SHRINK", "no such seal", advice)
        size = os.fstat(opened).st_size
        if size < region.length:
            raise _failed(path, f"a file of {region.length} bytes, as the region says", f"{size} bytes", _SEND_AGAIN)
        if attestation is not None and not attested(pid, attested_fd, attestation):
            raise _failed(path, f"memory that process {pid} has registered in this session", "another's", _OWN)
        return SharedMapping(opened, region.length)
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise _failed(path, f"{region.length} bytes mapped", said, "raise the memory limits") from None
    finally:
        os.close(opened)


def owning_process(regions: Iterable[Region]) -> int | None:
    """The PID that the handles of these regions name; None unless all name the same, and are of this host."""
    owners: set[int | None] = set()
    for region in regions:
        handles = [handle for handle in region.handles if handle.transport == TransportCode.SHM]
        owners.add(_fields(handles[0], "")[0] if handles and region.boot == boot_id() else None)
    return owners.pop() if len(owners) == 1 else None


_SEND_AGAIN = "send the handle of memory that is still there"
_OWN = "register memory of your own, and attest the session before you do (KVP-REG-ATTEST)"


def _fields(handle: Handle, path: str) -> tuple[int, int, str, int]:
    """The process, descriptor, nonce and descriptor of attestations that a handle states."""
    try:
        pid, fd, nonce, attested_fd = msgpack.unpackb(bytes(handle.data))
    except (ValueError, TypeError, msgpack.UnpackException):
        pid = fd = nonce = attested_fd = None
    numbers = all(type(number) is int and number >= 0 for number in (pid, fd, attested_fd))
    if not numbers or pid < 1 or type(nonce) is not str:
        advice = "send the handle that registration.md describes"
        raise _failed(
            path, "msgpack of [process, descriptor, nonce, descriptor]", f"{len(handle.data)} other bytes", advice
        )
    return pid, fd, nonce, attested_fd


def _sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # files other than memfds have no seals
        return False


def _failed(path: str, mine: str, yours: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", mine, yours, advice)


_Kind = type[SharedMemory] | type[SharedMapping]


def buffers(regions: Mapping[int, Any], *, wanted: str, kinds: tuple[_Kind, ...]) -> dict[int, memoryview]:
    """The bytes of regions by id; raises LocalError(NO_TRANSPORT) for memory that is of none of these kinds."""
    views = {}
    for id, memory in regions.items():
        if not isinstance(memory, kinds):
            advice = "allocate it with kvproto.transport.memory.allocate and let the engine's tensors use it"
            raise LocalError(ErrorCode.NO_TRANSPORT, f"regions[{id}]", wanted, type(memory).__name__, advice)
        views[id] = memory.buffer
    return views


# the memory that is left

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def allocatable_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """The bytes that can be allocated at most, as the kernel and memory cgroups say; None if they do not."""
    memory = _table(proc / "meminfo", 1024)
    swap = memory.get("SwapFree", 0)
    limits = []
    if "MemFree" in memory:
        dropped = sum(memory.get(name, 0) for name in ("Buffers", "Cached", "SwapCached", "SReclaimable"))
        limits.append(max(memory["MemFree"] + dropped - memory.get("Shmem", 0), memory.get("MemAvailable", 0)) + swap)
    for folder in _cgroup_folders(proc, groups):
        limit, use = _limit(folder / "memory.max"), _table(folder / "memory.stat", 1)
        if limit is not None:
            limits.append(max(limit - use.get("anon", 0) - use.get("shmem", 0), 0) + swap)
    return min(limits, default=None)


def _cgroup_folders(proc: Path, groups: Path) -> list[Path]:
    """The folder of this process's cgroup (v2) and of each above it, as far as they can be seen here."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::/")), None)
    if own is None or ".." in own:
        return []
    inner = groups / own.lstrip("/")
    return [folder for folder in (inner, *inner.parents) if folder == groups or groups in folder.parents]


def _limit(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _table(file: Path, unit: int) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line, in bytes; empty if it cannot be read."""
    try:
        rows = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
        return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1}
    except (OSError, ValueError):
        return {}
