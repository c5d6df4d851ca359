"""Threads that wait for storage, so that nobody else has to.

A call that hangs delays neither a request nor the end of the process: calls that wait behind it are dropped, no more
are accepted while it hangs, and the threads are daemons.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

__all__ = ["Workers"]

_Params = ParamSpec("_Params")
_Made = TypeVar("_Made")
_Given = TypeVar("_Given")

LEAVE = 1.0
"""Seconds that the end of a process waits for calls that run."""


class _Call(NamedTuple):
    """A call of `work()`; or a share in a call of `work([given, ..])`."""

    future: Future[Any]
    work: Callable[..., Any]
    given: Any
    most: int = 0
    """How many may share a call; 0: none."""


class _Shared:
    """What the threads know; they do not refer to the `Workers`, so that it can be collected."""

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
                some = self._next()
                self.running.update(dict.fromkeys((call.future for call in some), time.monotonic()))
            if some:
                self._do(some)
            del some

    def _next(self) -> list[_Call]:
        """The next call, with those right behind it that can be done together with it."""
        first = self.waiting.popleft()
        some = [first]
        while self.waiting and len(some) < first.most and self.waiting[0].work == first.work:
            some.append(self.waiting.popleft())
        return [call for call in some if call.future.set_running_or_notify_cancel()]

    def _do(self, some: Sequence[_Call]) -> None:
        first, made, error = some[0], list[Any](), None
        try:
            made = first.work([call.given for call in some]) if first.most else [first.work()]
        except BaseException as raised:
            error = raised
        with self.changed:
            for call in some:
                del self.running[call.future]
            self.changed.notify_all()
        for i, call in enumerate(some):
            if error is None:
                call.future.set_result(made[i])
            else:
                call.future.set_exception(error)

    def end(self, seconds: float) -> None:
        """Accept no more, drop waiting calls, and give running calls this many seconds."""
        with self.changed:
            self.over = True
            dropped, self.waiting = self.waiting, deque()
            self.changed.notify_all()
        _cancel(dropped)
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
        """How many more calls are accepted; none while one hangs."""
        if self.hangs:
            return 0
        with self._shared.changed:
            return max(self.most - len(self._shared.waiting) - len(self._shared.running), 0)

    def submit(self, work: Callable[_Params, _Made], *args: _Params.args, **named: _Params.kwargs) -> Future[_Made]:
        """Have a thread do this; the future is cancelled if the workers are closed."""
        return self._submit(_Call(Future(), partial(work, *args, **named), None))

    def gather(self, work: Callable[[list[_Given]], Sequence[_Made]], given: _Given, most: int) -> Future[_Made]:
        """Have a thread do this together with other waiting calls of the same work, at most `most` at a time."""
        return self._submit(_Call(Future(), work, given, most))

    def _submit(self, call: _Call) -> Future[Any]:
        with self._shared.changed:
            if not self._shared.over:
                self._shared.waiting.append(call)
                self._shared.changed.notify()
                return call.future
        _cancel([call])
        return call.future

    def drop(self) -> None:
        """Cancel what waits."""
        with self._shared.changed:
            dropped, self._shared.waiting = self._shared.waiting, deque()
        _cancel(dropped)

    def close(self, seconds: float) -> None:
        """Accept no more, drop waiting calls, and give running calls this many seconds."""
        self._end.detach()
        self._shared.end(seconds)


def _cancel(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.future.cancel()
        call.future.set_running_or_notify_cancel()
