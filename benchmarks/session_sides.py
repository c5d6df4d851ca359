"""The sides that `session.py` measures: a Source in a process of its own, Sinks in this one, and sessions without either.

The cache is small, one page of 128 bytes a request, so that what is measured is the session and not the copy.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs

from kvproto import Cache, DType, Options, Pool, Prompt, Seed, Sink, Source, Ticket, lay_out
from kvproto.net import AllowList, Dialer, Listener, make_keys, read_keys
from kvproto.rank.checksums import session_id
from kvproto.rank.page_tables import grants_of
from kvproto.session import Exposed, Party, Registration, SinkEndpoint, SourceEndpoint
from kvproto.session.records import Answer
from kvproto.wire import decode, tables
from kvproto.wire import messages as m
from kvproto.wire.enums import Outcome, Transport
from kvproto.wire.messages import Grants

PAGES = 4096
GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=DType.U8)])
PROMPT = Prompt(range(4))
"""One page of both layers, K and V: 128 bytes."""
DEADLINE = 600_000
"""Milliseconds."""
MOST = 512
"""The number of sinks that the allow-list names, all with one key."""
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
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return cls(f"tcp://127.0.0.1:{free.getsockname()[1]}", folder, True)

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
    answers when all are over, `state` says what the process holds.
    """
    requests: dict[int, Any] = {}
    with place.source(metrics=True, **options) as source:
        pipe.send("ready")
        while True:
            try:
                word, first, count = pipe.recv()
            except EOFError:
                return
            answer: Any = None
            numbers = range(first, first + count)
            if word in ("expect", "finish"):
                for n in numbers:
                    if n not in requests:
                        requests[n] = source.request(ticket(n), PROMPT)
                    if word == "finish":
                        requests[n].finish({"kv": [n % PAGES]})
            elif word == "wait":
                for n in numbers:
                    requests.pop(n).wait(120)
                source.events()
            elif word == "state":
                peers = (sample["value"] for sample in source.metrics() if sample["name"] == "kvproto_peers")
                answer = state() | {"sessions": next(peers)}
            pipe.send(answer)


def state() -> dict[str, int]:
    """The resources of this process: resident bytes, descriptors, threads, and CPU time in microseconds."""
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
        self.place = place
        self._pipe.recv()

    def ask(self, word: str, first: int = 0, count: int = 0) -> Any:
        """Do this there, and wait for the answer."""
        self._pipe.send((word, first, count))
        return self._pipe.recv()

    def close(self) -> None:
        """Stop it in an orderly way."""
        self._pipe.close()
        self.process.join(20)
        self.process.kill()


def far(stack: ExitStack, kind: str = "curve", **options: Any) -> Far:
    """A source in another process and at a place of its own, until the stack unwinds."""
    source = Far(Place.of(kind, stack.enter_context(tempfile.TemporaryDirectory())), **options)
    stack.callback(source.close)
    return source


class Tap:
    """Messages that this process's Sinks send, and with `frames` receive, while the context lasts: their dialers are tapped."""

    def __init__(self, frames: bool = False) -> None:
        self._frames = frames
        self.sent: dict[str, float] = {}
        """The time at which a message of each type was last given to the socket, by time.perf_counter."""
        self.lengths: dict[str, int] = {}
        """Bytes of the last frame of each type."""
        self.accepted: set[tuple[int, int]] = set()
        """Sessions and sequences of transfers that a source has accepted."""

    def __enter__(self) -> Tap:
        send, receive = self._kept = Dialer.send, Dialer.receive

        def tapped_send(dialer: Any, key: Any, frame: bytes, server: bytes | None = None) -> bool:
            name, before = NAMES[frame[_TYPE]], time.perf_counter()
            taken = send(dialer, key, frame, server)
            self.sent[name] = before if name == "Transfer" else time.perf_counter()
            self.lengths[name] = len(frame)
            return taken

        def tapped_receive(dialer: Any, ready: Any) -> Any:
            frames = list(receive(dialer, ready))
            for _, frame in frames:
                name = NAMES.get(frame[_TYPE], "")
                self.lengths[name] = len(frame)
                if name == "Accepted":
                    message = decode(frame)
                    assert isinstance(message, m.Accepted)
                    self.accepted.add((message.session, message.sequence))
            return frames

        Dialer.send = tapped_send  # type: ignore[method-assign]
        if self._frames:
            Dialer.receive = tapped_receive  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Dialer.send, Dialer.receive = self._kept  # type: ignore[method-assign]


