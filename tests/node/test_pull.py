"""Two nodes of which the sink reads: leases, aborts, late sinks, sources that are gone."""

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto.errors import LocalError
from kvproto.events import Disconnected, Expired, Over, Sent
from kvproto.net import Listener, private_address
from kvproto.rank.base import party_of
from kvproto.transport.base import Connection as Connected
from kvproto.transport.shm.transport import ShmCopy, ShmTransport
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.messages import Abort, Done, Drained, Offer, Pulled, Register, Released, Renew, Renewed, Ticket
from tests.node import nodes
from tests.node.any_two import AnyTwo, small_world
from tests.node.test_node import CONTENT, FIRST, ITEMS, TOKENS, Flipping, Pair, ask, check, hand_over, pairs
from tests.pools import allocate, column
from tests.processes import imported
from tests.session.driver import geometry, ticket

imported(__name__)
SIZES = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2))


@attrs.define(eq=False)
class _Slow:
    """A copy whose bytes are there when its owner says so."""

    copy: ShmCopy
    mover: "SlowMover"
    stream: None = None

    @property
    def bytes(self) -> int:
        return self.copy.bytes

    @property
    def done(self) -> bool:
        return self.mover.finished

    def stop(self) -> Proof | None:
        self.mover.stopped = self.mover.finished
        return Proof.PROVEN if self.mover.finished else None


class SlowMover(ShmTransport):
    """A transport like a device's: copies are under way for a while, and some cannot begin."""

    capabilities = attrs.evolve(ShmTransport.capabilities, poll_interval=1e-3)

    def __init__(self, finished: bool = False, busy: int = 0) -> None:
        self.finished, self.busy, self.started, self.stopped = finished, busy, 0, False
        self.connections: list[Connected] = []

    def connect(self, *arguments: Any) -> Connected:
        self.connections.append(super().connect(*arguments))
        return self.connections[-1]

    def start(self, moves: Any) -> Any:
        if self.busy:
            self.busy -= 1
            raise LocalError(ErrorCode.BUSY, "", "a copy", "one more", "wait")
        self.started += 1
        return _Slow(super().start(moves), self)


class Unmapping(ShmTransport):
    """A transport that cannot reach a peer."""

    def connect(self, *_: Any, **__: Any) -> Connected:
        raise AssertionError("nobody writes")


