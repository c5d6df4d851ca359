"""Shared memory with slow copies: a separate thread writes layer after layer, with pauses.

Kills, stops and aborts then hit copies that are under way, as they do on GPUs and between hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import attrs

from kvproto.transport.base import Mapped, Memory, Move
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import Proof

__all__ = ["SlowShm"]

_AGAIN = 40


class SlowCopy:
    """A copy that is under way until its last layer is written, or until it is stopped between two layers."""

    stream = None

    def __init__(self, moves: Sequence[Move], layers: int, broken: str) -> None:
        self.bytes = 0
        self._moves, self._left, self._broken = moves, list(range(layers)), broken
        self._again = _AGAIN if broken == "write after arrival" else 0
        """Turns of the thread until the first layer is written once more, although all layers are done."""
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def step(self, plain: ShmTransport) -> bool:
        """Write the next layer; returns whether there is another one."""
        with self._lock:
            if not self._left and not self._again:
                return False
            if not self._left:
                self._again -= 1
            layer = self._left.pop(0) if self._left else 0
            if self._again in range(1, _AGAIN):
                return True
            try:
                self.bytes += sum(plain.start([_of(move, layer)]).bytes for move in self._moves)
            except Exception as error:
                self._error, self._left = error, []
            return bool(self._left or self._again)

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination."""
        if self._error is not None:
            raise self._error
        return not self._left and not self._lock.locked()

    def stop(self) -> Proof | None:
        """None while a layer is being written."""
        if self._broken == "late write":
            return Proof.PROVEN
        self._left = []
        return None if self._lock.locked() else Proof.PROVEN


def _of(move: Move, layer: int) -> Move:
    """One layer of a move."""
    first, end = move.layers or (layer, layer + 1)
    return attrs.evolve(move, layers=(layer, layer + 1) if first <= layer < end else (layer, layer))


class SlowShm(ShmTransport):
    """Transport shm with slow copies."""

    capabilities = attrs.evolve(ShmTransport.capabilities, batches=False, poll_interval=0.002)

    def __init__(self, layers: int, pause: float, broken: str = "") -> None:
        """`pause` is the seconds before each layer, and `broken` a fault that the checker has to find (breaks.py)."""
        self._layers, self._pause, self._broken = layers, pause, broken
        self._peers: list[Mapping[int, Memory | Mapped]] = []
        self._copies: list[SlowCopy] = []
        self._plain, self._closed = ShmTransport(), False
        self._thread = threading.Thread(target=self._run, name="chaos copies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            time.sleep(self._pause)
            for copy in tuple(self._copies):
                if not copy.step(self._plain):
                    self._copies.remove(copy)

    def start(self, moves: Sequence[Move]) -> SlowCopy:  # type: ignore[override]
        """Start a copy; the thread writes a layer of every copy, then pauses."""
        if self._broken == "another's page":
            moves = [attrs.evolve(move, sinks=self._other(move.sinks)) for move in moves]
        copy = SlowCopy(moves, self._layers, self._broken)
        self._copies.append(copy)
        return copy

    def _other(self, sinks: Mapping[int, Memory | Mapped]) -> Mapping[int, Memory | Mapped]:
        """The memory of another peer, once there is one."""
        if all(sinks is not each for each in self._peers):
            self._peers.append(sinks)
        return next((each for each in self._peers if each is not sinks), sinks)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._thread.join()
