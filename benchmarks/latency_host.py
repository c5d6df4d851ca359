"""Latency of a push of one page between two processes of this host, from `fetch` to the sink's event.

`python benchmarks/latency_host.py [--before PATH] [--rounds N] [--write]`: prints medians and p99; --write keeps the raw samples in
benchmarks/results/latency_host.json. The source has computed every request before it is fetched. Ways:

    floor    no kvproto: a byte over a socket to a waiting thread of the source's process, which sends one back to a waiting thread of the sink's
    before   nodes of an earlier commit, whose tree is at PATH, polled in a loop
    step     Source and Sink without a thread, which the program steps
    thread   Source and Sink with their I/O threads, in which the callback comes

each of them alone, beside a thread of pure Python in both processes that never lets go of the interpreter ("busy both"), beside one in the
sink's process only ("busy sink"), and beside both with `sys.setswitchinterval(0.0005)`. All ways are measured in turn in every round, so that
other load on the machine meets them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/latency_host.json"
LOADS = {
    "alone": (False, False, 0.005), "busy sink": (False, True, 0.005), "busy both": (True, True, 0.005),
    "busy both, 0.5 ms": (True, True, 0.0005),
}  # fmt: skip
"""Whether a thread of pure Python runs in the source's process, and in the sink's; their switch interval in seconds."""
PAGE, PAGES = 16, 8
WORK = 1e-3
"""Seconds that the source of `floor` computes and that are taken off again: an answer at once would come before the sink's busy thread runs."""


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


def key(number: int) -> bytes:
    """A ticket's, known to both processes."""
    return number.to_bytes(16, "little")


# one process for each side and way: it reads lines of [load, interval, first number, count] and answers with a line


def floor(role: str, address: str) -> Callable[[int, int], list[float]]:
    """What two wake-ups cost, and nothing else: a thread that waits in each process, and a byte to and fro."""
    path = address.removeprefix("ipc://")
    if role == "source":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        heard: queue.Queue[bytes] = queue.Queue()

        def answer() -> None:
            peer, _ = listening.accept()
            while byte := peer.recv(1):
                end = time.perf_counter() + WORK
                while time.perf_counter() < end:
                    pass
                peer.send(byte)
                heard.put(byte)

        threading.Thread(target=answer, daemon=True).start()

        def serve(first: int, count: int) -> list[float]:
            print("ready", flush=True)
            for _ in range(count):
                heard.get()
            return []

        return serve
    peer = socket.socket(socket.AF_UNIX)
    arrived: queue.Queue[float] = queue.Queue()

    def receive() -> None:
        while peer.recv(1):
            arrived.put(time.perf_counter())

    def fetch(first: int, count: int) -> list[float]:
        if first == 1:
            peer.connect(path)
            threading.Thread(target=receive, daemon=True).start()
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            peer.send(b"?")
            found.append(arrived.get() - begin - WORK)
        return found

    return fetch


def before(role: str, address: str) -> Callable[[int, int], list[float]]:
    """Nodes of the earlier commit; its modules are not those of this tree."""
    import hashlib

    from kvproto import layout  # type: ignore[attr-defined]
    from kvproto.net import Dialer, Listener
    from kvproto.rank.rank_pool import allocate  # type: ignore[attr-defined]
    from kvproto.session import Party
    from kvproto.sink.node import Received, SinkNode  # type: ignore[attr-defined]
    from kvproto.source.node import Sent, SourceNode  # type: ignore[attr-defined]
    from kvproto.source.prefill import Finished
    from kvproto.wire.enums import Outcome
    from kvproto.wire.messages import Ticket

    geometry = layout.lay_out([layout.GroupSpec.gqa("kv", 2, kv_heads=2, head_dim=64, page=PAGE)])
    pool = allocate(geometry, 0, {0: PAGES})
    content = hashlib.sha256(b"the prompt").digest()
    ticket = lambda n: Ticket(key=key(n), engine="prefill", replica=0, deadline=600_000)  # noqa: E731
    if role == "source":
        source = SourceNode(Party("prefill", 0, 0, 1), geometry, pool, Listener(address), {0: address})

        def serve(first: int, count: int) -> list[float]:
            for number in range(first, first + count):
                source.expect(ticket(number), content)
                source.finish(key(number), Finished({0: [0]}, PAGE, Outcome.CONTINUE, {}))
            print("ready", flush=True)
            sent = 0
            while sent < count:
                sent += sum(isinstance(event, Sent) for event in source.poll())
            return []

        return serve
    sink = SinkNode(Party("decode", 0, 0, 2), geometry, pool, Dialer(), address)

    def fetch(first: int, count: int) -> list[float]:
        found = []
        for number in range(first, first + count):
            begin = time.perf_counter()
            while not sink.endpoint.ready:
                sink.poll()
            sink.transfer(ticket(number), content, 0, PAGE, {0: [number % PAGES]})
            while not any(isinstance(event, Received) for event in sink.poll()):
                pass
            found.append(time.perf_counter() - begin)
        return found

    return fetch


