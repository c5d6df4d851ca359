"""The driver that gives a node its turns, in an I/O thread or in `step`.

Calls of the engine are posted as work. If the node's lock is free, the caller runs them at once, so that a request does
not wait for another thread; otherwise the thread that holds the lock runs them next. Sockets are used only under the
lock, and the I/O thread sleeps on their descriptors without it.
"""

import atexit
import contextlib
import logging
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from kvproto.errors import DeviceFault, KvprotoError, LocalError
from kvproto.rank.machine import machine
from kvproto.session import limits
from kvproto.wire.enums import ErrorCode

T = TypeVar("T")
_log = logging.getLogger("kvproto")


class Node(Protocol):
    """A receiver of turns from a `Driver`."""

    def turn(self, ready: Collection[int] | None) -> list[Any]:
        """Do what can be done now; return events. `ready` holds readable descriptors (None: not known)."""

    def filenos(self) -> Mapping[int, object]:
        """Descriptors that are readable when there is something to do; the same object if nothing has changed.

        Each comes with what it belongs to: a number that was closed and is in use again belongs to something else.
        """

    def timeout(self) -> float | None:
        """Seconds until a turn is due even if no descriptor is readable; None if no timer is set."""

    def close(self, reason: str) -> None:
        """Say Goodbye to all peers and release everything."""


