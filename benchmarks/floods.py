"""Loads that ZeroMQ itself does not bound: connections that arrive between two turns, and a message that never ends.

`python benchmarks/floods.py [--out]`. A Listener runs in this process, which may open 1,024 descriptors; the flood comes from another. The message comes in
the clear: a client that is on the allow-list could send the same under CURVE. Results are counts and bytes, no times.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import arguments, facts, keep

from kvproto.net import AllowList, Listener, make_keys

DESCRIPTORS, SECONDS, FRAME = 1024, 3.0, 1 << 20


def connections(port: int, seconds: float) -> None:
    """Open connections as fast as possible, and send nothing on them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held, until = [], time.monotonic() + seconds
    while time.monotonic() < until and len(held) < 8 * DESCRIPTORS:
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex(("127.0.0.1", port))
        held.append(made)
    time.sleep(max(until - time.monotonic(), 0))


def endless(port: int, seconds: float) -> None:
    """Send one endless message of frames of 1 MiB; by hand, as ZeroMQ sends no message before it is whole."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.sendall(greeting + bytes([4, len(ready)]) + ready)
        came = b""
        while b"READY" not in came:
            came += made.recv(1 << 12)
        frame, until = b"\x03" + struct.pack(">Q", FRAME) + bytes(FRAME), time.monotonic() + seconds
        while time.monotonic() < until:
            made.sendall(frame)


def beside(
    flood: Callable[[int, float], None], port: int, seconds: float, listener: Listener, look: Callable[[], int]
) -> int:
    """The most that `look` saw while the flood ran for so long and the listener had its turns."""
    process = multiprocessing.get_context("spawn").Process(target=flood, args=(port, seconds))
    process.start()
    most = 0
    while process.is_alive():
        select.select(listener.filenos(), [], [], 0.1)
        for _ in listener.receive():
            pass
        most = max(most, look())
    return most


def resident() -> int:
    """The resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print, keep."""
    args = arguments(__doc__, "floods", quick="few of everything, to see that it works").parse_args()
    seconds = SECONDS / 15 if args.quick else SECONDS
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    with tempfile.TemporaryDirectory() as folder:
        server, client = (make_keys(Path(folder) / name) for name in ("server", "client"))
        path = Path(folder) / "allow.toml"
        path.touch(0o600)  # whatever the umask
        path.write_text(f'[[client]]\nkey = "{client.public.decode()}"\nengine = "e"\n')
        with contextlib.closing(Listener("tcp://127.0.0.1:*", keys=server, allow=AllowList(path))) as listener:
            port = int(listener.address.rpartition(":")[2])
            counted = listener._connections
            most = beside(connections, port, seconds, listener, lambda: counted.count)
    with contextlib.closing(Listener("tcp://127.0.0.1:*", insecure=True)) as listener:
        before, port = resident(), int(listener.address.rpartition(":")[2])
        grown = beside(endless, port, seconds, listener, resident) - before
        until = time.monotonic() + min(seconds, 2)
        while time.monotonic() < until:
            select.select(listener.filenos(), [], [], 0.1)
            list(listener.receive())
        after = resident() - before
    found = {
        "connections": {"descriptors": DESCRIPTORS, "limit": counted.most, "most_at_once": most, "seconds": seconds},
        "endless_message": {"seconds": seconds, "grown_bytes": grown, "left_bytes": after},
    }
    print(found)
    keep(args.out, facts() | found)


if __name__ == "__main__":
    main()
