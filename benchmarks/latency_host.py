"""Latency of a push of one page between two processes of this host, from `fetch` to the sink's event.

`python benchmarks/latency_host.py [--rounds N] [--out]`. The source has computed every request before it is fetched. Ways:

    floor    no kvproto: a byte over a socket to a waiting thread of the source's process, which sends one back to a waiting thread of the sink's
    step     Source and Sink without a thread, which the program steps
    thread   Source and Sink with their I/O threads, in which the callback comes

each of them alone, beside a thread of pure Python in both processes that never lets go of the interpreter ("busy both"), beside one in the
sink's process only ("busy sink"), and beside both with `sys.setswitchinterval(0.0005)`. All ways are measured in turn in every round, so that
other load on the machine meets them alike. Results also have "before": nodes of a commit of that time, polled in a loop.
"""

from __future__ import annotations

import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median, quantiles

from harness import arguments, child, facts, keep, rounded

from kvproto import Cache, Options, Pool, Prompt, Sink, Source, Ticket, lay_out

LOADS = {
    "alone": (False, False, 0.005),
    "busy sink": (False, True, 0.005),
    "busy both": (True, True, 0.005),
    "busy both, 0.5 ms": (True, True, 0.0005),
}
"""Whether a thread of pure Python runs in the source's process, and in the sink's; their switch interval in seconds."""
PAGE, PAGES = 16, 8
GEOMETRY, PROMPT = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=64, page=PAGE)]), Prompt(range(PAGE))
WORK = 1e-3
"""Seconds that the source of `floor` computes and that are taken off again: an answer at once would come before the sink's busy thread runs."""
Serve = Callable[[int, int, Callable[[], None]], None]
"""Serves requests of numbers (first, count); calls back once all may be fetched."""
Measure = Callable[[int, int], list[float]]
"""Seconds of requests of numbers (first, count), one after the other."""


@contextmanager
def load(busy: bool) -> Iterator[None]:
    """A thread that computes in pure Python and gives the interpreter away only when it is made to."""
    over = False

    def compute() -> None:
        while not over:
            pass

    thread = threading.Thread(target=compute) if busy else None
    if thread is not None:
        thread.start()
    try:
        yield
    finally:
        over = True
        if thread is not None:
            thread.join()


def ticket(number: int) -> Ticket:
    """Known to both processes."""
    return Ticket(key=number.to_bytes(16, "little"), engine="prefill", replica=0, deadline=600_000)


# what two wake-ups cost, and nothing else: a thread that waits in each process, and a byte to and fro


def floor_source(path: str) -> Serve:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    answered: queue.Queue[bytes] = queue.Queue()

    def answer() -> None:
        peer, _ = listening.accept()
        while byte := peer.recv(1):
            end = time.perf_counter() + WORK
            while time.perf_counter() < end:
                pass
            peer.send(byte)
            answered.put(byte)

    threading.Thread(target=answer, daemon=True).start()

    def serve(first: int, count: int, ready: Callable[[], None]) -> None:
        ready()
        for _ in range(count):
            answered.get()

    return serve


def floor_sink(path: str) -> Measure:
    peer = socket.socket(socket.AF_UNIX)
    arrived: queue.Queue[float] = queue.Queue()

    def receive() -> None:
        while peer.recv(1):
            arrived.put(time.perf_counter())

    def measure(first: int, count: int) -> list[float]:
        if first == 1:
            peer.connect(path)
            threading.Thread(target=receive, daemon=True).start()
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            peer.send(b"?")
            seconds.append(arrived.get() - begin - WORK)
        return seconds

    return measure


# Source and Sink


def source(stack: ExitStack, address: str, thread: bool) -> Serve:
    opened = stack.enter_context(Source("prefill", Pool.allocate(GEOMETRY, PAGES), address, Options(thread=thread)))

    def serve(first: int, count: int, ready: Callable[[], None]) -> None:
        requests = [opened.request(ticket(number), PROMPT) for number in range(first, first + count)]
        for request in requests:
            request.finish({"kv": [0]})
        ready()
        for request in requests:
            request.wait(120)
        opened.events()

    return serve


