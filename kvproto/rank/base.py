"""The base of Source and Sink: turns, events, pools, and their end."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap
from types import NoneType
from typing import Any, Protocol

from kvproto import __version__
from kvproto.closing import Closing
from kvproto.errors import KvprotoError, LocalError, RemoteError, check_type, check_whole, wrong_type
from kvproto.events import Event, PoolFree
from kvproto.observability.counts import Counts, MetricSample, sample
from kvproto.observability.feed import FeedServer
from kvproto.observability.names import BASE
from kvproto.observability.records import Observer
from kvproto.options import Options
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import TOKENS
from kvproto.prompt import Prompt, Ticket, check_name
from kvproto.rank.driver import Driver, Node
from kvproto.rank.handles import Handle, LentPool, Withdrawal
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.session import Party, new_incarnation
from kvproto.session.records import Counters
from kvproto.transport.base import Transport
from kvproto.transport.loading import opened
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode

_KEPT = 4096
"""The most events kept for `events`; older ones are dropped."""
_PATIENCE = 1.0
"""Seconds for which `metrics` waits for a turn to end."""


def party_of(name: str, pool: Pool) -> Party:
    """The identity of this run of a rank; a later run has a greater incarnation (KVP-SES-SUPERSEDE)."""
    check_type("name", name, str, "the engine's name, a str")
    check_type("pool", pool, Pool, "a kvproto.Pool")
    check_name("name", name)
    return Party(name, pool.geometry.replica, pool.rank, new_incarnation(machine.time(), machine.randbelow(1 << 20)))


def options_of(options: Any) -> Options:
    """`options`, or the default ones for None; raises LocalError(OUT_OF_RANGE) for anything else."""
    check_type("options", options, (Options, NoneType), "a kvproto.Options")
    return options or Options()


def check_request(ticket: Any, prompt: Any, call: Any, geometry: Geometry) -> None:
    """Raise LocalError(OUT_OF_RANGE) unless all have the right types and the prompt states the geometry's axes."""
    check_type("ticket", ticket, Ticket, "a kvproto.Ticket", "read_ticket makes one of its JSON form")
    check_type("prompt", prompt, Prompt, "a kvproto.Prompt", "pass Prompt(token_ids)")
    if call is not None and not callable(call):
        raise wrong_type("callback", call, "something to call with the handle")
    for group in geometry.groups:
        if group.axis not in (None, TOKENS, *prompt.axes):  # KVP-TKT-W-AXES
            mine, yours = f"the length of axis {group.axis!r} of group {group.name!r}", f"of {sorted(prompt.axes)}"
            advice = f'state it, 0 for a request that has none: Prompt(..., axes={{"{group.axis}": 0}})'
            raise LocalError(ErrorCode.OUT_OF_RANGE, "prompt.axes", mine, yours, advice)


def ends_of(prompt: Prompt, tokens: int | Mapping[str, int] | None, least: int) -> tuple[int, Mapping[str, int]]:
    """The end of a fetch, in tokens and on each other axis, by default whole; raises LocalError(OUT_OF_RANGE)."""
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


class RankNode(Node, Protocol):
    """The turns of one rank, which a `Driver` runs: `SourceNode` or `SinkNode`."""

    def census(self) -> Counters:
        """Count the peers, and the messages that were sent again so far."""

    @property
    def quarantined(self) -> dict[int, int]:
        """The number of pages, by group id, that must not be reused yet."""

    def sleep(self, error: KvprotoError) -> LentPool:
        """End what is under way with this error, and ask for the pool back."""


