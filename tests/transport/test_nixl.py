"""NIXL between real processes, over UCX on host memory: bytes, refusals, deaths; and what needs no NIXL."""

import contextlib
import hashlib
import importlib.util
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import attrs
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproto.copying.execute import execute
from kvproto.copying.program import OP, CopyProgram, Operations, RankLayout, Runs, Window
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.planning.geometry import Geometry, Rank, mla, owns
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.transport.base import PeerRegions
from kvproto.transport.nixl import direct
from kvproto.transport.nixl.agent import Agent, Peer
from kvproto.transport.nixl.handle import ByteRange
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.staging.packed import PackedStream
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire.enums import ErrorCode, Feature, MemoryKind, Proof
from kvproto.wire.messages import Handle, Region
from tests.errors import raises
from tests.plan import oracle
from tests.plan.test_program import hold
from tests.pools import lower
from tests.processes import FORKED, imported
from tests.transport.test_packed import two_engines

imported("nixl._bindings", __name__)  # a second and a half for each process
LONG = 60.0
"""Seconds that nothing here takes, however slow the machine: a wait that ends by it fails the test."""
PAGES, LAYERS, SLOT = 24, 3, 100_000


@pytest.fixture(params=[False, True], ids=["by a thread", "eager"])
def who_moves_nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent.__init__, "__defaults__", (request.param,))


