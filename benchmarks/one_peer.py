"""The cost of one peer to a source: CPU time of a second of its frames, and memory of its sessions.

A Source runs in a process of its own, over ipc. A peer sends Pings of no session, Hellos that open sessions, or garbage
as fast as the source takes them; beside it a good sink fetches three pages again and again. Results are seconds of CPU
for each second of the clock, frames handled, the good sink's median, and bytes for each session that has greeted.

`python benchmarks/one_peer.py [--out]`
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import zmq
from harness import arguments, child, facts, keep

from kvproto import Cache, DType, Pool, Prompt, Sink, Source, lay_out, new_ticket, read_ticket, write_ticket
from kvproto.wire import encode
from kvproto.wire import messages as m
from kvproto.wire.enums import Role
from kvproto.wire.tables import MAJOR, MINOR

SECONDS, SESSIONS, PAGE = 3.0, 1024, 4
GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=PAGE, dtype=DType.U8)])
PROMPT = Prompt(range(10))
Frames = Callable[[int], bytes]


def serve(line: Connection, address: str) -> None:
    """A source that serves each ticket that comes, and tells what it has used; None: the end."""
    with Source("prefill", Pool.allocate(GEOMETRY, 16), address) as source:
        line.send("ready")
        while (asked := line.recv()) is not None:
            if asked == "used":
                usage = resource.getrusage(resource.RUSAGE_SELF)
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                sessions = len(source._node.endpoint.sessions)
                line.send((usage.ru_utime + usage.ru_stime, pages * resource.getpagesize(), sessions))
            else:
                source.request(read_ticket(asked), PROMPT).finish({"kv": [0, 1, 2]})


def hello(n: int, engine: str = "peer") -> bytes:
    """A Hello of another rank each time."""
    return encode(
        m.Hello(
            request=1,
            versions=(m.VersionRange(major=MAJOR, min_minor=MINOR, max_minor=MINOR),),
            engine=engine,
            incarnation=1,
            rank=n,
            replica=0,
            role=Role.SINK,
            offered=(),
            needed=(),
            limits=m.Limits(max_body=1 << 20, max_transfers=8),
        )
    )


KINDS: dict[str, Frames | None] = {
    "none": None,
    "garbage": lambda n: b"garbage" * 40,
    "Ping of no session": lambda n: encode(m.Ping(session=n + 1, request=n + 1)),
    "Hello": hello,
}


def flooded(line: Connection, sink: Sink, address: str, frames: Frames | None, seconds: float) -> dict[str, float]:
    """The load of a source while one peer sends as much as it takes."""
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(address)
    line.send("used")
    before, _, _ = line.recv()
    start, sent, took = time.monotonic(), 0, list[float]()
    while time.monotonic() - start < seconds:
        for _ in range(200 if frames else 0):
            try:
                peer.send(frames(sent) if frames else b"", zmq.DONTWAIT)
            except zmq.Again:
                break
            sent += 1
        while peer.poll(0):
            peer.recv()
        ticket, begun = new_ticket("prefill"), time.monotonic()
        line.send(write_ticket(ticket))
        sink.fetch(ticket, PROMPT, {"kv": [3, 4, 5]}).wait(30)
        took.append(time.monotonic() - begun)
    wall = time.monotonic() - start
    line.send("used")
    after, _, _ = line.recv()
    context.destroy(0)
    return {
        "cpu_a_second": round((after - before) / wall, 2),
        "frames_a_second": round(sent / wall),
        "fetch_ms": round(1e3 * statistics.median(took), 1),
    }


def greeted(line: Connection, address: str, count: int) -> dict[str, float]:
    """Memory of sessions that have greeted and go on no further."""
    line.send("used")
    _, before, had = line.recv()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * count + 16)
    for n in range(count):
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(address)
        peer.send(hello(n, "many"))
        peer.poll(10_000)
    line.send("used")
    _, after, have = line.recv()
    context.destroy(0)
    return {"sessions": have - had, "bytes_a_session": round((after - before) / max(have - had, 1))}


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "one_peer", quick="few of everything, to see that it works").parse_args()
    seconds, count = (0.2, 20) if args.quick else (SECONDS, SESSIONS)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    figures: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        address = f"ipc://{folder}/source"
        with child(serve, address) as line:
            assert line.recv() == "ready"
            with Sink("decode", Pool.allocate(GEOMETRY, 16), {"prefill": address}) as sink:
                for name, frames in KINDS.items():
                    figures[name] = flooded(line, sink, address, frames, seconds)
                    print(name, figures[name])
            figures["sessions"] = greeted(line, address, count)
            print(figures["sessions"])
            line.send(None)
    keep(args.out, facts() | figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
