"""Two nodes of which the sink reads: leases, aborts, late sinks, sources that are gone."""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import kvproto.node.sink
import kvproto.node.source
from kvproto.errors import LocalError
from kvproto.net import Dialer, Listener, private_address
from kvproto.node import Finished, SinkNode, SourceNode
from kvproto.node.pool import allocate
from kvproto.node.sink import Received
from kvproto.node.source import Sent
from kvproto.session import Party
from kvproto.session.events import Expired, Lost, Ready, Released, SessionClosed
from kvproto.transport.shm.transport import ShmCopy, ShmTransport
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Outcome, Proof
from kvproto.wire.messages import Abort, Done, Drained, Offer, Pulled, Register, Renew, Renewed, Ticket
from kvproto.wire.messages import Released as ReleasedNotice
from tests.node.any_two import AnyTwo, small_worlds
from tests.node.nodes import Nodes, begin, later
from tests.node.test_node import CONTENT, FIRST, ITEMS, TOKENS, Flipping, Pair, ask, check, hand_over
from tests.session.driver import geometry, ticket

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
        return Proof.PROVEN if self.mover.finished else None


class SlowMover(ShmTransport):
    """A mover like a device's: copies are under way for a while, and some cannot begin."""

    def __init__(self, finished: bool = False, busy: int = 0) -> None:
        self.finished, self.busy, self.started = finished, busy, 0

    def start(self, moves: Any) -> Any:
        if self.busy:
            self.busy -= 1
            raise LocalError(ErrorCode.BUSY, "", "a copy", "one more", "wait")
        self.started += 1
        return _Slow(super().start(moves), self)


class Unsummed(ShmTransport):
    """A mover that cannot sum."""

    def checksums(self, *_: Any, **__: Any) -> dict[int, int]:
        raise AssertionError("nobody verifies")


