"""Work that may take long, such as a plan of the largest Descriptions: done outside of turns, its result heard in one.

A frame of a peer then costs the others no turn. One thread does all of it, in order, and is started by the first.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kvproto.errors import KvprotoError

__all__ = ["Backstage"]

T = TypeVar("T")


class Backstage:
    """The thread of one node."""

    def __init__(self) -> None:
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._unhang = weakref.finalize(self, os.close, self._bell)
        self._thread: ThreadPoolExecutor | None = None
        self._heard: deque[Callable[[], None]] = deque()

    def defer(self, work: Callable[[], T], then: Callable[[T | KvprotoError], None]) -> None:
        """Do some work; a later `turn` tells `then` what came of it, or its KvprotoError."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvproto backstage")
        self._thread.submit(work).add_done_callback(lambda done: self._over(done, then))

    def _over(self, done: Future[T], then: Callable[[T | KvprotoError], None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        self._heard.append(lambda: then(error if isinstance(error, KvprotoError) else done.result()))
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def fileno(self) -> int:
        """A descriptor that is readable when `turn` has something to tell."""
        return self._bell

    def turn(self) -> None:
        """Tell what is done; raises what the work raised, if that is no KvprotoError."""
        if self._heard:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        while self._heard:
            self._heard.popleft()()

    def close(self) -> None:
        """Wait for what has begun, and forget the rest."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._unhang()
