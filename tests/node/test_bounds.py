"""What peers that are gone, that lie or that ask for much leave behind at others: nothing, and no turn that lasts."""

import contextlib
import gc
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvproto.copying.lowering import Pair
from kvproto.errors import KvprotoError
from kvproto.events import Refused
from kvproto.net import Listener, private_address
from kvproto.planning.geometry import Geometry, Rank, mla, owns
from kvproto.planning.plan import plan
from kvproto.rank.base import party_of
from kvproto.session import limits
from kvproto.session.limits import PATIENCE, PING_SILENCE, TICKET_WAIT
from kvproto.source.prefill import Computed
from kvproto.wire.enums import ErrorCode
from tests.node.nodes import (
    SINK,
    SOURCE,
    DrivenSource,
    Nodes,
    Received,
    TransferLost,
    ahead,
    begin,
    serve,
    sink_node,
    sleep,
)
from tests.node.test_node import CONTENT, ITEMS, TOKENS
from tests.node.test_sources import HELD, P0, PAGES, Q0, Fleet, fleet
from tests.pools import allocate
from tests.processes import imported
from tests.session.driver import geometry, ticket
from tests.steps import calls_of, least_steps

__all__ = ["fleet"]
imported(__name__)


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kvproto-")


def decode(conn: Connection, address: str) -> None:
    """A decode rank, until it is killed."""
    pool = allocate(geometry(1), 0, ITEMS)
    node = sink_node("other", pool)
    node.connect(P0, address)
    conn.send("listening")
    serve(conn, node)


