"""Sessions over sockets without nodes: what the messages of a transfer take where nothing is lowered, copied or summed."""

from __future__ import annotations

import multiprocessing
import select
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import attrs
from session_sides import GEOMETRY, PAGES, PROMPT, Place, state, ticket

from kvproto import Pool
from kvproto.net import AllowList, Dialer, Listener, read_keys
from kvproto.rank.checksums import session_id
from kvproto.rank.page_tables import grants_of
from kvproto.session import Exposed, Party, Registration, SinkEndpoint, SourceEndpoint
from kvproto.session.events import Arrived, Lost, RegisterAsked
from kvproto.wire.enums import Outcome, Transport
from kvproto.wire.messages import Grants

__all__ = ["Bare"]


def serve(pipe: Connection, place: Place) -> None:
    """A source whose copies are over at once; the pipe brings the numbers of requests that are computed, first and
    count, and takes what the process then holds.
    """
    keys = place.keys("prefill")
    allow = AllowList(keys / "allow.toml") if keys is not None else None
    listener = Listener(place.address, keys=read_keys(keys) if keys is not None else None, allow=allow)
    pipe.send(listener.address)
    endpoint = SourceEndpoint(
        Party("prefill", 0, 0, 1), GEOMETRY, {0: listener.address}, (), session_id, admit=listener.admit
    )
    epoll = select.epoll()
    for fd in (pipe.fileno(), *listener.filenos()):
        epoll.register(fd, select.EPOLLIN)
    while True:
        wait = endpoint.next_deadline()
        ready = epoll.poll(0 if listener.pending else None if wait is None else max(wait - time.monotonic(), 0))
        now = time.monotonic()
        if any(fd == pipe.fileno() for fd, _ in ready):
            try:
                first, count = pipe.recv()
            except EOFError:
                break
            for n in range(first, first + count):
                endpoint.expect(ticket(n), PROMPT.digest, now, len(PROMPT))
                endpoint.finish(bytes(ticket(n).key))
            pipe.send(state() | {"sessions": len(endpoint.sessions)} if not count else None)
        for conn, frame in listener.receive([fd for fd, _ in ready]):
            endpoint.receive(conn, frame, now)
        endpoint.on_time(now)
        for event in endpoint.take_events():
            if isinstance(event, RegisterAsked):
                endpoint.sessions[event.session].accept_register(Transport.SHM)
            elif isinstance(event, TransferRequested):
                endpoint.copying(event)
                endpoint.done(event, now, 0, Outcome.CONTINUE, (), None)
        for conn, frame in endpoint.to_send(now):
            listener.send(conn, frame)
    listener.close()


class Bare:
    """Both sides."""

    def __init__(self, stack: ExitStack, place: Place) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, place), daemon=True)
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
        self._layout = pool.layout
        regions = tuple(attrs.evolve(memory.region, id=id) for id, memory in pool.memories.items())
        exposed = Exposed(1, tuple(pool.layout.columns.values()), lambda _: Registration(regions))
        self._endpoint = SinkEndpoint(Party("decode-0", 0, 0, 1), GEOMETRY, (), address)
        self._endpoint.expose(exposed, time.monotonic())
        self._epoll, self._watched, self._number = select.epoll(), set[int](), 1
        self._endpoint.dial(time.monotonic())
        while not self._endpoint.ready:
            self._turn()

    def _turn(self) -> list[Any]:
        endpoint, dialer = self._endpoint, self._dialer
        self._flush()
        if not dialer.pending:
            watched = set(dialer.filenos())  # a closed one has left the epoll by itself
            for fd in watched - self._watched:
                self._epoll.register(fd, select.EPOLLIN)
            self._watched = watched
            wait = endpoint.next_deadline()
            self._epoll.poll(None if wait is None else max(wait - time.monotonic(), 0))
        now = time.monotonic()
        for key, frame in dialer.receive():
            endpoint.receive(key[-1], frame, now)
        for _, refusal in dialer.refusals():
            raise refusal
        endpoint.on_time(now)
        self._flush()
        events = endpoint.take_events()
        for event in events:
            if isinstance(event, Lost):
                raise event.error
        return events

    def _flush(self) -> None:
        for address, frame in self._endpoint.to_send(time.monotonic()):
            self._dialer.send((0, address), frame, self._server)

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """Seconds of so many: from the Transfer to its DoneAck."""
        numbers, found = self._expected(count), []
        for number in numbers:
            grants = self._grants(number)
            begin = time.perf_counter()
            self._ask(number, grants)
            while not any(isinstance(event, Arrived) for event in self._turn()):
                pass
            found.append(time.perf_counter() - begin)
        return [(seconds, seconds) for seconds in found]

    def at_once(self, count: int) -> None:
        """So many at once."""
        left = count
        for number in self._expected(count):
            self._ask(number, self._grants(number))
        while left:
            left -= sum(isinstance(event, Arrived) for event in self._turn())

    def state(self) -> dict[str, int]:
        """What the source's process holds."""
        self._pipe.send((0, 0))
        found: dict[str, int] = self._pipe.recv()
        return found

    def _expected(self, count: int) -> range:
        """Numbers of so many requests that the source has computed."""
        numbers = range(self._number, self._number + count)
        self._pipe.send((self._number, count))
        self._pipe.recv()
        self._number += count
        return numbers

    def _grants(self, number: int) -> dict[int, Grants]:
        return grants_of(self._layout, {"kv": [number % PAGES]}, 0, len(PROMPT), PROMPT.axes, False)

    def _ask(self, number: int, grants: dict[int, Grants]) -> None:
        self._endpoint.transfer(bytes(ticket(number).key), PROMPT.digest, grants, time.monotonic())
