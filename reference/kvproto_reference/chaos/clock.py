"""A clock that is wrong: it stands where kvproto reads time, in an engine of chaos alone.

kvproto asks time.monotonic for its timers and time.time for the number of a run. The kernel's waits and ZeroMQ's own
timers do not move with it.
"""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Runs at a rate of its own, and can be made to jump."""

    def __init__(self, rate: float, behind: float) -> None:
        """`behind`: seconds that the wall clock differs by; negative for one that has been set back."""
        self._rate, self._jumped, self._behind = rate, 0.0, behind
        self._monotonic, self._wall = time.monotonic, time.time
        self._began = self._monotonic()
        time.monotonic, time.time = self.monotonic, self.wall

    def monotonic(self) -> float:
        """In place of time.monotonic: it never goes back."""
        now = self._monotonic()
        return now + (now - self._began) * (self._rate - 1) + self._jumped

    def wall(self) -> float:
        """In place of time.time."""
        return self._wall() + self._behind

    def jump(self, seconds: float) -> None:
        """Go on so much later, as after a pause of the whole machine."""
        self._jumped += seconds

    def real(self) -> float:
        """Seconds that everybody agrees on."""
        return self._monotonic()
