"""What Source and Sink have in common: their turns, events and handles, and how they are closed."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap
from types import NoneType
from typing import Any, Generic, Protocol, Self, TypeVar

from kvproto.errors import KvprotoError, LocalError, check_type, check_whole, type_name
from kvproto.events import Event
from kvproto.observability.counts import Counts, MetricSample, sample
from kvproto.observability.feed import FeedServer
from kvproto.observability.names import BASE
from kvproto.observability.observer import Observer
from kvproto.options import Options
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.planning.geometry import Geometry
from kvproto.prompt import Prompt, Ticket, check_name
from kvproto.rank.driver import Driver, Node
from kvproto.rank.pool import Pool
from kvproto.session import Party, new_incarnation
from kvproto.session.records import Counters
from kvproto.transport.base import Transport
from kvproto.transport.loading import opened
from kvproto.wire.enums import ErrorCode

__all__ = [
    "Door",
    "Handle",
    "RankNode",
    "TicketHandle",
    "check_request",
    "ends_of",
    "options_of",
    "party_of",
    "transports_of",
]

Result = TypeVar("Result")

_KEPT = 4096
"""The most events kept for `events`; older ones are dropped."""
_PATIENCE = 1.0
"""Seconds for which `metrics` waits for a turn to end."""


def party_of(name: str, pool: Pool) -> Party:
    """The identity of this run of a rank; a later run has a greater incarnation (KVP-SES-SUPERSEDE)."""
    check_type("name", name, str, "the engine's name, a str")
    check_type("pool", pool, Pool, "a kvproto.Pool")
    check_name("name", name)
    return Party(name, pool.geometry.replica, pool.rank, new_incarnation(time.time(), secrets.randbits(20)))


def options_of(options: Any) -> Options:
    """`options`, or the default ones for None; raises LocalError(OUT_OF_RANGE) for anything else."""
    check_type("options", options, (Options, NoneType), "a kvproto.Options")
    return options or Options()


def check_request(ticket: Any, prompt: Any, call: Any, geometry: Geometry) -> None:
    """Raise LocalError(OUT_OF_RANGE) unless all have the right types and the prompt states the geometry's axes."""
    check_type("ticket", ticket, Ticket, "a kvproto.Ticket", "read_ticket makes one of its JSON form")
    check_type("prompt", prompt, Prompt, "a kvproto.Prompt", "pass Prompt(token_ids)")
    if call is not None and not callable(call):
        raise LocalError(ErrorCode.OUT_OF_RANGE, "callback", "something to call with the handle", type_name(call))
    for group in geometry.groups:
        if axis_of(group) not in (TOKENS, *prompt.axes):  # KVP-TKT-W-AXES
            mine, yours = f"the length of axis {group.axis!r} of group {group.name!r}", f"of {sorted(prompt.axes)}"
            advice = f'state it, 0 for a request that has none: Prompt(..., axes={{"{group.axis}": 0}})'
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, yours, advice)


def ends_of(prompt: Prompt, tokens: int | Mapping[str, int] | None, least: int) -> tuple[int, Mapping[str, int]]:
    """Where a fetch ends, in tokens and on each other axis; `tokens` states the former, or any of them by axis name.

    Other axes are fetched whole. Raises LocalError(OUT_OF_RANGE) for an unknown axis or an end not within the prompt.
    """
    named = tokens if isinstance(tokens, Mapping) else {} if tokens is None else {TOKENS: tokens}
    axes = dict(prompt.axes)
    if unknown := [name for name in named if name not in (TOKENS, *axes)]:
        known = sorted([TOKENS, *axes])
        raise LocalError(ErrorCode.OUT_OF_RANGE, "tokens", f"axes of {known}", repr(unknown[0]))
    for name in named.keys() & axes.keys():
        axes[name] = check_whole(f'tokens["{name}"]', named[name], 0, axes[name], f"0 to {axes[name]}, the prompt's")
    most = len(prompt)
    return check_whole("tokens", named.get(TOKENS, most), least, most, f"{least} to {most}, the prompt's"), axes


def transports_of(options: Options, pool: Pool) -> list[Transport]:
    """The transports of the options, those that are names opened for the pool; raises LocalError(NO_TRANSPORT)."""
    memory, measured = pool.memories, options.measured
    try:
        return [opened(each, memory, measured) if isinstance(each, str) else each for each in options.transports]
    except LocalError as error:
        raise error.at("Options.transports") from error


