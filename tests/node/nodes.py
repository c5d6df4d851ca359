"""Nodes that are polled together, and what tests do to them."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from kvproto.net.sockets import wait
from kvproto.node import SinkNode, SourceNode


class Nodes:
    """Source ranks and sink ranks, and what they have told."""

    def __init__(self, sources: Sequence[SourceNode], sinks: Sequence[SinkNode]) -> None:
        self.sources, self.sinks = list(sources), list(sinks)
        self.told: list[Any] = []

    def until(self, condition: Callable[[], Any]) -> None:
        # of those that are polled: the socket of another stays readable, and waiting for it would not wait
        self._until(condition, self.sinks, lambda: [s for sink in self.sinks for s in sink._dialer.sockets])

    def sources_until(self, condition: Callable[[], Any]) -> None:
        """The sinks do nothing meanwhile."""
        self._until(condition, [], lambda: [node._listener.socket for node in self.sources])

    def _until(self, condition: Callable[[], Any], sinks: list[SinkNode], sockets: Callable[[], list[Any]]) -> None:
        for _ in range(2000):
            for node in (*self.sources, *sinks):
                self.told += node.poll()
            if condition():
                return
            wait(sockets(), 0.01)
        raise AssertionError(self.told)

    def count(self, kind: Any) -> int:
        return sum(isinstance(e, kind) for e in self.told)

    def ends(self, kind: Any, count: int) -> list[Any]:
        """Events of this kind, once there are so many."""
        self.until(lambda: self.count(kind) == count)
        return [e for e in self.told if isinstance(e, kind)]

    def close(self) -> None:
        for node in (*self.sinks, *self.sources):
            node.close("over")


def later(seconds: float) -> Any:
    """A clock that is ahead."""
    return SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)


def begin(
    stack: contextlib.ExitStack, source: Callable[..., None], *arguments: Any
) -> tuple[BaseProcess, Callable[[str], None]]:
    """A source of its own process that listens, and a wait for what it says; killed with the stack."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=source, args=(theirs, *arguments), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    hear(ours, "listening")
    return process, lambda said: hear(ours, said)


def hear(conn: Connection, said: str) -> None:
    assert conn.poll(60)
    assert conn.recv() == said
