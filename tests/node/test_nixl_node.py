"""Nodes over NIXL, on host memory by UCX: streams through tiny slots, long direct writes, aborts, deaths."""

import contextlib
import importlib.util
import multiprocessing
import random
import secrets
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvproto.node.sink
import kvproto.node.source
from kvproto.execute import execute
from kvproto.geometry import Geometry
from kvproto.grants import items_needed
from kvproto.lowering import lower
from kvproto.net import Dialer, Listener, private_address
from kvproto.net.sockets import wait
from kvproto.node import Finished, SinkNode, SourceNode
from kvproto.node.pool import allocate
from kvproto.node.sink import Received
from kvproto.plan import plan
from kvproto.program import Window
from kvproto.session import Party
from kvproto.session.events import Expired, Lost, Ready, Released, SessionRefused
from kvproto.transport.nixl_direct import Costs, Way
from kvproto.transport.nixl_mover import NixlMover
from kvproto.transport.shm import HostMover
from kvproto.wire import decode
from kvproto.wire.enums import ErrorCode, Outcome, Proof
from kvproto.wire.messages import Chunk, Ticket
from tests.node.test_node import CONTENT, ITEMS, TOKENS, Pair, ask, check, hand_over
from tests.plan.worlds import caches, side
from tests.session.driver import geometry, ticket

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
SLOTS, SLOT = 4, 96
FEW, ROOM = 8, 40
"""Tokens that any ring holds, and items of a pool."""
FIRST = {(2, "token"): b"\7\0\0\0"}


def staged() -> list[NixlMover]:
    return [NixlMover(Way.PACKED, SLOTS, SLOT)]


