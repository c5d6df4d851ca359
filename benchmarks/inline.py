"""Transport inline compared with a bare ZeroMQ socket, and what a long hand-over costs others: `python benchmarks/inline.py [--write]`.

Two processes, over ipc and over loopback TCP. Each round sends the same bytes by a bare DEALER and ROUTER, in messages
as long as Data, and by inline: from `fetch` to Arrived, packed, checked and unpacked, first without VERIFY and then with.
Then short requests are fetched one after the other, by the same sink and by another, at first alone and then while a
hand-over of 1 GiB streams. --write keeps raw samples in benchmarks/results/inline.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvproto import Cache, Fetch, Options, Pool, Prompt, Sink, Source, Ticket, lay_out, new_ticket
from kvproto.transport.inline.transport import FRAME, WINDOW, InlineTransport

RESULTS = Path(__file__).parent / "results/inline.json"
PAGE, TOKEN = 64, 32 << 10
GEOMETRY = lay_out([Cache.gqa("kv", 8, kv_heads=8, head_dim=128, page=PAGE)])
"""TOKEN bytes a token, in runs of 128 KiB."""
MOVED, LONG = 64 << 20, 1 << 30
SHORT = Prompt([1])
Table = dict[str, list[int]]


def options(verify: bool, window: int) -> Options:
    return Options(transports=[InlineTransport(window)], verify=verify, insecure=True)


def prefill(conn: Connection, address: str, window: int) -> None:
    """Two sources, without and with VERIFY, and bare frames."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address.format("bare"))
    with ExitStack() as stack:
        sources = []
        for verify, bytes_ in ((False, LONG), (True, MOVED)):
            pool = Pool.allocate(GEOMETRY, bytes_ // TOKEN // PAGE)
            pool.array("kv", 0, "k")[:] = 7
            made = Source(f"prefill-{verify}", pool, address.format(verify), options(verify, window))
            sources.append(stack.enter_context(made))
        conn.send([router.getsockopt_string(zmq.LAST_ENDPOINT), *(s._node._listener.address for s in sources)])
        while asked := conn.recv():
            if isinstance(asked, int):
                identity, _ = router.recv_multipart()
                frame = bytes(FRAME)
                for _ in range(asked // FRAME):
                    router.send_multipart([identity, frame])
                continue
            which, ticket, tokens, table = asked
            prompt = Prompt(range(tokens)) if tokens > 1 else SHORT
            sources[which].request(ticket, prompt).finish(table)
            conn.send(None)
    router.close(linger=0)
    context.term()


class Decode:
    """Sinks of one source each, and a bare socket."""

    def __init__(self, conn: Connection, stack: ExitStack, addresses: list[str], window: int) -> None:
        self._conn = conn
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bare = self._context.socket(zmq.DEALER)
        self._bare.connect(addresses[0])
        stack.callback(self._context.term)
        stack.callback(self._bare.close, linger=0)
        self.sinks = []
        for name, which, pages in (
            ("long", 0, LONG // TOKEN // PAGE + 1),
            ("verified", 1, MOVED // TOKEN // PAGE),
            ("other", 0, 1),
        ):
            sink = Sink(
                name, Pool.allocate(GEOMETRY, pages), {f"prefill-{bool(which)}": addresses[1 + which]}, options(bool(which), window)
            )  # fmt: skip
            self.sinks.append((stack.enter_context(sink), which))

    def bare(self, bytes_: int) -> float:
        """Seconds."""
        self._conn.send(bytes_)
        begin = time.perf_counter()
        self._bare.send(b"")
        for _ in range(bytes_ // FRAME):
            self._bare.recv()
        return time.perf_counter() - begin

    def ready(self, sink: int, tokens: int, pages: list[int]) -> tuple[Ticket, Prompt]:
        """A request whose prefill is over."""
        which = self.sinks[sink][1]
        ticket = new_ticket(f"prefill-{bool(which)}")
        self._conn.send((which, ticket, tokens, {"kv": pages}))
        self._conn.recv()
        return ticket, Prompt(range(tokens)) if tokens > 1 else SHORT

    def fetch(self, sink: int, made: tuple[Ticket, Prompt], pages: list[int]) -> Fetch:
        """Ask for it."""
        return self.sinks[sink][0].fetch(*made, {"kv": pages})

    def inline(self, sink: int, bytes_: int) -> float:
        """Seconds."""
        pages = list(range(bytes_ // TOKEN // PAGE))
        made = self.ready(sink, bytes_ // TOKEN, pages)
        begin = time.perf_counter()
        self.fetch(sink, made, pages).wait(600)
        return time.perf_counter() - begin

    def short(self, sink: int) -> float:
        """Seconds of a request of one token."""
        page = [len(self.sinks[sink][0].pool.array("kv", 0, "k")) - 1]
        made = self.ready(sink, 1, [0])
        begin = time.perf_counter()
        self.fetch(sink, made, page).wait(60)
        return time.perf_counter() - begin


def measured(address: str, rounds: int, window: int) -> dict[str, Any]:
    """Rates and latencies over one kind of address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(theirs, address, window), daemon=True)
    process.start()
    theirs.close()
    found: dict[str, Any] = {"bare": [], "inline": [], "verified": [], "alone": {}, "beside": {}}
    with ExitStack() as stack:
        made = Decode(ours, stack, ours.recv(), window)
        for i in range(rounds + 1):  # the first one warms up
            seconds = {"bare": made.bare(MOVED), "inline": made.inline(0, MOVED), "verified": made.inline(1, MOVED)}
            for way, each in seconds.items():
                if i:
                    found[way].append(round(MOVED / each / 1e9, 4))
        for sink, name in ((0, "same"), (2, "other")):
            made.short(sink)
            found["alone"][name] = [made.short(sink) for _ in range(100)]
            found["beside"][name] = []
            pages = list(range(LONG // TOKEN // PAGE))
            long = made.fetch(0, made.ready(0, LONG // TOKEN, pages), pages)
            while not long.done:
                found["beside"][name].append(made.short(sink))
            found["beside"][name].pop()  # it may have outlived the stream
            long.wait(0)
        ours.send(None)
    process.join()
    return found


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, default=WINDOW, help="bytes that may be on their way")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, address in (("ipc", f"ipc://{folder}/{{}}"), ("tcp", "tcp://127.0.0.1:*")):
            found[name] = made = measured(address, args.rounds, args.window)
            rates = ", ".join(f"{way} {np.median(made[way]):.2f}" for way in ("bare", "inline", "verified"))
            print(f"{name}: {rates} GB/s, medians")
            for who in ("same", "other"):
                for when in ("alone", "beside"):
                    p50, p99 = np.percentile(made[when][who], (50, 99)) * 1e3
                    print(
                        f"  short request, {who} sink, {when}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, n {len(made[when][who])}"
                    )
    if args.write:
        head = {
            "benchmark": "inline", "date": datetime.now(UTC).isoformat(timespec="seconds"), "unit": "GB/s; seconds",
            "machine": f"{platform.machine()}, {platform.system()}", "cpus": os.cpu_count(), "load": os.getloadavg()[0],
            "versions": {"python": platform.python_version(), "numpy": np.__version__, "pyzmq": zmq.__version__, "zmq": zmq.zmq_version()},
            "bytes": MOVED, "long": LONG, "frame": FRAME, "window": args.window,
        }  # fmt: skip
        RESULTS.write_text(json.dumps(head | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
