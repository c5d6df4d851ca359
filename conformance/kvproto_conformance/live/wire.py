"""The suite's ZeroMQ sockets: a DEALER as the sink, a ROUTER as the source."""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol

import zmq


class Keys(NamedTuple):
    """A CURVE key pair in Z85, and for a client the server's public key."""

    public: bytes
    secret: bytes
    server: bytes = b""


def new_keys(server: bytes = b"") -> Keys:
    """Make a new pair."""
    return Keys(*zmq.curve_keypair(), server)


def free_address() -> str:
    """A TCP address of this host on which nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _identify(socket: zmq.Socket[bytes], keys: Keys) -> None:
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class Wire(Protocol):
    """One connection."""

    def send(self, *parts: bytes) -> None:
        """Send a ZeroMQ message of these parts."""

    def receive(self, seconds: float) -> bytes | None:
        """The next frame, or None if none comes in time."""

    def close(self) -> None:
        """Close it at once."""


class Dealer:
    """A connection to an engine that listens."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)
        self._stuck = False
        """Whether the last message could not be queued; the next one is then not waited for."""
        if keys is not None:
            _identify(self._socket, keys)
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        self._socket.connect(address)

    def send(self, *parts: bytes) -> None:
        """Send a ZeroMQ message of these parts; it is lost if the engine accepts no connection, or no more messages."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK if self._stuck else 0)
            self._stuck = False
        except zmq.Again:
            self._stuck = True

    def receive(self, seconds: float) -> bytes | None:
        """The next frame, or None if none comes in time."""
        if not self._socket.poll(int(max(seconds, 0) * 1000)):
            return None
        return b"".join(self._socket.recv_multipart())

    def close(self) -> None:
        """Close it once everything is sent."""
        self._socket.close()


class Router:
    """The socket to which an engine connects; it serves one peer at a time, the last one that sent something."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._address, self._keys = address, keys
        self._listen()

    def _listen(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        if self._keys is not None:
            _identify(self._socket, self._keys)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.bind(self._address)
        self._peer = self._before = b""

    def restart(self) -> None:
        """Break the connection, and listen at the same address again."""
        with self._socket.get_monitor_socket(zmq.EVENT_CLOSED) as closed:
            self._socket.unbind(self._address)
            closed.poll(1000)
            self._socket.disable_monitor()
        self._socket.close(0)
        self._listen()

    def send(self, *parts: bytes) -> None:
        """Send a ZeroMQ message of these parts."""
        self._socket.send_multipart((self._peer, *parts))

    def receive(self, seconds: float) -> bytes | None:
        """The next frame, or None if none comes in time."""
        if not self._socket.poll(int(max(seconds, 0) * 1000)):
            return None
        self._before = self._peer
        self._peer, *parts = self._socket.recv_multipart()
        return b"".join(parts)

    def turn_back(self) -> None:
        """Send to the peer of before the last message that was received."""
        self._peer = self._before

    def close(self) -> None:
        """Close it; what was sent goes out first."""
        self._socket.close()
