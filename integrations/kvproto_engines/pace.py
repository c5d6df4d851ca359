"""The worker's thread beside kvproto's I/O thread: both need one interpreter while transfers are under way."""

from __future__ import annotations

import sys
import threading
from typing import Any

from kvproto import Fetch, Request

__all__ = ["Pace"]

_REST = 2e-3
"""Seconds that a step which computes nothing waits at most. vLLM then sleeps 1 ms, in which it sees no fetch end."""
_SWITCH = 1e-4
"""The interpreter's switch interval, in seconds: for so long a thread that wants the interpreter waits for one that
computes or, as vLLM's workers do, polls in Python for the next step.
"""


class Pace:
    """Transfers under way, of one worker: its steps rest until a fetch ends, and threads switch often meanwhile."""

    def __init__(self, most: float = _REST, switch: float = _SWITCH) -> None:
        """`most` is for how many seconds a step rests, `switch` the interpreter's interval meanwhile."""
        self._most, self._switch = most, switch
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._under_way = set[Fetch | Request]()
        self._usual = sys.getswitchinterval()

    def begun(self, transfer: Fetch | Request) -> None:
        """Count a transfer as under way until it ends."""
        with self._lock:
            if not self._under_way:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._switch, self._usual))
            self._under_way.add(transfer)
        transfer.add_done_callback(self._over)

    def _over(self, transfer: Any) -> None:
        with self._lock:
            self._under_way.discard(transfer)
            if not self._under_way:
                sys.setswitchinterval(self._usual)
        if isinstance(transfer, Fetch):
            self._ended.set()

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way."""
        return not self._under_way

    def rest(self) -> None:
        """Wait until a fetch ends, if one is under way and none has ended since the last call."""
        with self._lock:
            fetching = any(isinstance(transfer, Fetch) for transfer in self._under_way)
        if fetching:
            self._ended.wait(self._most)
        self._ended.clear()