def needs_nixl(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that opens agents: it runs once for each way of moving them on."""
    missing = importlib.util.find_spec("nixl") is None
    return pytest.mark.skipif(missing, reason="nixl is not installed")(pytest.mark.usefixtures("who_moves_nixl")(test))


def program(seed: int) -> tuple[CopyProgram, int]:
    """Pages of 16 rows of 1152 bytes in random order on both sides, and the length of a region."""
    rng = np.random.default_rng(seed)
    group = mla(0, "pages", 0, 1152, 16)
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(LAYERS)),)),))
    columns, length = columns_without_gaps(geometry, 0, {0: PAGES + 8})
    own = RankLayout(geometry, 0, columns)
    windows = [{0: Window(0, PAGES * 16 - 5, rng.permutation(PAGES + 8)[:PAGES])} for _ in range(2)]
    return lower(plan(geometry, geometry).between(0, 0), own, own, *windows), length


def sink(conn: Connection, transports: str, length: int, slot_bytes: int) -> None:
    """A peer: memory that others write, and its content when asked."""
    os.environ["UCX_TLS"] = transports
    with Agent() as agent:
        memory = bytearray(length)
        registered = agent.register(memory, slot_bytes)
        conn.send(registered.region(0))
        while asked := conn.recv():
            conn.send(bytes(memory[slice(*asked)]))


def staged_sink(conn: Connection, transports: str, seed: int) -> None:
    """A peer with staging slots, that unpacks what chunks name."""
    os.environ["UCX_TLS"] = transports
    made, length = program(seed)
    pages = bytearray(length)
    with Agent() as agent:
        staging = agent.register(bytearray(4 * SLOT), SLOT)
        receiver = StagedReceiver(staging)
        receiver.open(1, PackedStream(made, "sink", {0: memoryview(pages)}))
        conn.send(staging.region(0))
        while not receiver.finish(1):
            if credit := receiver.credit(1):
                conn.send(credit)
            receiver.chunk(conn.recv())
    conn.send(bytes(pages))


@contextmanager
def started(target: Any, *args: Any) -> Iterator[tuple[BaseProcess, Connection, Region]]:
    ours, theirs = multiprocessing.Pipe()
    process = FORKED.Process(target=target, args=(theirs, os.environ.get("UCX_TLS", "all"), *args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LONG)
        yield process, ours, ours.recv()
    finally:
        process.kill()
        process.join()


def written(peer: Peer, source: ByteRange, to: int = 0) -> bool:
    return peer.write(source, peer.memory.part(to, source.length)).wait(LONG)


@needs_nixl
@pytest.mark.parametrize("transport", ["tcp", "all"])
def test_bytes_arrive_direct_and_staged(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transport)
    made, length = program(7)
    pages = bytearray(random.Random(1).randbytes(length))
    wanted = bytearray(length)
    execute(made, {0: memoryview(pages)}, {0: memoryview(wanted)})
    with Agent() as agent:
        with started(sink, length, 0) as (_, conn, region):
            peer, own = agent.connect(region, "regions[0]"), agent.register(pages)
            assert direct.DirectWrite(agent, made, {0: own}, {0: peer}).post().wait(LONG)
            conn.send((0, length))
            assert conn.recv() == wanted
        with started(staged_sink, 7) as (_, conn, region):
            link = StagedLink(agent.register(bytearray(3 * SLOT), SLOT), agent.connect(region, "regions[0]"))
            sender = StagedSender(link, PackedStream(made, "source", {0: memoryview(pages)}))
            chunks = 0
            while not sender.done:
                while conn.poll(0):
                    link.grant(conn.recv())
                for piece in sender.step():
                    conn.send(piece.notice(1, 1))
                    chunks += 1
                if not link.granted:
                    agent.wait(0.01)
            assert chunks == -(-made.bytes // SLOT) > 4
            found = conn.recv()
            while not isinstance(found, bytes):  # credit for what came last
                found = conn.recv()
            assert found == wanted


@needs_nixl
def test_a_killed_peer_ends_its_writes_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 64 << 20
    with Agent() as agent, started(sink, size, 0) as (first, _, one), started(sink, 4096, 0) as (_, conn, two):
        own = agent.register(bytearray(size))
        dying, living = agent.connect(one, "regions[0]"), agent.connect(two, "regions[0]")
        assert written(dying, own.memory.part(0, 4096))
        os.kill(first.pid or 0, signal.SIGSTOP)  # so the write cannot end
        write = dying.write(own.memory, dying.memory)
        assert written(living, own.memory.part(0, 4096))
        assert not write.ready()
        assert write.proof is None
        first.kill()
        with raises(KvprotoError, code=ErrorCode.PEER_LOST):
            raise AssertionError(f"{write.wait(LONG)} after {LONG} s or less")
        assert write.proof == Proof.UNPROVABLE
        with raises(KvprotoError, code=ErrorCode.PEER_LOST):
            written(dying, own.memory.part(0, 8))
        own.memory.buffer[:4] = b"here"  # type: ignore[index]
        assert written(living, own.memory.part(0, 8))
        conn.send((0, 4))
        assert conn.recv() == b"here"
        dying.close()
        with started(sink, 4096, 0) as (_, conn, again):  # the peer's successor
            successor = agent.connect(again, "regions[0]")
            assert written(successor, own.memory.part(0, 8))
            conn.send((0, 4))
            assert conn.recv() == b"here"


@needs_nixl
def test_a_peer_killed_under_shared_memory_never_hangs_the_sender() -> None:
    with Agent() as agent, started(sink, 8 << 20, 0) as (process, _, region):
        own, peer = agent.register(bytearray(8 << 20)), agent.connect(region, "regions[0]")
        writes = [peer.write(own.memory, peer.memory) for _ in range(8)]
        process.kill()
        for write in writes:
            with contextlib.suppress(KvprotoError):
                write.wait(LONG)
        assert all(w.proof is not None for w in writes)
        process.join()  # killed is not yet dead: its memory may take writes for some milliseconds more
        with raises(KvprotoError, code=ErrorCode.PEER_LOST):
            written(peer, own.memory)


@needs_nixl
def test_what_can_be_proved_of_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 64 << 20
    with Agent() as agent, started(sink, 3 * size, size) as (process, conn, region):
        own = agent.register(bytearray(3 * size), size)
        peer, other = (agent.connect(region, "regions[0]") for _ in range(2))
        assert written(peer, own.slot(0, 4096))
        os.kill(process.pid or 0, signal.SIGSTOP)
        patient, hasty = (to.write(own.slot(i, size), to.slot(i, size)) for i, to in enumerate((peer, other)))
        agent.register(bytearray(1))  # so both are posted
        other.close()
        with pytest.raises(KvprotoError) as caught:
            hasty.wait(LONG)
        assert (caught.value.code, hasty.proof) == (ErrorCode.ABORTED, Proof.UNPROVABLE)
        assert patient.proof is None
        os.kill(process.pid or 0, signal.SIGCONT)
        assert patient.wait(LONG)
        assert patient.proof == Proof.PROVEN
        peer.close()
        assert patient.proof == Proof.PROVEN
        peer = agent.connect(region, "regions[0]")
        assert written(peer, own.slot(2, 4096), 2 * size)
        conn.send((0, 1))
        assert conn.recv() == b"\0"


@needs_nixl
def test_the_transfers_that_served_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvproto.transport.nixl.agent._MOST_CACHED", 4)
    with Agent() as agent, Agent() as other:
        memory = bytearray(4096)
        own = agent.register(bytearray(range(256)) * 16, 1024)
        peer = agent.connect(other.register(memory, 1024).region(0), "regions[0]")
        for size in (1, 2, 3, 4, 1, 5, 6):
            assert peer.write(own.slot(0, size), peer.slot(1, size)).wait(LONG)
            assert memory[1024 : 1024 + size] == bytes(range(size))
        assert [slots.length for slots in agent._transfers.cached] == [4, 1, 5, 6]


@needs_nixl
def test_what_is_under_way_while_keys_are_loaded_anew_is_not_posted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Agent(eager=True) as agent, Agent() as other:
        own = agent.register(bytearray(4096), 1024)
        peer = agent.connect(other.register(bytearray(4096), 1024).region(0), "regions[0]")
        post = agent._transfers.nixl.post
        monkeypatch.setattr(
            agent._transfers.nixl, "post", lambda handle: post(handle) and False
        )  # as over slower links
        write = peer.write(own.slot(0, 1024), peer.slot(0, 1024))
        assert write.proof is None
        agent.connect(other.register(bytearray(8)).region(1), "regions[1]")
        assert write.wait(LONG)
        assert not agent._transfers.cached
        assert peer.write(own.slot(0, 1024), peer.slot(0, 1024)).wait(LONG)
        assert len(agent._transfers.cached) == 1


@needs_nixl
def test_transfers_that_are_posted_again_carry_what_the_slots_have_now() -> None:
    with Agent() as agent, Agent() as other:
        memory, dice = bytearray(3 * 4096), random.Random(3)
        own = agent.register(bytearray(3 * 4096), 4096)
        peer = agent.connect(other.register(memory, 4096).region(0), "regions[0]")
        wanted = bytearray(memory)
        for round_ in range(300):
            source, to = dice.randrange(3), dice.randrange(3)
            size = 4096 if round_ < 200 else dice.choice([1, 100, 4096])
            data = dice.randbytes(size)
            own.slot(source, size).buffer[:] = data  # type: ignore[index]
            write = peer.write(own.slot(source, size), peer.slot(to, size))
            assert write.wait(LONG)
            assert write.proof == Proof.PROVEN
            wanted[to * 4096 : to * 4096 + size] = data
            assert memory == wanted
            if round_ == 199:
                assert len(agent._transfers.cached) == 9
        assert len(agent._transfers.cached) == 27
        writes = [peer.write(own.slot(0, 4096), peer.slot(1, 4096)) for _ in range(20)]  # each by a transfer of its own
        assert all(w.wait(LONG) for w in writes)
        assert memory[4096:8192] == own.memory.buffer[:4096]  # type: ignore[index]
        assert len(agent._transfers.cached) == 27
        own.close()
        assert not agent._transfers.cached


@needs_nixl
@pytest.mark.parametrize("transport", ["tcp", "all"])
def test_a_peer_killed_before_a_transfer_is_posted_again(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transport)
    with Agent() as agent:
        own = agent.register(bytearray(b"here" * 1024), 1024)
        with started(sink, 4096, 1024) as (process, _, region):
            dead = agent.connect(region, "regions[0]")
            for _ in range(3):
                assert all(dead.write(own.slot(i, 1024), dead.slot(i, 1024)).wait(LONG) for i in range(4))
            assert len(agent._transfers.cached) == 4
            process.kill()
            process.join()
            again = [dead.write(own.slot(i, 1024), dead.slot(i, 1024)) for i in range(4)]
            for write in again:
                with contextlib.suppress(KvprotoError):
                    write.wait(LONG)
                assert write.proof is not None
            with raises(KvprotoError, code=ErrorCode.PEER_LOST):
                written(dead, own.slot(0, 1024))
            assert not agent._transfers.cached
            dead.close()
        with started(sink, 4096, 1024) as (_, conn, region):
            living = agent.connect(region, "regions[0]")
            for _ in range(2):
                assert living.write(own.slot(0, 1024), living.slot(3, 1024)).wait(LONG)
            conn.send((3072, 3076))
            assert conn.recv() == b"here"


@needs_nixl
def test_memory_that_is_closed_is_written_by_no_kept_transfer() -> None:
    with Agent() as agent, Agent() as other:
        memory, buffer = bytearray(4096), bytearray(b"a" * 4096)
        region = other.register(memory, 1024).region(0)
        own, twin = (agent.register(buffer, 1024) for _ in range(2))
        agent.connect(other.register(bytearray(8)).region(1), "regions[1]")  # so that the connection stays
        peer = agent.connect(region, "regions[0]")
        slot = own.slot(0, 1024)
        for each in (slot, twin.slot(1, 1024)):
            assert peer.write(each, peer.slot(0, 1024)).wait(LONG)
        own.close()
        assert not agent._transfers.cached  # NIXL may have taken the one for the other
        assert peer.write(twin.slot(1, 1024), peer.slot(1, 1024)).wait(LONG)
        twin.close()
        gone = peer.write(slot, peer.slot(0, 1024))
        with pytest.raises(KvprotoError) as caught:
            gone.wait(LONG)
        assert (caught.value.code, gone.proof) == (ErrorCode.TRANSPORT_FAILED, Proof.PROVEN)
        buffer[:] = b"b" * 4096
        again = agent.register(buffer, 1024)
        assert peer.write(again.slot(0, 1024), peer.slot(2, 1024)).wait(LONG)
        assert memory == b"a" * 2048 + b"b" * 1024 + bytes(1024)
        peer.close()
        assert not agent._transfers.cached
        with pytest.raises(KvprotoError):
            peer.write(again.slot(0, 1024), peer.slot(2, 1024)).wait(LONG)
        anew = agent.connect(region, "regions[0]")
        assert anew.write(again.slot(0, 1024), anew.slot(3, 1024)).wait(LONG)
        assert memory[3072:] == b"b" * 1024


@needs_nixl
def test_a_transfer_that_was_posted_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    size = 64 << 20
    with Agent() as agent, started(sink, size, size) as (process, conn, region):
        own = agent.register(bytearray(size), size)
        other, peer = (agent.connect(region, "regions[0]") for _ in range(2))
        for _ in range(2):
            assert peer.write(own.slot(0, size), peer.slot(0, size)).wait(LONG)
        assert len(agent._transfers.cached) == 1
        os.kill(process.pid or 0, signal.SIGSTOP)
        write = peer.write(own.slot(0, size), peer.slot(0, size))
        agent.register(bytearray(1))  # so it is posted
        assert not agent._transfers.cached
        peer.close()
        with pytest.raises(KvprotoError) as caught:
            write.wait(LONG)
        assert (caught.value.code, write.proof) == (ErrorCode.ABORTED, Proof.UNPROVABLE)
        assert not agent._transfers.cached
        os.kill(process.pid or 0, signal.SIGCONT)
        own.memory.buffer[-4:] = b"here"  # type: ignore[index]
        assert other.write(own.slot(0, size), other.slot(0, size)).wait(LONG)
        conn.send((size - 4, size))
        assert conn.recv() == b"here"


@needs_nixl
def test_the_descriptor_is_readable_from_the_end_of_a_write_to_the_next_wait() -> None:
    with Agent() as agent, Agent() as other:
        peer = agent.connect(other.register(bytearray(64)).region(0), "regions[0]")
        own = agent.register(bytearray(64))
        assert not agent.wait(0)
        for _ in range(3):
            assert all(written(peer, own.memory) for _ in range(3))
            agent.register(bytearray(1))  # so the thread has told of all
            assert select.select([agent.fileno()], [], [], LONG)[0]
            assert agent.wait(0)
            assert not agent.wait(0)


def reframed(handle: Handle, **changes: Any) -> Handle:
    """A handle with other fields and the right digest."""
    data = bytes(handle.data)
    names = ("name", "address", "length", "device", "kind", "slot_bytes", "metadata")
    fields = dict(zip(names, msgpack.unpackb(data[37:]), strict=True)) | changes
    body = msgpack.packb(list(fields.values()))
    return attrs.evolve(handle, data=data[:5] + hashlib.sha256(body).digest() + body)


@needs_nixl
def test_handles_that_are_refused() -> None:
    with Agent() as agent, Agent() as other:
        region = other.register(bytearray(4096)).region(0)
        (handle,) = region.handles
        data = bytes(handle.data)
        metadata = msgpack.unpackb(data[37:])[-1]
        rng = random.Random(5)

        def refused(*handles: Handle, **changes: Any) -> ErrorCode:
            with raises(RemoteError, path="regions[0].handles") as caught:
                agent.connect(attrs.evolve(region, handles=handles, **changes), "regions[0]")
            return caught.value.code

        assert refused() == ErrorCode.NO_TRANSPORT
        bad = [
            attrs.evolve(handle, data=d) for d in (b"", b"\xc1", data[:-1], data + b"\0", bytes(len(data)), data[:5])
        ]
        bad += [
            attrs.evolve(handle, data=data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]) for i in range(0, len(data), 9)
        ]
        bad += [reframed(handle, **c) for c in (
            {"name": "kvproto-" + "0" * 32}, {"name": "x"}, {"name": 5}, {"address": 0}, {"address": (1 << 63) - 4096},
            {"length": 4095}, {"length": -1}, {"kind": 2}, {"kind": 9}, {"device": -1}, {"slot_bytes": 4097}, {"metadata": ""},
            {"metadata": b""}, {"metadata": metadata[:70]}, {"metadata": metadata[: len(metadata) // 2]},
        )]  # fmt: skip
        bad += [reframed(handle, metadata=metadata[:70] + rng.randbytes(n)) for n in (1, 40, 400)]
        for one in bad:
            assert refused(one) == ErrorCode.TRANSPORT_FAILED
        assert refused(handle, length=4097) == ErrorCode.TRANSPORT_FAILED
        assert refused(agent.register(bytearray(4096)).handle) == ErrorCode.TRANSPORT_FAILED  # our own
        peer = agent.connect(region, "regions[0]")
        assert written(peer, agent.register(bytearray(8)).memory)


@needs_nixl
def test_a_peer_is_written_only_where_its_handle_says() -> None:
    with Agent() as agent, Agent() as other:
        memory = bytearray(8192)
        region = other.register(memoryview(memory)[:4096]).region(0)
        peer, own = agent.connect(region, "regions[0]"), agent.register(bytearray(b"x" * 8))
        with pytest.raises(KvprotoError):
            peer.memory.part(4092, 8)
        outside = attrs.evolve(peer.memory, address=peer.memory.address + 4092, length=8)
        write = peer.write(own.memory, outside)
        with pytest.raises(KvprotoError) as caught:
            write.wait(LONG)
        assert (caught.value.code, write.proof) == (ErrorCode.TRANSPORT_FAILED, Proof.PROVEN)
        assert memory == bytes(8192)


@needs_nixl
def test_two_regions_of_one_agent() -> None:
    with Agent() as agent, Agent() as other:
        memories = [bytearray(64), bytearray(64)]
        peers = [agent.connect(other.register(m).region(i), f"regions[{i}]") for i, m in enumerate(memories)]
        own = agent.register(bytearray(b"abcd"))
        assert written(peers[0], own.memory)
        peers[0].close()
        with pytest.raises(KvprotoError):
            written(peers[0], own.memory)
        assert written(peers[1], own.memory)
        assert [m[:4] for m in memories] == [b"abcd", b"abcd"]


@needs_nixl
def test_a_closed_agent_answers() -> None:
    agent, other = Agent(), Agent()
    peer = agent.connect(other.register(bytearray(64)).region(0), "regions[0]")
    own = agent.register(bytearray(64))
    agent.close()
    agent.close()
    for use in (lambda: agent.register(bytearray(8)), lambda: written(peer, own.memory), peer.close):
        with raises(KvprotoError, code=ErrorCode.TRANSPORT_FAILED):
            use()
    other.close()


@needs_nixl
def test_slots_that_are_none() -> None:
    with Agent() as agent, pytest.raises(LocalError) as caught:
        agent.register(bytearray(8), slot_bytes=9)
    assert caught.value.code == ErrorCode.OUT_OF_RANGE


@needs_nixl
def test_a_probe_measures_staging_memory_and_nothing_else() -> None:
    with Agent() as agent, Agent() as other:
        own = agent.register(bytearray(1 << 20))
        slots = agent.connect(other.register(bytearray(3 << 18), 1 << 18).region(0), "regions[0]")
        assert direct.probe(own, slots, 4 << 20) > 1e5
        pages = agent.connect(other.register(bytearray(1 << 20)).region(1), "regions[1]")
        with pytest.raises(KvprotoError):
            direct.probe(own, pages)
        direct.require_fast(1.0, slots)  # host memory is as fast as it is


@needs_nixl
def test_device_memory_that_is_reached_slowly_is_refused() -> None:
    with Agent() as agent, Agent() as other:
        peer = agent.connect(other.register(bytearray(64)).region(0), "regions[0]")
        peer.memory = attrs.evolve(peer.memory, kind=MemoryKind.CUDA)
        direct.require_fast(9e9, peer)
        with raises(RemoteError, code=ErrorCode.TRANSPORT_FAILED):
            direct.require_fast(2e9, peer)


def test_an_agent_without_nixl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with raises(LocalError, code=ErrorCode.NO_TRANSPORT):
        Agent()


def test_the_module_needs_no_nixl() -> None:
    code = "import sys, kvproto.transport.nixl.agent; sys.exit(any(m.split('.')[0].startswith('nixl') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**48))
def test_descriptors_are_the_program(seed: int) -> None:
    rng = random.Random(seed)
    source, target, whole, spans = two_engines(rng)
    made = plan(source, target)
    for rank in target.ranks:
        held = hold(rng, target, rank.rank, spans)
        for number in made.required(rank.rank):
            have = hold(rng, source, number, whole)
            lowered = lower(
                made.between(number, rank.rank), RankLayout(source, number, have.columns),
                RankLayout(target, rank.rank, held.columns), have.windows, held.windows,
            )  # fmt: skip
            there, wanted, here = (
                oracle.noise(x, n) for x, n in ((have.lengths, 1), (held.lengths, 2), (held.lengths, 2))
            )
            execute(
                lowered, {i: memoryview(p) for i, p in there.items()}, {i: memoryview(p) for i, p in wanted.items()}
            )
            count = 0
            bases = {i: 1000 * i for i in there}, {i: 5000 * i for i in here}
            for (a, b), runs in direct.descriptors(lowered, *bases).items():
                for x, y, n in zip(*(r.tolist() for r in runs), strict=True):
                    x, y, count = x - 1000 * a, y - 5000 * b, count + 1
                    here[b][y : y + n] = there[a][x : x + n]
            assert all(np.array_equal(here[i], wanted[i]) for i in here)
            assert count == lowered.runs().count


H200 = direct.Costs(descriptor=6.5e-6, link=335e9)


def test_the_threshold_is_where_descriptors_keep_the_packed_share() -> None:
    run = direct.threshold(H200)
    assert run / (run / H200.link + H200.descriptor) == pytest.approx(H200.packed * H200.link)


@pytest.mark.parametrize(
    ("runs", "way"),
    [
        (Runs(1000, 1000 * 1152), direct.WriteMode.PACKED),
        (Runs(1000, 1000 << 20), direct.WriteMode.PACKED),
        (Runs(10, 10 * 64 << 20), direct.WriteMode.DIRECT),
        (Runs(0, 0), direct.WriteMode.PACKED),
    ],
)
def test_the_choice_on_a_pair_of_h200(runs: Runs, way: direct.WriteMode) -> None:
    assert direct.choose(runs, H200) == way


def test_a_slow_link_needs_no_packing() -> None:
    assert direct.choose(Runs(1000, 1000 * 65536), direct.Costs(descriptor=6.5e-6, link=1e9)) == direct.WriteMode.DIRECT


NOTHING = CopyProgram((), Operations(np.empty(0, OP)), (), ())


@needs_nixl
def test_pages_behind_slots_need_the_feature_and_the_slots() -> None:
    """KVP-REG-STAGING"""
    memory = {0: SharedMemory(4096), 3: SharedMemory(64)}
    with closing(NixlTransport(slots=3, slot_bytes=512)) as sink, closing(NixlTransport(slots=3)) as source:
        exposed = sink.expose(memory, 4, NOTHING, NOTHING.runs)
        assert [r.id for r in exposed.regions] == [4]
        pages = [attrs.evolve(m.region, id=id, handles=exposed.handles[id]) for id, m in memory.items()]
        for regions, staged in ((pages, True), ([*pages, *exposed.regions], False)):
            with raises(RemoteError, code=ErrorCode.NO_TRANSPORT, path="regions[0].handles"):
                source.connect(PeerRegions(regions, memory, True, (Feature.STAGED,) * staged, b""))
        connection = source.connect(PeerRegions([*pages, *exposed.regions], memory, True, (Feature.STAGED,), b""))
        assert connection.link is not None
        assert connection.link.slot_bytes == 512
        connection.close()


@needs_nixl
def test_every_region_of_a_pool_is_registered_and_none_can_be_read() -> None:
    memory = {0: SharedMemory(4096), 3: SharedMemory(64)}
    with closing(NixlTransport(direct.WriteMode.DIRECT)) as sink, closing(NixlTransport()) as source:
        exposed = sink.expose(memory, 4, NOTHING, NOTHING.runs)
        assert (exposed.regions, exposed.packed) == ((), None)
        regions = [attrs.evolve(m.region, id=id, handles=exposed.handles[id]) for id, m in memory.items()]
        connection = source.connect(PeerRegions(regions, memory, True, (), b""))
        assert connection.mapped.keys() == memory.keys()
        connection.close()
        with raises(RemoteError, code=ErrorCode.NO_TRANSPORT):
            source.connect(PeerRegions(regions, memory, False, (), b""))
