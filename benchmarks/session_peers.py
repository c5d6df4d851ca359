"""What peers cost each other at one source rank: many of them, transfers that wait, floods."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import zmq
from session_latency import Transfers
from session_sides import PROMPT, Far, Place, far, state, ticket

from kvproto import Fetch, Sink
from kvproto.net import read_keys
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import Role

__all__ = ["floods", "held", "many"]

_HELD, _AT_ONCE = 4096, 1024


def many(peers: int, transfers: int) -> dict[str, Any]:
    """Seconds and what the source's process holds: so many sinks, then so many transfers of theirs at once."""
    found: dict[str, Any] = {"peers": peers, "transfers": transfers}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        other = stack.enter_context(far(Place.of("curve", folder)))
        found["before"] = other.ask("state")
        began = time.monotonic()
        sinks = [stack.enter_context(other.place.sink(n, 64, thread=False)) for n in range(peers)]
        found["opened_s"] = time.monotonic() - began
        _turns(sinks, lambda: all(link.endpoint.ready for sink in sinks for link in sink._node._links.values()))
        found["registered_s"] = time.monotonic() - began
        found["registered"] = other.ask("state")
        other.ask("expect", 1, transfers)
        began = time.monotonic()
        fetches: list[Fetch] = []
        for n in range(transfers):
            sink, page = sinks[n % peers], n // peers
            fetches.append(sink.fetch(ticket(1 + n), PROMPT, {"kv": [page]}))
        _turns(
            sinks,
            lambda: all(
                link.endpoint.accepted(n) for s in sinks for link in s._node._links.values() for n in link._numbers
            ),
        )
        found["accepted_s"] = time.monotonic() - began
        found["in_flight"] = other.ask("state")
        began = time.monotonic()
        other.ask("finish", 1, transfers)
        _turns(sinks, lambda: all(fetch.done for fetch in fetches))
        found["arrived_s"] = time.monotonic() - began
        other.ask("wait", 1, transfers)
        found["over"] = other.ask("state")
        found["sinks"] = state()
        for sink in sinks:
            sink.close()
        _until(lambda: other.ask("state")["sessions"] == 0)
        found["closed"] = other.ask("state")
    return found


def _turns(sinks: list[Sink], over: Callable[[], bool]) -> None:
    """Give turns to the sinks that have something to do until it is over."""
    by_fd, epoll = {sink.fileno(): sink for sink in sinks}, select.epoll()
    for fd in by_fd:
        epoll.register(fd, select.EPOLLIN)
    with contextlib.closing(epoll):
        for sink in sinks:
            sink.step()
        while not over():
            for fd, _ in epoll.poll(0.05):
                by_fd[fd].step()
            for sink in sinks:
                if sink.next_timer() == 0.0:
                    sink.step()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def held(rounds: int, number: int) -> dict[str, Any]:
    """Seconds of a transfer, and CPU microseconds of it at the source, beside no waiting transfers and beside 4,096."""
    found: dict[str, Any] = {"held": _HELD, "alone": [], "beside": [], "alone_cpu_us": 0, "beside_cpu_us": 0}
    with ExitStack() as stack:
        made: dict[str, tuple[Far, Transfers]] = {}
        for way in ("alone", "beside"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            other = stack.enter_context(far(Place.of("curve", folder)))
            if way == "beside":
                first = 1 << 50
                other.ask("expect", first, _HELD)
                for s in range(_HELD // _AT_ONCE):
                    sink = stack.enter_context(other.place.sink(1 + s))
                    for n in range(_AT_ONCE):
                        sink.fetch(ticket(first + s * _AT_ONCE + n), PROMPT, {"kv": [n]})
                _until(lambda other=other: other.ask("held") == _HELD)  # type: ignore[misc]
            transfers = Transfers(stack.enter_context(other.place.sink()), other, True)
            transfers(200)
            made[way] = other, transfers
        for _ in range(rounds):
            for way, (other, transfers) in made.items():
                before = other.ask("state")["cpu_us"]
                found[way] += [messages for messages, _ in transfers(number)]
                found[f"{way}_cpu_us"] += (other.ask("state")["cpu_us"] - before) / (rounds * number)
    return found


# floods


def garbage() -> Iterator[bytes]:
    """Frames that cannot be decoded."""
    while True:
        yield os.urandom(256)


def requests(session: int) -> Iterator[bytes]:
    """Valid requests, which are answered: a Ping, and a Transfer with an unknown ticket."""
    for n in count(1000):
        yield encode(m.Ping(session=session, request=n))


def flood(place: Place, kind: str, over: Any, sent: Any) -> None:
    """Send as fast as the source receives."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    keys = read_keys(Path(place.folder) / "decode")
    public = place.public()
    assert public is not None
    dealer.setsockopt(zmq.CURVE_SERVERKEY, public.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    dealer.setsockopt(zmq.SNDTIMEO, 100)
    dealer.connect(place.address)
    frames = garbage()
    if kind == "requests":
        dealer.send(encode(_hello()))
        welcome = decode(dealer.recv())
        assert isinstance(welcome, m.Welcome)
        frames = requests(welcome.session)
    while not over.is_set():
        with contextlib.suppress(zmq.Again):
            dealer.send(next(frames))
            sent.value += 1
        while dealer.poll(0):
            dealer.recv()
    dealer.close(linger=0)
    context.term()


def _hello() -> m.Hello:
    from kvproto.session.negotiation import LIMITS, Terms

    terms = Terms(())
    return m.Hello(
        request=1, versions=terms.versions, engine="decode-400", incarnation=1, rank=0, replica=0, role=Role.SINK,
        offered=(), needed=(), limits=LIMITS,
    )  # fmt: skip


@contextmanager
def flooded(place: Place, kind: str) -> Iterator[Any]:
    """A flood at a place while the context lasts; gives the number of frames sent so far."""
    context = multiprocessing.get_context("spawn")
    over, sent = context.Event(), context.Value("q", 0)
    process = context.Process(target=flood, args=(place, kind, over, sent), daemon=True)
    process.start()
    try:
        _until(lambda: sent.value > 100)
        yield sent
    finally:
        over.set()
        process.join(10)
        process.kill()


def floods(rounds: int, number: int) -> dict[str, Any]:
    """Seconds of a transfer alone, beside each flood at its own source, and beside the same flood at another source.

    The last says what the flood costs as a process that takes a core, so that the difference is the source's.
    """
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        places = []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            places.append(stack.enter_context(far(Place.of("curve", folder))))
        mine, elsewhere = places
        transfers = Transfers(stack.enter_context(mine.place.sink()), mine, True)
        transfers(200)
        for _ in range(rounds):
            found.setdefault("alone", []).extend(each for each, _ in transfers(number))
            for kind in ("garbage", "requests"):
                for where, other in (("elsewhere", elsewhere), ("here", mine)):
                    with flooded(other.place, kind) as sent:
                        before, began = sent.value, time.monotonic()
                        some = [each for each, _ in transfers(number)]
                        rate = (sent.value - before) / (time.monotonic() - began)
                    found.setdefault(f"{kind} {where}", []).extend(some)
                    found.setdefault(f"{kind} {where} frames_s", []).append(round(rate))
    return found
