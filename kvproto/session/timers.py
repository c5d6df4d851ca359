"""The timers of an endpoint: time comes in as an argument, and the next deadline goes out."""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

import attrs

_SPARE = 64
"""The number of cancelled timers in the heap up to which it is not rebuilt."""


@attrs.define(eq=False)
class Timer:
    """An action at a time, which `cancel` withdraws."""

    action: Callable[[float], None] | None
    _owner: "Timers"

    def cancel(self) -> None:
        """Withdraw the action; has no effect on a timer that has run."""
        if self.action is not None:
            self.action = None
            self._owner.cancelled()


class Timers:
    """A heap of timers; cancelled ones never count as the next deadline, and do not accumulate."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._cancelled = 0

    def at(self, when: float, action: Callable[[float], None]) -> Timer:
        """Call `action(now)` in the first `run` at or after `when`."""
        timer = Timer(action, self)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def cancelled(self) -> None:
        """Count a cancelled timer, and rebuild the heap if most of its timers are cancelled."""
        self._cancelled += 1
        if self._cancelled > _SPARE and 2 * self._cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next(self) -> float | None:
        """The time of the next action; None if there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
        return self._heap[0][0] if self._heap else None

    def run(self, now: float) -> None:
        """Run the actions that are due; an action that one of them sets runs in the next call."""
        due = []
        while (when := self.next()) is not None and when <= now:
            due.append(heapq.heappop(self._heap)[2])
        for timer in due:
            action, timer.action = timer.action, None
            if action is not None:
                action(now)
            else:  # cancelled by an earlier one, when it was no longer in the heap
                self._cancelled -= 1


class SharedTimers(Timers):
    """The timers of one endpoint in a heap that several share."""

    def __init__(self, heap: Timers, ran: Callable[[], None]) -> None:
        """`ran` is called after each action of this endpoint."""
        self._shared, self._ran = heap, ran

    def at(self, when: float, action: Callable[[float], None]) -> Timer:
        return self._shared.at(when, partial(self._run, action))

    def _run(self, action: Callable[[float], None], now: float) -> None:
        action(now)
        self._ran()

    def next(self) -> float | None:
        return self._shared.next()

    def run(self, now: float) -> None:
        self._shared.run(now)
