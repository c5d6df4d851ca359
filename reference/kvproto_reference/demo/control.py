"""JSON lines between the router and rank 0 of an engine, over ZeroMQ; the demo's own, and no part of kvproto."""

import contextlib
import json
import socket
import weakref
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import EngineError

_LINGER = 500
"""Milliseconds for what is still to be sent when a socket closes."""


class Control:
    """The engine's end: rank 0 listens, and answers whoever spoke last."""

    def __init__(self, folder: Path, name: str) -> None:
        """Listen in the engines' private directory; raises EngineError where another engine of that name listens."""
        path = folder / name
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:  # ZeroMQ would take the path over
                raise EngineError(f"{path} is in use: stop the {name} engine that listens there, or choose another DIR")
        self._socket, self._end = _open(self, zmq.ROUTER)
        self._socket.bind(f"ipc://{path}")
        self._router: bytes | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the router says something; edge-triggered, so ask `pending` too."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def pending(self) -> bool:
        """Whether the router has said something."""
        return bool(self._socket.poll(0))

    def receive(self) -> list[dict[str, Any]]:
        """What the router said."""
        found = []
        while self._socket.poll(0):
            self._router, line = self._socket.recv_multipart()
            found.append(json.loads(line))
        return found

    def send(self, op: str, **fields: Any) -> None:
        """Tell the router, if one ever spoke."""
        if self._router is not None:
            self._socket.send_multipart([self._router, json.dumps({"op": op, **fields}).encode()])

    def close(self) -> None:
        """Stop listening."""
        self._end()


class Line:
    """The router's end, to one engine that may still have to start, or to start again."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.socket, self._end = _open(self, zmq.DEALER)
        """Readable when the engine has said something."""
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for an engine that is not there
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        """Readable when it came or went."""
        self.connected = False
        self.socket.connect(f"ipc://{self.path}")

    def send(self, op: str, **fields: Any) -> None:
        """Tell the engine, if it is there."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(json.dumps({"op": op, **fields}).encode(), zmq.DONTWAIT)

    def receive(self) -> list[dict[str, Any]]:
        """What the engine said, and {"op": "lost"} where it went away; one that comes is greeted."""
        found = []
        while self.socket.poll(0):
            found.append(json.loads(self.socket.recv()))
        while self.monitor.poll(0):
            self.connected = recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self.send("hello")
            else:
                found.append({"op": "lost"})
        return found

    def close(self) -> None:
        """Close it."""
        self._end()


def _open(owner: object, kind: int) -> tuple[zmq.Socket[bytes], "weakref.finalize[Any, Any]"]:
    """A socket with a context of its own, and what closes both; an owner that nobody closes is closed all the same."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(kind)
    return made, weakref.finalize(owner, _close, context, made)


def _close(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    """The monitor first: ZeroMQ's own thread stands still where the socket that it would tell of an event is closed."""
    socket.disable_monitor()
    context.destroy(_LINGER)