def direct() -> list[NixlMover]:
    return [NixlMover(Way.DIRECT)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    tmp_path.chmod(0o700)
    made: list[Pair] = []

    def make(source_tp: int, sink_tp: int, **options: Any) -> Pair:
        made.append(
            Pair(tmp_path, geometry(source_tp), geometry(sink_tp), **{"give": staged, "take": staged} | options)
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


class Chunks:
    """Chunks that a source has sent, by sequence."""

    def __init__(self, node: SourceNode) -> None:
        self.slots: dict[int, list[int]] = {}
        send = node._listener.send

        def seen(conn: Any, frame: bytes) -> bool:
            message = decode(frame)
            if isinstance(message, Chunk):
                self.slots.setdefault(message.sequence, []).append(message.slot)
            return send(conn, frame)

        node._listener.send = seen  # type: ignore[method-assign]


def ends(pair: Pair, kind: type, count: int) -> list[Any]:
    pair.until(lambda: pair.count(kind) == count)
    return [e for e in pair.told if isinstance(e, kind)]


def poll_sources(pair: Pair, condition: Callable[[], bool]) -> None:
    """The sinks do nothing meanwhile."""
    for _ in range(2000):
        for node in pair.sources:
            pair.told += node.poll()
        if condition():
            return
        wait([node._listener.socket for node in pair.sources], 0.005)
    raise AssertionError(pair.told)


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("take", [staged, direct])
def test_every_byte_arrives_and_is_verified(pair: Callable[..., Pair], source_tp: int, sink_tp: int, take: Any) -> None:
    made = pair(source_tp, sink_tp, take=take)
    check(made, hand_over(made, np.random.default_rng()))
    received = ends(made, Received, sink_tp)
    assert all(e.handoff == {(2, "token"): b"\7\0\0\0"} for e in received)
    assert all(e.checksums and all(a == b for a, b in e.checksums.values()) for e in received)
    assert all(sink.endpoint.staged() == (list(range(source_tp)) if take is staged else []) for sink in made.sinks)


def test_all_slots_are_in_flight_at_once_and_each_is_used_again(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    chunks = Chunks(made.sources[0])
    sink_items = ask(made, np.random.default_rng())
    made.sinks[0].poll()  # it sends the Transfer
    poll_sources(made, lambda: len(chunks.slots.get(1, ())) == SLOTS)
    assert sorted(chunks.slots[1]) == list(range(SLOTS))
    (received,) = ends(made, Received, 1)
    check(made, sink_items)
    assert len(chunks.slots[1]) == -(-received.bytes[0] // SLOT) > 3 * SLOTS


@pytest.mark.parametrize(("descriptor", "through"), [(1.0, [0]), (1e-15, [])])
def test_long_runs_are_written_directly(pair: Callable[..., Pair], descriptor: float, through: list[int]) -> None:
    made = pair(1, 1, take=lambda: [NixlMover(Costs(descriptor=descriptor, link=1e9), SLOTS, SLOT)])
    check(made, hand_over(made, np.random.default_rng()))
    assert made.sinks[0].endpoint.staged() == through


def test_the_source_takes_the_sinks_first_choice_that_it_can(pair: Callable[..., Pair]) -> None:
    both: Callable[[], Any] = lambda: [HostMover(), *staged()]  # noqa: E731
    made = pair(1, 1, give=lambda: [*staged(), HostMover()], take=both)
    check(made, hand_over(made, np.random.default_rng()))
    assert made.sinks[0].endpoint.staged() == []
    made.close()
    made = pair(1, 1, take=both)
    check(made, hand_over(made, np.random.default_rng()))
    assert made.sinks[0].endpoint.staged() == [0]


def test_a_source_without_nixl_refuses(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1, give=list)
    refused = ends(made, SessionRefused, 2)
    assert {e.error.code for e in refused} == {ErrorCode.NO_TRANSPORT}


def test_after_an_abort_in_the_middle_the_next_request_has_all_slots(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1)
    chunks = [Chunks(node) for node in made.sources]
    ask(made, np.random.default_rng())
    made.sinks[0].poll()
    poll_sources(made, lambda: all(len(c.slots.get(1, ())) == SLOTS for c in chunks))
    made.sinks[0].abort(1, "changed our mind")
    (lost,) = ends(made, Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.ABORTED, Proof.PROVEN)
    ends(made, Released, 2)
    assert not any(node.busy for node in made.sources)
    np.frombuffer(made.sinks[0].pool.memory.buffer, np.uint8)[:] = 0  # type: ignore[attr-defined]
    sink_items = ask(made, np.random.default_rng())
    made.sinks[0].poll()
    poll_sources(made, lambda: all(sorted(c.slots.get(2, ())) == list(range(SLOTS)) for c in chunks))
    ends(made, Received, 1)
    check(made, sink_items)


def test_a_sink_that_returns_no_slots_holds_up_nobody_else(pair: Callable[..., Pair]) -> None:
    made = pair(1, 2)
    sink_items = ask(made, np.random.default_rng())
    idle, served = made.sinks
    idle.poll()
    made.sinks = [served]
    (received,) = ends(made, Received, 1)
    assert received.bytes[0] > SLOTS * SLOT
    assert made.sources[0].busy
    made.sinks = [idle, served]
    ends(made, Received, 2)
    check(made, sink_items)


def test_a_request_ends_at_its_deadline_though_the_sink_returns_no_slots(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair(1, 1)
    chunks = Chunks(made.sources[0])
    ask(made, np.random.default_rng(), deadline=5)
    made.sinks[0].poll()
    poll_sources(made, lambda: len(chunks.slots.get(1, ())) == SLOTS)
    monkeypatch.setattr(kvproto.node.source, "time", later(6))
    poll_sources(made, lambda: made.count(Expired) == 1)
    assert not made.sources[0].busy
    (lost,) = ends(made, Lost, 1)
    assert (lost.error.code, lost.proof) == (ErrorCode.DEADLINE, Proof.PROVEN)


def later(seconds: float) -> Any:
    """A clock that is ahead."""
    return SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)


def source(conn: Connection, address: str, made: Ticket, way: Way) -> None:
    """A prefill rank that says when its first chunks, or its first descriptors, are out, and then stands still."""
    pool = allocate(geometry(1), 0, ITEMS)
    mover = NixlMover(way, SLOTS, SLOT)
    node = SourceNode(Party("p", 0, 0, 7), geometry(1), pool, Listener(address), {0: address}, movers=[mover])
    chunks = Chunks(node)
    node.expect(made, CONTENT)
    items = {g: [1, 2, 3] for g in (0, 1)}
    if way is Way.PACKED:
        node.finish(bytes(made.key), Finished(items, TOKENS, Outcome.CONTINUE, FIRST))
    conn.send("listening")
    while not conn.poll(0.002):
        node.poll()
        if len(chunks.slots.get(1, ())) == SLOTS:
            conn.send("in the middle")
            chunks.slots.clear()


@pytest.mark.parametrize(("way", "proof"), [(Way.PACKED, Proof.PROVEN), (Way.DIRECT, Proof.UNPROVABLE)])
def test_pages_after_a_source_was_killed(
    way: Way, proof: Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    address, made = private_address(tmp_path, "kv"), ticket()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=source, args=(theirs, address, made, way), daemon=True)
    process.start()
    with contextlib.ExitStack() as stack:
        stack.callback(process.join)
        stack.callback(process.kill)
        assert ours.poll(60)
        assert ours.recv() == "listening"
        dialer = Dialer()
        pool = allocate(geometry(1), 0, ITEMS)
        mover = NixlMover(way, SLOTS, SLOT)
        sink = SinkNode(Party("d", 0, 0, secrets.randbits(60)), geometry(1), pool, dialer, address, movers=[mover])
        told: list[Any] = []
        stack.callback(sink.close, "over")

        def until(kind: type) -> Any:
            for _ in range(2000):
                told.extend(sink.poll())
                if found := [e for e in told if isinstance(e, kind)]:
                    return found[0]
                wait(dialer.sockets, 0.01)
            raise AssertionError(told)

        until(Ready)
        number = sink.transfer(made, CONTENT, 0, TOKENS, {g: [4, 5, 6] for g in (0, 1)})
        sink.poll()
        if way is Way.PACKED:
            assert ours.poll(60)
            assert ours.recv() == "in the middle"
        process.kill()
        process.join()
        assert not any(isinstance(e, Lost) for e in sink.poll())  # silence proves nothing
        sink.abort(number, "it takes too long")
        monkeypatch.setattr(kvproto.node.sink, "time", later(31))
        lost = until(Lost)
        assert (lost.error.code, lost.proof) == (ErrorCode.ABORTED, proof)


def small_worlds(count: int) -> list[int]:
    """Seeds of pairs of at most two ranks a side, with something to move."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        source, sink = world(seed)
        few = len(source.ranks) <= 2 and len(sink.ranks) <= 2
        from_zero = all(g.cp_size == 1 or not g.origin for g in (*source.groups, *sink.groups))
        if few and from_zero and plan(source, sink).routes:
            found.append(seed)
        seed += 1
    return found


def world(seed: int) -> tuple[Geometry, Geometry]:
    rng = random.Random(seed)
    held = caches(rng)
    return side(rng, held, 0, complete=True), side(rng, held, 0, complete=False)


def window(geometry: Geometry, rank: int, order: dict[int, list[int]]) -> dict[int, list[int]]:
    """Items of a rank for the first tokens, by group id."""
    shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
    need = {g.id: items_needed(g, shares[g.id].cp_rank, 0, FEW) for g in geometry.groups if g.id in shares}
    return {g.id: order[g.id][: need.get(g.id, 0)] for g in geometry.groups}


@pytest.mark.parametrize("take", [staged, direct])
@pytest.mark.parametrize("seed", small_worlds(5))
def test_any_two_engines(tmp_path: Path, seed: int, take: Any) -> None:
    tmp_path.chmod(0o700)
    from_, to = world(seed)
    routes, rng, made = plan(from_, to), np.random.default_rng(seed), ticket()
    number = next(r.rank for r in to.ranks if routes.required(r.rank))
    addresses = {r.rank: private_address(tmp_path, f"kv-{r.rank}") for r in from_.ranks}
    theirs, mine = ({g.id: rng.permutation(ROOM).tolist() for g in geometry.groups} for geometry in (from_, to))
    mine = window(to, number, mine)
    pools = {rank: allocate(from_, rank, dict.fromkeys(theirs, ROOM)) for rank in addresses}
    pool = allocate(to, number, dict.fromkeys(mine, ROOM))
    wanted = {0: memoryview(bytearray(pool.memory.length))}
    for rank, there in pools.items():
        memory = np.from_dlpack(there.memory)
        memory[:] = rng.integers(1, 256, memory.size, np.uint8)
        sides = (
            {g: Window(0, FEW, np.array(i, np.int64)) for g, i in items.items()}
            for items in (window(from_, rank, theirs), mine)
        )
        execute(lower(routes.between(rank, number), there.side, pool.side, *sides), {0: memoryview(memory)}, wanted)
    told: list[Any] = []
    with contextlib.ExitStack() as stack:
        nodes: list[Any] = []
        for rank, there in pools.items():
            party, listener = Party("p", 0, rank, rank + 1), Listener(addresses[rank])
            node = SourceNode(party, from_, there, listener, addresses, movers=staged())
            stack.callback(node.close, "over")
            node.expect(made, CONTENT)
            node.finish(bytes(made.key), Finished(window(from_, rank, theirs), FEW, Outcome.CONTINUE, {}))
            nodes.append(node)
        party, dialer, seed_ = Party("d", 0, number, 99), Dialer(), addresses[routes.required(number)[0]]
        sink = SinkNode(party, to, pool, dialer, seed_, movers=take())
        stack.callback(sink.close, "over")

        def until(*kinds: type) -> None:
            for _ in range(2000):
                for node in (sink, *nodes):
                    told.extend(node.poll())
                if any(isinstance(e, kinds) for e in told):
                    return
                wait(dialer.sockets, 0.002)
            raise AssertionError(told)

        until(Ready)
        sink.transfer(made, CONTENT, 0, FEW, mine)
        until(Received, Lost)
    assert not [e for e in told if isinstance(e, Lost)]
    assert np.array_equal(np.from_dlpack(pool.memory), np.frombuffer(wanted[0], np.uint8))
    assert any(wanted[0])
