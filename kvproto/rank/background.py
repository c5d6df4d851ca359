"""Long work, such as planning large Descriptions, done in order by one thread, so that no peer's frame waits for it."""

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from kvproto.errors import KvprotoError
from kvproto.rank.machine import machine

T = TypeVar("T")
_TURN = 0.01
"""Seconds after which a turn leaves results to the next one."""


class Background:
    """A thread of one rank for work that is too long for a turn; its results are passed on in a turn."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_bell = weakref.finalize(self, os.close, self._bell)
        self._thread: Executor | None = None
        self.results: deque[Callable[[], None]] = deque()

    def defer(self, work: Callable[[], T], then: Callable[[T | KvprotoError], None]) -> None:
        """Do `work` in the thread; a later `turn` calls `then` with its result, or the KvprotoError that it raised."""
        if self._thread is None:
            self._thread = machine.executor()
        self._thread.submit(work).add_done_callback(lambda done: self._over(done, then))

    def _over(self, done: Future[T], then: Callable[[T | KvprotoError], None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        self.results.append(lambda: then(error if isinstance(error, KvprotoError) else done.result()))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has results to pass on."""
        return self._bell

    def turn(self) -> None:
        """Pass on results, for a limited time; raises the work's exception, unless that is a KvprotoError."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        until = machine.monotonic() + _TURN
        while self.results:
            self.results.popleft()()
            if self.results and machine.monotonic() > until:
                os.eventfd_write(self._bell, 1)  # the next turn passes on the rest
                return

    def close(self) -> None:
        """Wait for the work that has begun, and drop the rest."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._close_bell()