def test_a_sink_that_was_killed_leaves_no_session_and_no_mapping(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fleet.source(P0, 1)
    before = mappings()
    with contextlib.ExitStack() as stack:
        process, _ = begin(stack, decode, fleet.address(P0))
        fleet.until(lambda: source.memory._mapped)
        assert mappings() > before
        os.kill(process.pid or 0, signal.SIGKILL)
    with monkeypatch.context() as patch:
        for seconds in (PING_SILENCE + 1, PING_SILENCE + PATIENCE + 2):
            ahead(patch, seconds, *SOURCE)
            fleet.turn(source)
    assert (len(source.endpoint.sessions), len(source.memory._mapped), mappings()) == (0, 0, before)
    fleet.connect(P0)
    assert isinstance(fleet.ended(fleet.ask(P0, source)), Received)


def test_runs_that_were_superseded_are_unmapped(fleet: Fleet) -> None:
    """KVP-SES-SUPERSEDE: five runs of a sink, none of which says Goodbye: one of them is mapped."""
    source = fleet.source(P0, 1)
    fleet.connect(P0)
    fleet.ready()
    before = mappings()
    for n in range(5):
        later = sink_node("d", fleet.pool)
        later.connect(P0, fleet.address(P0))
        fleet.sinks.append(later)
        fleet.until(lambda n=n: fleet.connected == n + 2)  # type: ignore[misc]
        fleet.sinks.remove(later)
    assert (len(source.endpoint.sessions), len(source.memory._mapped), mappings()) == (1, 1, before)


def test_a_source_that_never_ends_what_it_has_accepted(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-TRN-ENDLESS: until it must have ended it, it is waited for; then the pages are free by its own word."""
    source = fleet.source(P0, 1)
    fleet.connect(P0)
    fleet.ready()
    made = attrs.evolve(ticket(3000.0), engine="p")
    source.expect(made, CONTENT, TOKENS)
    number = fleet.fetch(0, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[P0]), seconds=5.0)
    (link,) = fleet.sink._links.values()
    fleet.until(lambda: link.endpoint.transfers and all(each.accepted for each in link.endpoint.transfers))
    with monkeypatch.context() as patch:
        patch.setattr(limits, "PING_SILENCE", 1000.0)
        for seconds in (6, TICKET_WAIT + PATIENCE - 1):
            ahead(patch, seconds, *SINK)
            fleet.turns(3)
            assert not fleet.count(TransferLost)
        ahead(patch, 6 + TICKET_WAIT + PATIENCE + 1, *SINK)
        (lost,) = fleet.ends(TransferLost, 1)
        assert (lost.number, lost.error.code, lost.proven) == (number, ErrorCode.DEADLINE, True)
    assert isinstance(fleet.ended(fleet.ask(P0, source)), Received)


@pytest.mark.parametrize(
    "address",
    ["tcp://999.1.1.1:5", "tcp://127.0.0.1:http", "tcp://127.0.0.1:99999", "tcp://", "ipc://@x", "ipc://" + "x" * 200,
     "inproc://x", "", "x", "ipc:///proc/self/mem", "tcp://127.0.0.1:5;tcp://127.0.0.1:6", "ipc:///a\0b", "pgm://x;239.0.0.1:5"],
)  # fmt: skip
def test_addresses_in_welcome_that_cannot_be(fleet: Fleet, address: str) -> None:
    """KVP-NET-INSECURE: the link is refused with a typed error, and other sources go on."""
    good = fleet.source(Q0, 2)
    pool, at = allocate(geometry(2), 0, ITEMS), fleet.address(P0)
    fleet.sources.append(DrivenSource(party_of("p", pool), pool, Listener(at), {0: at, 1: address}))
    fleet.connect(P0, Q0)
    lost = fleet.ended(fleet.ask(P0))
    assert isinstance(lost, TransferLost)
    assert isinstance(lost.error, KvprotoError)
    assert (lost.error.code, lost.proven) == (ErrorCode.OUT_OF_RANGE, True)
    assert fleet.count(Refused)
    assert isinstance(fleet.ended(fleet.ask(Q0, good)), Received)


def test_a_request_costs_the_same_beside_many_that_wait(fleet: Fleet) -> None:
    """Requests of which a part is computed, each asked for by a sink: a turn looks at none of them."""
    source = fleet.source(P0, 1)
    fleet.connect(P0)
    other = sink_node("other", fleet.pool)
    other.connect(P0, fleet.address(P0))
    fleet.sinks.append(other)
    fleet.ready()

    def one() -> None:
        assert isinstance(fleet.ended(fleet.ask(P0, source)), Received)
        fleet.told.clear()

    alone = least_steps(one, 12)
    for _ in range(300):
        made = attrs.evolve(ticket(300.0), engine="p")
        source.expect(made, CONTENT, TOKENS)
        source.computed(bytes(made.key), Computed(dict.fromkeys((0, 1), np.array(HELD[:1])), 4, (0, 1)))
        fleet.fetch(1, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[Q0]))
    fleet.until(lambda: sum(len(request.sends) for request in source.requests) == 300)
    fleet.sinks.remove(other)
    assert least_steps(one, 12) < 2 * alone
    other.close("over")


def test_a_turn_of_a_sink_costs_the_same_beside_many_that_it_waits_for(fleet: Fleet) -> None:
    source = fleet.source(P0, 1)
    fleet.connect(P0)
    fleet.ready()
    alone = least_steps(lambda: (fleet.sink.turn(), fleet.sink.timeout()), 5)
    for _ in range(300):
        made = attrs.evolve(ticket(300.0), engine="p")
        source.expect(made, CONTENT, TOKENS)
        fleet.fetch(0, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[P0]), seconds=300.0)
    (link,) = fleet.sink._links.values()
    under_way = link.endpoint.transfers
    fleet.until(lambda: len(under_way) == 300 and all(transfer.accepted for transfer in under_way))
    assert least_steps(lambda: (fleet.sink.turn(), fleet.sink.timeout()), 5) < 1.5 * alone


def test_a_turn_of_a_sink_costs_the_same_beside_many_sources(fleet: Fleet) -> None:
    """It looks only at what has something to do."""
    fleet.source(P0, 1)
    fleet.connect(P0)
    fleet.ready()

    def turn() -> None:
        fleet.sink.turn([])
        fleet.sink.timeout()
        fleet.sink.filenos()

    fleet.until(lambda: fleet.sink.timeout() != 0.0)
    alone = least_steps(turn, 5)
    for number in range(1, 40):
        fleet.source(("p", number), 1)
        fleet.connect(("p", number))
    fleet.until(lambda: fleet.connected == 40)
    assert len(fleet.sink.ready) == 40
    assert least_steps(turn, 5) <= 1.1 * alone


def test_a_sink_that_is_not_eager_greets_a_source_with_its_first_fetch(fleet: Fleet) -> None:
    sources = {replica: fleet.source(replica, byte) for byte, replica in enumerate((P0, Q0), 10)}
    later = sink_node("later", fleet.pool, eager=False)
    fleet.sinks.append(later)
    for replica in sources:
        later.connect(replica, fleet.address(replica))
    made = fleet.request(P0, sources[P0])
    fleet.fetch(1, made, CONTENT, TOKENS, dict.fromkeys((0, 1), PAGES[P0]))
    fleet.until(lambda: any(isinstance(event, Received) for event in fleet.told))
    assert [len(source.endpoint.sessions) for source in sources.values()] == [1, 0]
    assert fleet.holds(P0, 10)


def test_a_plan_that_takes_long_takes_no_turn(tmp_path: Path) -> None:
    """Two replicas each rank of which holds all layers: both sides plan, and see how rows lie, beside their turns, once for all that
    state them.
    """
    theirs, made = everything_everywhere(ranks=107, layers=200), everything_everywhere(ranks=100, layers=200)
    address = private_address(tmp_path, "kv")
    pools = [allocate(theirs, 0, {0: 2}), allocate(made, 0, {0: 2}), allocate(made, 0, {0: 2})]
    source = DrivenSource(party_of("p", pools[0]), pools[0], Listener(address), dict.fromkeys(range(107), address))
    sinks = [sink_node(name, pool) for name, pool in zip("de", pools[1:], strict=True)]
    with contextlib.closing(Nodes([source], sinks)) as nodes:
        for sink in sinks:
            sink.connect(P0, address)
        ready: list[int] = []
        with calls_of(plan, Pair.__init__) as calls:
            while len(source.memory._mapped) < 2:  # the other ranks that they look for are this one, too
                for node in (source, *sinks):
                    nodes.turn(node, ready=ready)
                ready = sleep([source, *sinks], 1.0)
        assert calls == []
        assert len(source.endpoint.plans._made) == 1


def everything_everywhere(ranks: int, layers: int) -> Geometry:
    """Candidates without end."""
    group = mla(0, "target", 0, 8, 1)
    held = tuple(Rank(rank=r, owns=(owns(group, range(layers)),)) for r in range(ranks))
    return Geometry(replica=0, facts=(), groups=(group,), ranks=held)
