"""Times transport `nixl` in two processes, written and packed; the peer is `-m kvproto.transport.nixl.bench`."""

import contextlib
import multiprocessing.connection
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.base import Memory
from kvproto.transport.bench import HOST, BenchJob, BenchPath, RunOnce
from kvproto.transport.nixl.agent import Agent, Peer, Registered
from kvproto.transport.nixl.backend import HostBackend, MemoryBackend
from kvproto.transport.nixl.direct import DirectWrite
from kvproto.transport.shm.memory import SharedMemory
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire.enums import ErrorCode

_SLOTS = 4
_PATIENCE = 30.0


@contextmanager
def _opened(place: str, memory: int) -> Iterator[tuple[MemoryBackend, Memory, Agent, Registered, Registered]]:
    """The pages and the staging slots of one process, and the agent that has registered them."""
    length, most = memory * 3 // 10 // 4096 * 4096, 8 << 20 if place == HOST else 64 << 20
    slot_bytes = min(most, memory // 64 // 4096 * 4096)
    with contextlib.ExitStack() as stack:
        backend: MemoryBackend
        pool: Memory
        if place == HOST:
            backend, pool = HostBackend(), SharedMemory(length)  # which is freed with its last view
        else:
            from kvproto.transport.cuda.memory import DeviceMemory
            from kvproto.transport.nixl.device import DeviceBackend

            number = int(place.removeprefix("gpu"))
            backend, pool = DeviceBackend(number), DeviceMemory(length, number)
            stack.callback(pool.close)
            stack.callback(backend.close)
            pool.zero()
        slots = backend.allocate(_SLOTS * slot_bytes)
        agent = stack.enter_context(Agent(backend.eager))
        yield backend, pool, agent, agent.register(backend.of(pool)), agent.register(slots, slot_bytes)


def _direct(agent: Agent, own: Registered, peer: Peer, ends: tuple[str, str]) -> BenchPath:
    def prepare(program: CopyProgram) -> RunOnce:
        def copy() -> float:
            begin = time.perf_counter()
            if not DirectWrite(agent, program, {0: own}, {0: peer}).post().wait(_PATIENCE):
                raise _late(f"a write of {program.bytes} bytes under way", "look at UCX_TLS and UCX_NET_DEVICES")
            return time.perf_counter() - begin

        return copy

    return BenchPath("nixl", "direct", *ends, own.memory.length, 1 << 14, prepare)


def _packed(
    conn: Connection, backend: MemoryBackend, pool: Memory, agent: Agent, link: StagedLink, ends: tuple[str, str]
) -> BenchPath:
    def prepare(program: CopyProgram) -> RunOnce:
        conn.send(program)

        def copy() -> float:
            """Seconds from gathering the first byte to having scattered the last."""
            conn.send(None)
            _receive(conn)
            begin = time.perf_counter()
            sender = StagedSender(link, backend.packer(program, "source", {0: pool}))
            while not sender.done:
                while conn.poll(0):
                    link.grant(conn.recv())
                before = sender.under_way
                pieces = sender.step()
                for piece in pieces:
                    conn.send(piece.notice(1, 1))
                if not pieces and sender.under_way == before and ends[0] == HOST:  # a GPU wakes nobody
                    multiprocessing.connection.wait([conn, agent.fileno()], 0.01)
                    agent.wait(0)
                if time.perf_counter() > begin + _PATIENCE:
                    raise _late(f"{program.bytes} bytes under way")
            while (credit := _receive(conn)) is not None:
                link.grant(credit)
            return time.perf_counter() - begin

        return copy

    return BenchPath("nixl", "packed", *ends, pool.length, 1 << 16, prepare)


def _receive(conn: Connection) -> Any:
    if not conn.poll(_PATIENCE):
        raise _late("no word of the peer")
    return conn.recv()


def _late(state: str, advice: str = "") -> LocalError:
    return LocalError(ErrorCode.DEADLINE, "", f"{_PATIENCE:g} s", state, advice)


def job(memory: int, source: str = HOST, sink: str = HOST) -> BenchJob:
    """The job of both ways, whose two processes together use less than `memory` bytes."""

    @contextmanager
    def opened() -> Iterator[Sequence[BenchPath]]:
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "kvproto.transport.nixl.bench", str(theirs.fileno()), str(memory), sink]
        null = subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=null, stdout=null)
        theirs.close()
        try:
            with _opened(source, memory) as (backend, pool, agent, pages, staging):
                there, slots = (agent.connect(region, "regions") for region in _receive(ours))
                packed = _packed(ours, backend, pool, agent, StagedLink(staging, slots), (source, sink))
                yield [_direct(agent, pages, there, (source, sink)), packed]
        except EOFError:
            status, advice = f"it ended with status {process.wait()}", "look at what NIXL and UCX wrote to stderr"
            raise LocalError(ErrorCode.PEER_LOST, "", "a peer process", status, advice) from None
        finally:
            ours.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    return BenchJob("nixl" if source == HOST else f"nixl {source} to {sink}", 2, opened)


def _serve(conn: Connection, memory: int, place: str) -> None:
    """The peer: register pages and staging slots, and unpack the chunks of each copy of a program."""
    with _opened(place, memory) as (backend, pool, _, pages, staging):
        conn.send([pages.region(0, backend.device_name), staging.region(1, backend.device_name)])
        receiver, program = StagedReceiver(staging), None
        while True:
            if (message := conn.recv()) is not None:
                program = message
                continue
            assert program is not None
            receiver.open(1, backend.packer(program, "sink", {0: pool}))
            conn.send(None)
            while True:
                if (credit := receiver.credit(1)) is not None:
                    conn.send(credit)
                if receiver.finish(1):
                    break
                if conn.poll(None if not receiver.busy else 0):
                    receiver.chunk(conn.recv())
            receiver.close(1)
            conn.send(None)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
        except KvprotoError as error:
            sys.exit(f"peer: {error.between('wanted', 'found', ' ')}")
