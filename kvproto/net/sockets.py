"""ROUTER at the source, one DEALER for each address at the sink; one message is one frame.

Without CURVE only ipc in a private directory is allowed, or loopback TCP with `insecure`. Clause KVP-NET-INSECURE.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import time
import weakref
from collections.abc import Hashable, Iterable
from pathlib import Path

import zmq

from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode

__all__ = ["Dialer", "Listener", "private_address"]

_MAX_FRAME = (1 << 24) + 16
_LINGER = 500
"""Milliseconds for frames that are still to go when a socket closes."""


def private_address(directory: str | Path, name: str) -> str:
    """An ipc address in a directory that only this user may enter."""
    return f"ipc://{Path(directory) / name}"


def _check(address: str, insecure: bool) -> None:
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        folder = Path(rest).parent
        if not folder.is_dir():
            raise LocalError(
                ErrorCode.INTERNAL, "address", "an existing directory", str(folder), "make it with mode 0700"
            )
        mode = folder.stat()
        if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o077:
            raise LocalError(
                ErrorCode.INTERNAL,
                "address",
                "a directory of this user with mode 0700",
                str(folder),
                f"chmod 700 {folder}",
            )
    elif scheme == "tcp":
        host = rest.rpartition(":")[0].strip("[]")
        loopback = (
            host == "localhost"
            or (host.replace(".", "").isdigit() and ipaddress.ip_address(host).is_loopback)
            or host == "::1"
        )
        if not insecure or not loopback:
            raise LocalError(
                ErrorCode.INTERNAL,
                "address",
                "ipc, or loopback TCP with --insecure",
                address,
                "KV addresses would travel in the clear",
            )
    else:
        raise LocalError(ErrorCode.INTERNAL, "address", "ipc:// or tcp://", address, "give a ZeroMQ address")


class Listener:
    """Where sinks dial."""

    def __init__(self, address: str, insecure: bool = False) -> None:
        _check(address, insecure)
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

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    def receive(self) -> list[tuple[Hashable, bytes]]:
        """What has come: connection and frame."""
        found: list[tuple[Hashable, bytes]] = []
        while _readable(self._socket):
            try:
                conn, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            if len(frames) == 1:  # KVP-NET-ONE
                found.append((conn, frames[0]))
        return found

    def send(self, conn: Hashable, frame: bytes) -> bool:
        """Send; False where the peer is gone or takes nothing."""
        assert isinstance(conn, bytes)
        try:
            self._socket.send_multipart([conn, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close, giving queued frames half a second."""
        self._end()


def _close(context: zmq.Context[zmq.Socket[bytes]], sockets: Iterable[zmq.Socket[bytes]]) -> None:
    """Sockets first: a context waits for them, for ever where it is collected as garbage with them, or at exit."""
    for socket in sockets:
        socket.close()
    context.term()


def _alive(address: str) -> bool:
    import socket

    path = address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


class Dialer:
    """Connections of a sink, by address."""

    def __init__(self, insecure: bool = False) -> None:
        self._insecure = insecure
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._end = weakref.finalize(self, _close, self._context, self._sockets.values())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """For a poller."""
        return list(self._sockets.values())

    def receive(self) -> list[tuple[Hashable, bytes]]:
        """What has come: address and frame."""
        found: list[tuple[Hashable, bytes]] = []
        for address, socket in self._sockets.items():
            while _readable(socket):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(frames) == 1:  # KVP-NET-ONE
                    found.append((address, frames[0]))
        return found

    def send(self, address: Hashable, frame: bytes) -> bool:
        """Send, connecting at first use."""
        assert isinstance(address, str)
        if address not in self._sockets:
            _check(address, self._insecure)
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, _LINGER)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
            socket.connect(address)
            self._sockets[address] = socket
        try:
            self._sockets[address].send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close all, giving queued frames half a second."""
        self._end()


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Asked before each receive: an exception for an empty turn costs more than all else of an idle poll."""
    events = socket.getsockopt(zmq.EVENTS)
    return isinstance(events, int) and bool(events & zmq.POLLIN)


def wait(sockets: list[zmq.Socket[bytes]], seconds: float) -> None:
    """Return when one of the sockets has something, or after the time."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    if sockets:
        poller.poll(int(seconds * 1000))
    else:
        time.sleep(seconds)
