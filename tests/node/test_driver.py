"""Turns of a node by an I/O thread or by `step`: wake-ups, order of work, failures, close, fork."""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pytest

from kvproto.errors import DeviceFault, LocalError
from kvproto.rank.driver import Driver
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

SOON = 20.0
"""Seconds in which something must happen."""


class Bell:
    """A node that is woken by a descriptor and by a timer, and tells what its work has left."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.rung, self.timed, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.planned: float | None = None
        self.failure: BaseException | None = None
        self.events: list[Any] = []
        self.turns: list[int] = []
        """Threads of the turns."""

    def turn(self, ready: Collection[int] | None) -> list[Any]:
        self.turns.append(threading.get_ident())
        if self.failure is not None:
            raise self.failure
        if ready and self.fd in ready:
            os.eventfd_read(self.fd)
            self.rung.set()
        if self.planned is not None:
            self.planned = None
            self.timed.set()
        events, self.events = self.events, []
        return events

    def filenos(self) -> Mapping[int, object]:
        return {self.fd: self.rung}

    def timeout(self) -> float | None:
        return self.planned

    def close(self, reason: str) -> None:
        assert not self.ended.is_set()
        self.ended.set()
        os.close(self.fd)


class Driven:
    """A driver of a Bell, and what it has delivered."""

    def __init__(self, thread: bool = True, callbacks: Any = None) -> None:
        self.node, self.told = Bell(), list[Any]()
        self.failed = threading.Event()
        self.driver = Driver(self.node, "a bell", self._deliver, thread, callbacks)
        self.driver.start()

    def _deliver(self, event: Any) -> None:
        self.told.append(event)
        if isinstance(event, BaseException):
            self.failed.set()
        elif callable(event):
            self.driver.later(event)

    def tell(self, event: Any) -> None:
        self.driver.post(lambda: self.node.events.append(event))


@pytest.fixture
def driven() -> Iterator[Callable[..., Driven]]:
    made: list[Driven] = []

    def make(**options: Any) -> Driven:
        made.append(Driven(**options))
        return made[-1]

    yield make
    for each in made:
        each.driver.close()


def test_a_descriptor_wakes_the_thread(driven: Callable[..., Driven]) -> None:
    made = driven()
    os.eventfd_write(made.node.fd, 1)
    assert made.node.rung.wait(SOON)


def test_a_number_that_is_in_use_again_belongs_to_another(driven: Callable[..., Driven]) -> None:
    """What was closed and opened again between two turns wakes the thread too."""
    made = driven()
    os.eventfd_write(made.node.fd, 1)
    assert made.node.rung.wait(SOON)

    def open_again() -> None:
        other = os.eventfd(0, os.EFD_NONBLOCK)
        os.dup2(other, made.node.fd)
        os.close(other)
        os.eventfd_write(made.node.fd, 1)
        made.node.rung = rung

    rung = threading.Event()
    made.driver.post(open_again)
    assert rung.wait(SOON)


def test_a_timer_that_work_has_set_wakes_a_thread_that_sleeps_longer(driven: Callable[..., Driven]) -> None:
    """The work runs in the caller's turn, after the thread has gone to sleep for a minute."""
    made = driven()
    os.eventfd_write(made.node.fd, 1)
    assert made.node.rung.wait(SOON)

    class Once:
        """A timer that the turn of the caller must not use up."""

        def __call__(self) -> None:
            made.node.turn = self.turn  # type: ignore[method-assign]

        def turn(self, ready: Collection[int] | None) -> list[Any]:
            made.node.planned, made.node.turn = 0.01, type(made.node).turn.__get__(made.node)  # type: ignore[method-assign]
            return []

    made.driver.post(Once())
    assert made.node.timed.wait(SOON)


