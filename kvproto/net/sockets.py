"""ROUTER at the source, one DEALER for each address at the sink; one message is one frame.

Without CURVE only ipc in a private directory is allowed, or loopback TCP with `insecure`. Clause KVP-NET-INSECURE.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from kvproto.errors import LocalError
from kvproto.net import direct
from kvproto.wire.enums import ErrorCode

__all__ = ["Dialer", "Listener", "check_address", "private_address"]

_MAX_FRAME = (1 << 24) + 16
_LINGER = 500
"""Milliseconds for frames that are still to go when a socket closes."""


def private_address(directory: str | Path, name: str) -> str:
    """An ipc address in a directory that only this user may enter."""
    return f"ipc://{Path(directory) / name}"


def check_address(address: str, insecure: bool) -> None:
    """Raise LocalError for an address that may not be used: see the module (KVP-NET-INSECURE)."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        _check_path(rest)
    elif scheme == "tcp":
        _check_loopback(rest, insecure)
    else:
        raise _bad("ipc:// or tcp://", address, "give a ZeroMQ address")


_LONGEST_PATH = 107
"""Bytes of a Unix socket's path."""


def _check_path(path: str) -> None:
    folder = Path(path).parent
    if not path or path.startswith("@") or len(os.fsencode(path)) > _LONGEST_PATH:
        advice = "abstract sockets are open to every user"
        raise _bad(f"ipc:// and a path in the file system of at most {_LONGEST_PATH} bytes", f"ipc://{path}", advice)
    if not folder.is_dir():
        raise _bad("an existing directory", str(folder), "make it with mode 0700")
    mode = folder.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
        raise _bad("a directory of this user with mode 0700", str(folder), f"chmod 700 {folder}")


def _check_loopback(rest: str, insecure: bool) -> None:
    host, _, port = rest.rpartition(":")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not (insecure and loopback):
        advice = "KV addresses would travel in the clear"
        raise _bad("ipc, or loopback TCP with Options(insecure=True), --insecure", f"tcp://{rest}", advice)
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise _bad("a port, 0 to 65535 or *", f"tcp://{rest}", "give a number")


def _bad(mine: str, yours: str, advice: str) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, "address", mine, yours, advice)


_PER_TURN = 256
"""Frames that one turn takes, so that no peer holds a turn up."""


class Listener:
    """A ROUTER where sinks dial; connections are ZeroMQ's routing ids."""

    def __init__(self, address: str, insecure: bool = False) -> None:
        """Bind; raises LocalError for an address that may not be used, or is in use."""
        check_address(address, insecure)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
        self._socket.setsockopt(zmq.LINGER, _LINGER)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._end = weakref.finalize(self, _close, self._context, [self._socket])
        try:
            # ZeroMQ itself would take over an ipc path that someone listens on
            if address.startswith("ipc://") and _alive(address):
                raise zmq.ZMQError(zmq.EADDRINUSE, "Address already in use")
            self._socket.bind(address)
        except zmq.ZMQError as e:
            self.close()
            raise LocalError(
                ErrorCode.INTERNAL, "address", address, str(e), "choose another address, or stop its owner"
            ) from e
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._look = False
        """Whether anything was done since `receive` found no more; else the descriptor tells of all that comes."""

    @property
    def pending(self) -> bool:
        """Whether there is something to take of which the descriptor does not tell: left behind by `receive`, or come
        while a frame was sent. Ask before sleeping.
        """
        return self._look and direct.readable(self._socket)

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` should be called; edge-triggered, as ZeroMQ's are."""
        return self._fd

    def receive(self) -> Iterator[tuple[Hashable, bytes]]:
        """What has come, connection and frame, at most 256 of them, each taken when it is asked for; a message of
        several parts is ignored (KVP-NET-ONE).
        """
        self._look = True
        for _ in range(_PER_TURN):
            frames = direct.receive(self._socket)
            if not frames:
                self._look = frames is not None
                return
            if len(frames) == 2:
                yield frames[0], frames[1]

    def send(self, conn: Hashable, frame: bytes) -> bool:
        """Send; False where the peer is gone or takes nothing."""
        assert isinstance(conn, bytes)
        self._look = True
        return direct.send(self._socket, [conn, frame])

    def close(self) -> None:
        """Close, giving queued frames half a second."""
        self._end()


class Dialer:
    """The DEALERs of a sink: one for each key, whose last element is the address that it connects to."""

    def __init__(self, insecure: bool = False) -> None:
        self._insecure = insecure
        self._context = zmq.Context()
        self._sockets: dict[tuple[Any, ...], zmq.Socket[bytes]] = {}
        self._fds: list[int] = []
        self._look = set[tuple[Any, ...]]()
        """As `Listener`'s, by key."""
        self._end = weakref.finalize(self, _close, self._context, self._sockets.values())

    @property
    def pending(self) -> bool:
        """As `Listener.pending`, of any connection."""
        return any(direct.readable(self._sockets[key]) for key in self._look)

    def filenos(self) -> list[int]:
        """Descriptors that are readable when `receive` should be called; edge-triggered, as ZeroMQ's are."""
        return self._fds

    def receive(self) -> list[tuple[tuple[Any, ...], bytes]]:
        """What has come, key and frame, at most 256 a key; a message of several parts is ignored (KVP-NET-ONE)."""
        found: list[tuple[tuple[Any, ...], bytes]] = []
        for key, each in self._sockets.items():
            self._look.add(key)
            for _ in range(_PER_TURN):
                frames = direct.receive(each)
                if frames is None:
                    self._look.discard(key)
                if not frames:
                    break
                if len(frames) == 1:
                    found.append((key, frames[0]))
        return found

    def send(self, key: tuple[Any, ...], frame: bytes) -> bool:
        """Send, connecting at first use; raises LocalError for an address that may not be used."""
        if key not in self._sockets:
            address = str(key[-1])
            check_address(address, self._insecure)
            made = self._context.socket(zmq.DEALER)
            made.setsockopt(zmq.LINGER, _LINGER)
            made.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
            try:
                made.connect(address)
            except zmq.ZMQError as e:
                made.close()
                raise LocalError(
                    ErrorCode.INTERNAL,
                    "address",
                    "an address that ZeroMQ connects to",
                    f"{address}: {e}",
                    "mend the address",
                ) from e
            self._sockets[key] = made
            self._fds = [*self._fds, int(made.getsockopt(zmq.FD))]
        self._look.add(key)
        return direct.send(self._sockets[key], [frame])

    def drop(self, wanted: Callable[[tuple[Any, ...]], bool]) -> None:
        """Close the connections whose keys are not wanted any more."""
        for key in [k for k in self._sockets if not wanted(k)]:
            former = self._sockets.pop(key)
            self._look.discard(key)
            gone = int(former.getsockopt(zmq.FD))
            self._fds = [fd for fd in self._fds if fd != gone]
            former.close()

    def close(self) -> None:
        """Close all, giving queued frames half a second."""
        self._end()


def _close(context: zmq.Context[zmq.Socket[bytes]], sockets: Iterable[zmq.Socket[bytes]]) -> None:
    """Sockets first: a context waits for them, for ever where it is collected as garbage with them, or at exit."""
    for each in sockets:
        each.close()
    context.term()


def _alive(address: str) -> bool:
    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True
