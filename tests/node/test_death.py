"""A source that dies in the middle of its writes: its pages come back with proof, and the next source serves."""

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from kvproto import Pool
from kvproto.copying.program import CopyProgram
from kvproto.errors import DeviceFault, LocalError
from kvproto.events import Disconnected, Over, Unwanted
from kvproto.net import Listener, private_address
from kvproto.rank.base import party_of
from kvproto.transport.base import Memory, Move
from kvproto.transport.process import Watch
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.messages import Ticket
from tests.node import nodes
from tests.node.test_node import CONTENT, FIRST, ITEMS, TOKENS
from tests.pools import allocate, column, contents
from tests.processes import imported
from tests.session.driver import geometry, ticket

imported(__name__)
PAGES = [4, 5, 6]


class Endless:
    """A copy that never ends: a thread writes its rows again and again."""

    done = False
    bytes = 0
    stream = None

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves, self._transport = moves, ShmTransport()
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        byte = 0
        while True:
            byte = byte % 255 + 1
            for move in self._moves:
                for memory in move.sources.values():
                    np.frombuffer(memory.buffer, np.uint8)[:] = byte  # type: ignore[union-attr]
            self._transport.start(self._moves)

    def stop(self) -> Proof | None:
        return None


class EndlessTransport(ShmTransport):
    def start(self, moves: Sequence[Move]) -> Any:
        return Endless(moves)

    def begin_checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> Any:
        return dict


