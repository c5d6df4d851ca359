"""JSON lines between the router and rank 0 of an engine, over ZeroMQ; the demo's own, and no part of kvproto."""

import json
import socket
from pathlib import Path
from typing import Any

import zmq

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
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"ipc://{path}")
        self._router: bytes | None = None

    def wait(self, seconds: float) -> None:
        """Return once the router has said something, after `seconds` at the latest."""
        self._socket.poll(int(1000 * seconds))

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
        self._context.destroy(_LINGER)


class Line:
    """The router's end, to one engine that may still have to start."""

    def __init__(self, folder: Path, name: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        """Readable when the engine has said something."""
        self.socket.connect(f"ipc://{folder / name}")

    def send(self, op: str, **fields: Any) -> None:
        """Tell the engine."""
        self.socket.send(json.dumps({"op": op, **fields}).encode())

    def receive(self) -> list[dict[str, Any]]:
        """What the engine said."""
        found = []
        while self.socket.poll(0):
            found.append(json.loads(self.socket.recv()))
        return found

    def close(self) -> None:
        """Close it."""
        self._context.destroy(_LINGER)
