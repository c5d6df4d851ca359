"""One sink rank and several source replicas over one pool: what one of them does costs the others nothing."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest

from kvproto import Ticket
from kvproto.errors import LocalError
from kvproto.events import Disconnected, Over, Refused
from kvproto.net import Listener, private_address
from kvproto.planning.geometry import Geometry
from kvproto.rank.base import party_of
from kvproto.sink.node import Replica
from kvproto.source.node import SourceNode
from kvproto.transport.base import Exposure, Move, Transport
from kvproto.transport.shm.transport import ShmCopy, ShmTransport
from kvproto.wire.enums import ErrorCode
from kvproto.wire.enums import Transport as Transports
from kvproto.wire.messages import Handle
from tests.node import nodes
from tests.node.test_death import prefill
from tests.node.test_node import CONTENT, FIRST, ITEMS, TOKENS
from tests.node.test_pull import SlowMover
from tests.pools import allocate, column, memory
from tests.session.driver import geometry, ticket

P0, P1, Q0 = ("p", 0), ("p", 1), ("q", 0)
PAGES = {P0: [1, 2, 3], P1: [4, 5, 6], Q0: [7, 8, 9]}
"""Of the sink, for a request of each replica."""
HELD = [0, 1, 2]
"""Of every source."""


class Fleet(nodes.Nodes):
    """A sink and the sources that a test opens; each source's memory holds a byte of its own."""

    def __init__(self, folder: Path, transports: Sequence[Transport] = ()) -> None:
        self.folder = folder
        self.pool = allocate(geometry(1), 0, ITEMS)
        self.sink = nodes.sink_node("d", self.pool, transports=transports)
        super().__init__([], [self.sink])

    def address(self, replica: Replica) -> str:
        return private_address(self.folder, f"{replica[0]}-{replica[1]}")

    def source(self, replica: Replica, byte: int, to: Geometry | None = None, **options: Any) -> SourceNode:
        """A source replica of one rank, in this process."""
        made = attrs.evolve(to or geometry(1), replica=replica[1])
        pool, address = allocate(made, 0, ITEMS), self.address(replica)
        nodes.put(pool, byte)
        node = nodes.DrivenSource(party_of(replica[0], pool), pool, Listener(address), {0: address}, **options)
        self.sources.append(node)
        return node

    def end(self, source: SourceNode) -> None:
        """Its process goes on."""
        self.sources.remove(source)
        source.close("over")
        memory(source.pool).close()

    def connect(self, *replicas: Replica) -> None:
        for replica in replicas:
            self.sink.connect(replica, self.address(replica))

    def request(self, replica: Replica, source: SourceNode | None) -> Ticket:
        """A request that its source has computed; without one, that nobody knows."""
        made = attrs.evolve(ticket(), engine=replica[0], replica=replica[1])
        if source is not None:
            source.prefilled(made, CONTENT, nodes.finished(dict.fromkeys((0, 1), HELD), TOKENS, FIRST))
        return made

    def ask(self, replica: Replica, source: SourceNode | None = None, made: Ticket | None = None) -> int:
        made = made or self.request(replica, source)
        return self.fetch(0, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[replica]))

    def ended(self, number: int) -> Any:
        """What a transfer has come to."""
        kinds = nodes.Received | nodes.TransferLost
        self.until(lambda: any(isinstance(e, kinds) and e.number == number for e in self.told))
        return next(e for e in self.told if isinstance(e, kinds) and e.number == number)

    def holds(self, replica: Replica, byte: int) -> bool:
        return bool((column(self.pool, 0, 0, "latent")[PAGES[replica][:2]] == byte).all())


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.closing(Fleet(tmp_path)) as made:
        yield made


def asked(fleet: Fleet) -> tuple[SourceNode, Ticket, int]:
    """A source, the ticket of a request that it has been asked for, and the number of the transfer."""
    source = fleet.source(P0, 1)
    fleet.connect(P0)
    made = attrs.evolve(ticket(), engine="p")
    source.expect(made, CONTENT, TOKENS)
    number = fleet.ask(P0, made=made)
    fleet.until(lambda: source.asking(bytes(made.key)))
    return source, made, number


def test_replicas_and_engines_write_one_pool(fleet: Fleet) -> None:
    sources = {replica: fleet.source(replica, byte) for byte, replica in enumerate((P0, P1, Q0), 10)}
    fleet.connect(*sources)
    numbers = {replica: fleet.ask(replica, source) for replica, source in sources.items()}  # before they are ready
    for byte, (replica, number) in enumerate(numbers.items(), 10):
        assert isinstance(fleet.ended(number), nodes.Received)
        assert fleet.holds(replica, byte)
    fleet.ends(Over, 3)
    assert fleet.idle()