def prefill(conn: Connection, address: str, made: Ticket, endless: bool, engine: str = "p") -> None:
    """A prefill rank; with `endless` it writes until it is killed."""
    pool = allocate(geometry(1), 0, ITEMS)
    transports = [EndlessTransport()] if endless else []
    party = party_of(engine, pool)
    node = nodes.DrivenSource(party, pool, Listener(address), {0: address}, verify=not endless, transports=transports)
    nodes.put(pool, 7)
    node.prefilled(made, CONTENT, nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    conn.send("listening")
    nodes.serve(conn, node)


class Decode(nodes.Nodes):
    """A decode rank and its source, which may come anew."""

    def __init__(self, pool: Pool, address: str, quarantine: float = 0.5) -> None:
        self.node = nodes.sink_node("d", pool, quarantine=quarantine)
        super().__init__([], [self.node])
        self.find(address)

    def find(self, address: str) -> None:
        """The source listens there now."""
        self.node.connect(nodes.PREFILL, address)

    def ask(self, made: Ticket, pages: list[int]) -> int:
        return self.fetch(0, made, CONTENT, TOKENS, dict.fromkeys((0, 1), pages))


@attrs.frozen
class World:
    """What a test starts."""

    folder: Path
    stack: contextlib.ExitStack

    def prefill(self, made: Ticket, endless: bool, address: str = "") -> tuple[str, Any]:
        place = address or private_address(self.folder, f"kv-{secrets.token_hex(4)}")
        return place, nodes.begin(self.stack, prefill, place, made, endless)[0]

    def decode(self, address: str, pool: Pool, quarantine: float = 0.5) -> Decode:
        return self.stack.enter_context(contextlib.closing(Decode(pool, address, quarantine)))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


def rows(pool: Pool, pages: Sequence[int] = PAGES) -> Any:
    return column(pool, 0, 0, "latent")[pages[:2]]


def written(world: World, quarantine: float = 0.5) -> tuple[Pool, Any, Decode, int]:
    """A sink's pool that a source process writes without end, both, and the transfer."""
    pool, made = allocate(geometry(1), 0, ITEMS), ticket()
    address, process = world.prefill(made, endless=True)
    decode = world.decode(address, pool, quarantine)
    number = decode.ask(made, PAGES)
    decode.until(lambda: rows(pool).any(), 0.01)
    return pool, process, decode, number


@pytest.mark.parametrize("same", [False, True])
def test_killed_in_the_middle_of_its_writes(world: World, same: bool) -> None:
    """KVP-REG-PROCESS: Registered names the process, whose end is the proof (KVP-END-PROVEN).

    The loss is told at once, with proof: no byte changes from then on, and the next incarnation serves, at the same
    address or at another.
    """
    pool, process, decode, number = written(world)
    os.kill(process.pid, signal.SIGKILL)
    lost = decode.first(nodes.TransferLost)
    before = bytes(contents(pool))
    assert (lost.number, lost.error.code, lost.proven) == (number, ErrorCode.PEER_LOST, True)
    assert decode.first(Disconnected).reason == "its process has ended"
    assert decode.node.quarantined == {}
    for _ in range(50):
        assert bytes(contents(pool)) == before
    again, former = ticket(), decode.node.sources[nodes.PREFILL][0]
    address, _ = world.prefill(again, endless=False, address=former if same else "")
    if not same:
        decode.find(address)
    number = decode.ask(again, PAGES)
    assert decode.first(nodes.Received).number == number
    assert (rows(pool) == 7).all()


def asking(conn: Connection, address: str, made: Ticket) -> None:
    """A decode rank that asks for a request, until it is killed."""
    both = Decode(allocate(geometry(1), 0, ITEMS), address)
    both.ask(made, PAGES)
    conn.send("listening")
    nodes.serve(conn, both.node)


def test_a_sink_that_is_killed_keeps_no_pages(world: World) -> None:
    """The source sees the end of the process whose memory it has mapped, and does not wait until it is silent."""
    pool, made = allocate(geometry(1), 0, ITEMS), ticket(300.0)
    address, key = private_address(world.folder, "kv"), bytes(made.key)
    source = nodes.DrivenSource(party_of("p", pool), pool, Listener(address), {0: address})
    world.stack.callback(source.close, "over")
    prefill = nodes.Nodes([source], [])
    source.expect(made, CONTENT, TOKENS)
    process, _ = nodes.begin(world.stack, asking, address, made)
    prefill.until(lambda: source.tickets.is_asked(key))
    process.kill()
    prefill.ends(Unwanted, 1)
    source.finish(key, nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    (over,) = prefill.ends(Over, 1)
    assert {rank: error.code for rank, error in over.lost.items()} == {0: ErrorCode.PEER_LOST}
    assert [e.reason for e in prefill.told if isinstance(e, Disconnected)] == ["its process has ended"]


def test_pages_of_a_source_that_hangs_come_back_when_it_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, not dead: silence is no proof, and what it may still write is counted (KVP-END-REUSE)."""
    pool, process, decode, number = written(world)
    os.kill(process.pid, signal.SIGSTOP)
    decode.abort(0, number)
    with monkeypatch.context() as patch:
        nodes.ahead(patch, 40, *nodes.SINK)
        lost = decode.first(nodes.TransferLost)
    assert (lost.number, lost.proven) == (number, False)
    assert decode.node.quarantined == {0: 3, 1: 3}
    again = ticket()
    decode.find(world.prefill(again, endless=False)[0])
    number = decode.ask(again, [7, 8, 9])  # serves meanwhile, into other pages
    assert decode.first(nodes.Received).number == number
    assert (rows(pool, [7, 8]) == 7).all()
    assert not decode.count(nodes.TransferProven)
    os.kill(process.pid, signal.SIGKILL)
    assert decode.first(nodes.TransferProven).number == lost.number
    assert decode.node.quarantined == {}


def test_without_sight_of_the_process_there_is_no_proof(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-REG-DEATH.

    Another PID namespace, say: its pages stay in quarantine, and past a share of the pool the node says so.
    """
    monkeypatch.setattr(Watch, "of", lambda process: None)
    _, process, decode, number = written(world, quarantine=0.2)
    decode.node.check_quarantine()
    os.kill(process.pid, signal.SIGKILL)
    decode.abort(0, number)
    nodes.ahead(monkeypatch, 40, *nodes.SINK)
    assert not decode.first(nodes.TransferLost).proven
    with pytest.raises(LocalError) as caught:
        decode.node.check_quarantine()
    assert (caught.value.code, caught.value.path) == (ErrorCode.BUSY, "quarantine[target]")
    decode.turn()
    assert not decode.count(nodes.TransferProven)


@attrs.frozen
class Broken:
    """A copy whose GPU has lost its context."""

    bytes = 0
    stream = None

    @property
    def done(self) -> bool:
        raise DeviceFault(LocalError(ErrorCode.TRANSPORT_FAILED, "", "copy", "CUDA_ERROR_ILLEGAL_ADDRESS", ""))

    def stop(self) -> Proof | None:
        return Proof.PROVEN


class BrokenTransport(ShmTransport):
    def start(self, moves: Sequence[Move]) -> Any:
        return Broken()


def test_a_device_fault_is_no_refusal(world: World) -> None:
    """It leaves `turn`, again and again, and says nothing to peers: the end of the process is what they hear."""
    pool, made = allocate(geometry(1), 0, ITEMS), ticket()
    address = private_address(world.folder, "kv")
    source = nodes.DrivenSource(
        party_of("p", pool), pool, Listener(address), {0: address}, transports=[BrokenTransport()]
    )  # fmt: skip
    world.stack.callback(source.close, "over")
    decode = world.decode(address, allocate(geometry(1), 0, ITEMS))
    decode.sources.append(source)
    decode.ready()
    source.prefilled(made, CONTENT, nodes.finished({g: [1, 2, 3] for g in (0, 1)}, TOKENS, FIRST))
    decode.ask(made, PAGES)
    with pytest.raises(DeviceFault):
        decode.until(lambda: False)
    with pytest.raises(DeviceFault):
        source.turn()
    decode.turn(decode.node)
    assert not decode.count(nodes.TransferLost)