class Trusting(SinkNode):
    """A decode rank without VERIFY."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args[:5], False, *args[6:])


class Wire:
    """What a pair says, by class name."""

    def __init__(self, pair: Pair) -> None:
        self.said: list[Any] = []
        for node in (*pair.sources, *pair.sinks):
            carrier: Any = node._listener if isinstance(node, SourceNode) else node._dialer
            carrier.send = self._through(carrier.send)

    def _through(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def seen(to: Any, frame: bytes) -> Any:
            self.said.append(decode(frame))
            return send(to, frame)

        return seen

    def of(self, kind: type) -> list[Any]:
        return [m for m in self.said if isinstance(m, kind)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    tmp_path.chmod(0o700)
    made: list[Pair] = []

    def make(source_tp: int, sink_tp: int, **options: Any) -> Pair:
        made.append(Pair(tmp_path, geometry(source_tp), geometry(sink_tp), **{"pull": True} | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def offered(made: Pair, wire: Wire) -> None:
    """The first sink asks, then does nothing until an offer is under way."""
    made.sinks[0].poll()
    made.sources_until(lambda: wire.of(Offer))


def serves_another(made: Pair) -> None:
    """A request of its own ends well."""
    for sink in made.sinks:
        np.frombuffer(sink.pool.memory.buffer, np.uint8)[:] = 0  # type: ignore[attr-defined]
    made.told = [e for e in made.told if isinstance(e, Ready)]
    check(made, hand_over(made, np.random.default_rng()))
    assert made.count(Received) == len(made.sinks)
    assert not any(node.busy for node in (*made.sinks, *made.sources))


@pytest.mark.parametrize(("source_tp", "sink_tp"), SIZES)
def test_every_byte_is_read_and_verified(pair: Callable[..., Pair], source_tp: int, sink_tp: int) -> None:
    made = pair(source_tp, sink_tp)
    wire = Wire(made)
    check(made, hand_over(made, np.random.default_rng()))
    received = made.ends(Received, sink_tp)
    assert all(e.checksums and e.handoff for e in received)
    routes = sum(len(e.bytes) for e in received)
    assert (len(wire.of(Offer)), len(wire.of(Pulled)), len(wire.of(Done))) == (routes, routes, 0)
    assert sum(sum(e.bytes.values()) for e in made.ends(Sent, routes)) == sum(sum(e.bytes.values()) for e in received)
    made.until(lambda: len(wire.of(ReleasedNotice)) == routes)


def test_the_sinks_memory_is_open_to_nobody(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    wire = Wire(made)
    hand_over(made, np.random.default_rng())
    ours, theirs = sorted(wire.of(Register), key=lambda m: int(m.access))
    assert [bytes(h.data) for r in ours.regions for h in r.handles] == [b""]
    assert all(h.data for r in theirs.regions for h in r.handles)
    assert all(not way.connection.mapped for way in made.sources[0]._ways.values())


@pytest.mark.parametrize("one", ["pull_source", "pull_sink"])
def test_one_side_alone_pushes(pair: Callable[..., Pair], one: str) -> None:
    made = pair(1, 1, pull=False, **{one: True})
    wire = Wire(made)
    check(made, hand_over(made, np.random.default_rng()))
    assert (len(wire.of(Done)), wire.of(Offer)) == (1, [])


def test_flipped_bit_is_found(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, node=Flipping)
    hand_over(made, np.random.default_rng())
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.VERIFY_FAILED, Proof.PROVEN)


def test_without_verify(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1, verify=False)
    check(made, hand_over(made, np.random.default_rng()))
    assert made.ends(Received, 1)[0].checksums == {}


@pytest.mark.parametrize("pull", [False, True])
def test_nothing_is_summed_for_a_sink_that_does_not_verify(pair: Callable[..., Pair], pull: bool) -> None:
    made = pair(2, 1, node=Trusting, pull=pull, give=lambda: [Unsummed()])
    check(made, hand_over(made, np.random.default_rng()))
    assert made.ends(Received, 1)[0].checksums == {}


def test_abort_before_the_offer(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    wire = Wire(made)
    rng, ticket_ = np.random.default_rng(), ticket()
    made.until(lambda: made.count(Ready) == 1)
    made.sources[0].expect(ticket_, CONTENT)
    number = made.sinks[0].transfer(ticket_, CONTENT, 0, TOKENS, {g: rng.permutation(12)[:3].tolist() for g in (0, 1)})
    made.until(lambda: bool(made.sources[0].endpoint.asking(bytes(ticket_.key))))
    made.sinks[0].abort(number, "changed our mind")
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.ABORTED, Proof.PROVEN)
    items = {g: [0, 1, 2] for g in (0, 1)}
    made.sources[0].finish(bytes(ticket_.key), Finished(items, TOKENS, Outcome.CONTINUE, FIRST))
    made.ends(Released, 1)
    assert wire.of(Offer) == []
    serves_another(made)


def test_abort_that_crosses_the_offer(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    wire = Wire(made)
    ask(made, np.random.default_rng())
    offered(made, wire)
    made.sinks[0].abort(1, "changed our mind")
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.ABORTED, Proof.PROVEN)
    made.ends(Released, 1)
    assert wire.of(Pulled) == []
    serves_another(made)


@pytest.mark.parametrize("source_tp", [1, 2])
def test_abort_during_the_copy_waits_for_it(pair: Callable[..., Pair], source_tp: int) -> None:
    mover = SlowMover()
    made = pair(source_tp, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng())
    made.until(lambda: mover.started == source_tp)
    made.sinks[0].abort(1, "changed our mind")
    for _ in range(5):
        made.told += [e for node in (*made.sinks, *made.sources) for e in node.poll()]
    assert (wire.of(Abort), made.count(Lost), made.count(Released)) == ([], 0, 0)
    mover.finished = True
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.ABORTED, Proof.PROVEN)
    made.ends(Released, source_tp)
    assert (len(wire.of(Drained)), wire.of(Pulled)) == (source_tp, [])
    serves_another(made)


def test_a_copy_that_cannot_begin_renews_its_lease(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover(finished=True, busy=3)
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    sink_items = ask(made, np.random.default_rng())
    made.until(lambda: mover.busy < 3)
    mover.busy = 10**9
    monkeypatch.setattr(kvproto.node.sink, "time", later(8))
    monkeypatch.setattr(kvproto.node.source, "time", later(8))
    made.until(lambda: bool(wire.of(Renewed)))
    mover.busy = 0
    monkeypatch.setattr(kvproto.node.sink, "time", later(12))
    monkeypatch.setattr(kvproto.node.source, "time", later(12))
    made.ends(Received, 1)
    check(made, sink_items)


def test_a_sink_that_comes_late_asks_for_a_lease_and_reads(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has given nothing up: a lease is a promise, and what it holds it holds until the deadline."""
    made = pair(1, 1)
    wire = Wire(made)
    sink_items = ask(made, np.random.default_rng())
    offered(made, wire)
    monkeypatch.setattr(kvproto.node.sink, "time", later(9))  # of ten
    made.ends(Received, 1)
    assert len(wire.of(Renew)) == 1
    check(made, sink_items)


