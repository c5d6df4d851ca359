"""Two engines in two network namespaces, each with its own address, over a link that delays and loses packets."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import numpy as np
import pytest

from kvproto import Options, Pool, Seed, Sink, Source, new_ticket, read_ticket, write_ticket
from tests.processes import FORKED, imported

from .doors import GEOMETRY, PAGES, PROMPT, filled, rows
from .keyed import allow, entry, host

imported(__name__)

ADDRESSES = "10.213.77.1", "10.213.77.2"
REQUESTS = 20
CLONE_NEWNET = 0x40000000


@attrs.frozen
class Link:
    """Names of the namespaces, whose ends of the link have the ADDRESSES, in their order."""

    names: tuple[str, str]

    def netem(self, *how: str) -> None:
        """Have both ends delay or lose what they send; nothing: neither."""
        for name in self.names:
            run("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "kv", "root", "netem", *how)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link((f"kvp{os.getpid()}", f"kvd{os.getpid()}"))
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        pytest.skip(f"no network namespaces: {missing[0]} is not installed (iproute2)")
    try:
        try:
            for name in made.names:
                run("ip", "netns", "add", name)
            first, second = made.names
            run("ip", "-n", first, "link", "add", "kv", "type", "veth", "peer", "name", "kv", "netns", second)
            for name, address in zip(made.names, ADDRESSES, strict=True):
                run("ip", "-n", name, "address", "add", f"{address}/30", "dev", "kv")
                run("ip", "-n", name, "link", "set", "kv", "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
            made.netem("delay", "1ms")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(name: str) -> None:
    """Go on in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def prefill(name: str, folder: Path, line: Connection) -> None:
    """Computes whatever ticket comes, until the other end is closed."""
    enter(name)
    with Source("prefill", filled(), f"tcp://{ADDRESSES[0]}:*", Options(keys=folder)) as source:
        line.send(source._node._listener.address)
        while (ticket := line.recv()) is not None:
            source.request(read_ticket(ticket), PROMPT).finish({"kv": [3, 1, 2]})


def decode(name: str, folder: Path, seed: Seed, line: Connection) -> None:
    """Fetches whatever ticket comes, and says which bytes it got."""
    enter(name)
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": seed}, Options(keys=folder)) as sink:
        while (ticket := line.recv()) is not None:
            sink.fetch(read_ticket(ticket), PROMPT, {"kv": [9, 0, 5]}).wait(30)
            line.send(rows(sink.pool, [9, 0, 5]))
            for place in (("kv", layer, part) for layer in range(2) for part in ("k", "v")):
                sink.pool.array(*place)[:] = 0


def started(target: Callable[..., None], *arguments: object) -> Connection:
    here, there = FORKED.Pipe()
    FORKED.Process(target=target, args=(*arguments, there), daemon=True).start()
    there.close()
    return here


@pytest.mark.parametrize("how", [("delay", "2ms"), ("delay", "10ms", "5ms", "loss", "5%")], ids=["delay", "loss"])
def test_two_namespaces(tmp_path: Path, link: Link, how: tuple[str, ...]) -> None:
    """KVP-NET-CURVE: two hosts meet by keys alone; every byte of each request arrives."""
    ours, theirs = host(tmp_path, "prefill"), host(tmp_path, "decode")
    allow(ours, [entry(theirs)])
    link.netem(*how)
    source = started(prefill, link.names[0], ours.folder)
    sink = started(decode, link.names[1], theirs.folder, Seed(source.recv(), ours.public))
    right = rows(filled(), [3, 1, 2])
    for _ in range(REQUESTS):
        ticket = write_ticket(new_ticket("prefill"))
        source.send(ticket)
        sink.send(ticket)
        assert np.array_equal(sink.recv(), right)
    for each in (sink, source):
        each.send(None)
