"""Transport `nixl` between GPUs, two processes: exact bytes packed and direct, nodes, deaths, and slow ways refused."""

import contextlib
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvproto.copying.execute import execute
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Refused
from kvproto.net import Listener, private_address
from kvproto.rank.base import party_of
from kvproto.transport.nixl import agent as nixl
from kvproto.transport.nixl.agent import Agent
from kvproto.transport.nixl.device import DeviceBackend
from kvproto.transport.nixl.direct import DEVICE_FLOOR, DirectWrite, WriteMode, probe, require_fast
from kvproto.transport.nixl.handle import HandleContents
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.transport.staging.staged import StagedLink, StagedSender
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Ticket
from tests.errors import raises
from tests.gpu.conftest import FOUND
from tests.gpu.memory import get, on_gpu, put
from tests.gpu.nixl_sink import EDGE, noise, places, pools, sink
from tests.node import nodes
from tests.node.test_nixl_node import FIRST, Chunks, staged_ranks
from tests.node.test_node import CONTENT, TOKENS
from tests.plan.programs import random_pairs
from tests.pools import allocate
from tests.session.driver import geometry, ticket

pytest.importorskip("nixl")
pytestmark = [pytest.mark.skipif(FOUND < 2, reason="needs two GPUs"), pytest.mark.timeout(300)]
SEEDS = 25
LONG = 60
ITEMS = {0: 12, 1: 12}


