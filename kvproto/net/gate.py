"""Who may connect to a Listener, and how many.

ZeroMQ's questions are answered from the allow-list, and connections are counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator

import zmq
from zmq.utils import z85

from kvproto.net.allowed import AllowList
from kvproto.net.direct import Inbox
from kvproto.net.limits import LIST_CHECK, MAX_CLIENT_CONNECTIONS, MAX_CONNECTIONS, TURN_FRAMES

__all__ = ["Connections", "Handshakes", "event_of", "events_of"]

_log = logging.getLogger("kvproto")
_ASK = "inproc://zeromq.zap.01"
_names = itertools.count()
_COUNTED = 10.0
"""Seconds between two words on connections that nothing was heard of."""

Socket = zmq.Socket[bytes]


class Handshakes:
    """Answers ZeroMQ's question whether a client key may connect (ZAP, RFC 27), in the turns of its Listener."""

    def __init__(self, context: zmq.Context[Socket], allow: AllowList) -> None:
        self._allow, self._next_word = allow, 0.0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ASK)
        self.inbox = Inbox(self.socket)

    def turn(self) -> None:
        """Answer those that have come, a bounded number (KVP-NET-UNKNOWN)."""
        for _ in range(TURN_FRAMES):
            if not self.inbox.readable:
                return
            _, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.DONTWAIT)
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
            known = self._allow.knows(key)
            answer = (b"200", b"OK", key) if known else (b"400", b"not on the allow-list", b"")
            self.socket.send_multipart([b"1.0", request, *answer, b""])
            if not known:
                self._tell(key, address)

    def _tell(self, key: bytes, address: bytes) -> None:
        """Let the operator know whom to add, without a flood of words."""
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + LIST_CHECK
            words = "a client at %s is refused: its key %s is not in %s"
            _log.warning(words, address.decode(errors="replace"), key.decode(), self._allow.path)


