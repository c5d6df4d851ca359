"""A real etcd, one member, that a test can stop, pause and start again; and engines that use it."""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

import kvproto
from kvproto_discovery import Etcd, FoundSources
from kvproto_discovery.etcd import text
from kvproto_discovery.places import etcd_of
from tests.door.doors import GEOMETRY, PAGES, PROMPT, filled


@attrs.define
class Member:
    """One process of etcd, and its data."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    ports: tuple[int, int] = (0, 0)
    keys: Path | None = None
    """The folder of the certificates with which it serves https alone, and asks for those of clients."""
    known: bool = False
    """Whether it has ever answered at its ports, which it keeps from then on."""

    def start(self) -> None:
        """Start it, again if it was killed, and wait until it answers."""
        program = shutil.which("etcd") or str(Path(sys.prefix, "debian/usr/bin/etcd"))
        while not (self.process and self.process.poll() is None):
            if not self.known:
                self.ports = _free()
            client, peer = f"{self.url}:{self.ports[0]}", f"http://127.0.0.1:{self.ports[1]}"
            self.process = subprocess.Popen(
                [program, "--data-dir", str(self.folder), "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
                 "--heartbeat-interval=20", "--election-timeout=200", "--unsafe-no-fsync", *self._secure],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            with contextlib.suppress(AssertionError):
                until(self._answers)

    @property
    def url(self) -> str:
        """Its URL, up to its port."""
        return f"http{'s' if self.keys else ''}://127.0.0.1"

    @property
    def _secure(self) -> list[str]:
        if self.keys is None:
            return []
        files = {"cert-file": "own.pem", "key-file": "own.key", "trusted-ca-file": "ca.pem"}
        return ["--client-cert-auth", *(f"--{name}={self.keys / file}" for name, file in files.items())]

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError("it has ended")
        with contextlib.suppress(kvproto.LocalError):
            self.etcd.rows()
            self.known = True
        return self.known

    def signal(self, number: int) -> None:
        """Stop, continue or kill it."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    @property
    def place(self) -> str:
        """The text that settings name it by."""
        place = f"etcd:{self.url}:{self.ports[0]}"
        if self.keys is None:
            return place
        return f"{place}?ca={self.keys}/ca.pem&cert={self.keys}/own.pem&key={self.keys}/own.key"

    @property
    def etcd(self) -> Etcd:
        """It, as a client of its own."""
        return etcd_of(self.place)

    def put(self, name: str, value: str) -> None:
        """Write anything."""
        self.etcd.call("kv/put", key=text(self.etcd.prefix + name), value=text(value))

    def delete(self, name: str) -> None:
        """Remove a key, as an operator may."""
        self.etcd.call("kv/deleterange", key=text(self.etcd.prefix + name))


def _free() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Its value, once it is true."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        pause.wait(0.02)
    return found


@contextlib.contextmanager
def source(
    folder: Path, name: str = "prefill", file: str = "prefill", options: kvproto.Options | None = None
) -> Iterator[kvproto.Source]:
    """A prefill engine at a socket of its own."""
    with kvproto.Source(name, filled(), f"ipc://{folder}/{file}", options) as made:
        yield made


@contextlib.contextmanager
def decode(found: FoundSources | None = None) -> Iterator[kvproto.Sink]:
    """A decode engine that follows a directory."""
    with kvproto.Sink("decode", kvproto.Pool.allocate(GEOMETRY, PAGES)) as sink, contextlib.ExitStack() as stack:
        if found is not None:
            stack.enter_context(contextlib.closing(found))
            found.follow(sink)
        yield sink


def hand_over(prefill: kvproto.Source, sink: kvproto.Sink) -> kvproto.Fetch:
    """A request, handed over."""
    ticket = kvproto.new_ticket(prefill.name, replica=prefill.geometry.replica)
    fetch = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
    prefill.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
    fetch.wait(30)
    return fetch


@contextlib.contextmanager
def running(folder: Path, keys: Path | None = None) -> Iterator[Member]:
    """A member with its data in a folder, with or without keys."""
    made = Member(folder, keys=keys)
    made.start()
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.signal(signal.SIGKILL)
