"""Transport `shm`: anonymous shared memory of one host, numpy strided copies.

A region is a memfd. Its handle names the owner's process, descriptor and a random nonce; a peer opens it through /proc,
checks the nonce in the file's name, and maps it. Nothing has a name in the file system, so nothing is left behind,
however a process ends.
"""

from __future__ import annotations

import collections.abc
import fcntl
import mmap
import os
import secrets
import weakref
from typing import Any

import attrs
import msgpack
import numpy as np

from kvproto.copying.execute import checksums, execute
from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.base import Mapped, Memory, Move
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["HostCopy", "HostMover", "Mapping", "SharedMemory", "connect"]

_NAME = "kvproto-"


class SharedMemory:
    """A region that this process owns."""

    def __init__(self, length: int, id: int = 0) -> None:
        self._nonce = secrets.token_hex(16)
        self._fd = os.memfd_create(_NAME + self._nonce, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._fd, 0, length)
            # a peer that has mapped it must not be killed by our making it shorter
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as e:
            os.close(self._fd)
            raise LocalError(
                ErrorCode.TRANSPORT_FAILED, "", f"{length} bytes of shared memory", str(e), "make the pools smaller"
            ) from e
        self._let_go = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(self._fd, length)
        self.buffer = memoryview(self._map)
        self.id, self.length = id, length

    def __dlpack__(self, **options: Any) -> Any:
        return np.frombuffer(self.buffer, np.uint8).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return np.frombuffer(self.buffer, np.uint8).__dlpack_device__()

    @property
    def region(self) -> Region:
        """What Register says of it."""
        data = msgpack.packb([os.getpid(), self._fd, self._nonce])
        handle = Handle(transport=Transport.SHM, data=data)
        return Region(id=self.id, base=0, length=self.length, kind=MemoryKind.HOST, boot=boot_id(), handles=(handle,))

    def close(self) -> None:
        """Give it up: peers that have mapped it keep it until they unmap; raises BufferError while views of it live."""
        self.buffer.release()
        self._map.close()
        self._let_go()


class Mapping:
    """A peer's region in this process."""

    def __init__(self, fd: int, length: int) -> None:
        try:
            self._map = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Unmap."""
        self.buffer.release()
        self._map.close()


def connect(region: Region, path: str) -> Mapping:
    """Map a peer's region; raises NO_TRANSPORT or TRANSPORT_FAILED."""
    handle = next((h for h in region.handles if h.transport == Transport.SHM), None)
    if handle is None or region.boot != boot_id():
        raise RemoteError(
            ErrorCode.NO_TRANSPORT, f"{path}.handles", "SHM on this host", "none", "use a common transport"
        )
    try:
        pid, fd, nonce = msgpack.unpackb(bytes(handle.data))
        link = f"/proc/{int(pid)}/fd/{int(fd)}"
        if os.readlink(link).split(" ")[0] != f"/memfd:{_NAME}{nonce}":
            raise OSError("another file")
        opened = os.open(link, os.O_RDWR)
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(opened).st_size < region.length:
            os.close(opened)
            raise OSError("not sealed, or shorter than the region says")
        return Mapping(opened, region.length)
    except KvprotoError:
        raise
    except Exception as e:
        advice = "run both engines as one user, in one PID namespace"
        raise RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", "cannot map", type(e).__name__, advice) from e


@attrs.frozen
class HostCopy:
    """A copy that was over when it was started."""

    bytes: int
    done: bool = True

    def stop(self) -> Proof:
        """Nothing is under way."""
        return Proof.PROVEN


class HostMover:
    """Runs copy programs between shared memory of one host, at once."""

    transport = Transport.SHM
    together = True
    in_parts = True
    late = 0.0

    def connect(self, region: Region, path: str) -> Mapping:
        """As `connect`."""
        return connect(region, path)

    def prepare(self, move: Move) -> None:
        """There is nothing to prepare."""

    def start(self, moves: collections.abc.Sequence[Move]) -> HostCopy:
        """Run them; every byte is there on return."""
        return HostCopy(sum(execute(_program(m), _buffers(m.sources), _buffers(m.sinks)) for m in moves))

    def checksums(
        self, program: CopyProgram, memory: collections.abc.Mapping[int, Memory], sink: bool
    ) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`."""
        return checksums(program, _buffers(memory), sink)

    def close(self) -> None:
        """Nothing is held."""


def _program(move: Move) -> CopyProgram:
    return move.program if move.layers is None else move.program.select(layers=range(*move.layers))


def _buffers(side: collections.abc.Mapping[int, Memory | Mapped]) -> dict[int, memoryview]:
    found = {}
    for id, memory in side.items():
        assert isinstance(memory, SharedMemory | Mapping)
        found[id] = memory.buffer
    return found