class Connections:
    """Counts a Listener's TCP connections, and has the kernel drop new ones while there are too many.

    ZeroMQ cannot stop accepting without ending the connections that it has, and cannot end one: `cut` does, by its
    descriptor. Clauses KVP-NET-CONNECTIONS, KVP-NET-CLIENT, KVP-NET-SILENT.
    """

    def __init__(self, context: zmq.Context[Socket], listener: Socket, allow: AllowList | None) -> None:
        """Before the listener is bound; with an allow-list its clients prove who they are."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(most // 2, 1))
        self.most_of_one = min(MAX_CLIENT_CONNECTIONS, max(self.most // 2, 1))
        self.count, self.full, self._allow, self._next_word = 0, False, allow, 0.0
        self._silent: dict[int, None] = {}
        """Descriptors of connections that nothing was heard of, the oldest first."""
        self._unheard, self._next_count = 0, 0.0
        """How many have ended like that, and when the log says so next."""
        self._clients: dict[int, bytes] = {}
        """Keys of the others."""
        self._of = Counter[bytes]()
        """How many there are of each key."""
        self._fd: int | None = None
        """ZeroMQ's listening socket."""
        self.inbox = events_of(context, listener, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def turn(self) -> None:
        """Count those that came and went."""
        while (frames := self.inbox.take()) is not None:
            event, value = event_of(frames)
            self.count += (event == zmq.EVENT_ACCEPTED) - (event == zmq.EVENT_DISCONNECTED)
            if event == zmq.EVENT_LISTENING:
                self._fd = value
            elif event == zmq.EVENT_DISCONNECTED:
                self._unheard += value in self._silent
                self._gone(value)
            elif event == zmq.EVENT_ACCEPTED and self._allow is not None and value not in self._clients:
                self._silent[value] = None
                if len(self._silent) > self.most_of_one:
                    oldest = next(iter(self._silent))
                    del self._silent[oldest]
                    self._unheard += 1
                    self.cut(oldest)
        full = self.count >= (self.most * 3 // 4 if self.full else self.most)
        if full != self.full:
            self._drop(full)
            self.full = full
            self._tell_full()
        if self._unheard:
            self._tell_unheard(time.monotonic())

    def heard(self, key: bytes, digits: bytes) -> bool:
        """A frame has come by a connection; False where it is one too many of its client, and cut for that."""
        fd = int(digits or -1)
        if self._clients.get(fd) == key or self._allow is None:
            return True
        if self._of[key] >= self.most_of_one:
            self._tell_of(self._allow.name(key))
            self.cut(fd)
            return False
        self._gone(fd)  # it was another's, whose end is not counted yet
        self._clients[fd] = key
        self._of[key] += 1
        return True

    def _tell_full(self) -> None:
        if not self.full:
            _log.warning("%d connections are left: new ones are taken again", self.count)
            return
        of = [(self._allow.name(key), count) for key, count in self._of.most_common(1) if self._allow is not None]
        most = "".join(f"; most of them, {count}, are of client {name}" for name, count in of)
        _log.warning("full: %d connections, and new ones wait until some end%s", self.count, most)

    def _tell_unheard(self, now: float) -> None:
        """Strangers have no name; how many there are shows a scan, or somebody who wears the source out."""
        if now >= self._next_count:
            self._next_count = now + _COUNTED
            _log.info("connections that have ended before a frame was heard of them: %d", self._unheard)
            self._unheard = 0

    def _tell_of(self, name: str) -> None:
        """Name a client that has too many, without a flood of words."""
        now = time.monotonic()
        if now >= self._next_word:
            self._next_word = now + LIST_CHECK
            _log.warning("client %s has %d connections, as many as one may: more are closed", name, self.most_of_one)

    def _gone(self, fd: int) -> None:
        self._silent.pop(fd, None)
        if (key := self._clients.pop(fd, None)) is not None:
            self._of[key] -= 1

    def cut_unknown(self) -> None:
        """End the connections of clients that may not connect any more."""
        for fd in [fd for fd, key in self._clients.items() if self._allow is not None and not self._allow.knows(key)]:
            self.cut(fd)

    def cut(self, fd: int) -> None:
        """End a connection. One that has just ended may have left its descriptor to another of this listener, which
        connects again and goes on; nothing else is touched.
        """
        if self._fd is None:
            return
        with contextlib.suppress(OSError), _borrowed(self._fd) as listening, _borrowed(fd) as connection:
            if connection.getsockname()[1] == listening.getsockname()[1]:
                connection.shutdown(socket.SHUT_RDWR)

    def _drop(self, all_new: bool) -> None:
        """Drop every packet to the listening socket, or none; those of connections go on to theirs."""
        if self._fd is None:
            return
        with _borrowed(self._fd) as listening:
            self._filter(listening, all_new)

    def _filter(self, listening: socket.socket, all_new: bool) -> None:
        try:
            if listening.family == socket.AF_UNIX:
                return
            if all_new:
                nothing = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
                program = struct.pack("@HP", 1, ctypes.addressof(nothing))
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            else:
                listening.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        except OSError as error:  # a sandbox that allows no filters: connections are counted, and come all the same
            _log.warning("more than %d connections: new ones cannot be dropped: %s", self.most, error)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor of ZeroMQ's as a socket."""
    made = socket.socket(fileno=fd)
    try:
        yield made
    finally:
        made.detach()


_ATTACH_FILTER, _DETACH_FILTER, _RETURN = 26, 27, 6
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux, and BPF's instruction that ends a program with how much to keep."""


def events_of(context: zmq.Context[Socket], watched: Socket, events: int) -> Inbox:
    """What ZeroMQ tells of a socket's connections; unbounded, since ZeroMQ's own thread would wait for room."""
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
    """Which event a message of `events_of` tells of, and its value; 0 for none."""
    event, value = struct.unpack("=Hi", frames[0]) if frames else (0, 0)
    return event, value