def test_a_source_that_is_gone_is_greeted_again_by_the_next_fetch(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it listened before, and its other requests go on meanwhile."""
    fleet.connect(P0, Q0)
    stays = fleet.source(Q0, 2)
    for byte in (10, 11, 12):
        source = fleet.source(P0, byte)
        assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)
        assert fleet.holds(P0, byte)
        fleet.end(source)
        fleet.until(lambda: fleet.sink._links[P0].over)
        assert isinstance(fleet.ended(fleet.ask(Q0, stays)), nodes.Received)
    number = fleet.ask(P0)  # greets a listener that is no more
    nodes.ahead(monkeypatch, 31, *nodes.SINK)
    assert fleet.ended(number).error.code == ErrorCode.PEER_LOST


class ForOne(ShmTransport):
    """Has memory for one peer."""

    exposed = 0

    def expose(self, *given: Any) -> Exposure:
        self.exposed += 1
        if self.exposed > 1:
            raise LocalError(ErrorCode.BUSY, "regions", "one peer", "another")
        return super().expose(*given)


def test_a_source_to_which_no_memory_can_be_exposed_costs_its_own_link_alone(tmp_path: Path) -> None:
    with contextlib.closing(Fleet(tmp_path, [ForOne()])) as fleet:
        first = fleet.source(P0, 1)
        fleet.connect(P0)
        assert isinstance(fleet.ended(fleet.ask(P0, first)), nodes.Received)
        second = fleet.source(Q0, 2)
        fleet.connect(Q0)
        lost = fleet.ended(fleet.ask(Q0, second))
        assert (lost.error.code, lost.error.path) == (ErrorCode.BUSY, "regions")
        assert isinstance(fleet.ended(fleet.ask(P0, first)), nodes.Received)


class Hidden(ShmTransport):
    """Exposes memory that nobody can map, or copies that fail, until it hears of it."""

    heard = 0

    def expose(self, *given: Any) -> Exposure:
        made = super().expose(*given)
        other = Handle(transport=Transports.SHM, data=msgpack.packb([os.getpid(), 1 << 20, "0" * 32, 0]))
        return made if self.heard else attrs.evolve(made, handles=dict.fromkeys(made.handles, (other,)))

    def unreachable(self) -> None:
        self.heard += 1


class Unwritten(ShmTransport):
    """A source whose copies fail until `sink` exposes its memory anew."""

    def __init__(self, sink: Hidden) -> None:
        self._sink = sink

    def start(self, moves: Sequence[Move]) -> ShmCopy:
        if not self._sink.heard:
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "", "the write", "a listener that is gone")
        return super().start(moves)


@pytest.mark.parametrize("refused", [True, False], ids=["at Register", "by each copy"])
def test_memory_that_a_source_cannot_reach_is_exposed_anew(tmp_path: Path, refused: bool) -> None:
    """Where fetches fail in a row: one that arrives in between begins the count again."""
    transport = Hidden()
    if not refused:
        transport.expose = ShmTransport().expose  # type: ignore[method-assign]
    with contextlib.closing(Fleet(tmp_path, [transport])) as fleet:
        source = fleet.source(P0, 1, transports=[ShmTransport() if refused else Unwritten(transport)])
        fleet.connect(P0)
        for _ in range(2):
            assert fleet.ended(fleet.ask(P0, source)).error.code == ErrorCode.TRANSPORT_FAILED
            assert not transport.heard
        assert fleet.ended(fleet.ask(P0, source)).error.code == ErrorCode.TRANSPORT_FAILED
        assert transport.heard == 1
        for _ in range(3):
            assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)
        assert fleet.holds(P0, 1)
        assert transport.heard == 1


def test_links_that_are_over_leave_no_descriptor_and_no_mapping(fleet: Fleet) -> None:
    fleet.connect(P0)

    def round_trip() -> tuple[int, int]:
        source = fleet.source(P0, 1)
        assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)
        fleet.end(source)
        fleet.until(lambda: fleet.sink._links[P0].over)
        return len(os.listdir("/proc/self/fd")), sum("memfd" in line for line in Path("/proc/self/maps").open())

    for _ in range(3):
        round_trip()
    fds, maps = round_trip()
    counts = [round_trip() for _ in range(5)]
    assert max(f for f, _ in counts) <= fds + 2  # ZeroMQ closes a socket when it likes
    assert all(m <= maps for _, m in counts)


def test_a_source_that_never_answers(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost after a while, not before; others serve meanwhile; when it comes, it is heard."""
    other = fleet.source(Q0, 2)
    fleet.connect(P0, Q0)
    number = fleet.ask(P0)
    assert isinstance(fleet.ended(fleet.ask(Q0, other)), nodes.Received)
    assert not fleet.count(nodes.TransferLost)
    with monkeypatch.context() as patch:
        nodes.ahead(patch, 31, *nodes.SINK)
        lost = fleet.ended(number)
    assert (lost.error.code, lost.proven) == (ErrorCode.PEER_LOST, True)
    late = fleet.source(P0, 1)
    assert isinstance(fleet.ended(fleet.ask(P0, late)), nodes.Received)
    assert fleet.holds(P0, 1)


def test_a_source_of_other_weights_is_refused_and_costs_the_others_nothing(fleet: Fleet) -> None:
    other = fleet.source(Q0, 2)
    wrong = fleet.source(P0, 1, geometry(1, weights="b"))
    fleet.connect(P0, Q0)
    for _ in range(2):  # a later fetch asks again, and is told the same
        lost = fleet.ended(fleet.ask(P0, wrong))
        assert (lost.error.code, lost.proven) == (ErrorCode.IDENTITY_MISMATCH, True)
    assert fleet.count(Refused)
    assert isinstance(fleet.ended(fleet.ask(Q0, other)), nodes.Received)


def test_a_source_that_nobody_connected(fleet: Fleet) -> None:
    lost = fleet.ended(fleet.ask(P0))
    assert (lost.error.code, lost.proven) == (ErrorCode.WRONG_PEER, True)


def test_abort_of_a_fetch_that_waits_for_its_link(fleet: Fleet) -> None:
    fleet.connect(P0)
    number = fleet.ask(P0)
    fleet.abort(0, number)
    lost = fleet.ended(number)
    assert (lost.error.code, lost.proven) == (ErrorCode.ABORTED, True)
    assert fleet.idle()


def test_disconnect_ends_what_is_under_way(fleet: Fleet) -> None:
    """What has not been asked is lost at once; what was asked is lost too, and the source frees its pages."""
    source, made, number = asked(fleet)
    fleet.sink.disconnect(P0, "enough")
    assert fleet.ended(number).error.code in (ErrorCode.PEER_LOST, ErrorCode.ABORTED)
    source.finish(bytes(made.key), nodes.finished(dict.fromkeys((0, 1), HELD), TOKENS, FIRST))
    fleet.ends(Over, 1)
    lost = fleet.ended(fleet.ask(P0, source))
    assert lost.error.code == ErrorCode.WRONG_PEER
    fleet.connect(P0)
    assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)


