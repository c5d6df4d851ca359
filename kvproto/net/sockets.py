"""ROUTER at the source, a DEALER for each address at the sink; one message is one frame (KVP-NET-CURVE)."""

import contextlib
import errno
import math
import socket
import time
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import zmq

from kvproto.errors import KvprotoError, LocalError, RemoteError, ReportedError, bad
from kvproto.net import limits
from kvproto.net.addresses import HostNames, check_address, encrypted, is_named, numbered
from kvproto.net.admission import ClientLoad, Connections, Handshakes, Socket, check_descriptors, event_of, events_of
from kvproto.net.allow_list import AllowList
from kvproto.net.keys import KeyPair
from kvproto.net.libzmq import Inbox
from kvproto.session import Party
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode

RECEIVE_TIME = 0.001
"""Seconds after which a turn stops receiving; the next goes on with the other connections (KVP-NET-TURN)."""

_MAX_FRAME = tables.HEADER_BYTES + tables.MAX_BODY
_LINGER = 500
"""Milliseconds that a closing socket waits for frames that are not sent yet."""
_OPTIONS = {
    zmq.MAXMSGSIZE: _MAX_FRAME,
    zmq.RCVHWM: limits.RECEIVE_QUEUE,
    zmq.SNDHWM: limits.SEND_QUEUE,
    zmq.HANDSHAKE_IVL: int(1000 * limits.HANDSHAKE),
    zmq.LINGER: _LINGER,
    zmq.SNDTIMEO: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 20,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""Options of sockets on both sides. TCP keepalive tells a lost host from a stopped process, which still answers it."""
_SPARE = 32
"""Descriptors that must be left before anything is opened: a context takes ten, and a connection four."""
_BREAKS = 3
"""Handshakes that a server ends without a reason, after which it is taken to have another key."""


class Listener:
    """A ROUTER that sinks dial; a connection is a routing id and the key that its client proved (KVP-NET-OWNER)."""

    def __init__(
        self, address: str, insecure: bool = False, keys: KeyPair | None = None, allow: AllowList | None = None
    ) -> None:
        """Bind to `address`, with CURVE unless it is private or keys are missing.

        Raises LocalError(OUT_OF_RANGE) for an address that may not be used or is in use, and for keys without an
        allow-list.
        """
        check_address(address, keys is not None, insecure)
        self._allow = allow if keys is not None and encrypted(address) else None
        if keys is not None and encrypted(address) and allow is None:
            raise bad("allow", "an allow-list with the keys", "none", "list the clients")
        check_descriptors(_SPARE, "listen")
        self._context: zmq.Context[Socket] = zmq.Context()
        opened: list[Socket] = []
        self._end = weakref.finalize(self, _close, self._context, opened)
        try:
            place = numbered(address)
            router = _open(self._context, zmq.ROUTER, "[" in place, opened)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._handshakes, self._cut_at = None, math.inf
            if keys is not None and self._allow is not None:
                self._handshakes = Handshakes(self._context, self._allow)
                opened.insert(0, self._handshakes.socket)
                router.setsockopt(zmq.CURVE_SERVER, 1)
                router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
                router.setsockopt(zmq.ZAP_DOMAIN, b"kvproto")
            # ZeroMQ itself would take over an ipc path that another process listens on
            if address.startswith("ipc://") and _alive(address):
                raise zmq.ZMQError(zmq.EADDRINUSE, "Address already in use")
            self._connections = Connections(self._context, router, self._allow)
            opened.append(self._connections.inbox.socket)
            router.bind(place)
            self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
            if place != address:  # its name stays when its number changes
                self.address = f"{address.rpartition(':')[0]}:{self.address.rpartition(':')[2]}"
        except zmq.ZMQError as e:
            self.close()
            wanted, advice = "an address that is free on this machine", "choose another address, or stop its owner"
            if e.errno == errno.ENODEV:
                wanted, advice = "an address of this machine", "name one of its interfaces, or its IP address"
            raise bad("address", wanted, f"{address}: {e}", advice) from e
        self._inbox = Inbox(router)
        self._inboxes = [self._inbox, self._connections.inbox]
        self._inboxes += [self._handshakes.inbox] if self._handshakes is not None else []
        self._load = ClientLoad(self._allow) if self._allow is not None else None

    @property
    def pending(self) -> bool:
        """See `Inbox.pending`, for any of its sockets."""
        return True in [inbox.look and inbox.pending for inbox in self._inboxes]

    def filenos(self) -> list[int]:
        """Descriptors that are readable when `receive` should be called; edge-triggered, as ZeroMQ's are."""
        return [inbox.fd for inbox in self._inboxes]

    def receive(self, ready: Collection[int] | None = None) -> Iterator[tuple[Hashable, bytes]]:
        """Receive up to 256 frames, each with its connection, one per step of the iterator.

        Messages of several parts are ignored (KVP-NET-ONE), and so are keys that are no longer allowed
        (KVP-NET-REVOKE). `ready` holds the descriptors that were readable (None: look at all).
        """
        for gate in (self._connections, self._handshakes):
            if gate is not None and (ready is None or gate.inbox.look or gate.inbox.fd in ready):
                gate.turn()
        if ready is not None and not self._inbox.look and self._inbox.fd not in ready:
            return
        for _ in range(limits.TURN_FRAMES):
            began = time.monotonic()
            frames = self._inbox.take(who=True)
            if not frames:
                return
            if len(frames) != 4:
                continue
            key, fd, conn, frame = frames
            if self._allow is None or (self._allow.knows(key) and self._connections.count_frame(key, fd)):
                try:
                    yield (conn, key), frame
                finally:  # also for the last frame of a turn
                    if self._load is not None:
                        self._load.add(key, began, time.monotonic())

    def renew(self, now: float) -> bool:
        """Read the allow-list again; whether it differs. Removed clients end at the next check, after being told."""
        if self._allow is None:
            return False
        if now >= self._cut_at:
            self._cut_at = math.inf
            self._connections.cut_unknown()
        changed = self._allow.renew(now)
        if changed:
            self._cut_at = now + limits.LIST_CHECK
        return changed

    def admit(self, conn: Hashable, party: Party, role: int) -> None:
        """Raise RemoteError(NOT_ALLOWED) if the key of a connection may not be this party (KVP-NET-ALLOW)."""
        assert isinstance(conn, tuple)
        if self._allow is not None:
            self._allow.check(conn[1], party, role)

    def name_of(self, conn: Hashable) -> str:
        """The client of a connection, for display: by the key that it proved, if there are keys."""
        assert isinstance(conn, tuple)
        return self._allow.name(conn[1]) if self._allow is not None else "(unknown peer)"

    def send(self, conn: Hashable, frame: bytes) -> bool:
        """Send a frame; False if the peer is gone or its queue is full."""
        assert isinstance(conn, tuple)
        return self._inbox.send([conn[0], frame])

    def close(self) -> None:
        """Close, after waiting up to half a second for queued frames."""
        self._end()


@attrs.define(eq=False)
class _Line:
    """One DEALER, and the events of its handshakes if it has any."""

    key: tuple[Any, ...]
    inbox: Inbox
    events: Inbox | None
    ipv6: bool = False
    """Whether its host is reached by IPv6 alone."""
    greeting: bool = attrs.field(default=attrs.Factory(lambda line: line.events is not None, takes_self=True))
    """Whether its first handshake has not succeeded yet; an ipc address has none."""
    broken: bool = False
    """Whether its connection ended, and has not come back yet."""
    breaks: int = 0


class Dialer:
    """The DEALERs of a sink, one for each key: its owner first, and last the address to connect to.

    A turn looks only at lines whose descriptors are readable, and at those that were used since nothing was found on
    them: ZeroMQ's descriptors are edge-triggered, and any call on a socket may consume the edge.
    """

    def __init__(self, insecure: bool = False, keys: KeyPair | None = None) -> None:
        self._insecure, self._keys = insecure, keys
        check_descriptors(_SPARE, "sources")
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._lines: dict[tuple[Any, ...], _Line] = {}
        self._owned: dict[Hashable, list[_Line]] = {}
        self._by_fd: dict[int, _Line] = {}
        """Lines by the descriptors of their inboxes and of their events."""
        self._used: dict[_Line, None] = {}
        """Lines on which frames may wait that no descriptor announces."""
        self._watched: set[_Line] = set()
        self._eventful: dict[_Line, None] = {}
        """Lines whose events were not read to the end."""
        self._opened: list[Socket] = []
        self._fds: dict[int, object] | None = {}
        self._turns = 0
        self.names = HostNames()
        self._end = weakref.finalize(self, _close, self._context, self._opened)

    @property
    def pending(self) -> bool:
        """See `Inbox.pending`, for any connection."""
        for line in list(self._used):
            if line.inbox.pending:
                return True
            del self._used[line]
        for line in list(self._eventful):
            if line.events is not None and line.events.pending:
                return True
            del self._eventful[line]
        return False

    def filenos(self) -> Mapping[int, object]:
        """Descriptors of `receive`, edge-triggered; the same object while nothing has changed."""
        if self._fds is None:
            self._fds = dict[int, object](self._by_fd)
        return self._fds

    def receive(self, ready: Collection[int] | None = None) -> Iterator[tuple[tuple[Any, ...], bytes]]:
        """Receive up to 256 frames, each with its key, from the connections in turn, one per step of the iterator.

        `ready` holds the descriptors that were readable (None: look at all). Clause KVP-NET-TURN. Messages of several
        parts are ignored (KVP-NET-ONE).
        """
        for fd in self._by_fd if ready is None else ready:
            line = self._by_fd.get(fd)
            if line is not None and line.inbox.fd == fd:
                self._used[line] = None
        lines, left = list(self._used), limits.TURN_FRAMES
        self._turns += 1
        first = self._turns % len(lines) if lines else 0
        lines = lines[first:] + lines[:first]
        while lines:
            more = []
            for line in lines:
                frames = line.inbox.take()
                if frames is None:
                    self._used.pop(line, None)
                    continue
                left -= 1
                if len(frames) == 1:
                    yield line.key, frames[0]
                if left == 0:
                    return
                more.append(line)
            lines = more

    def holds(self, owner: Hashable) -> bool:
        """Whether frames wait on connections of an owner."""
        lines = [line for line in self._owned.get(owner, ()) if line.inbox.readable]
        self._used |= dict.fromkeys(lines)
        return bool(lines)

    def refusals(self, ready: Collection[int] | None = None) -> list[tuple[tuple[Any, ...], KvprotoError]]:
        """Connections whose handshake cannot succeed, and why; NOT_ALLOWED was reported by the source."""
        refusals = []
        for line in self._with_events(ready) if self._watched else ():
            while line.greeting and line.events is not None and (frames := line.events.take()) is not None:
                event, value = event_of(frames)
                line.broken = event == zmq.EVENT_DISCONNECTED
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    line.greeting = False
                elif event and not line.broken and value != errno.EAGAIN:  # EAGAIN: the server is silent or stopped
                    line.breaks += _BREAKS if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else 1
                    if line.breaks >= _BREAKS:
                        self._unwatch(line)
                        ours = self._keys.public.decode() if self._keys else None
                        refusals.append((line.key, _refusal(event, str(line.key[-1]), ours)))
        return refusals

    def returned(self, ready: Collection[int] | None = None) -> list[tuple[Any, ...]]:
        """Connections that broke and came back; call this after `refusals`, with the same descriptors."""
        returned = dict[tuple[Any, ...], None]()
        for line in self._with_events(ready) if self._watched else ():
            while not line.greeting and line.events is not None and (frames := line.events.take()) is not None:
                event = event_of(frames)[0]
                line.broken = event == zmq.EVENT_DISCONNECTED
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    returned[line.key] = None
        return list(returned)

    def _with_events(self, ready: Collection[int] | None) -> list[_Line]:
        """The lines that may have events."""
        for fd in self._by_fd if ready is None else ready:
            line = self._by_fd.get(fd)
            if line is not None and line.events is not None and line.events.fd == fd:
                self._eventful[line] = None
        return list(self._eventful)

    def send(self, key: tuple[Any, ...], frame: bytes, server: bytes | None = None) -> bool:
        """Send a frame, connecting at first use; False if its queue is full. Raises OUT_OF_RANGE or INTERNAL."""
        line = self._lines.get(key)
        if line is not None and (line.greeting or line.broken) and self._has_moved(line):
            self._drop(line)
            self._owned[key[0]].remove(line)
            line = None
        if line is None:
            line = self._lines[key] = self._connect(key, server)
            self._owned.setdefault(key[0], []).append(line)
            self._by_fd[line.inbox.fd] = line
            if line.events is not None:
                self._by_fd[line.events.fd] = line
                line.events.look = True
                self._watched.add(line)
                self._eventful[line] = None
            self._fds = None
        self._used[line] = None
        return line.inbox.send([frame])

    def _has_moved(self, line: _Line) -> bool:
        """Whether the host's name has turned out to be one of IPv6 alone, or of it no longer; looks it up again."""
        address = str(line.key[-1])
        if is_named(address):
            self.names.look_up(address)
        return line.ipv6 != self.names.is_ipv6(address)

    def _connect(self, key: tuple[Any, ...], server: bytes | None) -> _Line:
        address = str(key[-1])
        check_address(address, self._keys is not None and server is not None, self._insecure)
        check_descriptors(_SPARE, "address", len(self._owned.get(key[0], ())))
        opened: list[Socket] = []
        events = None
        try:
            ipv6 = self.names.is_ipv6(address)
            made = _open(self._context, zmq.DEALER, ipv6, opened)
            if encrypted(address):
                if self._keys is not None and server is not None:
                    made.setsockopt(zmq.CURVE_SERVERKEY, server)
                    made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
                    made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
                self.names.look_up(address)
                events = events_of(self._context, made, _EVENTS)
                opened.append(events.socket)
            made.connect(address)
            line = _Line(key, Inbox(made), events, ipv6)
        except zmq.ZMQError as e:
            _shut(opened)
            if e.errno == errno.EMFILE:
                advice = "raise the limit of open files (ulimit -n)"
                raise LocalError(ErrorCode.INTERNAL, "address", "a descriptor for a connection", str(e), advice) from e
            mine, yours = "a host name that can be resolved here, or an IP address", f"{address}: {e}"
            advice = "correct the address, or make sure that this host can resolve the name"
            raise LocalError(ErrorCode.OUT_OF_RANGE, "address", mine, yours, advice) from e
        self._opened += opened
        return line

    def _unwatch(self, line: _Line) -> None:
        if line.events is not None:
            self._watched.discard(line)
            self._eventful.pop(line, None)
            line.inbox.socket.disable_monitor()
            self._shut(line.events)
            line.events = None

    def _shut(self, inbox: Inbox) -> None:
        del self._by_fd[inbox.fd]
        self._fds = None
        self._opened.remove(inbox.socket)
        inbox.socket.close()

    def drop(self, owner: Hashable) -> None:
        """Close the connections of an owner."""
        for line in self._owned.pop(owner, ()):
            self._drop(line)

    def _drop(self, line: _Line) -> None:
        del self._lines[line.key]
        self._used.pop(line, None)
        self._unwatch(line)
        self._shut(line.inbox)

    def close(self) -> None:
        """Close all connections, after waiting up to half a second for queued frames."""
        self._end()


_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def _refusal(event: int, address: str, ours: str | None) -> KvprotoError:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        advice = "the operator of the source adds our public key to its allow-list"
        mine = "an allow-list without this key"
        return ReportedError.of(address, RemoteError(ErrorCode.NOT_ALLOWED, "keys", mine, ours or "no key", advice))
    mine, yours = f"the source's key at {address}", "another key, or none"
    advice = "compare it with the source's public.key; a source that has none needs keys too"
    if ours is None:
        mine, yours = "a source without keys, as we have none", f"one with keys at {address}"
        advice = "give this sink keys, Options(keys=...), and the source's public.key in its Seed"
    return LocalError(ErrorCode.WRONG_PEER, "key", mine, yours, advice)


def _open(context: zmq.Context[Socket], kind: int, ipv6: bool, opened: list[Socket]) -> Socket:
    socket_ = context.socket(kind)
    opened.append(socket_)
    for option, value in _OPTIONS.items():
        socket_.setsockopt(option, value)
    if ipv6:
        socket_.setsockopt(zmq.IPV6, 1)
    return socket_


def _close(context: zmq.Context[Socket], sockets: Iterable[Socket]) -> None:
    """Close sockets before their context, which waits for them: forever in garbage collection, or at exit."""
    _shut(sockets)
    context.term()


def _shut(sockets: Iterable[Socket]) -> None:
    """Stop events before closing sockets: ZeroMQ's thread hangs if the socket that receives its events is closed."""
    for opened in sockets:
        with contextlib.suppress(zmq.ZMQError):  # an error of one must not keep the others open
            opened.disable_monitor()
    for opened in sockets:
        opened.close()


def _alive(address: str) -> bool:
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