class Unsummed(ShmTransport):
    """A transport that cannot sum."""

    def begin_checksums(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("nobody verifies")


class Wire:
    """What a pair says, by class name."""

    def __init__(self, pair: Pair) -> None:
        self.said: list[Any] = []
        for node in (*pair.sources, *pair.sinks):
            nodes.seen(node, self._see)

    def _see(self, _: Any, frame: bytes) -> bytes:
        self.said.append(decode(frame))
        return frame

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.said if isinstance(m, kind)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    yield from pairs(tmp_path, pull=True)


def reading(pair: Callable[..., Pair], source_tp: int = 1, deadline: float = 60.0) -> tuple[Pair, Wire, SlowMover]:
    """The sink reads from every source rank, and its copies do not end yet."""
    mover = SlowMover()
    made = pair(source_tp, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng(), deadline)
    made.until(lambda: mover.started == source_tp)
    return made, wire, mover


def refuse(made: Pair) -> None:
    """The source has no pages for its request."""
    (source,) = made.sources
    (key,) = source.by_key
    source.refuse(key, LocalError(ErrorCode.INTERNAL, "", "out of pages", ""))


def offered(made: Pair, wire: Wire) -> None:
    """The first sink asks, then does nothing until an offer is under way."""
    made.turn(made.sinks[0])
    made.sources_until(lambda: wire.of(Offer))


def serves_another(made: Pair) -> None:
    """A request of its own ends well."""
    for sink in made.sinks:
        nodes.put(sink.pool, 0)
    made.told.clear()
    check(made, hand_over(made, np.random.default_rng()))
    assert made.count(nodes.Received) == len(made.sinks)
    assert made.idle()


@pytest.mark.parametrize(("source_tp", "sink_tp"), SIZES)
def test_every_byte_is_read_and_verified(pair: Callable[..., Pair], source_tp: int, sink_tp: int) -> None:
    made = pair(source_tp, sink_tp)
    wire = Wire(made)
    check(made, hand_over(made, np.random.default_rng()))
    received = made.ends(nodes.Received, sink_tp)
    assert all(e.checksums and e.handoff for e in received)
    routes = sum(len(e.bytes) for e in received)
    assert (len(wire.of(Offer)), len(wire.of(Pulled)), len(wire.of(Done))) == (routes, routes, 0)
    assert sum(sum(e.bytes.values()) for e in made.ends(Sent, routes)) == sum(sum(e.bytes.values()) for e in received)
    made.until(lambda: len(wire.of(Released)) == routes)


def test_the_sinks_memory_is_open_to_nobody(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1, give=lambda: [Unmapping()])
    wire = Wire(made)
    hand_over(made, np.random.default_rng())
    ours, theirs = sorted(wire.of(Register), key=lambda m: int(m.access))
    assert [bytes(h.data) for r in ours.regions for h in r.handles] == [b""]
    assert all(h.data for r in theirs.regions for h in r.handles)


@pytest.mark.parametrize("one", ["pull_source", "pull_sink"])
def test_one_side_alone_pushes(pair: Callable[..., Pair], one: str) -> None:
    made = pair(1, 1, pull=False, **{one: True})
    wire = Wire(made)
    check(made, hand_over(made, np.random.default_rng()))
    assert (len(wire.of(Done)), wire.of(Offer)) == (1, [])


def test_flipped_bit_is_found(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, take=lambda: [Flipping()])
    hand_over(made, np.random.default_rng())
    assert made.lost() == (ErrorCode.VERIFY_FAILED, True)


def test_without_verify(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, verify=False)
    check(made, hand_over(made, np.random.default_rng()))
    assert made.ends(nodes.Received, 1)[0].checksums == {}


@pytest.mark.parametrize("pull", [False, True])
def test_nothing_is_summed_for_a_sink_that_does_not_verify(pair: Callable[..., Pair], pull: bool) -> None:
    made = pair(2, 1, trust=True, pull=pull, give=lambda: [Unsummed()])
    check(made, hand_over(made, np.random.default_rng()))
    assert made.ends(nodes.Received, 1)[0].checksums == {}


def test_abort_before_the_offer(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    wire = Wire(made)
    rng, ticket_ = np.random.default_rng(), ticket()
    made.ready()
    made.sources[0].expect(ticket_, CONTENT, TOKENS)
    number = made.fetch(0, ticket_, CONTENT, TOKENS, {g: rng.permutation(12)[:3].tolist() for g in (0, 1)})
    made.until(lambda: made.sources[0].asking(bytes(ticket_.key)))
    made.abort(0, number)
    assert made.lost() == (ErrorCode.ABORTED, True)
    items = {g: [0, 1, 2] for g in (0, 1)}
    made.sources[0].finish(bytes(ticket_.key), nodes.finished(items, TOKENS, FIRST))
    made.ends(Over, 1)
    assert wire.of(Offer) == []
    serves_another(made)


def test_abort_that_crosses_the_offer(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    wire = Wire(made)
    ask(made, np.random.default_rng())
    offered(made, wire)
    made.abort(0)
    assert made.lost() == (ErrorCode.ABORTED, True)
    made.ends(Over, 1)
    assert wire.of(Pulled) == []
    serves_another(made)


@pytest.mark.parametrize("source_tp", [1, 2])
def test_abort_during_the_copy_waits_for_it(pair: Callable[..., Pair], source_tp: int) -> None:
    made, wire, mover = reading(pair, source_tp)
    made.abort(0)
    made.turns(5)
    assert (wire.of(Abort), made.count(nodes.TransferLost), made.count(Over)) == ([], 0, 0)
    mover.finished = True
    assert made.lost() == (ErrorCode.ABORTED, True)
    made.ends(Over, source_tp)
    assert (len(wire.of(Drained)), wire.of(Pulled)) == (source_tp, [])
    serves_another(made)


def test_a_copy_that_cannot_begin_renews_its_lease(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover(finished=True, busy=3)
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    sink_items = ask(made, np.random.default_rng())
    made.until(lambda: mover.busy < 3)
    mover.busy = 10**9
    nodes.ahead(monkeypatch, 8)
    made.until(lambda: bool(wire.of(Renewed)))
    mover.busy = 0
    nodes.ahead(monkeypatch, 12)
    made.ends(nodes.Received, 1)
    check(made, sink_items)


def test_a_sink_that_comes_late_asks_for_a_lease_and_reads(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has given nothing up: a lease is a promise, and what it holds it holds until the deadline."""
    made = pair(1, 1)
    wire = Wire(made)
    sink_items = ask(made, np.random.default_rng())
    offered(made, wire)
    nodes.ahead(monkeypatch, 7.6, *nodes.SINK)  # of ten: less than a quarter is left
    made.ends(nodes.Received, 1)
    assert len(wire.of(Renew)) == 1
    check(made, sink_items)


def test_after_the_lease_nothing_is_read(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover(finished=True)
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng())
    offered(made, wire)
    nodes.ahead(monkeypatch, 11)
    (lost,) = made.ends(nodes.TransferLost, 1)
    assert (lost.error.code, lost.proven, mover.started) == (ErrorCode.DEADLINE, True, 0)
    made.ends(Over, 1)
    serves_another(made)


def test_what_was_read_beyond_the_lease_is_not_used(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    made, wire, mover = reading(pair)
    nodes.ahead(monkeypatch, 11)
    mover.finished = True
    (lost,) = made.ends(nodes.TransferLost, 1)
    assert (lost.error.code, lost.error.path, lost.proven) == (ErrorCode.DEADLINE, "lease", True)
    assert (wire.of(Pulled), made.count(nodes.Received)) == ([], 0)
    serves_another(made)


def test_a_ticket_that_ends_takes_the_lease_with_it(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    made, wire, mover = reading(pair, deadline=5)
    assert wire.of(Offer)[0].lease <= 5000
    nodes.ahead(monkeypatch, 6)
    made.ends(Over, 1)
    mover.finished = True
    assert made.lost() == (ErrorCode.DEADLINE, True)
    serves_another(made)


def test_a_refused_request_is_over_once_though_its_lease_ends_later(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, mover = reading(pair)
    refuse(made)
    mover.finished = True
    made.ends(Over, 1)
    nodes.ahead(monkeypatch, 11)
    made.turns(5)
    assert made.count(Over) == 1


def test_what_is_read_after_a_request_is_over_is_not_reported(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, wire, mover = reading(pair)
    refuse(made)
    nodes.ahead(monkeypatch, 11, *nodes.SOURCE)
    made.until(lambda: made.count(Over) == 1)
    mover.finished = True
    made.until(lambda: bool(wire.of(Pulled)))
    made.turns(5)
    assert (made.count(Over), made.count(Sent)) == (1, 0)


def test_a_source_that_says_goodbye_while_it_is_read(pair: Callable[..., Pair]) -> None:
    made, _, mover = reading(pair)
    made.sources.pop().close("over")
    made.until(lambda: made.count(Disconnected) == 1)
    assert made.count(nodes.TransferLost) == 0
    mover.finished = True
    assert made.lost() == (ErrorCode.PEER_LOST, True)
    made.until(lambda: not any(connection.mapped for connection in mover.connections))
    assert mover.connections


def test_a_silent_sink_keeps_what_it_was_lent(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is no proof that nobody reads; the deadline of the ticket is."""
    made = pair(1, 1, lease=50.0)
    wire = Wire(made)
    ask(made, np.random.default_rng())
    (source,) = made.sources

    def told(seconds: float) -> list[Any]:
        nodes.ahead(monkeypatch, seconds, *nodes.SOURCE)
        return [e for _ in range(3) for e in source.turn() if isinstance(e, Over)]

    offered(made, wire)
    assert told(45) == []
    assert [type(e) for e in told(61)] == [Expired]


@pytest.mark.parametrize("pull", [False, True])
def test_a_sink_that_registers_and_leaves_at_once(pair: Callable[..., Pair], pull: bool) -> None:
    made = pair(1, 1, pull=pull)
    wire = Wire(made)
    made.until(lambda: wire.of(Register))
    made.sinks.pop().close("changed our mind")
    made.ends(Disconnected, 1)
    assert not made.sources[0].endpoint.sessions


def test_one_sink_rank_gives_up_and_the_other_reads(pair: Callable[..., Pair]) -> None:
    movers = [SlowMover(), SlowMover(finished=True)]
    taken = iter(movers)
    made = pair(1, 2, take=lambda: [next(taken)])
    (first, second), sink_items = made.sinks, ask(made, np.random.default_rng())
    made.until(lambda: movers[0].started == 1 and made.count(nodes.Received) == 1)
    made.abort(0)
    movers[0].finished = True
    assert made.ends(nodes.TransferLost, 1)[0].proven
    made.ends(Over, 1)
    made.sinks = [second]
    check(made, sink_items[1:])
    made.sinks = [first, second]
    serves_another(made)


def test_an_offer_of_fewer_tokens_than_were_asked_for_is_not_read(pair: Callable[..., Pair]) -> None:
    mover = SlowMover(finished=True)
    made = pair(1, 1, take=lambda: [mover])
    lies = [True]

    def lying(_: Any, frame: bytes) -> bytes:
        message = decode(frame)
        if not isinstance(message, Offer) or not lies:
            return frame
        short = attrs.evolve(message.grants[1], count=4, valid=4, items=message.grants[1].items[:1])  # type: ignore[index]
        return encode(attrs.evolve(message, grants=(message.grants[0], short, message.grants[2])))

    nodes.seen(made.sources[0], lying)
    ask(made, np.random.default_rng())
    (lost,) = made.ends(nodes.TransferLost, 1)
    assert (lost.error.code, lost.proven, mover.started) == (ErrorCode.BAD_GRANT, True, 0)
    made.ends(Over, 1)
    lies.clear()
    serves_another(made)


def source(conn: Connection, address: str, made: Ticket) -> None:
    """A prefill rank that offers, and then stands still."""
    pool = allocate(geometry(1), 0, ITEMS)
    nodes.put(pool, 7)
    node = nodes.DrivenSource(party_of("p", pool), pool, Listener(address), {0: address}, pull=True)
    said: list[Any] = []
    nodes.seen(node, lambda _, frame: (said.append(decode(frame)), frame)[1])
    node.prefilled(made, CONTENT, nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    conn.send("listening")

    def stand_still() -> None:
        if any(isinstance(m, Offer) for m in said):
            conn.send("offered")
            conn.recv()

    nodes.serve(conn, node, stand_still)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_source_is_killed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    """Its memory stays what it was; the lease decides whether it may be used."""
    address, made = private_address(tmp_path, "kv"), ticket()
    with contextlib.ExitStack() as stack:
        process, hear = nodes.begin(stack, source, address, made)
        pool, mover = allocate(geometry(1), 0, ITEMS), SlowMover()
        sink = nodes.sink_node("d", pool, transports=[mover], pull=True)
        sink.connect(nodes.PREFILL, address)
        alone = stack.enter_context(contextlib.closing(nodes.Nodes([], [sink])))
        alone.ready()
        alone.fetch(0, made, CONTENT, TOKENS, {g: [4, 5, 6] for g in (0, 1)})
        alone.until(lambda: mover.started)
        hear("offered")
        process.kill()
        process.join()
        mover.finished = True
        if not in_time:
            nodes.ahead(monkeypatch, 11, *nodes.SINK)
            alone.until(lambda: mover.stopped)  # the copy is stopped; Drained will never come
            nodes.ahead(monkeypatch, 50, *nodes.SINK)
        (over,) = alone.ends(nodes.Received | nodes.TransferLost, 1)
    if in_time:
        assert isinstance(over, nodes.Received)
        assert (column(pool, 0, 0, "latent")[[4, 5]] == 7).all()
    else:
        assert (over.error.code, over.proven) == (ErrorCode.DEADLINE, True)


@pytest.mark.parametrize("number", range(12))
def test_any_two_engines(tmp_path: Path, number: int) -> None:
    with contextlib.closing(AnyTwo(tmp_path, small_world(number), lambda: {"pull": True}, pull=True)) as made:
        made.finish()
        made.ask()
        assert isinstance(made.ends(nodes.Received | nodes.TransferLost, 1)[0], nodes.Received)
        made.check()