def test_work_of_many_threads_runs_once_each_and_in_the_order_of_each(driven: Callable[..., Driven]) -> None:
    made, done = driven(), list[tuple[int, int]]()
    lock = threading.Lock()

    def add(item: tuple[int, int]) -> None:
        assert lock.acquire(blocking=False)  # never two at once
        done.append(item)
        lock.release()

    def post(thread: int) -> None:
        for n in range(200):
            made.driver.post(lambda n=n: add((thread, n)))  # type: ignore[misc]

    threads = [threading.Thread(target=post, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    last = threading.Event()
    made.driver.post(last.set)
    assert last.wait(SOON)
    assert sorted(done) == [(i, n) for i in range(8) for n in range(200)]
    assert all([n for i, n in done if i == thread] == list(range(200)) for thread in range(8))


def test_work_while_a_turn_is_under_way_runs_after_it(driven: Callable[..., Driven]) -> None:
    """Whoever posts does not wait for the turn of another thread."""
    made, entered, leave, ran = driven(), threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(SOON)

    other = threading.Thread(target=lambda: made.driver.post(hold))
    other.start()
    assert entered.wait(SOON)
    made.driver.post(ran.set)
    assert not ran.is_set()
    leave.set()
    assert ran.wait(SOON)
    other.join()


def test_a_failure_of_posted_work_is_raised_to_its_caller_alone(driven: Callable[..., Driven]) -> None:
    made, heard, wrong = driven(), threading.Event(), KeyError("a defect")
    said: list[Exception] = []

    def work() -> None:
        raise wrong

    def failed(error: Exception) -> None:
        said.append(error)
        heard.set()

    made.driver.leave(work, failed)
    assert heard.wait(SOON)
    assert said == [wrong]
    ran = threading.Event()
    made.driver.post(ran.set)
    assert ran.wait(SOON)
    assert made.driver.failure is None
    assert not made.told


def test_a_failure_of_a_turn_reaches_the_engine_and_ends_the_thread(driven: Callable[..., Driven]) -> None:
    """By what was delivered, by callbacks that wait, and by every later call."""
    made, called, wrong = driven(), threading.Event(), KeyError("a defect")
    made.tell(called.set)
    assert called.wait(SOON)
    made.node.failure = wrong
    os.eventfd_write(made.node.fd, 1)
    assert made.failed.wait(SOON)
    assert made.told[-1] is wrong
    assert made.driver._thread is not None
    made.driver._thread.join(SOON)
    assert not made.driver._thread.is_alive()
    with pytest.raises(KeyError):
        made.driver.post(lambda: None)
    number = len(made.node.turns)
    made.driver.close()
    assert made.node.ended.is_set()
    assert len(made.node.turns) == number


def test_a_device_fault_is_told_as_its_error(driven: Callable[..., Driven]) -> None:
    made = driven()
    error = LocalError(ErrorCode.TRANSPORT_FAILED, "", "copy", "a fault")
    made.node.failure = DeviceFault(error)
    os.eventfd_write(made.node.fd, 1)
    assert made.failed.wait(SOON)
    assert made.told == [error]
    with pytest.raises(LocalError) as caught:
        made.driver.check()
    assert caught.value is error


def test_callbacks_run_outside_the_lock(driven: Callable[..., Driven]) -> None:
    """So they may call the driver, and close it."""
    made, ran = driven(), threading.Event()
    made.tell(lambda: made.driver.post(ran.set))
    assert ran.wait(SOON)
    made.tell(made.driver.close)
    assert made.node.ended.wait(SOON)
    assert made.driver._thread is not None
    made.driver._thread.join(SOON)
    assert not made.driver._thread.is_alive()


@pytest.mark.parametrize("thread", [True, False])
def test_a_callback_that_raises_costs_no_other(
    driven: Callable[..., Driven], caplog: pytest.LogCaptureFixture, thread: bool
) -> None:
    made, ran = driven(thread=thread), threading.Event()

    def wrong() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "kvproto"):
        made.tell(wrong)
        made.tell(ran.set)
        if not thread:
            made.driver.step()
        assert ran.wait(SOON)
    assert "ZeroDivisionError" in caplog.text
    made.driver.check()


def test_callbacks_run_where_the_engine_says(driven: Callable[..., Driven]) -> None:
    calls: list[Callable[[], object]] = []
    made, ran = driven(thread=False, callbacks=calls.append), threading.Event()
    made.tell(ran.set)
    assert not ran.is_set()
    calls.pop()()
    assert ran.is_set()


def test_close_leaves_nothing_behind(driven: Callable[..., Driven]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = driven()
    made.driver.close()
    made.driver.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert made.driver.closed
    assert "kvproto a bell" not in [t.name for t in threading.enumerate()]
    for call in (lambda: made.driver.post(lambda: None), made.driver.step, made.driver.fileno):
        with raises(LocalError, path="a bell", yours="closed"):
            call()


def test_step_is_for_those_without_a_thread(driven: Callable[..., Driven]) -> None:
    made = driven()
    with raises(LocalError, path="step", advice="pass Options(thread=False)"):
        made.driver.step()


def test_step_waits_for_a_descriptor_and_for_work_of_other_threads(driven: Callable[..., Driven]) -> None:
    made, ran = driven(thread=False), threading.Event()
    os.eventfd_write(made.node.fd, 1)
    made.driver.step(SOON)
    assert made.node.rung.is_set()
    assert not select.select([made.driver.fileno()], [], [], 0)[0]
    assert made.driver.next_timer() is None
    other = threading.Thread(target=lambda: made.driver.post(ran.set))
    other.start()
    other.join()
    assert select.select([made.driver.fileno()], [], [], 0)[0]
    made.driver.step(SOON)
    assert ran.is_set()


def test_step_waits_for_the_timer_that_the_last_turn_has_left(driven: Callable[..., Driven]) -> None:
    made = driven(thread=False)

    def plans(ready: Collection[int] | None) -> list[Any]:
        os.eventfd_read(made.node.fd)
        made.node.planned = 0.005
        del made.node.turn  # type: ignore[method-assign]
        return []

    made.node.turn = plans  # type: ignore[method-assign]
    os.eventfd_write(made.node.fd, 1)
    made.driver.step(SOON)
    assert made.driver.next_timer() == 0.005
    assert not made.node.timed.is_set()
    begun = time.monotonic()
    made.driver.step(SOON)
    assert made.node.timed.is_set()
    assert time.monotonic() - begun < SOON


def test_a_fork_is_told_that_it_is_one(driven: Callable[..., Driven]) -> None:
    made = driven(thread=False)
    child = os.fork()
    if child == 0:
        said = 1
        try:
            made.driver.close()  # does nothing to what is the parent's
            made.driver.step()
        except LocalError as error:
            said = 0 if error.path == "a bell" and str(os.getpid()) in error.yours else 2
        finally:
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not made.node.ended.is_set()
    made.driver.step()


def test_a_node_that_fails_at_once_opens_nothing() -> None:
    before, node = set(os.listdir("/proc/self/fd")), Bell()
    node.failure = KeyError("a defect")
    driver = Driver(node, "a bell", lambda event: None, True, None)
    with pytest.raises(KeyError):
        driver.start()
    driver.abandon()
    os.close(node.fd)
    assert set(os.listdir("/proc/self/fd")) <= before
