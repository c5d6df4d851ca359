"""Memory that two processes share, as registration.md describes for transport shm: the suite's and an engine's."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SHRINK, _GROW = 2, 4
_PREFIX = "kvproto-"


class BadHandle(Exception):
    """A handle that an engine stated does not follow registration.md."""


def boot_id() -> str:
    """The host's boot id, as a region states it, in hex."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


class Shared:
    """A region of the suite: a sealed memfd."""

    def __init__(self, length: int, sealed: bool = True) -> None:
        self.nonce = secrets.token_hex(16)
        self.fd = os.memfd_create(_PREFIX + self.nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, length)
        if sealed:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SHRINK | _GROW)
        self._map = mmap.mmap(self.fd, length)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def handle(self, pid: int | None = None, fd: int | None = None, nonce: str | None = None) -> str:
        """Its entry in Register, in hex; fields that are given replace the true ones."""
        stated = self.nonce if nonce is None else nonce
        return (
            b"\x93" + write_uint(os.getpid() if pid is None else pid) + write_uint(self.fd if fd is None else fd)
            + b"\xd9" + bytes([len(stated)]) + stated.encode()
        ).hex()  # fmt: skip

    def close(self) -> None:
        """Free it; nothing may view it any more."""
        self.bytes = np.empty(0, np.uint8)
        self._map.close()
        os.close(self.fd)


def began(pid: int) -> int:
    """The start of a process, in ticks since boot; -1 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def holds(pids: Iterable[int], nonce: str) -> bool:
    """Whether one of these processes has a region mapped or open, according to the kernel."""
    return any(_holds(pid, _PREFIX + nonce) for pid in pids)


def _holds(pid: int, name: str) -> bool:
    try:
        if name in Path(f"/proc/{pid}/maps").read_text():
            return True
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    return any(name in _link(link) for link in links)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def map_region(region: dict[str, Any]) -> tuple[mmap.mmap, Bytes, str]:
    """Map a region (JSON form) that an engine registered with this nonce; raises BadHandle."""
    data = next((bytes.fromhex(h["data"]) for h in region["handles"] if h["transport"] == "SHM"), None)
    if data is None:
        raise BadHandle("no handle for SHM")
    pid, fd, nonce = _read_handle(data)
    link = f"/proc/{pid}/fd/{fd}"
    try:
        name = os.readlink(link)
        if not name.startswith(f"/memfd:{_PREFIX}{nonce}"):
            raise BadHandle(f"descriptor {fd} of process {pid} is {name}")
        opened = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BadHandle(f"{link}: {error.strerror}") from error
    try:
        if fcntl.fcntl(opened, _F_GET_SEALS) & (_SHRINK | _GROW) != _SHRINK | _GROW:
            raise BadHandle("the file is not sealed against shrinking and growing")
        if os.fstat(opened).st_size < int(region["length"]):
            raise BadHandle(f"a file of {os.fstat(opened).st_size} bytes for a region of {region['length']}")
        mapped = mmap.mmap(opened, int(region["length"]))
    finally:
        os.close(opened)
    return mapped, np.frombuffer(mapped, np.uint8), nonce


def write_uint(number: int) -> bytes:
    """A msgpack unsigned integer in its shortest form."""
    if number < 0x80:
        return bytes([number])
    mark, width = next((m, w) for m, w in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)) if number < 256**w)
    return bytes([mark]) + number.to_bytes(width, "big")


def read_uint(data: bytes, at: int) -> tuple[int, int]:
    """A number of a handle, and the offset of the next byte; raises BadHandle."""
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(data[at])
    if width is None:
        if data[at] >= 0x80:
            raise BadHandle(f"no unsigned integer at byte {at} of the handle")
        return data[at], at + 1
    return int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width


def _read_handle(data: bytes) -> tuple[int, int, str]:
    """PID, descriptor and nonce."""
    try:
        if data[0] != 0x93:
            raise BadHandle("no msgpack array of three")
        pid, at = read_uint(data, 1)
        fd, at = read_uint(data, at)
        if data[at : at + 2] != b"\xd9\x20" or len(data) != at + 34:
            raise BadHandle("no nonce of 32 characters at the end of the handle")
    except IndexError:
        raise BadHandle(f"a handle that ends after {len(data)} bytes") from None
    nonce = data[at + 2 :].decode("ascii", "replace")
    if set(nonce) - set("0123456789abcdef"):
        raise BadHandle("a nonce that is not lower-case hex")
    return pid, fd, nonce
