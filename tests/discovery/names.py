"""`unshare --mount --net python names.py FOLDER`: sources by DNS, from a server at which this program decides what it says.

It prints what became of each step as JSON. The resolver is that of the C library, with a resolv.conf of this namespace.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import kvproto
from kvproto_discovery import read_found
from tests.discovery.members import hand_over, until
from tests.door.doors import GEOMETRY, PAGES, filled
from tests.examples.pods import mount

_A, _AAAA = 1, 28
NAME = "prefill-0.prefill"
OPTIONS = kvproto.Options(insecure=True, transports=["inline"])


class Server:
    """A DNS server with the records of some names; None: it has lost them, and says so."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] | None = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.53", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(512)
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        labels, at = list[str](), 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode())
            at += 1 + length
        (kind,) = struct.unpack_from(">H", query, at + 1)
        records = self.records
        addresses = [] if records is None else records.get(".".join(labels), [])
        code = 2 if records is None else 0 if addresses else 3
        data = [
            socket.inet_pton(socket.AF_INET6 if kind == _AAAA else socket.AF_INET, each)
            for each in addresses if (":" in each) == (kind == _AAAA) and kind in (_A, _AAAA)
        ]  # fmt: skip
        found = b"".join(struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in data)
        head = query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(data), 0, 0)
        return head + query[12 : at + 5] + found


def resolve_here(folder: Path) -> None:
    """Have this mount namespace ask the server."""
    (folder / "resolv.conf").write_text("nameserver 127.0.0.53\noptions timeout:1 attempts:1\n")
    (folder / "nsswitch.conf").write_text("hosts: dns\n")
    mount(folder, "resolv.conf", "nsswitch.conf")


def main(folder: Path) -> None:
    """A pod that starts, moves to other addresses, loses its name and ends."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    resolve_here(folder)
    server, said = Server(), dict[str, object]()
    found = read_found("dns:prefill=prefill-{0-1}.prefill:7100")
    with (
        kvproto.Sink("decode", kvproto.Pool.allocate(GEOMETRY, PAGES), None, OPTIONS) as sink,
        contextlib.closing(found),
    ):
        found.follow(sink)
        until(lambda: not found.why)
        said["before"] = sink.unready
        for name, address in (("IPv4", "127.0.0.2"), ("moved", "127.0.0.3"), ("IPv6", "::1")):
            place = f"tcp://{f'[{address}]' if ':' in address else address}:7100"
            with kvproto.Source("prefill", filled(), place, OPTIONS) as source:
                server.records = {NAME: [address, "127.0.0.9"] if name == "moved" else [address]}
                until(lambda: sink.ready)
                hand_over(source, sink)
                said[name] = [seed.address for seed in found.values()]
                if name == "IPv6":
                    server.records = None
                    until(lambda: found.why)
                    hand_over(source, sink)
                    said["no answer"] = sorted(sink.ready)
                    server.records = {}
                    until(lambda: not found)
                    hand_over(source, sink)
                    said["no name"] = sorted(sink.ready)
            until(lambda: not sink.ready)
        until(lambda: not sink.sources)
        said["after"] = sink.unready
    print(json.dumps(said))
    sys.stdout.flush()
    os._exit(0)  # without waiting for a resolver that waits


if __name__ == "__main__":
    main(Path(sys.argv[1]))
