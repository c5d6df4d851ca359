"""Admission to a Listener: handshakes by the allow-list, numbers of connections, and clients that are busy."""

import contextlib
import ctypes
import itertools
import logging
import os
import resource
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils import z85

from kvproto.errors import LocalError
from kvproto.net.allow_list import AllowList
from kvproto.net.libzmq import Inbox
from kvproto.net.limits import LIST_CHECK, MAX_CLIENT_CONNECTIONS, MAX_CONNECTIONS, TURN_FRAMES
from kvproto.wire.enums import ErrorCode

_log = logging.getLogger("kvproto")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_names = itertools.count()
_SUMMARY_PAUSE = 10.0
"""Seconds between two log records about connections that ended without a frame."""

Socket = zmq.Socket[bytes]


class Handshakes:
    """Tells ZeroMQ whether a client key may connect (ZAP, RFC 27), in the turns of its Listener."""

    def __init__(self, context: zmq.Context[Socket], allow: AllowList) -> None:
        self._allow, self._next_log = allow, 0.0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)
        self.inbox = Inbox(self.socket)

    def turn(self) -> None:
        """Answer the requests of ZeroMQ that wait, up to a limit (KVP-NET-UNKNOWN)."""
        for _ in range(TURN_FRAMES):
            if not self.inbox.readable:
                return
            _, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.DONTWAIT)
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
            known = self._allow.knows(key)
            answer = (b"200", b"OK", key) if known else (b"400", b"not on the allow-list", b"")
            self.socket.send_multipart([b"1.0", request, *answer, b""])
            if not known:
                self._log_refusal(key, address)

    def _log_refusal(self, key: bytes, address: bytes) -> None:
        """Log which key the operator could add, at a limited rate."""
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LIST_CHECK
            words = "a client at %s is refused: its key %s is not in %s"
            _log.warning(words, address.decode(errors="replace"), key.decode(), self._allow.path)