def now(role: str, address: str, thread: bool) -> Callable[[int, int], list[float]]:
    """Source and Sink of this tree."""
    from kvproto import Cache, Options, Pool, Prompt, Sink, Source, Ticket, lay_out

    geometry = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=64, page=PAGE)])
    pool, options = Pool.allocate(geometry, PAGES), Options(thread=thread)
    prompt = Prompt(range(PAGE))
    ticket = lambda n: Ticket(key=key(n), engine="prefill", replica=0, deadline=600_000)  # noqa: E731
    if role == "source":
        source = Source("prefill", pool, address, options)

        def serve(first: int, count: int) -> list[float]:
            requests = [source.request(ticket(number), prompt) for number in range(first, first + count)]
            for request in requests:
                request.finish({"kv": [0]})
            print("ready", flush=True)
            for request in requests:
                request.wait(120)
            source.events()
            return []

        return serve
    sink = Sink("decode", pool, {"prefill": address}, options)

    def fetch(first: int, count: int) -> list[float]:
        found = []
        for number in range(first, first + count):
            told: list[float] = []
            call = lambda _, told=told: told.append(time.perf_counter())  # noqa: E731
            begin = time.perf_counter()
            sink.fetch(ticket(number), prompt, {"kv": [number % PAGES]}, on_done=call).wait(120)
            while not told:  # the callback may come after `wait`: in the I/O thread, or with the next step
                time.sleep(0) if thread else sink.step()
            found.append(told[0] - begin)
        sink.events()
        return found

    return fetch


def child(way: str, role: str, address: str) -> None:
    """Serve the lines of the parent until there are no more."""
    plain = {"before": before, "floor": floor}
    go = plain[way](role, address) if way in plain else now(role, address, way == "thread")
    for line in sys.stdin:
        busy, interval, first, count = json.loads(line)
        sys.setswitchinterval(interval)
        with load(busy):
            found = go(first, count)
        print(json.dumps(found), flush=True)
    os._exit(0)


class Way:
    """Both processes of one way."""

    def __init__(self, way: str, tree: Path, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._both = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", way, role, f"ipc://{folder}/{way}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder,
            )
            for role in ("source", "sink")
        ]  # fmt: skip
        self._number = 1

    def measure(self, load: str, count: int) -> list[float]:
        """Seconds of so many pushes, one after the other."""
        *busy, interval = LOADS[load]
        for process, each in zip(self._both, busy, strict=True):
            self._say(process, [each, interval, self._number, count])
            if process is self._both[0]:
                assert self._hear(process) == "ready"
        self._number += count
        found: list[float] = json.loads(self._hear(self._both[1]))
        self._hear(self._both[0])
        return found

    @staticmethod
    def _say(process: subprocess.Popen[str], what: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    @staticmethod
    def _hear(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def close(self) -> None:
        """End both."""
        for process in self._both:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def facts() -> dict[str, Any]:
    """What the samples are of."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "load": os.getloadavg(),
        "python": platform.python_version(), "versions": {name: version(name) for name in ("numpy", "pyzmq")},
    }  # fmt: skip


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="tree of the earlier commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pushes", type=int, default=50, help="in each round, of each way and load")
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
    trees = {"floor": ROOT} | ({"before": args.before.resolve()} if args.before else {})
    trees |= dict.fromkeys(("step", "thread"), ROOT)
    samples: dict[str, dict[str, list[float]]] = {load: {way: [] for way in trees} for load in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: Way(name, tree, folder) for name, tree in trees.items()}
        for way in ways.values():
            way.measure("alone", 20)  # connect, and warm up
        for _ in range(args.rounds):
            for load_ in LOADS:
                for name, way in ways.items():
                    samples[load_][name] += way.measure(load_, args.pushes)
        for way in ways.values():
            way.close()
    print(
        f"{'load':<20}{'way':<10}{'median':>10}{'p90':>10}{'p99':>10}{'worst':>10}   ms, {os.getloadavg()[0]:.1f} load"
    )
    for load_, by_way in samples.items():
        for name, found in by_way.items():
            cuts = quantiles(found, n=100)
            row = "".join(f"{1e3 * value:10.3f}" for value in (median(found), cuts[89], cuts[98], max(found)))
            print(f"{load_:<20}{name:<10}{row}")
    if args.write:
        kept = {
            load: {way: [round(s * 1e6, 1) for s in found] for way, found in some.items()}
            for load, some in samples.items()
        }
        args.out.write_text(json.dumps({**facts(), "unit": "us", "samples": kept}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
