"""JSON messages between the router and rank 0 of an engine, over ZeroMQ; they belong to the demo, not to kvproto."""

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
"""Milliseconds that a closing socket waits for its unsent messages."""
_LAST = 100
"""Milliseconds in which the last messages of an engine that has gone are read, which ZeroMQ may hand on after that."""


class Control:
    """The engine's end of the line: rank 0 listens, and answers whichever router spoke last."""

    def __init__(self, folder: Path, name: str) -> None:
        """Listen in the engines' private directory; raises EngineError if an engine of that name listens there."""
        path = folder / name
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:  # ZeroMQ would take the path over
                raise EngineError(f"{path} is in use: stop the {name} engine that listens there, or choose another DIR")
        self._socket, self._end = _open(self, zmq.ROUTER)
        self._socket.bind(f"ipc://{path}")
        self._router: bytes | None = None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the router sends; it is edge-triggered, so check `pending` too."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def pending(self) -> bool:
        """Whether a message of the router is waiting."""
        return bool(self._socket.poll(0))

    def receive(self) -> list[dict[str, Any]]:
        """All waiting messages of the router, oldest first."""
        found = []
        while self._socket.poll(0):
            sender, *rest = self._socket.recv_multipart()
            if (message := _message(rest)) is not None:
                self._router = sender
                found.append(message)
        return found

    def send(self, op: str, **fields: Any) -> None:
        """Send a message to the router, if one ever spoke."""
        if self._router is not None:
            self._socket.send_multipart([self._router, json.dumps({"op": op, **fields}).encode()])

    def close(self) -> None:
        """Stop listening."""
        self._end()


class Line:
    """The router's end of the line to one engine, which may not have started yet, or may be restarting."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.socket, self._end = _open(self, zmq.DEALER)
        """Becomes readable when the engine sends."""
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for an engine that is not there
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        """Becomes readable when the engine connects or disconnects."""
        self.connected = False
        self.socket.connect(f"ipc://{self.path}")

    def send(self, op: str, **fields: Any) -> None:
        """Send a message to the engine, or nothing if it is not connected."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(json.dumps({"op": op, **fields}).encode(), zmq.DONTWAIT)

    def receive(self) -> list[dict[str, Any]]:
        """All waiting messages of the engine, with {"op": "lost"} after a disconnect; say hello on a connect."""
        found, changes = [], []
        while self.monitor.poll(0):  # first, as the last messages come before the engine has gone
            changes.append(recv_monitor_message(self.monitor)["event"])
        patience = _LAST if zmq.EVENT_DISCONNECTED in changes else 0
        while self.socket.poll(patience):
            if (message := _message(self.socket.recv_multipart())) is not None:
                found.append(message)
        for event in changes:
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self.connected:
                self.send("hello")
            else:
                found.append({"op": "lost"})
        return found

    def close(self) -> None:
        """Close the socket."""
        self._end()


def _message(parts: list[bytes]) -> dict[str, Any] | None:
    """A message of the other end; None for what anything else that dials this socket may say."""
    try:
        (line,) = parts
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and isinstance(message.get("op"), str) else None


def _open(owner: object, kind: int) -> tuple[zmq.Socket[bytes], "weakref.finalize[Any, Any]"]:
    """A socket with its own context, and a finalizer that closes both, at the latest when `owner` is collected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = context.socket(kind)
    return made, weakref.finalize(owner, _close, context, made)


def _close(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
    """Close the monitor first: ZeroMQ's thread hangs when it reports an event to a monitor socket that is closed."""
    socket.disable_monitor()
    context.destroy(_LINGER)
