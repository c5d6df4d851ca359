"""Shared memory whose copies take their time: a thread of its own writes layer after layer, with pauses.

Kills, stops and aborts then hit copies that are under way, as they do on GPUs and between hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import attrs

from kvproto.errors import LocalError
from kvproto.transport.base import Move
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, Proof

__all__ = ["SlowShm"]


class SlowCopy:
    """One that is under way until its thread has ended."""

    stream = None

    def __init__(self, moves: Sequence[Move], layers: Sequence[int], pause: float, lies: bool) -> None:
        self.bytes = 0
        self._moves, self._layers, self._pause, self._lies = moves, layers, pause, lies
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="chaos copy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        plain = ShmTransport()
        try:
            for layer in self._layers:
                if _paused(self._stop, self._pause, self._lies):
                    return
                self.bytes += sum(plain.start([_of(move, layer)]).bytes for move in self._moves)
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether every byte is there."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> Proof | None:
        """None while a layer is being written."""
        self._stop.set()
        return Proof.PROVEN if self._lies or not self._thread.is_alive() else None


def _paused(stop: threading.Event, seconds: float, lies: bool) -> bool:
    """Wait before a layer; whether it is not to be written any more."""
    if lies:
        time.sleep(seconds)
        return False
    return stop.wait(seconds)


def _of(move: Move, layer: int) -> Move:
    """One layer of it."""
    first, end = move.layers or (layer, layer + 1)
    return attrs.evolve(move, layers=(layer, layer + 1) if first <= layer < end else (layer, layer))


class SlowShm(ShmTransport):
    """Transport shm, slowly."""

    capabilities = attrs.evolve(ShmTransport.capabilities, batches=False, poll_interval=0.002)

    def __init__(self, layers: int, pause: float, lies: bool = False) -> None:
        """`pause`: seconds before each layer; `lies`: say PROVEN while writes go on, which the checker has to find."""
        self._layers, self._pause, self._lies = range(layers), pause, lies

    def start(self, moves: Sequence[Move]) -> SlowCopy:  # type: ignore[override]
        """Start them; the thread ends with the last layer."""
        try:
            return SlowCopy(moves, self._layers, self._pause, self._lies)
        except RuntimeError as error:  # no thread is to be had
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "", "a thread for a copy", str(error)) from error
