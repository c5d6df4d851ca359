"""Nodes over NIXL, on host memory by UCX: streams through tiny slots, long direct writes, aborts, deaths."""

import contextlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto.copying.program import CopyProgram, RankLayout
from kvproto.errors import RemoteError
from kvproto.events import Over, Refused
from kvproto.net import Listener, private_address
from kvproto.planning.layout import Parallel
from kvproto.planning.plan import plan
from kvproto.rank.base import party_of
from kvproto.rank.pool import columns_without_gaps
from kvproto.sink.node import SinkNode
from kvproto.sink.registered_pool import SinkPrograms
from kvproto.source.node import SourceNode
from kvproto.transport.nixl.backend import HostBackend
from kvproto.transport.nixl.direct import Costs, WriteMode
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire import decode
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Chunk, Ticket
from kvproto_catalog.models import PRESETS, describe
from tests.node import nodes
from tests.node.any_two import AnyTwo, small_world
from tests.node.test_node import CONTENT, FIRST, ITEMS, TOKENS, Pair, ask, check, hand_over, pairs
from tests.node.test_parts import LAYERS, Prefill, compute_some, hand_over_at_random
from tests.pools import allocate
from tests.processes import imported
from tests.session.driver import geometry, ticket

imported(__name__)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
SLOTS, SLOT = 4, 96


def staged() -> list[NixlTransport]:
    return [NixlTransport(WriteMode.PACKED, SLOTS, SLOT)]