class Driver:
    """Gives turns to one node, from `start` on."""

    def __init__(
        self,
        node: Node,
        name: str,
        deliver: Callable[[Any], None],
        thread: bool,
        callbacks: Callable[[Callable[[], object]], object] | None,
    ) -> None:
        """`deliver` receives each event, under the lock; what it passes to `later` runs where `callbacks` says."""
        self._node, self._name, self._deliver, self._callbacks = node, name, deliver, callbacks
        self._lock = threading.Lock()
        self._inbox: deque[tuple[Callable[[], None], Callable[[Exception], object]]] = deque()
        """Work, and what to call with the exception that it raises."""
        self._later: deque[Callable[[], object]] = deque()
        self._epoll = select.epoll()
        self._watched: Mapping[int, object] = {}
        """The last answer of the node's `filenos`."""
        self._ready: list[int] | None = None
        """Descriptors that were readable at the last poll, until a turn has seen them; None if there was no poll."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._pid, self._asleep_until = machine.getpid(), 0.0
        self.closed = False
        """Whether `close` was called."""
        self._restless = 0
        self._calling: int | None = None
        """The thread that runs callbacks."""
        self._due: float | None = 0.0
        """The time of the next turn, as the last one left it; None if no timer is set."""
        self.stepped = False
        """Whether `step` was ever called."""
        self.failure: BaseException | None = None
        """The error after which no further turn is possible."""
        self._uncalled: BaseException | None = None
        """The error of a callback that could not be run; the next turn fails with it."""
        self._exit = partial(_at_exit, weakref.WeakMethod(self.close))  # an object that atexit.unregister recognizes
        self._thread = threading.Thread(target=self._run, name=f"kvproto {name}", daemon=True) if thread else None

    def start(self) -> None:
        """Take the first turn, and start the I/O thread if there is one."""
        with self._lock:
            self._turn()
        atexit.register(self._exit)
        if self._thread is not None:
            self._thread.start()

    def abandon(self) -> None:
        """Release what the driver itself holds, after `start` has failed."""
        self.closed = True
        self._release()

    # for the engine

    def post(self, work: Callable[[], None], failed: Callable[[Exception], object] | None = None) -> None:
        """Run `work` on the node: at once if its lock is free, otherwise as soon as it is.

        An exception of `work` is passed to `failed`, and the node goes on. Without `failed` it is logged, and also
        raised here if the work ran at once.
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
                rested = wait is None or machine.monotonic() + wait >= self._asleep_until
        finally:
            if self._thread is None or not rested or self._later:
                self._ring()
        if raised:
            raise raised[0]

    def leave(self, work: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        """Have the I/O thread, or the next `step`, run `work` on the node, and return at once."""
        self.check()
        self._inbox.append((work, failed))
        self._ring()

    def between_turns(self, ask: Callable[[], T], patience: float) -> T | None:
        """Call `ask` between two turns and return its result; None if a turn takes longer than `patience` seconds."""
        if not self._lock.acquire(timeout=patience):
            return None
        try:
            return ask()
        finally:
            self._lock.release()

    def later(self, call: Callable[[], object], wake: bool = False) -> None:
        """Run a callback of the engine outside the lock, or fail the next turn; `wake` if no turn would run it."""
        if self._callbacks is not None:
            try:
                self._callbacks(call)
            except Exception as error:
                _log.exception("Options.callbacks of %s has not taken a callback", self._name)
                self._uncalled = self._uncalled or error
                self._ring()
            return
        self._later.append(call)
        if wake:
            self._call_back() if self.closed else self._ring()

    def step(self, timeout: float = 0.0) -> None:
        """Wait up to `timeout` seconds for something to do and take one turn; for a node without an I/O thread."""
        self.check()
        if self._thread is not None:
            advice = "pass Options(thread=False)"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "step", "no I/O thread", f"{self._name} has one", advice)
        self.stepped = True
        planned = None if self._due is None else max(self._due - machine.monotonic(), 0.0)
        self._rest(timeout if planned is None else min(timeout, planned), planned)
        with self._lock:
            self._turn()
        self._call_back()

    def fileno(self) -> int:
        """The descriptor that is readable when `step` has something to do."""
        self.check()
        return self._epoll.fileno()

    def next_timer(self) -> float | None:
        """Seconds until `step` is due even if the descriptor is not readable; None if no timer is set."""
        self.check()
        return 0.0 if self._inbox or self._later else self._node.timeout()

    def check(self) -> None:
        """Raise LocalError or the node's failure if no turn is possible: when closed, in a fork, or after a failure."""
        if machine.getpid() != self._pid:
            advice = "open a Source or Sink in the process that uses it, or start workers by spawn"
            mine, yours = f"process {self._pid}", f"its fork {machine.getpid()}"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, self._name, mine, yours, advice)
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, self._name, "open", "closed", "open another")

    def check_wait(self) -> None:
        """Raise LocalError where waiting would never end: in a callback, or in the I/O thread itself."""
        if threading.get_ident() == self._calling or threading.current_thread() is self._thread:
            advice = "check `done`, add another callback, or set Options.callbacks to run callbacks elsewhere"
            yours = "a callback, which holds up everything else"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "wait", "a thread of the engine", yours, advice)

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye, end the thread and release everything; a second call does nothing."""
        if self.closed or machine.getpid() != self._pid:
            return
        with self._lock:
            if self.closed:
                return
            if self.failure is None:
                self._turn()
            self.closed = True
            with contextlib.suppress(Exception) if self.failure else contextlib.nullcontext():
                self._node.close(reason)
        self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._call_back()
        self._release()

    def _release(self) -> None:
        atexit.unregister(self._exit)
        self._epoll.close()
        os.close(self._bell)

    # turns

    def _turn(self) -> float | None:
        """With the lock: run posted work and the node's turn; return its timeout. Stores and raises a fatal error."""
        if self.failure is not None:
            raise self.failure
        try:
            if self._uncalled is not None:
                mine, advice = "a place that takes callbacks", "end it after the Source or Sink, or open another"
                raise LocalError(ErrorCode.ABORTED, "Options.callbacks", mine, repr(self._uncalled), advice)
            while self._inbox:
                work, failed = self._inbox.popleft()
                try:
                    work()
                except DeviceFault:
                    raise
                except Exception as error:  # it goes only to the one who posted the work
                    if not isinstance(error, KvprotoError):
                        _log.exception("a call of %s has failed", self._name)
                    failed(error)
            ready, self._ready = self._ready, []
            for event in self._node.turn(ready):
                self._deliver(event)
            filenos = self._node.filenos()
            if filenos is not self._watched:
                self._watch(filenos)
            wait = self._node.timeout()
            self._due = None if wait is None else machine.monotonic() + wait if wait else 0.0
            return wait
        except BaseException as error:
            self._fail(error.error if isinstance(error, DeviceFault) else error)
            raise

    def _fail(self, error: BaseException) -> None:
        """With the lock: end all turns with this error, which every handle and every later call raises."""
        self.failure = error
        self._deliver(error)

    def _watch(self, watched: Mapping[int, object]) -> None:
        before, now = self._watched.items(), watched.items()
        for fd, _ in before - now:
            with contextlib.suppress(OSError):  # already closed, which has removed it
                self._epoll.unregister(fd)
        for fd, _ in now - before:
            self._epoll.register(fd, select.EPOLLIN)
        self._watched = watched

    def _run(self) -> None:
        """The I/O thread."""
        try:
            while not self.closed:
                with self._lock:
                    if self.closed:
                        return
                    wait = self._turn()
                    nap = limits.RESEND / 2  # so that a post which only sets a timer to resend need not wake it
                    nap = nap if wait is None else min(wait, nap)
                    self._asleep_until = machine.monotonic() + nap
                self._call_back()
                if self.closed:  # by a callback: the descriptors are gone
                    return
                self._rest(nap, wait)
                self._asleep_until = 0.0
        except BaseException as error:
            with self._lock:
                if self.failure is None:  # a callback has raised what ends a thread, such as SystemExit
                    mine, advice = "callbacks that return, or raise an Exception", "open another"
                    self._fail(LocalError(ErrorCode.ABORTED, self._name, mine, repr(error), advice))
        while self._later:
            with contextlib.suppress(BaseException):
                self._call_back()

    def _rest(self, seconds: float, planned: float | None) -> None:
        """Sleep unless the node has something to do: next to a computing thread, even the shortest sleep costs 5 ms."""
        if planned == 0.0 and self._restless < _RESTLESS:
            self._restless, self._ready = self._restless + 1, None
            return
        self._restless = 0
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> None:
        if self._inbox or self._later:
            seconds = 0.0
        if 0 < seconds < _TICK:  # epoll counts whole milliseconds
            machine.sleep(seconds)
            seconds = 0.0
        self._ready = [fd for fd, _ in self._epoll.poll(min(seconds, _LONGEST))]
        if self._bell in self._ready:  # checked first, as each system call may cost the interpreter lock
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
"""The most seconds that one sleep takes."""
_TICK = 1e-3
_RESTLESS = 16
"""The most turns in a row without polling the descriptors."""


def _at_exit(close: weakref.WeakMethod[Callable[..., None]]) -> None:
    found = close()
    if found is not None:
        found("the process ends")