_TYPE = slice(6, 8)
NAMES = {
    cls.TYPE.to_bytes(2, "little"): name
    for name, cls in vars(m).items()
    if isinstance(getattr(cls, "TYPE", 0), int) and hasattr(cls, "TYPE")
}
assert tables.HEADER_BYTES == 16


# sessions over sockets without nodes: nothing is lowered, copied or summed


class Rank:
    """A source rank whose memory needs no mapping, and whose copies are over at once."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        """Calls to make once the endpoint has returned."""
        self.endpoint: SourceEndpoint

    def report(self, event: Any) -> None: ...

    def request_changed(self, request: Any) -> None: ...

    def request_released(self, request: Any, routed: Any, lost: Any) -> None: ...

    def request_expired(self, request: Any) -> None: ...

    def transfer_read(self, attempt: Any, count: int) -> None: ...

    def map_memory(self, session: Any, register: Any, described: Any) -> None:
        self.work.append(lambda: session.accept_register(Transport.SHM))

    def attest(self, attestation: bytes, holds: bool) -> None: ...

    def unmap_memory(self, session: Any, epoch: int) -> None:
        self.work.append(lambda: session.holder.unmapped(epoch))

    def transfer_due(self, attempt: Any) -> None:
        def done() -> None:
            attempt.copying = True
            self.endpoint.done(attempt, 0, Answer(Outcome.CONTINUE), time.monotonic())

        self.work.append(done)


def serve_bare(pipe: Connection, place: Place) -> None:
    """A source of sessions alone; the pipe brings the numbers of requests that are computed, first and count, and takes
    what the process then holds.
    """
    keys = place.keys("prefill")
    allow = AllowList(keys / "allow.toml") if keys is not None else None
    listener = Listener(place.address, keys=read_keys(keys) if keys is not None else None, allow=allow)
    pipe.send(listener.address)
    rank, party = Rank(), Party("prefill", 0, 0, 1)
    endpoint = SourceEndpoint(rank, party, GEOMETRY, {0: listener.address}, (), session_id, admit=listener.admit)
    rank.endpoint = endpoint
    epoll = select.epoll()
    for fd in (pipe.fileno(), *listener.filenos()):
        epoll.register(fd, select.EPOLLIN)
    while True:
        wait = endpoint.timers.next()
        ready = epoll.poll(0 if listener.pending else None if wait is None else max(wait - time.monotonic(), 0))
        now = time.monotonic()
        if any(fd == pipe.fileno() for fd, _ in ready):
            try:
                first, count = pipe.recv()
            except EOFError:
                break
            for n in range(first, first + count):
                state_ = endpoint.tickets.expect(ticket(n), n, PROMPT.digest, now, len(PROMPT))
                endpoint.tickets.finish(state_)
            pipe.send(state() | {"sessions": len(endpoint.sessions)} if not count else None)
        for conn, frame in listener.receive([fd for fd, _ in ready]):
            endpoint.receive(conn, frame, now)
        endpoint.on_time(now)
        work, rank.work = rank.work, []
        for act in work:
            act()
        for conn, frame in endpoint.to_send(now):
            listener.send(conn, frame)
    listener.close()


class Bare:
    """Both sides; it drives the sink's endpoint, which calls it."""

    def __init__(self, stack: ExitStack, place: Place) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve_bare, args=(theirs, place), daemon=True)
        process.start()
        theirs.close()
        address = self._pipe.recv()
        public, keys = place.public(), place.keys("decode")
        self._server = public.encode() if public is not None else None
        self._dialer = Dialer(keys=read_keys(keys) if keys is not None else None)
        stack.callback(process.join, 10)
        stack.callback(self._pipe.close)
        stack.callback(self._dialer.close)
        pool = Pool.allocate(GEOMETRY, PAGES)
        self._rules, self._arrived = pool.page_rules, 0
        regions = tuple(attrs.evolve(memory.region, id=id) for id, memory in pool.memories.items())
        exposed = Exposed(1, tuple(pool.layout.columns.values()), lambda _: Registration(regions))
        self._endpoint = SinkEndpoint(Party("decode-0", 0, 0, 1), GEOMETRY, (), address, self)
        self._endpoint.expose(exposed, time.monotonic())
        self._epoll, self._watched, self._number = select.epoll(), set[int](), 1
        self._endpoint.dial(time.monotonic())
        while not self._endpoint.ready:
            self._turn()

    def needs_turn(self) -> None:
        """It sends in every turn."""

    def report(self, event: Any) -> None:
        """Nothing to do."""

    planned = map_memory = unmap_memory = useful = offered = proven = report

    def attest(self, attestation: bytes, holds: bool) -> None: ...

    def ready(self) -> None:
        """Nothing to do: see `SinkEndpoint.ready`."""

    def arrived(self, transfer: Any, done: Any, seconds: float) -> None:
        """Count it."""
        self._arrived += 1

    def lost(self, transfer: Any, proof: Any) -> None:
        """Nothing may be lost."""
        raise transfer.error

    def _turn(self) -> int:
        """One turn; how many transfers have arrived."""
        endpoint, dialer = self._endpoint, self._dialer
        self._flush()
        if not dialer.pending:
            watched = set(dialer.filenos())  # a closed one has left the epoll by itself
            for fd in watched - self._watched:
                self._epoll.register(fd, select.EPOLLIN)
            self._watched = watched
            wait = endpoint.timers.next()
            self._epoll.poll(None if wait is None else max(wait - time.monotonic(), 0))
        now = time.monotonic()
        for key, frame in dialer.receive():
            endpoint.receive(key[-1], frame, now)
        for _, refusal in dialer.refusals():
            raise refusal
        endpoint.on_time(now)
        self._flush()
        arrived, self._arrived = self._arrived, 0
        return arrived

    def _flush(self) -> None:
        for address, frame in self._endpoint.to_send(time.monotonic()):
            self._dialer.send((0, address), frame, self._server)

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """Seconds of so many: from the Transfer to its DoneAck."""
        numbers, figures = self._expected(count), []
        for number in numbers:
            grants = self._grants(number)
            begin = time.perf_counter()
            self._ask(number, grants)
            while not self._turn():
                pass
            figures.append(time.perf_counter() - begin)
        return [(seconds, seconds) for seconds in figures]

    def at_once(self, count: int) -> None:
        """So many at once."""
        left = count
        for number in self._expected(count):
            self._ask(number, self._grants(number))
        while left:
            left -= self._turn()

    def state(self) -> dict[str, int]:
        """The resources of the source's process."""
        self._pipe.send((0, 0))
        figures: dict[str, int] = self._pipe.recv()
        return figures

    def _expected(self, count: int) -> range:
        """Numbers of so many requests that the source has computed."""
        numbers = range(self._number, self._number + count)
        self._pipe.send((self._number, count))
        self._pipe.recv()
        self._number += count
        return numbers

    def _grants(self, number: int) -> dict[int, Grants]:
        return grants_of(self._rules, {"kv": [number % PAGES]}, 0, len(PROMPT), PROMPT.axes, False)

    def _ask(self, number: int, grants: dict[int, Grants]) -> None:
        self._endpoint.transfer(bytes(ticket(number).key), PROMPT.digest, grants, time.monotonic())
