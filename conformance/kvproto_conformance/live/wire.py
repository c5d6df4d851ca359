"""ZeroMQ sockets of the suite: a DEALER where it is the sink, a ROUTER where it is the source."""

from __future__ import annotations

from typing import Protocol

import zmq

__all__ = ["Dealer", "Router", "Wire"]


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

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(address)

    def send(self, *parts: bytes) -> None:
        """Send a ZeroMQ message of these parts."""
        self._socket.send_multipart(parts)

    def receive(self, seconds: float) -> bytes | None:
        """The next frame, or None if none comes in time."""
        if not self._socket.poll(int(max(seconds, 0) * 1000)):
            return None
        return b"".join(self._socket.recv_multipart())

    def close(self) -> None:
        """Close it; what was sent goes out first."""
        self._socket.close()


class Router:
    """Where an engine connects; it hears one peer at a time, the last that spoke."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.bind(address)
        self._peer = b""

    def send(self, *parts: bytes) -> None:
        """Send a ZeroMQ message of these parts."""
        self._socket.send_multipart((self._peer, *parts))

    def receive(self, seconds: float) -> bytes | None:
        """The next frame, or None if none comes in time."""
        if not self._socket.poll(int(max(seconds, 0) * 1000)):
            return None
        self._peer, *parts = self._socket.recv_multipart()
        return b"".join(parts)

    def close(self) -> None:
        """Close it; what was sent goes out first."""
        self._socket.close()
