"""Transport inline compared with a bare ZeroMQ socket, and what a long hand-over costs others: `python benchmarks/inline.py [--out]`.

Two processes, over ipc and over loopback TCP. Each round sends the same bytes by a bare DEALER and ROUTER, in messages
as long as Data, and by inline: from `fetch` to Arrived, packed, checked and unpacked, first without VERIFY and then with.
Then short requests are fetched one after the other, by the same sink and by another, at first alone and then while a
hand-over of 1 GiB streams. --out keeps all samples.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from harness import arguments, child, facts, keep

from kvproto import Cache, Fetch, Options, Pool, Prompt, Sink, Source, Ticket, lay_out, new_ticket
from kvproto.transport.inline.transport import FRAME, WINDOW, InlineTransport

PAGE, TOKEN = 64, 32 << 10
GEOMETRY = lay_out([Cache.gqa("kv", 8, kv_heads=8, head_dim=128, page=PAGE)])
"""TOKEN bytes a token, in runs of 128 KiB."""
MOVED, LONG = 64 << 20, 1 << 30
QUICK = 4 << 20, 128 << 20
SHORT = Prompt([1])


def options(verify: bool, window: int) -> Options:
    return Options(transports=[InlineTransport(window)], verify=verify, insecure=True)


def addresses(stack: ExitStack, kind: str) -> list[str]:
    """Three: of a bare socket, and of sources without and with VERIFY."""
    if kind == "ipc":
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return [f"ipc://{folder}/{name}" for name in ("bare", "plain", "verified")]
    with ExitStack() as taken:
        free = [taken.enter_context(socket.socket()) for _ in range(3)]
        for end in free:
            end.bind(("127.0.0.1", 0))
        return [f"tcp://127.0.0.1:{end.getsockname()[1]}" for end in free]


def prefill(conn: Connection, places: list[str], window: int, moved: int, long: int) -> None:
    """Two sources, without and with VERIFY, and bare frames."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(places[0])
    with ExitStack() as stack:
        sources = []
        for verify, bytes_ in ((False, long), (True, moved)):
            pool = Pool.allocate(GEOMETRY, bytes_ // TOKEN // PAGE)
            pool.array("kv", 0, "k")[:] = 7
            source = Source(f"prefill-{verify}", pool, places[1 + verify], options(verify, window))
            sources.append(stack.enter_context(source))
        conn.send("ready")
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

    def __init__(
        self, conn: Connection, stack: ExitStack, places: list[str], window: int, moved: int, long: int
    ) -> None:
        self._conn = conn
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bare = self._context.socket(zmq.DEALER)
        self._bare.connect(places[0])
        stack.callback(self._context.term)
        stack.callback(self._bare.close, linger=0)
        self.sinks = []
        sizes = ("long", 0, long // TOKEN // PAGE + 1), ("verified", 1, moved // TOKEN // PAGE), ("other", 0, 1)
        for name, which, pages in sizes:
            seed = {f"prefill-{bool(which)}": places[1 + which]}
            sink = Sink(name, Pool.allocate(GEOMETRY, pages), seed, options(bool(which), window))
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


def measured(kind: str, rounds: int, window: int, moved: int, long: int) -> dict[str, Any]:
    """Rates in GB/s and latencies in seconds over one kind of address."""
    figures: dict[str, Any] = {"bare": [], "inline": [], "verified": [], "alone": {}, "beside": {}}
    with ExitStack() as stack:
        places = addresses(stack, kind)
        conn = stack.enter_context(child(prefill, places, window, moved, long))
        conn.recv()
        decode = Decode(conn, stack, places, window, moved, long)
        for i in range(rounds + 1):  # the first one warms up
            seconds = {
                "bare": decode.bare(moved),
                "inline": decode.inline(0, moved),
                "verified": decode.inline(1, moved),
            }
            for way, took in seconds.items():
                if i:
                    figures[way].append(round(moved / took / 1e9, 4))
        for sink, name in ((0, "same"), (2, "other")):
            decode.short(sink)
            figures["alone"][name] = [decode.short(sink) for _ in range(100)]
            figures["beside"][name] = []
            pages = list(range(long // TOKEN // PAGE))
            fetch = decode.fetch(0, decode.ready(0, long // TOKEN, pages), pages)
            while not fetch.done:
                figures["beside"][name].append(decode.short(sink))
            figures["beside"][name].pop()  # it may have outlived the stream
            fetch.wait(0)
        conn.send(None)
    return figures


def main() -> int:
    """Measure, print, keep."""
    parser = arguments(__doc__, "inline", rounds=5, quick="few of everything, to see that it works")
    parser.add_argument("--window", type=int, default=WINDOW, help="bytes that may be on their way")
    args = parser.parse_args()
    head = {"benchmark": "inline", "unit": "GB/s; seconds"} | facts() | {"zmq": zmq.zmq_version()}
    moved, long = QUICK if args.quick else (MOVED, LONG)
    figures: dict[str, Any] = {kind: measured(kind, args.rounds, args.window, moved, long) for kind in ("ipc", "tcp")}
    for kind, of in figures.items():
        rates = ", ".join(f"{way} {np.median(of[way]):.2f}" for way in ("bare", "inline", "verified"))
        print(f"{kind}: {rates} GB/s, medians")
        for who in ("same", "other"):
            for when in ("alone", "beside"):
                p50, p99 = np.percentile(of[when][who], (50, 99)) * 1e3
                count = len(of[when][who])
                print(f"  short request, {who} sink, {when}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, n {count}")
    sizes = {"bytes": moved, "long": long, "frame": FRAME, "window": args.window}
    keep(args.out, head | sizes | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
