"""Threads that wait for storage; a call that hangs delays neither requests nor the end of the process."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Condition
from typing import Any, NamedTuple, ParamSpec, TypeVar

from kvproto.rank.machine import machine

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

LEAVE = 1.0
"""Seconds that the end of a process waits for running calls."""


class _Call(NamedTuple):
    """One item of a call of `work([item, ..])`."""

    future: Future[Any]
    work: Callable[[list[Any]], Sequence[Any]]
    item: Any
    most: int
    """The most items in one call."""


class CallQueue:
    """The calls of the threads; the threads do not refer to their `Workers`, so that it can be collected."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.added: Callable[[], object] = self.changed.notify
        """Called when a call has come, with the lock."""
        self.waiting: deque[_Call] = deque()
        self.running: dict[Future[Any], float] = {}
        """Start of each call, on the monotonic clock."""
        self.over = False

    def serve(self) -> None:
        """Run calls until the queue has ended: the body of each thread."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.over)
                if not self.waiting:
                    return
                calls = self.take()
            if calls:
                self.run(calls)
            del calls

    def take(self) -> list[_Call]:
        """With the lock: begin the next call, unless it was cancelled, with those right behind it that can share it."""
        first = self.waiting.popleft()
        calls = [first]
        while self.waiting and len(calls) < first.most and self.waiting[0].work == first.work:
            calls.append(self.waiting.popleft())
        calls = [call for call in calls if call.future.set_running_or_notify_cancel()]
        self.running.update(dict.fromkeys((call.future for call in calls), machine.monotonic()))
        return calls

    def run(self, calls: Sequence[_Call]) -> None:
        """Do the work of calls that have begun."""
        first, results, error = calls[0], list[Any](), None
        try:
            results = [*first.work([call.item for call in calls])]
        except BaseException as raised:
            error = raised
        with self.changed:
            for call in calls:
                del self.running[call.future]
            self.changed.notify_all()
        for i, call in enumerate(calls):
            if error is None:
                call.future.set_result(results[i])
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
            machine.wait_for(self.changed, lambda: not self.running, seconds)


class Workers:
    """A few threads that run calls; thread-safe."""

    def __init__(self, count: int, limit: float, most: int) -> None:
        """A call that takes more than `limit` seconds hangs; at most `most` calls may be waiting or running."""
        self.limit, self.most = limit, most
        self._queue = CallQueue()
        self._end = weakref.finalize(self, self._queue.end, LEAVE)
        machine.serve(self._queue, count)

    @property
    def hangs(self) -> bool:
        """Whether a call has run for longer than the limit."""
        with self._queue.changed:
            since = min(self._queue.running.values(), default=None)
        return since is not None and machine.monotonic() - since > self.limit

    @property
    def room(self) -> int:
        """The number of calls that are still accepted; none while one hangs."""
        if self.hangs:
            return 0
        with self._queue.changed:
            return max(self.most - len(self._queue.waiting) - len(self._queue.running), 0)

    def submit(self, work: Callable[_Params, _Result], *args: _Params.args, **named: _Params.kwargs) -> Future[_Result]:
        """Have a thread run a call; the future is cancelled if the workers are closed."""
        return self.gather(lambda _: [work(*args, **named)], None, 1)

    def gather(self, work: Callable[[list[_Item]], Sequence[_Result]], item: _Item, most: int) -> Future[_Result]:
        """Have a thread process an item, in one call with up to `most` waiting items of the same work."""
        call = _Call(Future(), work, item, most)
        with self._queue.changed:
            if not self._queue.over:
                self._queue.waiting.append(call)
                self._queue.added()
                return call.future
        _cancel([call])
        return call.future

    def drop(self) -> None:
        with self._queue.changed:
            dropped, self._queue.waiting = self._queue.waiting, deque()
        _cancel(dropped)

    def close(self, seconds: float) -> None:
        """Accept no more, drop waiting calls, and give running calls this many seconds."""
        self._end.detach()
        self._queue.end(seconds)


def _cancel(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.future.cancel()
        call.future.set_running_or_notify_cancel()