class Peer:
    """Staging on GPU 1 in another process, and a way there from GPU 0."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.conn, theirs = multiprocessing.Pipe()
        arguments = (theirs, 1, slots, slot_bytes)
        self.process = multiprocessing.get_context("spawn").Process(target=sink, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.place = DeviceBackend(0)
        self.agent = Agent(self.place.eager)
        staging, arena = self.hear()
        self.target = self.agent.connect(staging, "regions[1]")
        self.arena = self.agent.connect(arena, "regions[0]")
        self.own = self.agent.register(self.place.allocate(slots * slot_bytes), slot_bytes)
        self._sequence = 0
        self.link: StagedLink | None = None

    def hear(self) -> Any:
        assert self.conn.poll(LONG)
        return self.conn.recv()

    def packed(self, program: Any, lengths: dict[int, int], source: dict[int, Any], seed: int) -> dict[int, Any]:
        self.link = self.link or StagedLink(self.own, self.target)
        self.conn.send((program, lengths, False, seed))
        self._sequence += 1
        sender = StagedSender(self.link, self.place.packer(program, "source", source))
        while not sender.done:
            while self.conn.poll(0):
                self.link.grant(self.conn.recv())
            for piece in sender.step():
                self.conn.send(piece.notice(1, self._sequence))
        while (credit := self.hear()) is not None:
            self.link.grant(credit)
        return self.hear()  # type: ignore[no-any-return]

    def direct(self, program: Any, lengths: dict[int, int], source: dict[int, Any], seed: int) -> Any:
        """Bytes of the arena."""
        self.conn.send((program, lengths, True, seed))
        assert self.hear() == "ready"
        peers = {
            r: nixl.Peer(
                self.agent, HandleContents(self.arena.name, self.arena.memory.part(at, lengths[r]), 0, b""), ""
            )
            for r, at in places(lengths)[0].items()
        }
        own = {r: self.agent.register(self.place.of(m)) for r, m in source.items()}
        assert DirectWrite(self.agent, program, own, peers).post().wait(LONG)
        for each in own.values():
            each.close()
        self.conn.send("complete")
        return self.hear()

    def close(self) -> None:
        self.agent.close()
        self.place.close()
        self.process.kill()
        self.process.join()


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    made = Peer(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("peer", [(3, 100), (4, 4096), (8, 16 << 20)], indirect=True)
def test_packed_bytes_of_random_programs(peer: Peer) -> None:
    """Every byte of every pool and of what is beside it; slots that are smaller than a row, too."""
    for seed in range(SEEDS):
        for program, from_lengths, to_lengths in random_pairs(random.Random(seed)):
            with pools(from_lengths, 0, seed) as (_, source):
                wanted = {r: noise(r, n + 2 * EDGE, seed + 1000) for r, n in to_lengths.items()}
                inside = {r: memoryview(a)[EDGE : len(a) - EDGE] for r, a in wanted.items()}
                execute(program, held(from_lengths, seed), inside)
                found = peer.packed(program, to_lengths, source, seed + 1000)
                assert all(np.array_equal(found[r], wanted[r]) for r in wanted), seed


@pytest.mark.parametrize("peer", [(3, 4096)], indirect=True)
def test_direct_bytes_of_random_programs(peer: Peer) -> None:
    for seed in range(SEEDS):
        for program, from_lengths, to_lengths in random_pairs(random.Random(seed)):
            with pools(from_lengths, 0, seed) as (_, source):
                offsets, size = places(to_lengths)
                wanted = noise(0, size, seed + 1000)
                inside = {r: memoryview(wanted)[at : at + to_lengths[r]] for r, at in offsets.items()}
                execute(program, held(from_lengths, seed), inside)
                assert np.array_equal(peer.direct(program, to_lengths, source, seed + 1000), wanted), seed


def held(lengths: dict[int, int], seed: int) -> dict[int, memoryview]:
    """What `pools` puts into them."""
    return {r: memoryview(noise(r, n + 2 * EDGE, seed)[EDGE : EDGE + n].copy()) for r, n in lengths.items()}


@pytest.mark.parametrize("peer", [(4, 16 << 20)], indirect=True)
def test_the_way_between_two_gpus_of_a_host_is_fast(peer: Peer) -> None:
    rate = probe(peer.own, peer.target)
    require_fast(rate, peer.target)
    with raises(RemoteError, code=ErrorCode.TRANSPORT_FAILED, path="regions[1]"):
        require_fast(rate, peer.target, floor=1e15)


@pytest.mark.parametrize("peer", [(3, 1 << 20)], indirect=True)
def test_too_few_slots_are_refused(peer: Peer) -> None:
    two = peer.agent.register(peer.place.allocate(2 << 20), 1 << 20)
    with raises(LocalError, code=ErrorCode.OUT_OF_RANGE):
        StagedLink(two, peer.target)


@pytest.mark.parametrize("peer", [(3, 1 << 20)], indirect=True)
def test_a_peer_that_dies_ends_a_write(peer: Peer) -> None:
    assert peer.target.write(peer.own.slot(0, 4096), peer.target.slot(0, 4096)).wait(LONG)
    peer.process.kill()
    peer.process.join()
    write = peer.target.write(peer.own.slot(0, 1 << 20), peer.target.slot(0, 1 << 20))
    with contextlib.suppress(KvprotoError):  # its memory is mapped here, so a copy into it may go well
        write.wait(LONG)
    assert write.proof is not None


# nodes


def floor(slot_bytes: int) -> float:
    """Tiny slots cannot be probed."""
    return DEVICE_FLOOR if slot_bytes >= 1 << 20 else 0.0


def test_staging_that_is_too_small_to_probe_is_refused(tmp_path: Path) -> None:
    made = Node(tmp_path, WriteMode.PACKED, slot_bytes=97, loud=True)
    try:
        refused = made.first(Refused)
        assert (refused.error.code, refused.error.path) == (ErrorCode.TRANSPORT_FAILED, "regions[1]")
    finally:
        made.close()


def source_node(
    conn: Connection,
    address: str,
    made: Ticket,
    way: WriteMode,
    slots: int,
    slot_bytes: int,
    hold: bool,
    loud: bool = False,
) -> None:
    """A prefill rank on GPU 0; with `hold` it stands still when its first chunks are out."""
    pool = allocate(geometry(1), 0, ITEMS, 0)
    put(on_gpu(pool), noise(0, on_gpu(pool).length, 5))
    transport = NixlTransport(way, slots, slot_bytes, device=0, floor=DEVICE_FLOOR if loud else floor(slot_bytes))
    node = nodes.DrivenSource(party_of("p", pool), pool, Listener(address), {0: address}, transports=[transport])
    chunks = Chunks(node)
    node.prefilled(made, CONTENT, nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    conn.send("listening")

    def stand_still() -> None:
        if hold and len(chunks.slots.get(1, ())) == slots:
            conn.send("in the middle")
            conn.recv()

    nodes.serve(conn, node, stand_still)
    node.close("over")


class Node(nodes.Nodes):
    """A decode rank on GPU 1, and its source in another process."""

    def __init__(
        self, folder: Path, way: WriteMode, slots: int = 4, slot_bytes: int = 96, hold: bool = False, loud: bool = False
    ) -> None:
        address, self.ticket = private_address(folder, "kv"), ticket()
        self.conn, theirs = multiprocessing.Pipe()
        arguments = (theirs, address, self.ticket, way, slots, slot_bytes, hold, loud)
        self.process = multiprocessing.get_context("spawn").Process(target=source_node, args=arguments, daemon=True)
        self.process.start()
        self.pool = allocate(geometry(1), 0, ITEMS, 1)
        assert self.conn.poll(LONG)
        assert self.conn.recv() == "listening"
        transport = NixlTransport(way, slots, slot_bytes, device=1)
        self.node = nodes.sink_node("d", self.pool, transports=[transport])
        self.node.connect(nodes.PREFILL, address)
        super().__init__([], [self.node])

    def ask(self) -> int:
        return self.fetch(0, self.ticket, CONTENT, TOKENS, {g: [4, 5, 6] for g in (0, 1)})

    def close(self) -> None:
        super().close()
        self.process.kill()
        self.process.join()


@pytest.mark.parametrize(
    ("way", "slot_bytes"), [(WriteMode.PACKED, 96), (WriteMode.PACKED, 1 << 20), (WriteMode.DIRECT, 1 << 20)]
)
def test_nodes_hand_over_and_verify(tmp_path: Path, way: WriteMode, slot_bytes: int) -> None:
    made = Node(tmp_path, way, slot_bytes=slot_bytes)
    try:
        made.ready()
        assert staged_ranks(made.node) == ([0] if way is WriteMode.PACKED else [])
        made.ask()
        received = made.first(nodes.Received, nodes.TransferLost)
        assert isinstance(received, nodes.Received), received
        assert received.checksums
        data = noise(0, on_gpu(made.pool).length, 5)
        got, rows = get(on_gpu(made.pool)), 0
        for group in (0, 1):
            spec, share = made.pool.layout.groups[group], made.pool.layout.shares[group]
            for layer in share.layers.tolist():
                for part in spec.parts:
                    _, at, shape, strides = made.pool.place(spec.name, layer, part.name)
                    a, b = (np.ndarray(shape, np.uint8, x, at, strides) for x in (data, got))
                    there, here = (x[i].reshape(-1, *shape[2:])[:TOKENS] for x, i in ((a, [1, 2, 3]), (b, [4, 5, 6])))
                    assert np.array_equal(there, here)
                    rows += len(here)
        assert rows
    finally:
        made.close()


def test_pages_after_a_source_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Node(tmp_path, WriteMode.PACKED, hold=True)
    try:
        made.ready()
        number = made.ask()
        made.turn()
        assert made.conn.poll(LONG)
        assert made.conn.recv() == "in the middle"
        made.process.kill()
        made.process.join()
        made.turn()
        assert not made.count(nodes.TransferLost)
        made.abort(0, number)
        nodes.ahead(monkeypatch, 31, *nodes.SINK)
        lost = made.first(nodes.TransferLost)
        assert (lost.error.code, lost.proven) == (ErrorCode.ABORTED, True)
    finally:
        made.close()