def test_after_the_lease_nothing_is_read(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover(finished=True)
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng())
    offered(made, wire)
    for module in (kvproto.node.sink, kvproto.node.source):
        monkeypatch.setattr(module, "time", later(11))
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof, mover.started) == (ErrorCode.DEADLINE, Proof.PROVEN, 0)
    made.ends(Released, 1)
    serves_another(made)


def test_what_was_read_beyond_the_lease_is_not_used(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng())
    made.until(lambda: mover.started == 1)
    for module in (kvproto.node.sink, kvproto.node.source):
        monkeypatch.setattr(module, "time", later(11))
    mover.finished = True
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.error.path, lost.proof) == (ErrorCode.DEADLINE, "lease", Proof.PROVEN)
    assert (wire.of(Pulled), made.count(Received)) == ([], 0)
    serves_another(made)


def test_a_ticket_that_ends_takes_the_lease_with_it(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    made = pair(1, 1, take=lambda: [mover])
    wire = Wire(made)
    ask(made, np.random.default_rng(), deadline=5)
    made.until(lambda: mover.started == 1)
    assert wire.of(Offer)[0].lease <= 5000
    for module in (kvproto.node.sink, kvproto.node.source):
        monkeypatch.setattr(module, "time", later(6))
    made.ends(Expired, 1)
    mover.finished = True
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.DEADLINE, Proof.PROVEN)
    serves_another(made)


def test_a_source_that_says_goodbye_while_it_is_read(pair: Callable[..., Pair]) -> None:
    mover = SlowMover()
    made = pair(1, 1, take=lambda: [mover])
    ask(made, np.random.default_rng())
    made.until(lambda: mover.started == 1)
    made.sources.pop().close("over")
    made.until(lambda: made.count(SessionClosed) == 1)
    assert made.count(Lost) == 0
    mover.finished = True
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.PEER_LOST, Proof.PROVEN)
    assert made.sinks[0]._puller._ways == {}