def test_a_run_of_a_source_whose_clock_was_ahead_keeps_no_later_one_out(fleet: Fleet) -> None:
    """KVP-SES-OLDER: nothing is remembered of incarnations, in whatever order runs are met."""
    earlier, former = fleet.source(P0, 1), fleet.address(P0)
    pool, elsewhere = allocate(geometry(1), 0, ITEMS), fleet.address(Q0)
    nodes.put(pool, 2)
    party = party_of("p", pool)
    party = attrs.evolve(party, incarnation=party.incarnation + (365 * 86_400_000 << 20))  # its clock is a year ahead
    later = nodes.DrivenSource(party, pool, Listener(elsewhere), {0: elsewhere})
    fleet.sources.append(later)
    for address, source, byte in ((former, earlier, 1), (elsewhere, later, 2)):
        fleet.sink.connect(P0, address)
        assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)
        assert fleet.holds(P0, byte)
    for address, source, byte in ((former, earlier, 1), (elsewhere, later, 2)):
        fleet.sink.connect(P0, address)
        assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)
        assert fleet.holds(P0, byte)


def test_a_connection_that_breaks_loses_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-RESUME, over sockets: a request that is computed when nothing reaches the sink arrives by the next."""
    source, made, number = asked(fleet)
    ((session, before),) = source.endpoint.sessions.items()
    conn = before.conn
    fleet.sink._dialer.drop(fleet.sink._links[P0])
    source.finish(bytes(made.key), nodes.finished(dict.fromkeys((0, 1), HELD), TOKENS, FIRST))
    fleet.until(lambda: not source._copies.under_way)
    nodes.ahead(monkeypatch, 6, *nodes.SINK)  # it pings, and hears that nobody knows it
    fleet.turn()
    nodes.ahead(monkeypatch, 6)
    assert isinstance(fleet.ended(number), nodes.Received)
    assert fleet.holds(P0, 1)
    assert (list(source.endpoint.sessions), before.conn == conn) == ([session], False)
    assert not fleet.count(Disconnected)


def test_a_later_run_of_a_sink_takes_over(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-SES-SUPERSEDE: the earlier one is told, again and again, and the later one is served."""
    slow = SlowMover()
    source = fleet.source(P0, 1, transports=[slow])
    fleet.connect(P0)
    number = fleet.ask(P0, source)
    fleet.until(lambda: slow.started)
    later = nodes.sink_node("d", fleet.pool)
    fleet.sinks.append(later)
    later.connect(P0, fleet.address(P0))
    fleet.ready()
    slow.finished = True
    fleet.sinks.remove(later)
    with monkeypatch.context() as patch:
        nodes.ahead(patch, 11, *nodes.SINK)  # the earlier one hears of it when it asks after its source
        lost = fleet.ended(number)
    assert lost.error.code in (ErrorCode.SUPERSEDED, ErrorCode.PEER_LOST)
    lost = fleet.ended(fleet.ask(P0, source))
    assert lost.error.code == ErrorCode.SUPERSEDED
    fleet.sinks.insert(0, later)
    assert isinstance(fleet.ended(fleet.ask(P0, source)), nodes.Received)