class Handle(Generic[Result]):
    """An operation of a Source or Sink: wait for its end, poll it, or add a callback."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.began = time.monotonic()
        """When the operation was requested, in seconds of `time.monotonic`."""
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Any], object]] = []
        self._result: Result | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "waiting" if not self.done else f"lost: {self._error}" if self._error is not None else "done"
        return f"<{type(self).__name__} of {self._door.name}, {state}>"  # the ticket's key is a secret

    @property
    def done(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self._ended.is_set()

    @property
    def result(self) -> Result | None:
        """The event that ended the operation, or None while it is under way; raises its error if it failed."""
        if self._error is not None:
            raise self._error.again() if isinstance(self._error, KvprotoError) else self._error
        return self._result

    def wait(self, timeout: float | None = None) -> Result:
        """Wait up to `timeout` seconds (None: without limit) until the operation has ended, and return its event.

        Without an I/O thread this steps the Source or Sink. Raises the operation's error if it failed, TimeoutError,
        or LocalError(UNEXPECTED_MESSAGE) where it can never end: in a callback, after `close`, or in a forked process.
        """
        check_type("timeout", timeout, (int, float, NoneType), "seconds, or None")
        if not self.done:
            self._door._wait(self._ended, timeout)
        if not self.done:
            raise TimeoutError(f"{self!r} after {timeout} s")
        found = self.result
        assert found is not None
        return found

    def add_done_callback(self, call: Callable[[Self], object]) -> None:
        """Call `call` with this handle when it has ended, or at once if it has, where `Options.callbacks` says."""
        with self._door._handles_lock:
            if not self.done:
                self._callbacks.append(call)
                return
        self._door._driver.later(lambda: call(self), wake=True)

    def _post(self, work: Callable[[], None], *, wait: bool = True) -> None:
        """Run `work` on the node unless the request has ended; with `wait` in this thread, if the node is free."""
        post = self._door._driver.post if wait else self._door._driver.leave
        post(lambda: None if self.done else work(), self._failed)

    def _failed(self, error: Exception) -> None:
        """On the node: a posted call raised. End this handle with the error, and stop the node's work for it."""
        self._end(None, error)
        wrapped = error if isinstance(error, KvprotoError) else LocalError(ErrorCode.ABORTED, "", advice=repr(error))
        with contextlib.suppress(Exception):
            self._give_up(wrapped)

    def _give_up(self, error: KvprotoError) -> None:
        raise NotImplementedError

    def _end(self, result: Result | None, error: BaseException | None = None) -> None:
        if isinstance(error, KvprotoError):
            error.kept()  # its frames would keep the pool's memory as long as the handle
        with self._door._handles_lock:
            if self.done:
                return
            self._result, self._error = result, error
            self._ended.set()
            calls, self._callbacks = self._callbacks, []
        for call in calls:
            self._door._driver.later(lambda call=call: call(self))  # type: ignore[misc]


class TicketHandle(Handle[Result]):
    """The handle of a request, which its ticket names."""

    def __init__(self, door: Door, ticket: Ticket) -> None:
        super().__init__(door)
        self.ticket, self._key = ticket, bytes(ticket.key)


class RankNode(Node, Protocol):
    """The node of a rank."""

    def census(self) -> Counters:
        """Count the peers, and the messages that were sent again so far."""