def test_a_silent_sink_keeps_what_it_was_lent(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is no proof that nobody reads; the deadline of the ticket is."""
    made = pair(1, 1, lease=50.0)
    wire = Wire(made)
    ask(made, np.random.default_rng())
    (source,) = made.sources

    def told(seconds: float) -> list[Any]:
        monkeypatch.setattr(kvproto.node.source, "time", later(seconds))
        return [e for _ in range(3) for e in source.poll() if isinstance(e, Released | Expired)]

    offered(made, wire)
    assert told(45) == []
    assert [type(e) for e in told(61)] == [Expired]


@pytest.mark.parametrize("pull", [False, True])
def test_a_sink_that_registers_and_leaves_at_once(pair: Callable[..., Pair], pull: bool) -> None:
    made = pair(1, 1, pull=pull)
    wire, (source,) = Wire(made), made.sources
    sink = made.sinks.pop()
    for _ in range(2000):
        sink.poll()
        if wire.of(Register):
            break
        source.poll()
    sink.close("changed our mind")
    made.ends(SessionClosed, 1)
    assert not source.endpoint.sessions


def test_one_sink_rank_gives_up_and_the_other_reads(pair: Callable[..., Pair]) -> None:
    movers = [SlowMover(), SlowMover(finished=True)]
    taken = iter(movers)
    made = pair(1, 2, take=lambda: [next(taken)])
    (first, second), sink_items = made.sinks, ask(made, np.random.default_rng())
    made.until(lambda: movers[0].started == 1 and made.count(Received) == 1)
    first.abort(1, "changed our mind")
    movers[0].finished = True
    assert made.ends(Lost, 1)[0].proof == Proof.PROVEN
    made.ends(Released, 1)
    made.sinks = [second]
    check(made, sink_items[1:])
    made.sinks = [first, second]
    serves_another(made)


def test_an_offer_of_fewer_tokens_than_were_asked_for_is_not_read(pair: Callable[..., Pair]) -> None:
    mover = SlowMover(finished=True)
    made = pair(1, 1, take=lambda: [mover])
    send, lies = made.sources[0]._listener.send, [True]

    def lying(conn: Any, frame: bytes) -> bool:
        message = decode(frame)
        if isinstance(message, Offer) and lies:
            short = attrs.evolve(message.grants[1], count=4, valid=4, items=message.grants[1].items[:1])  # type: ignore[index]
            message = attrs.evolve(message, grants=(message.grants[0], short, message.grants[2]))
            return send(conn, encode(message))
        return send(conn, frame)

    made.sources[0]._listener.send = lying  # type: ignore[method-assign]
    ask(made, np.random.default_rng())
    (lost,) = made.ends(Lost, 1)
    assert (lost.error.code, lost.proof, mover.started) == (ErrorCode.BAD_GRANT, Proof.PROVEN, 0)
    made.ends(Released, 1)
    lies.clear()
    serves_another(made)


def source(conn: Connection, address: str, made: Ticket) -> None:
    """A prefill rank that offers, and then stands still."""
    pool = allocate(geometry(1), 0, ITEMS)
    np.frombuffer(pool.memory.buffer, np.uint8)[:] = 7  # type: ignore[attr-defined]
    node = SourceNode(Party("p", 0, 0, 7), geometry(1), pool, Listener(address), {0: address}, pull=True)
    node.expect(made, CONTENT)
    items = {g: [1, 2, 3] for g in (0, 1)}
    node.finish(bytes(made.key), Finished(items, TOKENS, Outcome.CONTINUE, FIRST))
    conn.send("listening")
    while not conn.poll(0.002):
        node.poll()
        if node._offers:
            conn.send("offered")
            conn.recv()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_source_is_killed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    """Its memory stays what it was; the lease decides whether it may be used."""
    tmp_path.chmod(0o700)
    address, made = private_address(tmp_path, "kv"), ticket()
    with contextlib.ExitStack() as stack:
        process, hear = begin(stack, source, address, made)
        pool, mover = allocate(geometry(1), 0, ITEMS), SlowMover()
        party = Party("d", 0, 0, secrets.randbits(60))
        sink = SinkNode(party, geometry(1), pool, Dialer(), address, movers=[mover], pull=True)
        alone = stack.enter_context(contextlib.closing(Nodes([], [sink])))
        alone.ends(Ready, 1)
        sink.transfer(made, CONTENT, 0, TOKENS, {g: [4, 5, 6] for g in (0, 1)})
        alone.until(lambda: mover.started)
        hear("offered")
        process.kill()
        process.join()
        mover.finished = True
        if not in_time:
            monkeypatch.setattr(kvproto.node.sink, "time", later(11))
            alone.until(lambda: not sink.busy)  # the copy is stopped; Drained will never come
            monkeypatch.setattr(kvproto.node.sink, "time", later(50))
        (over,) = alone.ends(Received | Lost, 1)
    if in_time:
        assert isinstance(over, Received)
        assert (pool.array(0, 0, "latent")[[4, 5]] == 7).all()
    else:
        assert (over.error.code, over.proof) == (ErrorCode.DEADLINE, Proof.PROVEN)


@pytest.mark.parametrize("seed", small_worlds(12))
def test_any_two_engines(tmp_path: Path, seed: int) -> None:
    with contextlib.closing(AnyTwo(tmp_path, seed, lambda: {"pull": True}, pull=True)) as made:
        made.finish()
        made.ask()
        assert isinstance(made.ends(Received | Lost, 1)[0], Received)
        made.check()