def other_process(stack: contextlib.ExitStack, fleet: Fleet, replica: Replica, endless: bool) -> tuple[Ticket, Any]:
    made = attrs.evolve(ticket(), engine=replica[0], replica=replica[1])
    return made, nodes.begin(stack, prefill, fleet.address(replica), made, endless, replica[0])[0]


def test_a_process_that_has_connected_and_hangs_loses_a_fetch_at_its_deadline(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        made, process = other_process(stack, fleet, Q0, endless=False)
        fleet.connect(Q0)
        fleet.ready()
        os.kill(process.pid, signal.SIGSTOP)
        number = fleet.fetch(0, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[Q0]), seconds=5.0)
        with monkeypatch.context() as patch:
            nodes.ahead(patch, 6, *nodes.SINK)
            fleet.turn(fleet.sink)
        with monkeypatch.context() as patch:
            nodes.ahead(patch, 60, *nodes.SINK)
            lost = fleet.ended(number)
        assert (lost.error.code, lost.proven) == (ErrorCode.DEADLINE, False)
        assert fleet.sink.quarantined == {0: 3, 1: 3}
        os.kill(process.pid, signal.SIGKILL)
        fleet.ends(nodes.TransferProven, 1)
        assert fleet.sink.quarantined == {}


def test_a_process_that_hangs_and_dies_holds_its_own_pages_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-END-REUSE: one quarantine for the pool, and the others go on; killed, it gives its pages back, and a new run
    at its address serves.
    """
    with contextlib.ExitStack() as stack:
        made, process = other_process(stack, fleet, Q0, endless=True)
        sources = {replica: fleet.source(replica, byte) for byte, replica in enumerate((P0, P1), 20)}
        fleet.connect(P0, P1, Q0)
        number = fleet.ask(Q0, made=made)
        fleet.until(lambda: column(fleet.pool, 0, 0, "latent")[PAGES[Q0][:2]].any(), 0.01)
        os.kill(process.pid, signal.SIGSTOP)
        fleet.abort(0, number)
        with monkeypatch.context() as patch:
            nodes.ahead(patch, 40, *nodes.SINK)
            lost = fleet.ended(number)
        assert not lost.proven
        assert fleet.sink.quarantined == {0: 3, 1: 3}
        for byte, (replica, source) in enumerate(sources.items(), 20):
            assert isinstance(fleet.ended(fleet.ask(replica, source)), nodes.Received)
            assert fleet.holds(replica, byte)
        assert fleet.sink.quarantined == {0: 3, 1: 3}
        os.kill(process.pid, signal.SIGKILL)
        fleet.ends(nodes.TransferProven, 1)
        assert fleet.sink.quarantined == {}
        made, _ = other_process(stack, fleet, Q0, endless=False)
        assert isinstance(fleet.ended(fleet.ask(Q0, made=made)), nodes.Received)
        assert fleet.holds(Q0, 7)


def test_every_process_that_dies_is_seen(fleet: Fleet) -> None:
    """Also one whose descriptor has the number of another that died before."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            made, process = other_process(stack, fleet, Q0, endless=True)
            fleet.connect(Q0)
            number = fleet.ask(Q0, made=made)
            fleet.until(lambda: column(fleet.pool, 0, 0, "latent")[PAGES[Q0][:2]].any(), 0.01)
            process.kill()
            lost = fleet.ended(number)
            assert (lost.error.code, lost.proven) == (ErrorCode.PEER_LOST, True)
            nodes.put(fleet.pool, 0)
