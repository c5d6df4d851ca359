"""A source that dies in the middle of its writes: its pages come back with proof, and the next source serves."""

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import kvproto.node.sink
from kvproto.copying.program import CopyProgram
from kvproto.errors import DeviceFault, LocalError
from kvproto.net import Dialer, Listener, private_address
from kvproto.net.sockets import wait
from kvproto.node import Finished, SinkNode, SourceNode
from kvproto.node.pool import Pool, allocate
from kvproto.node.sink import Received
from kvproto.session import Party
from kvproto.session.events import Lost, Proven, Ready, SessionClosed
from kvproto.transport.base import Memory, Move
from kvproto.transport.process import Watch
from kvproto.transport.shm.transport import ShmTransport
from kvproto.wire.enums import ErrorCode, Outcome, Proof
from kvproto.wire.messages import Ticket
from tests.node.test_node import CONTENT, ITEMS, TOKENS
from tests.session.driver import geometry, ticket

PAGES = [4, 5, 6]


class Endless:
    """A copy that never ends: a thread writes its rows again and again."""

    done = False
    bytes = 0
    stream = None

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves, self._mover = moves, ShmTransport()
        threading.Thread(target=self._write, daemon=True).start()

    def _write(self) -> None:
        byte = 0
        while True:
            byte = byte % 255 + 1
            for move in self._moves:
                for memory in move.sources.values():
                    np.frombuffer(memory.buffer, np.uint8)[:] = byte  # type: ignore[union-attr]
            self._mover.start(self._moves)

    def stop(self) -> Proof | None:
        return None


class EndlessMover(ShmTransport):
    def start(self, moves: Sequence[Move]) -> Any:
        return Endless(moves)

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        return {}


def prefill(conn: Connection, address: str, made: Ticket, endless: bool) -> None:
    """A prefill rank; with `endless` it writes until it is killed."""
    pool = allocate(geometry(1), 0, ITEMS)
    movers = [EndlessMover()] if endless else []
    party = Party("p", 0, 0, secrets.randbits(60))
    node = SourceNode(party, geometry(1), pool, Listener(address), {0: address}, not endless, movers)
    np.frombuffer(pool.memory.buffer, np.uint8)[:] = 7  # type: ignore[attr-defined]
    node.expect(made, CONTENT)
    items = {g: [1, 2, 3] for g in (0, 1)}
    node.finish(bytes(made.key), Finished(items, TOKENS, Outcome.CONTINUE, {(2, "token"): b"\7\0\0\0"}))
    conn.send("listening")
    while not conn.poll(0.002):
        node.poll()


class Decode:
    """A decode rank whose node is made anew for each incarnation of the source; its pool stays."""

    def __init__(self, address: str, pool: Pool, stack: contextlib.ExitStack) -> None:
        self.dialer, self.told = Dialer(), list[Any]()
        party = Party("d", 0, 0, secrets.randbits(60))
        self.node = SinkNode(party, geometry(1), pool, self.dialer, address)
        stack.callback(self.node.close, "over")

    def until(self, condition: Callable[[], Any]) -> Any:
        for _ in range(2000):
            self.told += self.node.poll()
            if found := condition():
                return found
            wait(self.dialer.sockets, 0.01)
        raise AssertionError(self.told)

    def first(self, *kinds: type) -> Any:
        return self.until(lambda: [e for e in self.told if isinstance(e, kinds)])[0]

    def ask(self, made: Ticket) -> int:
        self.first(Ready)
        return self.node.transfer(made, CONTENT, 0, TOKENS, dict.fromkeys((0, 1), PAGES))


@attrs.frozen
class World:
    """What a test starts."""

    folder: Path
    stack: contextlib.ExitStack

    def prefill(self, made: Ticket, endless: bool) -> tuple[str, Any]:
        address = private_address(self.folder, f"kv-{secrets.token_hex(4)}")
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("forkserver")
        process = spawn.Process(target=prefill, args=(theirs, address, made, endless), daemon=True)
        process.start()
        self.stack.callback(ours.close)
        self.stack.callback(process.join)
        self.stack.callback(process.kill)
        assert ours.poll(60)
        assert ours.recv() == "listening"
        return address, process

    def decode(self, address: str, pool: Pool) -> Decode:
        return Decode(address, pool, self.stack)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    tmp_path.chmod(0o700)
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


def rows(pool: Pool) -> Any:
    return pool.array(0, 0, "latent")[PAGES[:2]]


