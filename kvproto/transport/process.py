"""Processes of one host: a pidfd, opened before start times are compared, proves that one has ended.

A process that registers memory with a peer writes an attestation into a file of its own, which the peer reads through
/proc. So nobody who was told of another's memory can register it as its own (KVP-REG-ATTEST).
"""

import fcntl
import os
import select
import threading
import weakref
from functools import cache
from pathlib import Path

from kvproto.wire.messages import Process


@cache
def boot_id() -> bytes:
    """The kernel's boot id: 16 bytes that name this host and its present run, as the UUID is written."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def pid_namespace() -> int:
    """The inode of this process's PID namespace; PIDs can be compared only within one."""
    return os.stat("/proc/self/ns/pid").st_ino


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time of a process; None if /proc does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


def start_time(pid: int) -> int | None:
    """The start of a process, in ticks since boot; None if it has ended. Together with the PID it names one process."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else stat[1]


@cache
def _named(pid: int) -> Process:
    stat = _stat(pid)
    assert stat is not None
    return Process(boot=boot_id(), namespace=pid_namespace(), pid=pid, start=stat[1])


def this_process() -> Process:
    """The name of this process; after a fork, of the child."""
    return _named(os.getpid())


class Attestations:
    """The sessions in which memory of this process is registered: digests of 32 bytes in an anonymous file.

    The file is there as long as memory whose handles name it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may go while it is held
        self._fd: int | None = None
        self._places: dict[bytes, int] = {}
        self._unused: list[int] = []
        self._memories = set[int]()
        """By id."""

    def of(self, memory: object) -> int:
        """The descriptor by which peers read them, as long as this memory is there; raises OSError if none is left."""
        with self._lock:
            if id(memory) not in self._memories:
                self._memories.add(id(memory))
                weakref.finalize(memory, self._gone, id(memory)).atexit = False
            if self._fd is None:
                self._fd = os.memfd_create(_ATTESTATIONS, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                for attestation, place in self._places.items():
                    self._write(attestation, place)
            return self._fd

    def gone(self, memory: object) -> None:
        """Close the file if this was the last memory."""
        self._gone(id(memory))

    def _gone(self, key: int) -> None:
        with self._lock:
            self._memories.discard(key)
            if self._fd is not None and not self._memories:
                os.close(self._fd)
                self._fd = None

    def add(self, attestation: bytes) -> None:
        """Write one, unless it is written."""
        with self._lock:
            if attestation not in self._places:
                self._places[attestation] = self._unused.pop() if self._unused else len(self._places)
                self._write(attestation, self._places[attestation])

    def drop(self, attestation: bytes) -> None:
        """Remove one, as its session is over."""
        with self._lock:
            place = self._places.pop(attestation, None)
            if place is not None:
                self._unused.append(place)
                self._write(bytes(DIGEST), place)

    def _write(self, content: bytes, place: int) -> None:
        if self._fd is not None:
            os.pwrite(self._fd, content, place * DIGEST)

    def forked(self) -> None:
        """Begin anew in a forked child, whose memory is not its parent's."""
        if self._fd is not None:
            os.close(self._fd)
        self.__init__()  # type: ignore[misc]


DIGEST = 32
_ATTESTATIONS = "kvproto-attestations"
_MOST_READ = DIGEST << 16
attestations = Attestations()
os.register_at_fork(after_in_child=attestations.forked)


def attest(attestation: bytes, holds: bool) -> None:
    """Write that memory of this process is registered in a session, or remove that."""
    (attestations.add if holds else attestations.drop)(attestation)


def attested(pid: int, fd: int, attestation: bytes) -> bool:
    """Whether a process on this host has written an attestation to the file of its descriptor `fd`; raises OSError."""
    link = f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(link).split(" ")[0] != f"/memfd:{_ATTESTATIONS}":  # opening another kind of file could wait
            return False
        opened = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        content = os.pread(opened, _MOST_READ, 0)
    finally:
        os.close(opened)
    return any(content[at : at + DIGEST] == attestation for at in range(0, len(content), DIGEST))


class Watch:
    """Watches one process for its end; `of` says whether it can be watched from here at all."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._ended = fd is None
        self._poll = select.poll()
        if fd is not None:
            self._poll.register(fd, select.POLLIN)

    @classmethod
    def of(cls, process: Process) -> "Watch | None":
        """A watch of a process; None if its end cannot be seen: another host, namespace or start, or a hidden /proc."""
        if (bytes(process.boot), process.namespace) != (boot_id(), pid_namespace()):
            return None
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return cls(None)
        except (OSError, OverflowError):  # no descriptor left, a number that is no PID
            return None
        stat = _stat(process.pid)
        if stat is not None and stat[1] == process.start:
            return cls(fd)
        ended = select.select([fd], [], [], 0)[0]
        os.close(fd)
        # it ended between the two calls; another start may be another process or time namespace, which proves nothing
        return cls(None) if stat is None and ended else None

    @classmethod
    def of_pid(cls, pid: int) -> "Watch | None":
        """A watch of the process that has this PID here now; None if there is none, or none that can be watched."""
        try:
            return cls(os.pidfd_open(pid))
        except (OSError, OverflowError):
            return None

    def fileno(self) -> int | None:
        """A descriptor that is readable once the process has ended; None if that is known already."""
        return self._fd

    @property
    def ended(self) -> bool:
        """Whether it has ended, so that none of its threads runs any more."""
        if not self._ended:
            self._ended = bool(self._poll.poll(0))
        return self._ended

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
