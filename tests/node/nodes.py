"""Nodes that get their turns together, and what tests do to them.

Between turns a test sleeps as a driver does: on the descriptors of the nodes, and no longer than their timers say. So a
wake-up that is lost is a test that fails.
"""

import contextlib
import multiprocessing
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Protocol, Self, cast

import attrs
import numpy as np
import pytest

import kvproto.sink.link
import kvproto.sink.node
import kvproto.sink.reads
import kvproto.source.node
from kvproto import Options, Pool, Prompt, Ticket
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Arrived, Connected, Lost, PagesFree
from kvproto.net import Dialer
from kvproto.planning.kinds import NO_AXES
from kvproto.rank.base import party_of
from kvproto.rank.machine import machine
from kvproto.rank.page_tables import grants_of
from kvproto.sink import Fetch
from kvproto.sink.node import SinkNode
from kvproto.source.node import SourceNode
from kvproto.source.prefill import Computed, Finished
from kvproto.source.request import Request
from kvproto.wire.enums import ErrorCode, ItemKind, Outcome
from tests.pools import contents
from tests.processes import FORKED

PREFILL = "p", 0
"""The source replica of most tests."""
SINK: tuple[ModuleType, ...] = (kvproto.sink.node, kvproto.sink.link, kvproto.sink.reads)
SOURCE: tuple[ModuleType, ...] = (kvproto.source.node,)
"""Modules of a role that ask for the time."""
LONGEST = 20.0
"""Seconds in which something must happen."""


class Driven(Protocol):
    """A node as a driver sees it."""

    def turn(self, ready: Any = ...) -> list[Any]: ...
    def filenos(self) -> Collection[int]: ...
    def timeout(self) -> float | None: ...


@attrs.frozen
class Received:
    """A fetch has arrived: its fields by group id."""

    number: int
    outcome: Outcome
    handoff: dict[tuple[int, str], bytes]
    checksums: dict[tuple[int, int], int]
    bytes: Mapping[int, int]
    seconds: float
    since: dict[int, int]

    @classmethod
    def of(cls, event: Arrived) -> Self:
        ids = {group.name: group.id for group in event.fetch.pool.geometry.groups}
        return cls(
            event.fetch.number,
            Outcome.FINISHED if event.finished else Outcome.CONTINUE,
            {(ids[name], part): data for name, parts in event.handoff.items() for part, data in parts.items()},
            {(writer, ids[name]): value for (writer, name), value in event.checksums.items()},
            event.bytes,
            event.seconds,
            {ids[name]: first for name, first in event.since.items()},
        )


@attrs.frozen
class TransferLost:
    number: int
    error: KvprotoError
    proven: bool


@attrs.frozen
class TransferProven:
    number: int


def numbered(event: Any) -> Any:
    """An event of a fetch by the fetch's number."""
    match event:
        case Arrived():
            return Received.of(event)
        case Lost():
            assert event.fetch.done
            return TransferLost(event.fetch.number, event.error, event.pages_free)
        case PagesFree():
            return TransferProven(event.fetch.number)
    return event


class Caller:
    """Stands for the Sink of a fetch: what its handle posts runs at once."""

    name = "d"
    closed = False

    def __init__(self) -> None:
        self._handles_lock = threading.Lock()
        self._driver = self

    def post(self, work: Callable[[], None], failed: Callable[[Exception], object]) -> None:
        work()

    def later(self, call: Callable[[], object], wake: bool = False) -> None:
        call()


def sleep(nodes: Iterable[Driven], longest: float) -> list[int]:
    """Return when a node has something to do, or after the longest time; the descriptors that are readable."""
    poll, planned = select.poll(), [longest]
    for node in nodes:
        for fd in node.filenos():
            poll.register(fd, select.POLLIN)
        if (seconds := node.timeout()) is not None:
            planned.append(seconds)
    return [fd for fd, _ in poll.poll(min(planned) * 1000)]


class Owner:
    """What the requests of a source need of its public class; callbacks run at once."""

    name = "p"

    def __init__(self, pool: Any) -> None:
        self.pool, self._handles_lock, self._driver = pool, threading.Lock(), self

    def later(self, call: Callable[[], object], wake: bool = False) -> None:
        call()