def direct() -> list[NixlTransport]:
    return [NixlTransport(WriteMode.DIRECT)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    yield from pairs(tmp_path, give=staged, take=staged)


def test_streams_are_prepared_when_memory_is_registered(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both sides, for the operations of requests to come."""
    known, asked = dict[tuple[str, int], Any](), list[tuple[str, int]]()
    packer = HostBackend.packer

    def prepare(self: HostBackend, program: CopyProgram, side: str, memory: Any) -> None:
        assert program.bytes == 0
        known[side, id(program.ops)] = program.ops

    def pack(self: HostBackend, program: CopyProgram, side: Any, *more: Any) -> Any:
        asked.append((side, id(program.ops)))
        return packer(self, program, side, *more)

    monkeypatch.setattr(HostBackend, "prepare", prepare)
    monkeypatch.setattr(HostBackend, "packer", pack)
    made = pair(2, 2)
    made.ready()
    number = len(known)
    check(made, hand_over(made, np.random.default_rng()))
    assert {side for side, _ in asked} == {"source", "sink"}
    assert set(asked) == set(known)
    assert len(known) == number


def test_a_stand_in_is_of_the_source_that_is_there_now() -> None:
    """And is made once for each of its ranks."""
    sides = [describe(PRESETS["deepseek-v3"][0], (), Parallel(tp=tp)) for tp in (1, 2)]
    own = RankLayout(sides[0], 0, columns_without_gaps(sides[0], 0, {0: 4})[0])
    first, other = (SinkPrograms(plan(source, sides[0]), source, own) for source in (sides[1], sides[0]))
    assert first.pair(0).source.geometry is sides[1]
    assert first.pair(0) is first.pair(0)
    assert first.pair(1) is not first.pair(0)
    assert other.pair(0).source.geometry is sides[0]


class Chunks:
    """Chunks that a source has sent, by sequence."""

    def __init__(self, node: SourceNode) -> None:
        self.slots: dict[int, list[int]] = {}
        nodes.seen(node, self._see)

    def _see(self, _: Any, frame: bytes) -> bytes:
        message = decode(frame)
        if isinstance(message, Chunk):
            self.slots.setdefault(message.sequence, []).append(message.slot)
        return frame


def staged_ranks(sink: SinkNode) -> list[int]:
    """Source ranks that write staging slots of a sink."""
    return sorted(sink._links[nodes.PREFILL].endpoint.streamed())


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("take", [staged, direct])
def test_every_byte_arrives_and_is_verified(pair: Callable[..., Pair], source_tp: int, sink_tp: int, take: Any) -> None:
    made = pair(source_tp, sink_tp, take=take)
    check(made, hand_over(made, np.random.default_rng()))
    received = made.ends(nodes.Received, sink_tp)
    assert all(e.handoff == FIRST for e in received)
    assert all(e.checksums for e in received)
    assert all(staged_ranks(sink) == (list(range(source_tp)) if take is staged else []) for sink in made.sinks)


def test_all_slots_are_in_flight_at_once_and_each_is_used_again(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    chunks = Chunks(made.sources[0])
    sink_items = ask(made, np.random.default_rng())
    made.turn(made.sinks[0])  # it sends the Transfer
    made.sources_until(lambda: len(chunks.slots.get(1, ())) == SLOTS)
    assert sorted(chunks.slots[1]) == list(range(SLOTS))
    (received,) = made.ends(nodes.Received, 1)
    check(made, sink_items)
    assert len(chunks.slots[1]) == -(-received.bytes[0] // SLOT) > 3 * SLOTS


def test_a_stream_goes_on_behind_the_last_chunk_of_a_prompt(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    prefill = Prefill(made, np.random.default_rng())
    chunks = Chunks(made.sources[0])
    items = prefill.asked(0)
    for model in (1, 0):
        prefill.compute(model, (0, LAYERS[model]), 0, 5)
        made.turns(3)
        assert not chunks.slots
    for layer in range(LAYERS[0]):
        prefill.compute(0, (layer, layer + 1), 5, TOKENS)
        there = (layer + 1) * TOKENS * 40 // SLOT
        made.until(lambda: len(chunks.slots.get(1, ())) == there)  # noqa: B023
    prefill.compute(1, (0, 1), 5, TOKENS)
    prefill.finish()
    (received,) = made.ends(nodes.Received, 1)
    check(made, [items])
    assert len(chunks.slots[1]) == -(-sum(received.bytes.values()) // SLOT)


def begun(made: Pair) -> Prefill:
    """A stream that waits for its second layer."""
    prefill, chunks = Prefill(made, np.random.default_rng()), Chunks(made.sources[0])
    prefill.asked(0)
    prefill.compute(1, (0, 1), 0, TOKENS)
    prefill.compute(0, (0, 1), 0, TOKENS)
    made.until(lambda: chunks.slots)
    assert made.sources[0].reads(prefill.key)
    return prefill


def refuse(made: Pair, prefill: Prefill) -> ErrorCode:
    made.sources[0].refuse(prefill.key, RemoteError(ErrorCode.INTERNAL, "", "out of pages", ""))
    return ErrorCode.INTERNAL


def abort(made: Pair, prefill: Prefill) -> ErrorCode:
    made.abort(0)
    return ErrorCode.ABORTED


def finish_short(made: Pair, prefill: Prefill) -> ErrorCode:
    """The engine says that it has fewer tokens than it had computed."""
    short = nodes.finished(prefill.items, TOKENS - 1, FIRST)
    made.sources[0].finish(prefill.key, short)
    return ErrorCode.BAD_GRANT


@pytest.mark.parametrize("end", [refuse, abort, finish_short])
def test_a_stream_that_waits_for_layers_ends_and_the_next_has_all_slots(
    pair: Callable[..., Pair], end: Callable[[Pair, Prefill], ErrorCode]
) -> None:
    made = pair(1, 1)
    prefill = begun(made)
    code = end(made, prefill)
    assert made.lost() == (code, True)
    made.until(lambda: not made.sources[0].reads(prefill.key))
    made.told.clear()
    nodes.put(made.sinks[0].pool, 0)
    chunks = Chunks(made.sources[0])
    check(made, hand_over(made, np.random.default_rng()))
    assert {slot for slots in chunks.slots.values() for slot in slots} == set(range(SLOTS))


def test_a_stream_that_waits_for_layers_holds_up_nobody(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1)
    begun(made)
    hand_over(made, np.random.default_rng())
    assert made.count(nodes.Received) == 1


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("take", [staged, direct])
def test_random_chunks_and_layers(pair: Callable[..., Pair], source_tp: int, sink_tp: int, take: Any) -> None:
    hand_over_at_random(pair(source_tp, sink_tp, take=take), random.Random())


@pytest.mark.parametrize(("descriptor", "through"), [(1.0, [0]), (1e-15, [])])
def test_long_runs_are_written_directly(pair: Callable[..., Pair], descriptor: float, through: list[int]) -> None:
    made = pair(1, 1, take=lambda: [NixlTransport(Costs(descriptor=descriptor, link=1e9), SLOTS, SLOT)])
    check(made, hand_over(made, np.random.default_rng()))
    assert staged_ranks(made.sinks[0]) == through


def test_the_source_takes_the_sinks_first_choice_that_it_can(pair: Callable[..., Pair]) -> None:
    both: Callable[[], Any] = lambda: [ShmTransport(), *staged()]  # noqa: E731
    made = pair(1, 1, give=lambda: [*staged(), ShmTransport()], take=both)
    check(made, hand_over(made, np.random.default_rng()))
    assert staged_ranks(made.sinks[0]) == []
    made.close()
    made = pair(1, 1, take=both)
    check(made, hand_over(made, np.random.default_rng()))
    assert staged_ranks(made.sinks[0]) == [0]


def test_a_source_without_nixl_refuses(pair: Callable[..., Pair]) -> None:
    made = pair(1, 1, give=list)
    refused = made.ends(Refused, 2)
    assert {e.error.code for e in refused} == {ErrorCode.NO_TRANSPORT}


def test_after_an_abort_in_the_middle_the_next_request_has_all_slots(pair: Callable[..., Pair]) -> None:
    made = pair(2, 1)
    chunks = [Chunks(node) for node in made.sources]
    ask(made, np.random.default_rng())
    made.turn(made.sinks[0])
    made.sources_until(lambda: all(len(c.slots.get(1, ())) == SLOTS for c in chunks))
    made.abort(0)
    assert made.lost() == (ErrorCode.ABORTED, True)
    made.ends(Over, 2)
    assert not any(node._copies.under_way for node in made.sources)
    nodes.put(made.sinks[0].pool, 0)
    sink_items = ask(made, np.random.default_rng())
    made.turn(made.sinks[0])
    made.sources_until(lambda: all(sorted(c.slots.get(2, ())) == list(range(SLOTS)) for c in chunks))
    made.ends(nodes.Received, 1)
    check(made, sink_items)


def test_a_sink_that_returns_no_slots_holds_up_nobody_else(pair: Callable[..., Pair]) -> None:
    made = pair(1, 2)
    sink_items = ask(made, np.random.default_rng())
    idle, served = made.sinks
    made.turn(idle)
    made.sinks = [served]
    (received,) = made.ends(nodes.Received, 1)
    assert received.bytes[0] > SLOTS * SLOT
    assert made.sources[0]._copies.under_way
    made.sinks = [idle, served]
    made.ends(nodes.Received, 2)
    check(made, sink_items)


def test_a_request_ends_at_its_deadline_though_the_sink_returns_no_slots(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair(1, 1)
    chunks = Chunks(made.sources[0])
    ask(made, np.random.default_rng(), deadline=5)
    made.turn(made.sinks[0])
    made.sources_until(lambda: len(chunks.slots.get(1, ())) == SLOTS)
    nodes.ahead(monkeypatch, 6, *nodes.SOURCE)
    made.sources_until(lambda: made.count(Over) == 1)
    assert not made.sources[0]._copies.under_way
    assert made.lost() == (ErrorCode.DEADLINE, True)


def source(conn: Connection, address: str, made: Ticket, mode: WriteMode) -> None:
    """A prefill rank that says when its first chunks, or its first descriptors, are out, and then stands still."""
    pool = allocate(geometry(1), 0, ITEMS)
    transports = [NixlTransport(mode, SLOTS, SLOT)]
    node = nodes.DrivenSource(party_of("p", pool), pool, Listener(address), {0: address}, transports=transports)
    chunks = Chunks(node)
    node.expect(made, CONTENT, TOKENS)
    if mode is WriteMode.PACKED:
        node.finish(bytes(made.key), nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    conn.send("listening")

    def tell() -> None:
        if len(chunks.slots.get(1, ())) == SLOTS:
            conn.send("in the middle")
            chunks.slots.clear()

    nodes.serve(conn, node, tell)


@pytest.mark.parametrize(("mode", "proven"), [(WriteMode.PACKED, True), (WriteMode.DIRECT, False)])
def test_pages_after_a_source_was_killed(
    mode: WriteMode, proven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, made = private_address(tmp_path, "kv"), ticket()
    with contextlib.ExitStack() as stack:
        process, hear = nodes.begin(stack, source, address, made, mode)
        pool = allocate(geometry(1), 0, ITEMS)
        sink = nodes.sink_node("d", pool, transports=[NixlTransport(mode, SLOTS, SLOT)])
        sink.connect(nodes.PREFILL, address)
        alone = stack.enter_context(contextlib.closing(nodes.Nodes([], [sink])))
        alone.ready()
        number = alone.fetch(0, made, CONTENT, TOKENS, {g: [4, 5, 6] for g in (0, 1)})
        alone.turn()
        if mode is WriteMode.PACKED:
            hear("in the middle")
        process.kill()
        process.join()
        alone.turn()
        assert not alone.count(nodes.TransferLost)  # silence proves nothing
        alone.abort(0, number)
        nodes.ahead(monkeypatch, 31, *nodes.SINK)
        assert alone.lost() == (ErrorCode.ABORTED, proven)


@pytest.mark.parametrize("take", [staged, direct])
@pytest.mark.parametrize("number", range(5))
def test_any_two_engines(tmp_path: Path, number: int, take: Any) -> None:
    with contextlib.closing(
        AnyTwo(tmp_path, small_world(number), lambda: {"transports": staged()}, transports=take())
    ) as made:
        made.ask()
        compute_some(made, random.Random())
        made.finish()
        assert isinstance(made.ends(nodes.Received | nodes.TransferLost, 1)[0], nodes.Received)
        made.check()