def sink(stack: ExitStack, address: str, thread: bool) -> Measure:
    pool, options = Pool.allocate(GEOMETRY, PAGES), Options(thread=thread)
    opened = stack.enter_context(Sink("decode", pool, {"prefill": address}, options))

    def measure(first: int, count: int) -> list[float]:
        seconds = []
        for number in range(first, first + count):
            told: list[float] = []
            call = lambda _, told=told: told.append(time.perf_counter())  # noqa: E731
            begin = time.perf_counter()
            opened.fetch(ticket(number), PROMPT, {"kv": [number % PAGES]}, on_done=call).wait(120)
            while not told:  # the callback may come after `wait`: in the I/O thread, or with the next step
                time.sleep(0) if thread else opened.step()
            seconds.append(told[0] - begin)
        opened.events()
        return seconds

    return measure


def side(pipe: Connection, way: str, role: str, path: str) -> None:
    """One process of one way: takes (busy, switch interval, first number, count) until there are no more."""
    with ExitStack() as stack:
        if way == "floor":
            go = floor_source(path) if role == "source" else floor_sink(path)
        else:
            go = (source if role == "source" else sink)(stack, f"ipc://{path}", way == "thread")
        while (asked := pipe.recv()) is not None:
            busy, interval, first, count = asked
            sys.setswitchinterval(interval)
            with load(busy):
                if role == "source":
                    go(first, count, lambda: pipe.send("ready"))  # type: ignore[call-arg, arg-type]
                    seconds = None
                else:
                    seconds = go(first, count)  # type: ignore[call-arg]
            pipe.send(seconds)


class Way:
    """Both processes of one way."""

    def __init__(self, stack: ExitStack, way: str, folder: str) -> None:
        self._source, self._sink = (
            stack.enter_context(child(side, way, role, f"{folder}/{way}")) for role in ("source", "sink")
        )
        stack.callback(lambda: (self._sink.send(None), self._source.send(None)))
        self._number = 1

    def measure(self, name: str, count: int) -> list[float]:
        """Seconds of so many pushes, one after the other."""
        busy_source, busy_sink, interval = LOADS[name]
        self._source.send((busy_source, interval, self._number, count))
        assert self._source.recv() == "ready"
        self._sink.send((busy_sink, interval, self._number, count))
        self._number += count
        seconds: list[float] = self._sink.recv()
        self._source.recv()
        return seconds


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "latency_host", rounds=20)
    parser.add_argument("--pushes", type=int, default=50, help="in each round, of each way and load (%(default)s)")
    args = parser.parse_args()
    head = facts()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ways = {name: Way(stack, name, folder) for name in ("floor", "step", "thread")}
        samples: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in LOADS}
        for way in ways.values():
            way.measure("alone", 20)  # connect, and warm up
        for _ in range(args.rounds):
            for name in LOADS:
                for way_name, way in ways.items():
                    samples[name][way_name] += way.measure(name, args.pushes)
    cuts_of = "".join(f"{cut:>10}" for cut in ("median", "p90", "p99", "worst"))
    print(f"{'load':<20}{'way':<10}{cuts_of}   ms, {head['load']} load")
    for name, by_way in samples.items():
        for way_name, seconds in by_way.items():
            cuts = quantiles(seconds, n=100)
            row = "".join(f"{1e3 * value:10.3f}" for value in (median(seconds), cuts[89], cuts[98], max(seconds)))
            print(f"{name:<20}{way_name:<10}{row}")
    us = {name: {way: [1e6 * s for s in of] for way, of in by_way.items()} for name, by_way in samples.items()}
    keep(args.out, head | {"unit": "us", "samples": rounded(us, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
