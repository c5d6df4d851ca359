"""Who gives a node its turns: an I/O thread of its own, or whoever calls `step`.

Calls of the engine are posted as work. The caller runs them at once where nobody has the node's lock, so that a request
leaves without waiting for another thread; else the thread that holds it runs them next. Sockets are touched under the
lock alone, and the I/O thread sleeps on their descriptors without it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol, TypeVar

from kvproto.errors import DeviceFault, KvprotoError, LocalError
from kvproto.session import limits
from kvproto.wire.enums import ErrorCode

__all__ = ["Driver", "Node"]

T = TypeVar("T")
_log = logging.getLogger("kvproto")


class Node(Protocol):
    """What a driver gives turns to."""

    def turn(self, ready: Collection[int]) -> list[Any]:
        """Receive, copy and answer what may be done now; returns what the engine should know.

        `ready`: descriptors of `filenos` that were readable; sockets are looked at in any case.
        """

    def filenos(self) -> Collection[int]:
        """Descriptors that are readable when there is something to do."""

    def timeout(self) -> float | None:
        """Seconds until there is something to do all the same; None: nothing is planned."""

    def close(self, reason: str) -> None:
        """Say Goodbye and let go of everything."""


class Driver:
    """Turns of one node."""

    def __init__(
        self, node: Node, name: str, deliver: Callable[[Any], None], thread: bool,
        callbacks: Callable[[Callable[[], object]], object] | None,
    ) -> None:  # fmt: skip
        """`deliver` is told of each event, under the lock; what it gives to `later` runs where `callbacks` says."""
        self._node, self._name, self._deliver, self._elsewhere = node, name, deliver, callbacks
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[], None], Callable[[Exception], object]]] = deque()
        """Work, and who hears of its exception."""
        self._later: deque[Callable[[], object]] = deque()
        self._epoll, self._watched = select.epoll(), set[int]()
        self._ready: list[int] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._pid, self._asleep_until = os.getpid(), 0.0
        self._closed = False
        self._restless = 0
        self._calling: int | None = None
        """The thread that runs callbacks."""
        self.failure: BaseException | None = None
        """Why no further turn is possible."""
        self._exit = partial(_at_exit, weakref.WeakMethod(self.close))  # known by itself to atexit.unregister
        atexit.register(self._exit)
        self._thread = threading.Thread(target=self._run, name=f"kvproto {name}", daemon=True) if thread else None
        try:
            with self._lock:
                self._turn()
        except BaseException:
            self._let_go()
            raise
        if self._thread is not None:
            self._thread.start()

    # for the engine

    def post(self, work: Callable[[], None], failed: Callable[[Exception], object] | None = None) -> None:
        """Run work on the node: now where its lock is free, else as soon as it is.

        An exception of the work goes to `failed` and the node goes on. Without `failed` it is logged, and raised here
        where the work ran at once.
        """
        self.check()
        raised: list[Exception] = []
        self._inbox.append((work, failed or raised.append))
        rested = False
        try:
            if self._lock.acquire(blocking=False):
                try:
                    wait = self._turn()
                finally:
                    self._lock.release()
                rested = wait is None or time.monotonic() + wait >= self._asleep_until
        finally:
            if self._thread is None or not rested or self._later:
                self._ring()
        if raised:
            raise raised[0]

    def leave(self, work: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        """Have the I/O thread, or the next `step`, run work on the node: the caller goes on at once."""
        self.check()
        self._inbox.append((work, failed))
        self._ring()

    def look(self, ask: Callable[[], T], patience: float) -> T | None:
        """What `ask` says between two turns; None where a turn takes longer than `patience` seconds."""
        if not self._lock.acquire(timeout=patience):
            return None
        try:
            return ask()
        finally:
            self._lock.release()

    def later(self, call: Callable[[], object], wake: bool = False) -> None:
        """Run a callback of the engine, outside the lock; `wake`: no turn is under way that would run it."""
        if self._elsewhere is not None:
            self._elsewhere(call)
            return
        self._later.append(call)
        if wake:
            self._call_back() if self._closed else self._ring()

    def step(self, timeout: float = 0.0) -> None:
        """One turn, after waiting up to `timeout` seconds for something to do; for whoever has no I/O thread."""
        self.check()
        if self._thread is not None:
            advice = "pass Options(thread=False)"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "step", "no I/O thread", f"{self._name} has one", advice)
        planned = self._node.timeout()
        self._rest(timeout if planned is None else min(timeout, planned), planned)
        with self._lock:
            self._turn()
        self._call_back()

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has something to do."""
        self.check()
        return self._epoll.fileno()

    def next_timer(self) -> float | None:
        """Seconds until `step` has something to do whatever the descriptor says; None: nothing is planned."""
        self.check()
        return 0.0 if self._inbox or self._later else self._node.timeout()

    def check(self) -> None:
        """Raise where no turn is possible: closed, forked, or after a failure."""
        if os.getpid() != self._pid:
            advice = "open a Source or Sink in the process that uses it, or start workers by spawn"
            raise LocalError(
                ErrorCode.UNEXPECTED_MESSAGE, self._name, f"process {self._pid}", f"its fork {os.getpid()}", advice
            )
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, self._name, "open", "closed", "open another")

    def check_wait(self) -> None:
        """Raise where waiting would never end: in a callback, or in the I/O thread itself."""
        if threading.get_ident() == self._calling or threading.current_thread() is self._thread:
            advice = "ask `done`, add another callback, or let callbacks run elsewhere by Options.callbacks"
            yours = "a callback, without which nothing goes on"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "wait", "a thread of the engine", yours, advice)

    @property
    def closed(self) -> bool:
        """Whether no further turn comes."""
        return self._closed

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye, end the thread, let go; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            if self.failure is None:
                self._turn()
            self._closed = True
            with contextlib.suppress(Exception) if self.failure else contextlib.nullcontext():
                self._node.close(reason)
        self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._call_back()
        self._let_go()

    def _let_go(self) -> None:
        atexit.unregister(self._exit)
        self._epoll.close()
        os.close(self._bell)

    # turns

    def _turn(self) -> float | None:
        """With the lock: what was posted, then the node; seconds until the next. Raises and keeps what ends it."""
        if self.failure is not None:
            raise self.failure
        try:
            while self._inbox:
                self._work(*self._inbox.popleft())
            ready, self._ready = self._ready, []
            for event in self._node.turn(ready):
                self._deliver(event)
            watched = set(self._node.filenos())
            if watched != self._watched:
                self._watch(watched)
            return self._node.timeout()
        except BaseException as error:
            self.failure = error.error if isinstance(error, DeviceFault) else error
            self._deliver(self.failure)
            raise

    def _work(self, work: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        """Run what was posted; its exception concerns whoever posted it, and nobody else."""
        try:
            work()
        except DeviceFault:
            raise
        except Exception as error:
            if not isinstance(error, KvprotoError):
                _log.exception("a call of %s has failed", self._name)
            failed(error)

    def _watch(self, watched: set[int]) -> None:
        for fd in self._watched - watched:
            with contextlib.suppress(OSError):  # closed already: the kernel has forgotten it
                self._epoll.unregister(fd)
        for fd in watched - self._watched:
            self._epoll.register(fd, select.EPOLLIN)
        self._watched = watched

    def _run(self) -> None:
        """The I/O thread."""
        try:
            while not self._closed:
                with self._lock:
                    if self._closed:
                        return
                    wait = self._turn()
                    nap = limits.RESEND / 2  # who asks for something and so has it resent need not wake it
                    nap = nap if wait is None else min(wait, nap)
                    self._asleep_until = time.monotonic() + nap
                self._call_back()
                if self._closed:  # by a callback: there is nothing left to sleep on
                    return
                self._rest(nap, wait)
                self._asleep_until = 0.0
        except BaseException:
            if self.failure is None:
                raise
        self._call_back()

    def _rest(self, seconds: float, planned: float | None) -> None:
        """Sleep, unless the node has something to do; beside a thread that computes the shortest sleep costs 5 ms."""
        if planned == 0.0 and self._restless < _RESTLESS:
            self._restless += 1
            return
        self._restless = 0
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        if self._inbox or self._later:
            seconds = 0.0
        if 0 < seconds < _TICK:  # epoll counts whole milliseconds
            time.sleep(seconds)
            seconds = 0.0
        self._ready = [fd for fd, _ in self._epoll.poll(min(seconds, _LONGEST))]
        if self._bell in self._ready:  # asked first: each system call may cost the interpreter
            os.eventfd_read(self._bell)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _call_back(self) -> None:
        before, self._calling = self._calling, threading.get_ident()
        try:
            while self._later:
                try:
                    self._later.popleft()()
                except Exception:
                    _log.exception("a callback of %s has raised", self._name)
        finally:
            self._calling = before


_LONGEST = 60.0
"""Seconds that `step` sleeps, at most."""
_TICK = 1e-3
_RESTLESS = 16
"""Turns without a look at the descriptors, at most."""


def _at_exit(close: weakref.WeakMethod[Callable[..., None]]) -> None:
    found = close()
    if found is not None:
        found("the process ends")
