"""The two sides that `session.py` measures: a source in its own process, controlled over a pipe, and sinks.

The cache is small, one page of 128 bytes a request, so that what is measured is the session and not the copy.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from kvproto import Cache, DType, Options, Pool, Prompt, Seed, Sink, Source, Ticket, lay_out
from kvproto.net import make_keys
from kvproto.wire import tables
from kvproto.wire.messages import DoneAck, Transfer

PAGES = 4096
GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=DType.U8)])
PROMPT = Prompt(range(4))
"""One page of both layers, K and V: 128 bytes."""
DEADLINE = 600_000
"""Milliseconds."""
MOST = 512
"""How many sinks the allow-list names, all with one key."""
_SINK, _SOURCE = "decode", "prefill"


def ticket(number: int, deadline: int = DEADLINE) -> Ticket:
    """The ticket with this number, known to both sides."""
    return Ticket(key=number.to_bytes(16, "little"), engine=_SOURCE, replica=0, deadline=deadline)


@attrs.frozen
class Place:
    """An address, and the folders of the keys where it needs some."""

    address: str
    folder: str
    keyed: bool

    @classmethod
    def of(cls, kind: str, folder: str) -> Place:
        """`kind`: "curve", loopback TCP with keys, or "ipc"."""
        here = Path(folder)
        if kind == "ipc":
            return cls(f"ipc://{folder}/source", folder, False)
        make_keys(here / _SOURCE)
        key = make_keys(here / _SINK).public.decode()
        entries = [f'[[client]]\nkey = "{key}"\nengine = "{_SINK}-{n}"\n' for n in range(MOST)]
        (here / _SOURCE / "allow.toml").touch(0o600)  # whatever the umask
        (here / _SOURCE / "allow.toml").write_text("".join(entries))
        return cls("tcp://127.0.0.1:*", folder, True)

    def at(self, address: str) -> Place:
        """The same at the address that a source has bound."""
        return attrs.evolve(self, address=address)

    def keys(self, name: str) -> Path | None:
        """The folder of a side's keys."""
        return Path(self.folder) / name if self.keyed else None

    def source(self, pages: int = PAGES, **more: Any) -> Source:
        """A source here."""
        return Source(_SOURCE, Pool.allocate(GEOMETRY, pages), self.address, Options(keys=self.keys(_SOURCE), **more))

    def public(self) -> str | None:
        """The source's key."""
        keys = self.keys(_SOURCE)
        return (keys / "public.key").read_text().strip() if keys is not None else None

    def sink(self, number: int = 0, pages: int = PAGES, **more: Any) -> Sink:
        """A sink of the source that listens here; their numbers tell them apart."""
        options = Options(keys=self.keys(_SINK), **more)
        seed = {_SOURCE: Seed(self.address, self.public())}
        return Sink(f"{_SINK}-{number}", Pool.allocate(GEOMETRY, pages), seed, options)


def serve(pipe: Connection, place: Place, options: dict[str, Any]) -> None:
    """Keep a source until the pipe closes: `expect` (first, count) takes requests, `finish` computes them too, `wait`
    answers when all are over, `held` says how many transfers wait for their request, `state` what the process holds.
    """
    held: dict[int, Any] = {}
    with place.source(**options) as source:
        pipe.send(source._node._listener.address)
        while True:
            try:
                word, first, count = pipe.recv()
            except EOFError:
                return
            answer: Any = None
            numbers = range(first, first + count)
            if word == "expect":
                held |= {n: source.request(ticket(n), PROMPT) for n in numbers}
            elif word == "finish":
                for n in numbers:
                    held.setdefault(n, None)
                    held[n] = held[n] or source.request(ticket(n), PROMPT)
                    held[n].finish({"kv": [n % PAGES]})
            elif word == "wait":
                for n in numbers:
                    held.pop(n).wait(120)
                source.events()
            elif word == "held":
                answer = sum(len(claim.waiting) for claim in source._node.endpoint._claims.values())
            elif word == "state":
                answer = state() | {"sessions": len(source._node.endpoint.sessions)}
            pipe.send(answer)


def state() -> dict[str, int]:
    """What this process holds: resident bytes, descriptors, threads, and CPU time in microseconds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    times = os.times()
    return {
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "cpu_us": int(1e6 * (times.user + times.system)),
    }


class Far:
    """A source in another process."""

    def __init__(self, place: Place, **options: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(theirs, place, options), daemon=True)
        self.process.start()
        theirs.close()
        self.place = place.at(self._pipe.recv())

    def ask(self, word: str, first: int = 0, count: int = 0) -> Any:
        """Do this there, and wait for the answer."""
        self._pipe.send((word, first, count))
        return self._pipe.recv()

    def close(self) -> None:
        """Stop it in an orderly way."""
        self._pipe.close()
        self.process.join(20)
        self.process.kill()


@contextmanager
def far(place: Place, **options: Any) -> Iterator[Far]:
    """A source in another process, while the context lasts."""
    made = Far(place, **options)
    try:
        yield made
    finally:
        made.close()


class Stamps:
    """When a sink hands its Transfer and its DoneAck to the socket, by time.perf_counter."""

    def __init__(self, sink: Sink, clock: Any) -> None:
        dialer = sink._node._dialer
        send, transfer, ack = dialer.send, _type(Transfer), _type(DoneAck)
        self.asked = self.acked = 0.0
        self.frames: dict[bytes, int] = {}
        """Lengths by type."""

        def stamped(key: Any, frame: bytes, server: bytes | None = None) -> bool:
            kind = frame[_TYPE]
            if kind == transfer:
                self.asked = clock()
            taken = send(key, frame, server)
            if kind == ack:
                self.acked = clock()
            self.frames[kind] = len(frame)
            return taken

        dialer.send = stamped  # type: ignore[method-assign]


_TYPE = slice(6, 8)
assert tables.HEADER_BYTES == 16


def _type(cls: Any) -> bytes:
    number: int = cls.TYPE
    return number.to_bytes(2, "little")
