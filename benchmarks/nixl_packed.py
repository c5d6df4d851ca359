"""NIXL between two GPUs as transport `nixl` uses it: packed through staging slots, and long writes as its ceiling.

`python benchmarks/nixl_packed.py [--chunk MB ...] [--slots N ...]` compares sizes of slots; `measure` is what
transfer_gpu.py calls. Two processes, a GPU each; Chunk and Credit are frames of the wire format over a Unix socket. Packed: from the upload of
item ids to the last byte that is unpacked, host clock; tables of a request, on both sides, are made before. Ceiling: 1 GB in
writes of 64 MB by the same agent. Every byte of the sink's pool is compared before anything is timed, and all is warmed up
for a second at each run length.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from gpu import WARM_UP, compare, poison, random_bytes, scattered_shape
from harness import arguments, child

from kvproto.copying.program import CopyProgram
from kvproto.errors import KvprotoError
from kvproto.transport.bench import scattered
from kvproto.transport.cuda.driver import uuid
from kvproto.transport.cuda.memory import DeviceMemory
from kvproto.transport.nixl.agent import Agent
from kvproto.transport.nixl.device import DeviceBackend
from kvproto.transport.nixl.direct import DirectWrite, probe, require_fast
from kvproto.transport.staging.staged import StagedLink, StagedReceiver, StagedSender
from kvproto.wire import decode, encode
from kvproto.wire.messages import Message

POOL = 4 << 30
LONG = 64 << 20
CHUNK, SLOTS = 64 << 20, 8
PACKED, CALLED, CEILING = "NIXL, packed", "NIXL, packed, with its tables", "NIXL, writes of 64 MB"
PATIENCE = 60.0
Found = dict[str, dict[int, list[float]]]


def program(run: int) -> CopyProgram:
    layers, number, rows, width = scattered_shape(run)
    return scattered(width, number, layers, POOL // layers // width, seed=run, run=rows)


class Notices:
    """Frames between the two sides."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    def send(self, message: Message) -> None:
        self._end.send(encode(message))

    def receive(self) -> Any:
        """The next one, or None."""
        try:
            return decode(self._end.recv(1 << 16))
        except BlockingIOError:
            return None


def _sink(conn: Connection, end: socket.socket, chunk: int, slots: int, blocks: int | None) -> None:
    """Pages and slots on GPU 1; does what it is asked."""
    place, notices = DeviceBackend(1, blocks), Notices(end)
    pool, seen = DeviceMemory(POOL, 1), None
    with Agent(place.eager) as agent:
        pages = agent.register(place.of(pool))
        staging = agent.register(place.allocate(slots * chunk), chunk)
        conn.send([pages.region(0, uuid(1)), staging.region(1, uuid(1))])
        receiver = StagedReceiver(staging)
        while (asked := conn.recv()) is not None:
            what, sequence, run = asked
            if what == "poison":
                seen = poison(pool)
            elif what == "compare":
                width, source = scattered_shape(run)[3], DeviceMemory(POOL, 1)
                assert seen is not None
                compare(program(run), width, random_bytes(source, 1), seen)
                torch.cuda.synchronize(1)
                source.close()
            else:
                _receive(conn, notices, receiver, sequence, place.packer(program(run), "sink", {0: pool}))
            conn.send(None)


def _receive(conn: Connection, notices: Notices, receiver: StagedReceiver, sequence: int, packer: Any) -> None:
    receiver.open(sequence, packer)
    conn.send(None)
    while not receiver.finish(sequence):
        if (credit := receiver.credit(1)) is not None:
            notices.send(credit)
        if (chunk := notices.receive()) is not None:
            receiver.chunk(chunk)
    receiver.close(sequence)
    if (credit := receiver.credit(1)) is not None:
        notices.send(credit)