def sink_node(name: str, pool: Any, transports: Sequence[Any] = (), **options: Any) -> SinkNode:
    """A sink rank with these options."""
    return SinkNode(party_of(name, pool), pool, Dialer(), Options(**options), transports)


class DrivenSource(SourceNode):
    """A source rank that tests drive by keys of tickets."""

    def __init__(
        self, party: Any, pool: Any, listener: Any, endpoints: Any, *, transports: Any = (), **options: Any
    ) -> None:
        super().__init__(party, pool, listener, endpoints, Options(**options), transports)
        self.by_key: dict[bytes, Request] = {}

    def expect(self, made: Ticket, content: bytes, tokens: int | None = None, axes: Any = NO_AXES) -> None:  # type: ignore[override]
        request = self.by_key.get(bytes(made.key))
        if request is None:
            prompt = Prompt(range(tokens or 1), axes=axes)
            request = self.by_key[bytes(made.key)] = Request(Owner(self.pool), self, made, prompt)  # type: ignore[arg-type]
        super().expect(request, content, tokens, axes)

    def prefilled(self, made: Ticket, content: bytes, result: Finished) -> None:
        """A request whose prefill is over."""
        self.expect(made, content, result.tokens)
        self.finish(bytes(made.key), result)

    def computed(self, key: bytes, computed: Computed) -> None:  # type: ignore[override]
        super().computed(self.by_key[key], computed)

    def finish(self, key: bytes, finished: Finished) -> None:  # type: ignore[override]
        super().finish(self.by_key[key], finished)

    def refuse(self, request: Any, error: KvprotoError) -> None:
        super().refuse(self.by_key[request] if isinstance(request, bytes) else request, error)

    def reads(self, key: bytes) -> bool:
        """Whether a copy reads the items of a request."""
        return any(send.copies for send in self.by_key[key].sends)

    def asking(self, key: bytes) -> Any:
        """The transfers that wait for a request."""
        request = self.by_key.get(key)
        return request.state.asking() if request is not None and request.state is not None else []


class Nodes:
    """Source ranks and sink ranks, and what they have told."""

    def __init__(self, sources: Sequence[SourceNode], sinks: Sequence[SinkNode]) -> None:
        self.sources, self.sinks = list(sources), list(sinks)
        self.told: list[Any] = []
        self.connected = 0
        """How often a sink has told that all ranks of a source are ready."""
        self.fetches: dict[int, Fetch] = {}
        """By number, from 1."""

    def turn(self, *nodes: SourceNode | SinkNode, ready: Collection[int] | None = None) -> None:
        """One turn of these nodes, or of all; without `ready`, any descriptor may be readable."""
        for node in nodes or (*self.sources, *self.sinks):
            told = node.turn(ready)
            self.told += map(numbered, told)
            self.connected += isinstance(node, SinkNode) and sum(isinstance(e, Connected) for e in told)

    def until(self, condition: Callable[[], Any], longest: float = LONGEST) -> None:
        """Turns of all until it is so; `longest` is how long to sleep where nobody tells that it has become so."""
        self._until(condition, [*self.sources, *self.sinks], longest)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def sources_until(self, condition: Callable[[], Any]) -> None:
        """The sinks do nothing meanwhile."""
        self._until(condition, list(self.sources), LONGEST)

    def _until(self, condition: Callable[[], Any], nodes: list[SourceNode | SinkNode], longest: float) -> None:
        end, ready = time.monotonic() + 2 * LONGEST, None
        while time.monotonic() < end:
            if nodes:
                self.turn(*nodes, ready=ready)
            if condition():
                return
            ready = sleep(nodes, longest)
        raise AssertionError(self.told)

    def ready(self) -> None:
        """Every sink has a source that is ready."""
        self.until(lambda: self.connected >= len(self.sinks))

    def fetch(
        self, sink: int, made: Ticket, content: bytes, tokens: int, items: dict[int, list[int]], first: int = 0,
        seconds: float | None = None,
    ) -> int:  # fmt: skip
        """Ask for tokens [first, tokens) of a request; `items` by group id, from the page of token 0 on."""
        number, node, caller = len(self.fetches) + 1, self.sinks[sink], cast(Any, Caller())
        asked, pool = grants(node.pool, items, first, tokens), cast(Pool, node.pool)
        fetch = Fetch(caller, made, content, pool, node.epoch, asked, tokens, seconds=seconds)
        fetch.number, self.fetches[number] = number, fetch
        node.fetch(fetch)
        return number

    def abort(self, sink: int, number: int = 1) -> None:
        fetch = self.fetches[number]
        if fetch.link is not None:
            fetch.link.abort(fetch, changed_our_mind())

    def count(self, kind: Any) -> int:
        return sum(isinstance(e, kind) for e in self.told)

    def ends(self, kind: Any, count: int) -> list[Any]:
        """Events of this kind, once there are so many."""
        self.until(lambda: self.count(kind) == count)
        return [e for e in self.told if isinstance(e, kind)]

    def first(self, *kinds: type) -> Any:
        """The first event of these kinds; nobody tells that a GPU's copy is over."""
        self.until(lambda: self.count(kinds), 0.01)
        return next(e for e in self.told if isinstance(e, kinds))

    def lost(self) -> tuple[ErrorCode, bool]:
        """The end of the one transfer that is lost: why, and whether its pages are free with proof."""
        (lost,) = self.ends(TransferLost, 1)
        return lost.error.code, lost.proven

    def idle(self) -> bool:
        """Whether no transfer is under way at a sink, and no copy at a source."""
        links = [link for sink in self.sinks for link in sink._links.values()]
        return all(link.idle for link in links) and not any(node._copies.under_way for node in self.sources)

    def close(self) -> None:
        for node in (*self.sinks, *self.sources):
            node.close("over")