class Door:
    """A Source or a Sink: one rank's node, and the driver that gives it turns."""

    def __init__(self, name: str, pool: Pool, node: RankNode, options: Options) -> None:
        self.name, self.pool, self.options = name, pool, options
        self._handles_lock = threading.Lock()
        self._draining = False
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._bell: int | None = None
        """An eventfd that is readable while there are events; made by the first call of `fileno`."""
        self._who = f"{type(self).__name__} {name!r}"
        self._census, self._samples = node.census, list[MetricSample]()
        self._pools = [pool]
        """The current pool, last, after earlier ones that peers may still read or write."""
        pool._use(self._who)
        try:
            self._observer = self._observed()
            try:
                self._driver = Driver(node, self._who, self._deliver, options.thread, options.callbacks)
                self._observer.start()
            except BaseException:
                self._observer.close()
                raise
        except BaseException:
            pool._unuse(self._who)
            raise

    @property
    def geometry(self) -> Geometry:
        """What all ranks of this engine's replica own."""
        return self.pool.geometry

    def events(self) -> list[Event]:
        """The events since the last call, in order; at most the latest 4,096 are kept, with the handles that they name.

        When no event is left, raises the error that ended the node, if one did.
        """
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        found = []
        while self._events:
            found.append(self._events.popleft())
        if not found and self._driver.failure is not None:
            raise self._driver.failure
        return found

    def metrics(self) -> list[MetricSample]:
        """The metrics of spec/v1/metrics.md, as plain values that JSON can hold; may be called from any thread.

        While a turn takes longer than a second, this returns what the last call did. Raises
        LocalError(UNEXPECTED_MESSAGE) without Options(metrics=True).
        """
        if self._observer.counts is None:
            advice = "open it with Options(metrics=True)"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "metrics", "metrics that are counted", "none", advice)
        found = self._driver.between_turns(self._observer.samples, _PATIENCE)
        if found is not None:
            self._samples = found
        return self._samples

    def step(self, timeout: float = 0.0) -> list[Event]:
        """Wait up to `timeout` seconds for something to do, take one turn, and return `events()`.

        For a loop of your own: never call it from two threads at once. Raises LocalError(UNEXPECTED_MESSAGE) without
        Options(thread=False), after `close` and in a forked process.
        """
        check_type("timeout", timeout, (int, float), "seconds")
        self._driver.step(timeout)
        return self.events()

    def fileno(self) -> int:
        """A file descriptor for select, poll or an event loop, valid until `close`.

        It is readable when `step` has something to do or, with an I/O thread, when `events` has something to return.
        """
        if not self.options.thread:
            return self._driver.fileno()
        self._driver.check()
        with self._handles_lock:
            if self._bell is None:
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                if self._events:
                    self._ring()
            return self._bell

    def _ring(self) -> None:
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)

    def next_timer(self) -> float | None:
        """Seconds until `step` must be called even if the descriptor is not readable; None if no timer is set."""
        return self._driver.next_timer()

    def close(self, reason: str = "closed") -> None:
        """Say Goodbye to all peers and end what is under way; open handles end with LocalError(ABORTED)."""
        if self._driver.closed:
            return
        self._driver.close(reason)
        for handle in self._all_handles():
            advice = f"it was closed while the request was under way: {reason}"
            handle._end(None, LocalError(ErrorCode.ABORTED, self._who, "open", "closed", advice))
        self._driver._call_back()
        self._observer.close()
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None
        for pool in list(self._pools):
            self._drop(pool)

    def _drop(self, pool: Pool) -> None:
        """Stop using a pool."""
        self._pools.remove(pool)
        pool._unuse(self._who)

    def drain(self) -> None:
        """Finish what is under way and accept nothing new, before `close`; `drained` says when that is done.

        From now on a new request here raises DRAINING. A Source also refuses new sinks with that code, and ends the
        requests that no sink has asked for.
        """
        self._draining = True
        self._driver.post(self._drain)
        self._driver.post(self._observer.draining)

    def _drain(self) -> None:
        """On the node: refuse new requests of peers."""

    @property
    def drained(self) -> bool:
        """Whether it is draining and every request has ended, so that `close` interrupts nothing."""
        return self._draining and all(handle.done for handle in list(self._handles()))

    def _check_draining(self) -> None:
        if self._draining:
            raise LocalError(ErrorCode.DRAINING, self._who, "no new request while draining", "one", "send it elsewhere")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self, ended: threading.Event, timeout: float | None) -> None:
        self._driver.check()
        self._driver.check_wait()
        if self.options.thread:
            ended.wait(timeout)
            return
        until = None if timeout is None else time.monotonic() + timeout
        while not ended.is_set():
            left = 1.0 if until is None else until - time.monotonic()
            if left < 0:
                return
            self._driver.step(min(left, 1.0))

    def _deliver(self, event: Any) -> None:
        """Under the node's lock: pass on an event of the node, or the error that ends it."""
        if isinstance(event, BaseException):
            self._observer.failed(event)
            for handle in self._all_handles():
                handle._end(None, event)
            self._ring()
            return
        translated = self._translate(event)
        self._events.append(translated)
        self._ring()
        self._observer.hear(translated)

    def _observed(self) -> Observer:
        """Make the observer that counts events and feeds them to other processes, as the options say."""
        place = self.geometry.replica, self.pool.rank
        role = type(self).__name__.lower()
        base = dict(zip(BASE, (self.name, *map(str, place), role), strict=True))
        feed = self.options.feed
        counts = Counts() if self.options.metrics or feed is not None else None
        path = str(feed).replace("{rank}", str(self.pool.rank)).replace("{role}", role)
        opened = FeedServer(path, self.metrics) if feed is not None else None
        return Observer(base, lambda: starmap(partial(sample, base), self._gauges()), counts, opened)

    def _gauges(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """On the node: each gauge's metric, the values of its labels, and its value now."""
        census = self._census()
        yield "kvproto_in_flight", (), sum(not handle.done for handle in list(self._handles()))
        yield "kvproto_draining", (), int(self._draining)
        yield "kvproto_peers", (), census.peers
        yield "kvproto_suspects", (), census.suspects
        yield "kvproto_resends_total", (), census.resends

    def _translate(self, event: Any) -> Event:
        """Turn an event of the node into the engine's, and end the handle that it concerns."""
        raise NotImplementedError

    def _handles(self) -> Iterable[Handle[Any]]:
        """The handles of requests."""
        raise NotImplementedError

    def _all_handles(self) -> Iterator[Handle[Any]]:
        """The handles of requests and, in subclasses, of anything else that can end."""
        yield from list(self._handles())
