"""Threads that wait for storage, so that nobody else has to.

A call that hangs holds up neither a request nor the end of the process: what waits behind it is dropped, nothing more
is taken while it hangs, and the threads are daemons.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread
from typing import Any, ParamSpec, TypeVar

__all__ = ["Workers"]

_Params = ParamSpec("_Params")
_Made = TypeVar("_Made")
_Call = tuple[Future[Any], Callable[[], Any]]

LEAVE = 1.0
"""Seconds that the end of a process waits for calls that run."""


class _Shared:
    """What the threads know; not who gave them work, so that he can be forgotten."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.waiting: deque[_Call] = deque()
        self.running: dict[Future[Any], float] = {}
        """Since when, on the monotonic clock."""
        self.over = False

    def serve(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.over)
                if not self.waiting:
                    return
                future, call = self.waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self.running[future] = time.monotonic()
            try:
                made, error = call(), None
            except BaseException as raised:
                made, error = None, raised
            with self.changed:
                del self.running[future]
                self.changed.notify_all()
            if error is None:
                future.set_result(made)
            else:
                future.set_exception(error)
            del future, call, made, error

    def end(self, seconds: float) -> None:
        """Take no more, drop what waits, and give what runs so long."""
        with self.changed:
            self.over = True
            dropped, self.waiting = self.waiting, deque()
            self.changed.notify_all()
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()
        with self.changed:
            self.changed.wait_for(lambda: not self.running, seconds)


class Workers:
    """A few threads; any thread may call what is here."""

    def __init__(self, count: int, limit: float, most: int) -> None:
        """A call that takes more than `limit` seconds hangs; `most` may be under way at a time."""
        self.limit, self.most = limit, most
        self._shared = _Shared()
        self._end = weakref.finalize(self, self._shared.end, LEAVE)
        for i in range(count):
            Thread(target=self._shared.serve, name=f"tiers-{i}", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether a call has run for longer than the limit."""
        with self._shared.changed:
            since = min(self._shared.running.values(), default=None)
        return since is not None and time.monotonic() - since > self.limit

    @property
    def room(self) -> int:
        """How many calls more may be given; none while one hangs."""
        if self.hangs:
            return 0
        with self._shared.changed:
            return max(self.most - len(self._shared.waiting) - len(self._shared.running), 0)

    def submit(self, work: Callable[_Params, _Made], *args: _Params.args, **named: _Params.kwargs) -> Future[_Made]:
        """Have a thread do this; cancelled at once if all is over."""
        future: Future[_Made] = Future()
        with self._shared.changed:
            if not self._shared.over:
                self._shared.waiting.append((future, lambda: work(*args, **named)))
                self._shared.changed.notify()
                return future
        future.cancel()
        future.set_running_or_notify_cancel()
        return future

    def drop(self) -> None:
        """Cancel what waits."""
        with self._shared.changed:
            dropped, self._shared.waiting = self._shared.waiting, deque()
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()

    def close(self, seconds: float) -> None:
        """Take no more, drop what waits, and give what runs so long."""
        self._end.detach()
        self._shared.end(seconds)
