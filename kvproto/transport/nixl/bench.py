"""Times transport `nixl` between two processes of this host: a descriptor for each run, and packed into staging slots.

`python -m kvproto.transport.nixl.bench FD MEMORY PLACE` is the peer; it ends when the other end of its socket does.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np

from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.bench import HOST, BenchJob, BenchPath, RunOnce, program
from kvproto.transport.nixl.agent import Agent, Peer, Registered
from kvproto.transport.nixl.backend import HostBackend
from kvproto.transport.nixl.direct import DirectWrite
from kvproto.transport.nixl.handle import ByteRange
from kvproto.transport.staging.packed import PackedStream, Packer, Side
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire.enums import ErrorCode

__all__ = ["job"]

_MOST_RUNS = 1 << 16
_MOST_DESCRIPTORS = 1 << 14
_SLOTS = 4
_PATIENCE = 30.0


def _slot(memory: int, place: str) -> int:
    return min(8 << 20 if place == HOST else 64 << 20, memory // 64 // 4096 * 4096)


@attrs.frozen
class _Place:
    """Pages and staging slots of one process."""

    pages: ByteRange
    slots: ByteRange
    device: str | None
    """UUID of its GPU."""
    eager: bool
    packer: Callable[[CopyProgram, Side], Packer]


@contextmanager
def _open(place: str, memory: int) -> Iterator[_Place]:
    """Open pages and slots, which must outlive the agent that registers them."""
    length, slots = memory * 3 // 10 // 4096 * 4096, _SLOTS * _slot(memory, place)
    if place == HOST:
        pages, staging = (ByteRange.of(np.ones(n, np.uint8)) for n in (length, slots))
        assert pages.buffer is not None
        regions = {0: pages.buffer}
        yield _Place(pages, staging, None, HostBackend.eager, lambda made, side: PackedStream(made, side, regions))
        return
    from kvproto.transport.cuda.driver import uuid
    from kvproto.transport.cuda.memory import DeviceMemory
    from kvproto.transport.nixl.device import DeviceBackend

    number = int(place.removeprefix("gpu"))
    on, pool = DeviceBackend(number), DeviceMemory(length, number)
    try:
        pool.zero()
        pages, staging = on.of(pool), on.allocate(slots)
        yield _Place(pages, staging, uuid(number), on.eager, lambda made, side: on.packer(made, side, {0: pool}))
    finally:
        on.close()
        pool.close()


class _Direct(BenchPath):
    transport, way = "nixl", "direct"

    def __init__(self, agent: Agent, own: Registered, peer: Peer, source: str, sink: str) -> None:
        self._agent, self._own, self._peer, self.source, self.sink = agent, own, peer, source, sink

    def most_runs(self, run: int) -> int:
        return min(self._own.memory.length // run, _MOST_DESCRIPTORS)

    def runner(self, run: int, runs: int) -> RunOnce:
        made = program(run, runs, self._own.memory.length)

        def go() -> float:
            begin = time.perf_counter()
            if not DirectWrite(self._agent, made, {0: self._own}, {0: self._peer}).post().wait(_PATIENCE):
                raise _late(f"a write of {made.bytes} bytes under way", "look at UCX_TLS and UCX_NET_DEVICES")
            return time.perf_counter() - begin

        return go


class _Packed(BenchPath):
    transport, way = "nixl", "packed"

    def __init__(self, conn: Connection, agent: Agent, own: _Place, link: StagedLink, source: str, sink: str) -> None:
        self._conn, self._agent, self._own, self._link, self.source, self.sink = conn, agent, own, link, source, sink
        self._sequence = 0

    def most_runs(self, run: int) -> int:
        return min(self._own.pages.length // run, _MOST_RUNS)

    def runner(self, run: int, runs: int) -> RunOnce:
        made = program(run, runs, self._own.pages.length)
        self._conn.send((run, runs))
        return lambda: self._go(made)

    def _go(self, made: Any) -> float:
        """Seconds from gathering the first byte to having scattered the last."""
        self._sequence += 1
        self._conn.send(self._sequence)
        _hear(self._conn)
        begin = time.perf_counter()
        sender = StagedSender(self._link, self._own.packer(made, "source"))
        while not sender.done:
            while self._conn.poll(0):
                self._link.grant(self._conn.recv())
            before = sender.under_way
            pieces = sender.step()
            for piece in pieces:
                self._conn.send(piece.notice(1, self._sequence, 1))
            if not pieces and sender.under_way == before and self.source == HOST:  # a GPU wakes nobody
                multiprocessing.connection.wait([self._conn, self._agent.fileno()], 0.01)
                self._agent.wait(0)
            if time.perf_counter() > begin + _PATIENCE:
                raise _late(f"{made.bytes} bytes under way")
        while (message := _hear(self._conn)) is not None:
            self._link.grant(message)
        return time.perf_counter() - begin


def _hear(conn: Connection) -> Any:
    if not conn.poll(_PATIENCE):
        raise _late("no word of the peer")
    return conn.recv()


def _late(found: str, advice: str = "") -> LocalError:
    return LocalError(ErrorCode.DEADLINE, "", f"{_PATIENCE:g} s", found, advice)


def job(memory: int, source: str = HOST, sink: str = HOST) -> BenchJob:
    """The job of both ways, whose two processes together use less than `memory` bytes."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "kvproto.transport.nixl.bench", str(theirs.fileno()), str(memory), sink]
        null = subprocess.DEVNULL
        peer = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=null, stdout=null)
        theirs.close()
        try:
            with _open(source, memory) as place, Agent(place.eager) as agent:
                own = agent.register(place.pages)
                staging = agent.register(place.slots, _slot(memory, source))
                pages, slots = (agent.connect(region, "regions") for region in _hear(ours))
                packed = _Packed(ours, agent, place, StagedLink(staging, slots), source, sink)
                yield [_Direct(agent, own, pages, source, sink), packed]
        except EOFError:
            found, advice = f"it ended with status {peer.wait()}", "look at what NIXL and UCX wrote to stderr"
            raise LocalError(ErrorCode.PEER_LOST, "", "a peer process", found, advice) from None
        finally:
            ours.close()
            try:
                peer.wait(5)
            except subprocess.TimeoutExpired:
                peer.kill()
                peer.wait()

    return BenchJob("nixl" if source == HOST else f"nixl {source} to {sink}", 2, opened)


def _serve(conn: Connection, memory: int, place: str) -> None:
    """The peer: register pages and staging slots, and unpack what chunks name."""
    with _open(place, memory) as own, Agent(own.eager) as agent:
        pages, staging = agent.register(own.pages), agent.register(own.slots, _slot(memory, place))
        conn.send([pages.region(0, own.device), staging.region(1, own.device)])
        receiver = StagedReceiver(staging)
        made = None
        while True:
            asked = conn.recv()
            if isinstance(asked, tuple):
                run, runs = asked
                made = program(run, runs, own.pages.length)
                continue
            assert made is not None
            receiver.open(asked, 1, own.packer(made, "sink"))
            conn.send(None)
            while True:
                if (credit := receiver.credit(1)) is not None:
                    conn.send(credit)
                if receiver.complete(asked, 1):
                    break
                if conn.poll(None if not receiver.busy else 0):
                    receiver.chunk(conn.recv())
            receiver.close(asked, 1)
            conn.send(None)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
        except KvprotoError as error:
            sys.exit(f"peer: {error.between('wanted', 'found', ' ')}")
