"""Memory that two processes share, as registration.md describes for transport shm: the suite's and an engine's."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SHRINK, _GROW = 2, 4
_PREFIX = "kvproto-"
_ATTESTATIONS = "kvproto-attestations"
_DIGEST, _MOST_READ = 32, 2 << 20
Place = tuple[str, int, int]
"""Engine, replica and rank."""


class BadHandle(Exception):
    """A handle that an engine stated does not follow registration.md."""


def boot_id() -> str:
    """The host's boot id, as a region states it, in hex."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


class Unattested(Exception):
    """An engine registered memory in a session that its process has not attested."""


def attestation(session: str, access: str, source: Place, sink: Place) -> bytes:
    """The digest by which an owner attests that its memory is registered in a session."""
    parts = [write_uint(int(session)), write_uint({"WRITE": 1, "READ": 2}[access])]
    for engine, replica, rank in (source, sink):
        name = engine.encode()
        head = bytes([0xA0 | len(name)]) if len(name) < 32 else bytes([0xD9, len(name)])
        parts += [head + name, write_uint(replica), write_uint(rank)]
    return sha256(b"\x98" + b"".join(parts)).digest()


class Shared:
    """A region of the suite: a sealed memfd, and a file of its own for attestations."""

    def __init__(self, length: int, sealed: bool = True) -> None:
        self.nonce = secrets.token_hex(16)
        self.fd = os.memfd_create(_PREFIX + self.nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, length)
        if sealed:
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SHRINK | _GROW)
        self._attestations = os.memfd_create(_ATTESTATIONS, os.MFD_CLOEXEC)
        self._attested = 0
        self._map = mmap.mmap(self.fd, length)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def attest(self, attestation: bytes) -> None:
        """Write down that it is registered in a session."""
        os.pwrite(self._attestations, attestation, self._attested * _DIGEST)
        self._attested += 1

    def handle(
        self, pid: int | None = None, fd: int | None = None, nonce: str | None = None, attestations: int | None = None
    ) -> str:
        """Its entry in Register, in hex; fields that are given replace the true ones."""
        stated = self.nonce if nonce is None else nonce
        return (
            b"\x94" + write_uint(os.getpid() if pid is None else pid) + write_uint(self.fd if fd is None else fd)
            + b"\xd9" + bytes([len(stated)]) + stated.encode()
            + write_uint(self._attestations if attestations is None else attestations)
        ).hex()  # fmt: skip

    def close(self) -> None:
        """Free it; nothing may view it any more."""
        self.bytes = np.empty(0, np.uint8)
        self._map.close()
        os.close(self.fd)
        os.close(self._attestations)


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


def map_region(region: dict[str, Any], attestation: bytes) -> tuple[mmap.mmap, Bytes, str]:
    """Map a region (JSON form) that an engine registered with this nonce; raises BadHandle and Unattested."""
    data = next((bytes.fromhex(h["data"]) for h in region["handles"] if h["transport"] == "SHM"), None)
    if data is None:
        raise BadHandle("no handle for SHM")
    pid, fd, nonce, attestations = _read_handle(data)
    if not _attested(pid, attestations, attestation):
        raise Unattested(f"descriptor {attestations} of process {pid} has no attestation of this session")
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


def _attested(pid: int, fd: int, attestation: bytes) -> bool:
    link = f"/proc/{pid}/fd/{fd}"
    if _link(Path(link)) != f"/memfd:{_ATTESTATIONS} (deleted)":
        return False
    with open(link, "rb") as file:
        content = file.read(_MOST_READ)
    return attestation in {content[at : at + _DIGEST] for at in range(0, len(content), _DIGEST)}


def _read_handle(data: bytes) -> tuple[int, int, str, int]:
    """PID, descriptor, nonce and descriptor of attestations."""
    try:
        if data[0] != 0x94:
            raise BadHandle("no msgpack array of four")
        pid, at = read_uint(data, 1)
        fd, at = read_uint(data, at)
        if data[at : at + 2] != b"\xd9\x20":
            raise BadHandle("no nonce of 32 characters in the handle")
        attestations, end = read_uint(data, at + 34)
        if end != len(data):
            raise BadHandle("bytes behind the handle")
    except IndexError:
        raise BadHandle(f"a handle that ends after {len(data)} bytes") from None
    nonce = data[at + 2 : at + 34].decode("ascii", "replace")
    if set(nonce) - set("0123456789abcdef"):
        raise BadHandle("a nonce that is not lower-case hex")
    return pid, fd, nonce, attestations
