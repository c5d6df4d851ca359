"""What the messages of one transfer take, one transfer after the other, both sides warm."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from session_bare import Bare
from session_sides import PAGES, PROMPT, Far, Place, Stamps, far, ticket

from kvproto import Sink
from kvproto.wire import decode

__all__ = ["latency", "quantiles"]

WAYS = {"thread": True, "step": False}
_SENT, _BACK = ("Transfer", "DoneAck"), ("Accepted", "Done")


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    found = dict(zip(("p50", "p90", "p99", "worst"), np.percentile(seconds, (50, 90, 99, 100)) * 1e6, strict=True))
    return {name: round(float(value), 1) for name, value in found.items()}


def lengths(sink: Sink, other: Far) -> dict[str, int]:
    """Bytes of the frames of a transfer, by the name of the message."""
    found: dict[str, int] = {}
    dialer = sink._node._dialer
    send, receive = dialer.send, dialer.receive

    def sent(key: Any, frame: bytes, server: bytes | None = None) -> bool:
        found[type(decode(frame)).__name__] = len(frame)
        return send(key, frame, server)

    def received() -> Any:
        for key, frame in receive():
            found[type(decode(frame)).__name__] = len(frame)
            yield key, frame

    dialer.send, dialer.receive = sent, received  # type: ignore[method-assign, assignment]
    Transfers(sink, other, False, 1 << 40)(10)
    dialer.send, dialer.receive = send, receive  # type: ignore[method-assign]
    return {name: found[name] for name in (*_SENT, *_BACK)}


class Transfers:
    """Transfers of one sink."""

    def __init__(self, sink: Sink, other: Far, thread: bool, first: int = 1) -> None:
        self._sink, self._other, self._thread, self._number = sink, other, thread, first
        self._stamps = Stamps(sink, time.perf_counter)
        self.called: list[float] = []

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """Seconds of so many: from Transfer to DoneAck, and from `fetch` to the callback."""
        sink, stamps, found = self._sink, self._stamps, []
        self._other.ask("finish", self._number, count)
        for number in range(self._number, self._number + count):
            told: list[float] = []
            call = lambda _, told=told: told.append(time.perf_counter())  # noqa: E731
            begin = time.perf_counter()
            handle = sink.fetch(ticket(number), PROMPT, {"kv": [number % PAGES]}, on_done=call)
            handle.wait(60)
            while not told:
                time.sleep(0) if self._thread else sink.step()
            found.append((stamps.acked - stamps.asked, told[0] - begin))
        self._other.ask("wait", self._number, count)
        self._number += count
        sink.events()
        return found


def answer(pipe: Connection, keyed: tuple[bytes, bytes] | None, address: str) -> None:
    """The source's half of the floor: two frames back for each that comes, and one more is awaited."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if keyed is not None:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keyed[1])
    router.bind(address)
    pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    back = [bytes(n) for n in pipe.recv()]
    while True:
        who, frame = router.recv_multipart()
        if not frame:
            break
        for each in back:
            router.send_multipart([who, each])
        router.recv_multipart()
    router.close(linger=0)
    context.term()


class Floor:
    """The same number of frames of the same lengths over bare sockets: a DEALER and a ROUTER that block."""

    def __init__(self, stack: ExitStack, keyed: bool, folder: str, frames: dict[str, int]) -> None:
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        ours, theirs = multiprocessing.Pipe()
        address = "tcp://127.0.0.1:*" if keyed else f"ipc://{folder}/floor"
        arguments = (theirs, server if keyed else None, address)
        process = multiprocessing.get_context("spawn").Process(target=answer, args=arguments, daemon=True)
        process.start()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        if keyed:
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, server[0])
            self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, client[0])
            self._dealer.setsockopt(zmq.CURVE_SECRETKEY, client[1])
        self._dealer.connect(ours.recv())
        ours.send([frames[name] for name in _BACK])
        self._frames = [bytes(frames[name]) for name in _SENT]
        stack.callback(process.join, 10)
        stack.callback(self._context.term)
        stack.callback(self._dealer.close)
        stack.callback(self._dealer.send, b"")

    def __call__(self, count: int) -> list[tuple[float, float]]:
        """As `Transfers`; there is no engine."""
        ask, acknowledge = self._frames
        dealer, found = self._dealer, []
        for _ in range(count):
            begin = time.perf_counter()
            dealer.send(ask)
            dealer.recv()
            dealer.recv()
            dealer.send(acknowledge)
            seconds = time.perf_counter() - begin
            found.append((seconds, seconds))
        return found


def latency(rounds: int, count: int) -> dict[str, Any]:
    """Samples in seconds of every way over every kind of address; all ways are measured in turn in every round."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        ways: dict[str, Callable[[int], list[tuple[float, float]]]] = {}
        for kind in ("curve", "ipc"):
            for name, thread in WAYS.items():
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                other = stack.enter_context(far(Place.of(kind, folder), thread=True))
                sink = stack.enter_context(other.place.sink(thread=thread))
                frames = lengths(sink, other)
                ways[f"{kind} {name}"] = Transfers(sink, other, thread)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            ways[f"{kind} messages"] = Bare(stack, Place.of(kind, folder))
            ways[f"{kind} floor"] = Floor(stack, kind == "curve", folder, frames)
            found[f"{kind} frames"] = frames
        for way in ways.values():
            way(200)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                samples[name] += way(count)
    for name, some in samples.items():
        messages, whole = zip(*some, strict=True)
        bare = name.endswith(("floor", "messages"))
        found[name] = {"messages": list(messages)} | ({} if bare else {"door": list(whole)})
    return found