class _Source:
    def __init__(
        self,
        conn: Connection,
        end: socket.socket,
        agent: Agent,
        place: DeviceBackend,
        pool: DeviceMemory,
        chunk: int,
        slots: int,
    ) -> None:
        self._conn, self._notices, self._agent, self._place, self._pool = conn, Notices(end), agent, place, pool
        self._own, staging = agent.register(place.of(pool)), agent.register(place.allocate(slots * chunk), chunk)
        self._pages, theirs = (agent.connect(region, "regions") for region in self.hear())
        require_fast(probe(staging, theirs), theirs)
        self._link = StagedLink(staging, theirs)
        self._sequence, self._uploaded = 0, 0.0
        copier = place.copier
        expand = copier.expand

        def upload(*room: Any) -> None:
            self._uploaded = time.perf_counter()
            expand(*room)

        copier.expand = upload  # type: ignore[method-assign]

    def hear(self) -> Any:
        if not self._conn.poll(PATIENCE):
            raise TimeoutError("no word of the sink")
        return self._conn.recv()

    def ask(self, what: str, run: int) -> None:
        self._conn.send((what, self._sequence, run))
        self.hear()

    def packed(self, run: int, made: CopyProgram) -> tuple[float, float]:
        """GB/s from the upload on, and from the call on; the end is that all slots are free again."""
        self._sequence += 1
        self.ask("receive", run)
        called = time.perf_counter()
        sender = StagedSender(self._link, self._place.packer(made, "source", {0: self._pool}))
        while not sender.done or len(self._link.granted) < self._link.target.slots:
            while (credit := self._notices.receive()) is not None:
                self._link.grant(credit)
            for piece in sender.step():
                self._notices.send(piece.notice(1, self._sequence))
            if time.perf_counter() > called + PATIENCE:
                raise TimeoutError("a stream under way")
        over = time.perf_counter()
        self.hear()
        return made.bytes / (over - self._uploaded) / 1e9, made.bytes / (over - called) / 1e9

    def ceiling(self, made: CopyProgram) -> float:
        """GB/s."""
        begin = time.perf_counter()
        if not DirectWrite(self._agent, made, {0: self._own}, {0: self._pages}).post().wait(PATIENCE):
            raise TimeoutError("a write under way")
        return made.bytes / (time.perf_counter() - begin) / 1e9


def _write(
    told: Connection,
    conn: Connection,
    end: socket.socket,
    runs: list[int],
    rounds: int,
    chunk: int,
    slots: int,
    blocks: int | None,
) -> None:
    try:
        place, pool = DeviceBackend(0, blocks), DeviceMemory(POOL, 0)
        random_bytes(pool, 1)
        torch.cuda.synchronize(0)
        with Agent(place.eager) as agent:
            source, long = _Source(conn, end, agent, place, pool, chunk, slots), program(LONG)
            for run in runs:
                made = program(run)
                source.ask("poison", run)
                source.packed(run, made)
                source.ask("compare", run)
                samples: dict[str, list[float]] = {PACKED: [], CALLED: [], CEILING: []}
                warm = time.monotonic() + WARM_UP
                while len(samples[CEILING]) < rounds:
                    begun = time.monotonic()
                    figures = dict(zip(samples, (*source.packed(run, made), source.ceiling(long)), strict=True))
                    for name, rate in figures.items():
                        samples[name] += [rate] if begun > warm else []
                told.send((run, samples))
            conn.send(None)
        told.send(None)
    except (KvprotoError, TimeoutError, EOFError, OSError, AssertionError, RuntimeError) as error:
        told.send(f"{type(error).__name__}: {error}")


def measure(
    runs: list[int], rounds: int, chunk: int = CHUNK, slots: int = SLOTS, blocks: int | None = None
) -> Found | str:
    """GB/s by contender and run length, or why there are none."""
    figures: Found = {PACKED: {}, CALLED: {}, CEILING: {}}
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        child(_sink, ends[1], chunk, slots, blocks) as sink,
        child(_write, sink, ends[0], runs, rounds, chunk, slots, blocks) as result,
    ):
        for end in ends:
            end.close()  # so that an end that dies is noticed
        try:
            while result.poll(3 * PATIENCE):
                word = result.recv()
                if word is None:
                    return figures
                if isinstance(word, str):
                    return word
                run, samples = word
                for name, rates in samples.items():
                    figures[name][run] = rates
        except EOFError:
            return "the process ended"
    return "no answer in time"


def main() -> int:
    parser = arguments(__doc__, "nixl_packed", rounds=5)
    parser.add_argument("--chunk", type=int, nargs="*", default=[16, 32, 64], metavar="MB")
    parser.add_argument("--slots", type=int, nargs="*", default=[4, 8])
    parser.add_argument(
        "--blocks", type=int, help="thread blocks of packing and unpacking; by default one a multiprocessor"
    )
    parser.add_argument("--runs", type=int, nargs="*", default=[256, 4096, 1 << 20])
    args = parser.parse_args()
    print(
        f"{'chunk, MB':>10}{'slots':>7}{'run, bytes':>13}{'packed':>10}{'with tables':>13}{'64 MB writes':>14}{'packed / those':>16}  GB/s, medians"
    )
    for chunk, slots in itertools.product(args.chunk, args.slots):
        figures = measure(args.runs, args.rounds, chunk << 20, slots, args.blocks)
        if isinstance(figures, str):
            print(f"{chunk:10}{slots:7}  {figures}", flush=True)
            continue
        for run in args.runs:
            packed, called, long = (median(figures[name][run]) for name in (PACKED, CALLED, CEILING))
            print(
                f"{chunk:10}{slots:7}{run:13,}{packed:10.1f}{called:13.1f}{long:14.1f}{packed / long:16.3f}", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
