"""Who may connect to a Listener, and how many.

ZeroMQ's questions are answered from the allow-list, and connections are counted.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import resource
import socket
import struct
import time

import zmq
from zmq.utils import z85

from kvproto.net.allowed import AllowList
from kvproto.net.direct import Inbox
from kvproto.net.limits import LIST_CHECK, MAX_CONNECTIONS, TURN_FRAMES

__all__ = ["Connections", "Handshakes", "event_of", "events_of"]

_log = logging.getLogger("kvproto")
_ASK = "inproc://zeromq.zap.01"
_names = itertools.count()

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

    ZeroMQ cannot stop accepting without ending the connections that it has. Clause KVP-NET-CONNECTIONS.
    """

    def __init__(self, context: zmq.Context[Socket], listener: Socket) -> None:
        """Before the listener is bound."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most = MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(most // 2, 1))
        self.count, self.full = 0, False
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
        full = self.count >= (self.most * 3 // 4 if self.full else self.most)
        if full != self.full:
            self._drop(full)
            self.full = full

    def _drop(self, all_new: bool) -> None:
        """Drop every packet to the listening socket, or none; those of connections go on to theirs."""
        if self._fd is None:
            return
        listening = socket.socket(fileno=self._fd)
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
        finally:
            listening.detach()


_ATTACH_FILTER, _DETACH_FILTER, _RETURN = 26, 27, 6
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux, and BPF's instruction that ends a program with how much to keep."""


def events_of(context: zmq.Context[Socket], watched: Socket, events: int) -> Inbox:
    """What ZeroMQ tells of a socket's connections; unbounded, since ZeroMQ's own thread would wait for room."""
    name = f"inproc://kvproto.events.{next(_names)}"
    watched.monitor(name, events)
    inbox = context.socket(zmq.PAIR)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.setsockopt(zmq.LINGER, 0)
    inbox.connect(name)
    return Inbox(inbox)


def event_of(frames: list[bytes]) -> tuple[int, int]:
    """Which event a message of `events_of` tells of, and its value; 0 for none."""
    event, value = struct.unpack("=Hi", frames[0]) if frames else (0, 0)
    return event, value