class EngineRank(Closing):
    """A Source or a Sink: one rank's node, the driver that gives it turns, and a pool that may be taken back.

    Engines lend their memory to something else for a while, such as a trainer between rollouts: `sleep` and `wake_up`
    of vLLM, `release_memory_occupation` and `resume_memory_occupation` of SGLang. Sessions with peers outlive that.
    """

    _node: RankNode

    def __init__(self, name: str, pool: Pool, node: RankNode, options: Options, incarnation: int) -> None:
        self.name, self.pool, self.options = name, pool, options
        self.incarnation = incarnation
        """The number of this run, greater than those of earlier runs of the rank (KVP-SES-SUPERSEDE)."""
        self._handles_lock = threading.Lock()
        self._draining = False
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._bell: int | None = None
        """An eventfd that is readable while there are events; made by the first call of `fileno`."""
        self._who = f"{type(self).__name__} {name!r}"
        self._asleep, self._epoch = False, 1
        self._withdrawals: dict[int, Withdrawal] = {}
        """Withdrawals by the epoch of their pool."""
        self._samples = list[MetricSample]()
        self._pools = [pool]
        """The current pool, last, after earlier ones that peers may still read or write."""
        self._observer = self._observed()
        self._driver = Driver(node, self._who, self._deliver, options.thread, options.callbacks)

    def _start(self) -> None:
        """Take the first turn, and start the I/O thread; releases what was opened if that fails."""
        try:
            self.pool._use(self._who)
            try:
                self._driver.start()
                self._observer.start()
            except BaseException:
                self.pool._users.remove(self._who)
                raise
        except BaseException:
            self._driver.abandon()
            self._observer.close()
            raise

    @property
    def geometry(self) -> Geometry:
        """The Geometry, which states the shares of all ranks of this engine's replica."""
        return self.pool.layout.geometry

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
        if not isinstance(timeout, int | float):
            raise wrong_type("timeout", timeout, "seconds")
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
        pool._users.remove(self._who)

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
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    @property
    def in_flight(self) -> int:
        """The number of requests (Source) or fetches (Sink) that are not over."""
        return sum(not handle.done for handle in list(self._handles()))

    @property
    def drained(self) -> bool:
        """Whether it is draining and every request has ended, so that `close` interrupts nothing."""
        return self._draining and not self.in_flight

    def _check_draining(self) -> None:
        if self._draining:
            raise LocalError(ErrorCode.DRAINING, self._who, "no new request while draining", "one", "send it elsewhere")

    def _wait(self, ended: threading.Event, timeout: float | None) -> None:
        self._driver.check()
        self._driver.check_wait()
        if self.options.thread:
            ended.wait(timeout)
            return
        until = None if timeout is None else machine.monotonic() + timeout
        while not ended.is_set():
            left = 1.0 if until is None else until - machine.monotonic()
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
        if isinstance(event, PoolFree):
            del self._withdrawals[event.withdrawal.epoch]
            self._drop(event.withdrawal.pool)
        else:
            self._forget(event)
        self._events.append(event)
        self._ring()
        self._observer.hear(event)

    def _observed(self) -> Observer:
        """Make the observer that counts events and feeds them to other processes, as the options say."""
        place = self.geometry.replica, self.pool.rank
        role = type(self).__name__.lower()
        base = dict(zip(BASE, (self.name, *map(str, place), role), strict=True))
        feed = self.options.feed
        counts = Counts(machine.monotonic) if self.options.metrics or feed is not None else None
        path = str(feed).replace("{rank}", str(self.pool.rank)).replace("{role}", role)
        connected = lambda: list(self._observer.sessions.values())  # noqa: E731
        opened = FeedServer(path, self.metrics, connected) if feed is not None else None
        return Observer(base, lambda: starmap(partial(sample, base), self._gauges()), counts, opened)

    def _gauges(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """On the node: each gauge's metric, the values of its labels, and its value now."""
        census = self._node.census()
        yield "kvproto_build_info", (__version__, tables.SPEC), 1
        yield "kvproto_in_flight", (), self.in_flight
        yield "kvproto_draining", (), int(self._draining)
        yield "kvproto_peers", (), census.peers
        self._observer.keep(census.names)
        yield "kvproto_suspects", (), census.suspects
        yield "kvproto_resends_total", (), census.resends
        held = self.quarantined
        for group in self.pool.layout.columns:
            name = self.pool.layout.groups[group].name
            yield "kvproto_quarantined_pages", (name,), held.get(name, 0)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the I/O thread or `step`, for which there is no remedy here; None if none did."""
        return self._driver.failure

    @property
    def unready(self) -> str:
        """The reason that this rank should be sent no requests; empty if it may be."""
        if self.failure is not None:
            return f"it has ended by an error: {self.failure}"
        if self._driver.closed:
            return "it is closed"
        return "it drains" if self._draining else "it is asleep" if self._asleep else ""

    @property
    def quarantined(self) -> dict[str, int]:
        """The number of pages, by group name, that must not be reused yet.

        At a sink, a peer may still write them; at a source, their requests are over, and a copy or a peer may still
        read them.
        """
        names = {g.id: g.name for g in self.geometry.groups}
        return {names[group]: count for group, count in self._node.quarantined.items()}

    def _forget(self, event: Event) -> None:
        """Stop tracking the request that an event ends."""
        raise NotImplementedError

    def _handles(self) -> Iterable[Handle[Any]]:
        """The handles of requests."""
        raise NotImplementedError

    def _all_handles(self) -> Iterator[Handle[Any]]:
        """The handles of requests and of pools that are taken back."""
        yield from list(self._handles())
        yield from list(self._withdrawals.values())

    # pools

    @property
    def asleep(self) -> bool:
        """Whether it has no pool: true from `sleep` to `wake`."""
        return self._asleep

    def sleep(self, reason: str = "asleep") -> Withdrawal:
        """End what is under way with POOL_MOVED, and take the pool back from all peers until `wake`.

        The memory may be freed once the returned handle is done. New requests raise POOL_MOVED until `wake`. Raises
        LocalError(UNEXPECTED_MESSAGE) while asleep.
        """
        check_type("reason", reason, str, "a str")
        error = RemoteError(ErrorCode.POOL_MOVED, "", "memory for it", reason, "make a new ticket once it is awake")
        with self._handles_lock:
            self._check_awake("sleep", ErrorCode.UNEXPECTED_MESSAGE)
            self._asleep = True
            made = self._withdrawals[self._epoch] = Withdrawal(self, self.pool, self._epoch)
        self._post_withdrawal(made, lambda: self._node.sleep(error))
        return made

    def wake(self, pool: Pool) -> None:
        """Go on with a pool of the same rank on the same device: the old one, or another.

        Its caches may differ: a draft that was loaded or dropped, more layers, ranks that came or went. Sessions go on
        with peers that support it (feature EPOCHS), and are opened again with others. Raises LocalError:
        UNEXPECTED_MESSAGE while awake, FIELD_CONFLICT for a pool of another rank or replica, NO_TRANSPORT for another
        device.
        """
        self._check_pool(pool)
        with self._handles_lock:
            if not self._asleep:
                mine, advice = "a sleeping Source or Sink", "call sleep first, or move, of a Sink"
                raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "wake", mine, f"{self._who} is awake", advice)
            self._replace(pool)
            self._asleep, epoch = False, self._epoch
        self._driver.post(lambda: self._wake(pool, epoch))

    def _wake(self, pool: Pool, epoch: int) -> None:
        """On the node: go on with this pool."""
        raise NotImplementedError

    def _post_withdrawal(self, made: Withdrawal, work: Callable[[], LentPool | None]) -> None:
        def run() -> None:
            made.lent = work()
            if made.lent is not None:
                made.lent.withdrawal = made

        self._driver.post(run, made._failed)

    def _replace(self, pool: Pool) -> None:
        """Make this the current pool, with the lock held."""
        pool._use(self._who)
        self._pools.append(pool)
        self.pool, self._epoch = pool, self._epoch + 1

    def _check_awake(self, call: str, code: ErrorCode = ErrorCode.POOL_MOVED) -> None:
        if self._asleep:
            raise LocalError(code, call, "a pool", f"{self._who} is asleep", "wake it with a pool first")

    def _check_pool(self, pool: Pool) -> None:
        """Raise LocalError for a pool that cannot replace the current one."""
        check_type("pool", pool, Pool, "a kvproto.Pool")
        self._driver.check()
        for what, mine, yours in (
            ("rank", self.pool.rank, pool.rank),
            ("replica", self.geometry.replica, pool.geometry.replica),
        ):
            if mine != yours:
                advice = "open another Source or Sink"
                raise LocalError(ErrorCode.FIELD_CONFLICT, f"pool.{what}", str(mine), str(yours), advice)
        mine_, yours_ = (sorted({str(m.device) for m in each.memories.values()}) for each in (self.pool, pool))
        if mine_ != yours_:
            advice = "open another Source or Sink for memory of another device"
            raise LocalError(ErrorCode.NO_TRANSPORT, "pool", f"memory of device {mine_}", str(yours_), advice)