def changed_our_mind() -> RemoteError:
    return RemoteError(ErrorCode.ABORTED, "", "changed our mind", "")


def grants(pool: Any, items: dict[int, list[int]], first: int, tokens: int) -> Any:
    """What a sink rank asks for, from page tables by group id."""
    groups = {g.id: g.name for g in pool.layout.geometry.groups if g.kind != ItemKind.HANDOFF}
    return grants_of(pool.page_rules, {groups[g]: table for g, table in items.items() if g in groups}, first, tokens)


def finished(
    items: dict[int, list[int]], tokens: int, handoff: dict[tuple[int, str], bytes] | None = None,
    after: int | None = None,
) -> Finished:  # fmt: skip
    """A request whose prefill is over."""
    tables = {group: np.array(table, np.int64) for group, table in items.items()}
    return Finished(tables, tokens, Outcome.CONTINUE, handoff or {}, after)


def seen(node: SourceNode | SinkNode, see: Callable[[Any, bytes], bytes]) -> None:
    """Show a test each frame that a node sends; what it returns is sent."""
    carrier: Any = node._listener if isinstance(node, SourceNode) else node._dialer
    send = carrier.send
    carrier.send = lambda to, frame, *more: send(to, see(to, frame), *more)


def ahead(monkeypatch: pytest.MonkeyPatch, seconds: float, *modules: ModuleType) -> None:
    """Let the clock of a role be ahead; of both without modules."""
    for module in modules or (*SINK, *SOURCE):
        monkeypatch.setattr(module, "machine", attrs.evolve(machine, monotonic=lambda: time.monotonic() + seconds))


def begin(
    stack: contextlib.ExitStack, source: Callable[..., None], *arguments: Any
) -> tuple[BaseProcess, Callable[[str], None]]:
    """A source of its own process that listens, and a wait for what it says; killed with the stack."""
    ours, theirs = multiprocessing.Pipe()
    process = FORKED.Process(target=source, args=(theirs, *arguments), daemon=True)
    process.start()
    stack.callback(ours.close)
    stack.callback(process.join)
    stack.callback(process.kill)
    hear(ours, "listening")
    return process, lambda said: hear(ours, said)


def hear(conn: Connection, said: str) -> None:
    assert conn.poll(60)
    assert conn.recv() == said


def serve(conn: Connection, node: Driven, each: Callable[[], None] = lambda: None) -> None:
    """Turns of a node until its test says something; `each` runs after every turn."""
    while not conn.poll(0):
        node.turn()
        each()
        sleep([node], 0.01)


def put(pool: Pool, byte: int) -> None:
    """Fill a pool."""
    contents(pool)[:] = byte