def written(world: World) -> tuple[Pool, Any, Any, int]:
    """A sink's pool that a source process writes without end, both, and the transfer."""
    pool, made = allocate(geometry(1), 0, ITEMS), ticket()
    address, process = world.prefill(made, endless=True)
    decode = world.decode(address, pool)
    number = decode.ask(made)
    decode.until(lambda: rows(pool).any())
    return pool, process, decode, number


def test_killed_in_the_middle_of_its_writes(world: World) -> None:
    """KVP-REG-PROCESS: Registered names the process, whose end is the proof.

    The loss is told at once, with proof: no byte changes from then on, and the next incarnation serves.
    """
    pool, process, decode, number = written(world)
    os.kill(process.pid, signal.SIGKILL)
    lost = decode.first(Lost)
    seen = bytes(pool.memory.buffer)  # type: ignore[attr-defined]
    assert (lost.transfer, lost.error.code, lost.proof) == (number, ErrorCode.PEER_LOST, Proof.PROVEN)
    assert decode.first(SessionClosed).reason == "its process has ended"
    assert decode.node.quarantined == {}
    for _ in range(50):
        assert bytes(pool.memory.buffer) == seen  # type: ignore[attr-defined]
    again = ticket()
    address, _ = world.prefill(again, endless=False)
    following = world.decode(address, pool)
    following.ask(again)
    following.first(Received)
    assert (rows(pool) == 7).all()


def test_pages_of_a_source_that_hangs_come_back_when_it_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, not dead: silence is no proof, and what it may still write is counted."""
    pool, process, decode, number = written(world)
    os.kill(process.pid, signal.SIGSTOP)
    decode.node.abort(number, "enough")
    monkeypatch.setattr(kvproto.node.sink, "time", later(40))
    lost = decode.first(Lost)
    assert (lost.transfer, lost.proof) == (number, Proof.UNPROVABLE)
    assert decode.node.quarantined == {0: 3, 1: 3}
    again = ticket()
    address, _ = world.prefill(again, endless=False)
    following = world.decode(address, pool)  # serves meanwhile, into other pages
    following.first(Ready)
    following.node.transfer(again, CONTENT, 0, TOKENS, {g: [7, 8, 9] for g in (0, 1)})
    following.first(Received)
    assert not [e for e in decode.node.poll() if isinstance(e, Proven)]
    os.kill(process.pid, signal.SIGKILL)
    assert decode.first(Proven).transfer == number
    assert decode.node.quarantined == {}


def test_without_sight_of_the_process_there_is_no_proof(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """KVP-REG-DEATH.

    Another PID namespace, say: its pages stay in quarantine, and past a share of the pool the node says so.
    """
    monkeypatch.setattr(Watch, "of", lambda process: None)
    _, process, decode, number = written(world)
    os.kill(process.pid, signal.SIGKILL)
    decode.node.abort(number, "no answer")
    monkeypatch.setattr(kvproto.node.sink, "time", later(40))
    assert decode.first(Lost).proof == Proof.UNPROVABLE
    decode.node._most = 0.2
    with pytest.raises(LocalError) as caught:
        decode.node.transfer(ticket(), CONTENT, 0, TOKENS, dict.fromkeys((0, 1), PAGES))
    assert (caught.value.code, caught.value.path) == (ErrorCode.BUSY, "quarantine[target]")
    assert not [e for e in decode.node.poll() if isinstance(e, Proven)]


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


class BrokenMover(ShmTransport):
    def start(self, moves: Sequence[Move]) -> Any:
        return Broken()


def test_a_device_fault_is_no_refusal(world: World) -> None:
    """It leaves `poll`, again and again, and says nothing to peers: the end of the process is what they hear."""
    pool, made = allocate(geometry(1), 0, ITEMS), ticket()
    address = private_address(world.folder, "kv")
    party = Party("p", 0, 0, secrets.randbits(60))
    source = SourceNode(party, geometry(1), pool, Listener(address), {0: address}, movers=[BrokenMover()])
    world.stack.callback(source.close, "over")
    decode = world.decode(address, allocate(geometry(1), 0, ITEMS))
    decode.until(lambda: (source.poll(), decode.node.endpoint.ready)[1])
    source.expect(made, CONTENT)
    items = {g: [1, 2, 3] for g in (0, 1)}
    source.finish(bytes(made.key), Finished(items, TOKENS, Outcome.CONTINUE, {(2, "token"): b"\7\0\0\0"}))
    decode.ask(made)
    with pytest.raises(DeviceFault):
        decode.until(lambda: source.poll() and None)
    with pytest.raises(DeviceFault):
        source.poll()
    assert not [e for e in decode.node.poll() if isinstance(e, Lost)]


def later(seconds: float) -> Any:
    """A clock that is ahead."""
    import time

    class Later:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + seconds

    return Later
