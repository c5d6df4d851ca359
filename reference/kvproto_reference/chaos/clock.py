"""A wrong clock, which replaces the one that kvproto reads in an engine of chaos.

A rank reads its timers' clock and the time of day, for the number of a run, from its world. The kernel's waits and
ZeroMQ's own timers do not follow this clock.
"""

from __future__ import annotations

from kvproto.rank.machine import machine

__all__ = ["Clock"]


class Clock:
    """Runs at a given rate, and can be made to jump; replaces the clocks of the world."""

    def __init__(self, rate: float, behind: float) -> None:
        """`behind` is the seconds by which the wall clock differs, negative for one that has been set back."""
        self._rate, self._jumped, self._behind = rate, 0.0, behind
        self._monotonic, self._wall = machine.monotonic, machine.time
        self._began = self._monotonic()
        machine.monotonic, machine.time = self.monotonic, self.wall

    def monotonic(self) -> float:
        """Replaces `machine.monotonic`, and never goes back."""
        now = self._monotonic()
        return now + (now - self._began) * (self._rate - 1) + self._jumped

    def wall(self) -> float:
        """Replaces `machine.time`."""
        return self._wall() + self._behind

    def jump(self, seconds: float) -> None:
        """Jump forward, as after a pause of the whole machine."""
        self._jumped += seconds

    def real(self) -> float:
        """The true monotonic time, which all processes share."""
        return self._monotonic()