class Connections:
    """Counts a Listener's TCP connections, and has the kernel drop new ones while there are too many.

    ZeroMQ can neither stop accepting without ending its connections, nor end a single one, which `cut` does by its
    descriptor. An ipc address has another name while there are too many: ZeroMQ's thread ends the process if it lacks
    a descriptor for one that it accepts. Clauses KVP-NET-CONNECTIONS, KVP-NET-CLIENT, KVP-NET-SILENT.
    """

    def __init__(self, context: zmq.Context[Socket], listener: Socket, allow: AllowList | None) -> None:
        """Watch `listener`, which must not be bound yet; with an allow-list, its clients prove their keys."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(most // 2, 1))
        self.most_of_one = min(MAX_CLIENT_CONNECTIONS, max(self.most // 2, 1))
        self.count, self.full, self._allow, self._next_log = 0, False, allow, 0.0
        self._silent: dict[int, None] = {}
        """Descriptors of connections that have not sent a frame, the oldest first."""
        self._silent_ends, self._next_summary = 0, 0.0
        """The number of connections that ended without a frame, and when it may be logged next."""
        self._clients: dict[int, bytes] = {}
        """The client key of each other connection, by descriptor."""
        self._per_client = Counter[bytes]()
        """The number of connections of each key."""
        self._fd: int | None = None
        """The descriptor of ZeroMQ's listening socket."""
        self.inbox = events_of(context, listener, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def turn(self) -> None:
        """Count the connections that came and went, and limit them."""
        while (frames := self.inbox.take()) is not None:
            event, value = event_of(frames)
            self.count += (event == zmq.EVENT_ACCEPTED) - (event == zmq.EVENT_DISCONNECTED)
            if event == zmq.EVENT_LISTENING:
                self._fd = value
            elif event == zmq.EVENT_DISCONNECTED:
                self._silent_ends += value in self._silent
                self._forget(value)
            elif event == zmq.EVENT_ACCEPTED and self._allow is not None and value not in self._clients:
                self._silent[value] = None
                if len(self._silent) > self.most_of_one:
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    self._silent_ends += 1
                    self.cut(oldest)
        full = self.count >= (self.most * 3 // 4 if self.full else self.most)
        if full != self.full:
            self._drop(full)
            self.full = full
            self._log_full()
        if self._silent_ends:
            self._log_silent_ends(time.monotonic())

    def count_frame(self, key: bytes, digits: bytes) -> bool:
        """Count a frame on a connection; False if the client has too many connections, so that this one was cut."""
        fd = int(digits or -1)
        if self._clients.get(fd) == key or self._allow is None:
            return True
        if self._per_client[key] >= self.most_of_one:
            self._log_client(self._allow.name(key))
            self.cut(fd)
            return False
        self._forget(fd)  # the descriptor was another connection's, whose end is not counted yet
        self._clients[fd] = key
        self._per_client[key] += 1
        return True

    def _log_full(self) -> None:
        if not self.full:
            _log.warning("%d connections are left: new ones are accepted again", self.count)
            return
        of = [
            (self._allow.name(key), count) for key, count in self._per_client.most_common(1) if self._allow is not None
        ]
        most = "".join(f"; most of them, {count}, are of client {name}" for name, count in of)
        _log.warning("full: %d connections, and new ones wait until some end%s", self.count, most)

    def _log_silent_ends(self, now: float) -> None:
        """Log, at a limited rate, how many connections ended without a frame, which shows a scan or an attack."""
        if now >= self._next_summary:
            self._next_summary = now + _SUMMARY_PAUSE
            _log.info("connections that ended before they sent a frame: %d", self._silent_ends)
            self._silent_ends = 0

    def _log_client(self, name: str) -> None:
        """Log, at a limited rate, the name of a client that has too many connections."""
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + LIST_CHECK
            _log.warning("client %s has %d connections, the most for one: more are closed", name, self.most_of_one)

    def _forget(self, fd: int) -> None:
        self._silent.pop(fd, None)
        if (key := self._clients.pop(fd, None)) is not None:
            self._per_client[key] -= 1

    def cut_unknown(self) -> None:
        """Cut the connections of clients that are no longer on the allow-list."""
        for fd in [fd for fd, key in self._clients.items() if self._allow is not None and not self._allow.knows(key)]:
            self.cut(fd)

    def cut(self, fd: int) -> None:
        """End a connection by its descriptor.

        If it has just ended, its descriptor may be in use by another connection of this listener, which is cut instead
        and connects again; no other kind of descriptor is affected.
        """
        if self._fd is None:
            return
        with contextlib.suppress(OSError), _borrowed(self._fd) as listening, _borrowed(fd) as connection:
            if connection.getsockname()[1] == listening.getsockname()[1]:
                connection.shutdown(socket.SHUT_RDWR)

    def _drop(self, all_new: bool) -> None:
        """Drop every packet to the listening socket, or none; existing connections are not affected."""
        if self._fd is None:
            return
        with _borrowed(self._fd) as listening:
            if listening.family == socket.AF_UNIX:
                self._hide(Path(os.fsdecode(listening.getsockname())), all_new)
                return
            nothing = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
            program = struct.pack("@HP", 1, ctypes.addressof(nothing))
            try:
                if all_new:
                    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                else:
                    listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            except OSError as error:  # a sandbox may not allow filters: connections are counted, but not limited
                _log.warning("more than %d connections: new ones cannot be dropped: %s", self.most, error)

    def _hide(self, path: Path, hidden: bool) -> None:
        """Hide an ipc address, or show it again; a client that connects meanwhile tries again."""
        aside = path.with_name(path.name + ".full")
        try:
            if hidden:
                path.rename(aside)
            elif not path.exists():
                aside.rename(path)
            else:
                _log.error("%s was taken over by another process: stop it, and start this engine again", path)
        except OSError as error:
            _log.warning("%s: %s: %d connections, which are not limited", path, error.strerror, self.count)


_OF_CONNECTION = 4
"""Descriptors of a connection that a side dials, and of the events about it."""


def check_descriptors(count: int, path: str, held: int = 0) -> None:
    """Raise LocalError(INTERNAL) unless this process may open `count` more, as ZeroMQ ends it if it lacks one.

    Nor may one peer, with which it dials `held` connections, take more than half of what it may open.
    """
    most, advice = resource.getrlimit(resource.RLIMIT_NOFILE)[0], "raise the limit of open files (ulimit -n)"
    if most == resource.RLIM_INFINITY:
        return
    try:
        # no number beyond the kernel's table is open; to count them all takes long beside 1,000 peers
        table = Path("/proc/self/status").read_text().partition("FDSize:")[2].split()
        left = most - int(table[0]) if table else 0
        if left < count:
            left = most - len(os.listdir("/proc/self/fd"))
    except OSError:  # not one is left, or there is no /proc
        left = 0 if os.path.isdir("/proc/self") else count
    if left < count:
        raise LocalError(ErrorCode.INTERNAL, path, f"{count} descriptors", f"{left} of {most} left", advice)
    if held >= (share := most // 2 // _OF_CONNECTION):
        raise LocalError(ErrorCode.INTERNAL, path, f"at most {share} connections with one engine", "one more", advice)


_LOAD_SPAN = 1.0
"""Seconds over which time is added up."""
_LOAD_PAUSE = 10.0
"""Seconds between two records."""
_MOST_SHARE = 0.4
"""The share of the time, 0 to 1, that a client may take without a record."""


class ClientLoad:
    """The time and frames that each client of a Listener takes, by its key."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow
        self._since = self._quiet_until = 0.0
        self._seconds, self._frames = defaultdict[bytes, float](float), Counter[bytes]()

    def add(self, key: bytes, began: float, now: float) -> None:
        """Add a frame of a client that was handled from `began` to `now`, in seconds of `time.monotonic`."""
        if now - self._since > _LOAD_SPAN:
            self._log_busy(now - self._since, now)
            self._since = began
            self._seconds.clear()
            self._frames.clear()
        self._seconds[key] += now - began
        self._frames[key] += 1

    def _log_busy(self, span: float, now: float) -> None:
        for key, seconds in self._seconds.items():
            if seconds > _MOST_SHARE * span and now >= self._quiet_until:
                self._quiet_until = now + _LOAD_PAUSE
                words = "client %s keeps this source busy: %d frames took %.0f%% of %.1f s"
                _log.warning(words, self._allow.name(key), self._frames[key], 100 * seconds / span, span)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of ZeroMQ as a socket that does not close it."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


_ATTACH_FILTER, _DETACH_FILTER, _RETURN = 26, 27, 6
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER, and the BPF instruction that returns how many bytes to keep."""


def events_of(context: zmq.Context[Socket], watched: Socket, events: int) -> Inbox:
    """An inbox of ZeroMQ's events about a socket; its queue is unbounded, as ZeroMQ's thread would wait for room."""
    name = f"inproc://kvproto.events.{next(_names)}"
    watched.monitor(name, events)
    inbox = context.socket(zmq.PAIR)
    try:
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.connect(name)
        return Inbox(inbox)
    except zmq.ZMQError:
        inbox.close()
        raise


def event_of(frames: list[bytes]) -> tuple[int, int]:
    """The event and its value in a message of `events_of`; (0, 0) for none."""
    event, value = struct.unpack("=Hi", frames[0]) if frames else (0, 0)
    return event, value
