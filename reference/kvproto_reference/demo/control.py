"""JSON lines between the router and rank 0 of an engine, over kvproto's own sockets."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from kvproto.net import Dialer, Listener, private_address


class Control:
    """The engine's end: rank 0 listens, and answers whoever spoke last."""

    def __init__(self, folder: Path, name: str) -> None:
        self.listener = Listener(private_address(folder, name))
        self._conn: Hashable | None = None

    def receive(self) -> list[dict[str, Any]]:
        """What the router said."""
        found = []
        for conn, frame in self.listener.receive():
            self._conn = conn
            found.append(json.loads(frame))
        return found

    def send(self, op: str, **fields: Any) -> None:
        """Tell the router, if one ever spoke."""
        if self._conn is not None:
            self.listener.send(self._conn, json.dumps({"op": op, **fields}).encode())


class Line:
    """The router's end, to one engine."""

    def __init__(self, folder: Path, name: str) -> None:
        self._address = private_address(folder, name)
        self.dialer = Dialer()

    def send(self, op: str, **fields: Any) -> None:
        """Tell the engine."""
        self.dialer.send(self._address, json.dumps({"op": op, **fields}).encode())

    def receive(self) -> list[dict[str, Any]]:
        """What the engine said."""
        return [json.loads(frame) for _, frame in self.dialer.receive()]
