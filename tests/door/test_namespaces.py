"""Two engines in two network namespaces, each with its own address, over a link that delays and loses packets."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvproto import Options, Pool, Seed, Sink, Source, new_ticket, read_ticket, write_ticket
from tests.processes import FORKED, imported

from .doors import GEOMETRY, PAGES, PROMPT, filled, places, rows
from .keyed import allow, entry, host
from .namespaces import ADDRESSES, NotHere, Weather, enter, linked

imported(__name__)

REQUESTS = 10
WEATHER = {"near": Weather(), "far": Weather(delay=0.01), "lossy": Weather(0.002, jitter=0.005, loss=0.05)}


def prefill(name: str, folder: Path, line: Connection) -> None:
    """Computes whatever ticket comes, until there is none."""
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
            for place in places():
                sink.pool.array(*place)[:] = 0


def started(target: Callable[..., None], *arguments: object) -> Connection:
    here, there = FORKED.Pipe()
    FORKED.Process(target=target, args=(*arguments, there), daemon=True).start()
    there.close()
    return here


@pytest.mark.parametrize("weather", WEATHER)
def test_two_namespaces(tmp_path: Path, weather: str) -> None:
    """KVP-NET-CURVE: two hosts meet by their keys alone, and every byte of each request arrives."""
    ours, theirs = host(tmp_path, "prefill"), host(tmp_path, "decode")
    allow(ours, [entry(theirs)])
    right = rows(filled(), [3, 1, 2])
    try:
        with linked(WEATHER[weather]) as (first, second):
            source = started(prefill, first, ours.folder)
            sink = started(decode, second, theirs.folder, Seed(source.recv(), ours.public))
            began = time.monotonic()
            for _ in range(REQUESTS):
                ticket = write_ticket(new_ticket("prefill"))
                source.send(ticket)
                sink.send(ticket)
                assert sink.poll(60)
                assert np.array_equal(sink.recv(), right)
            assert time.monotonic() - began >= REQUESTS * 2 * WEATHER[weather].delay
            for each in (sink, source):
                each.send(None)
    except NotHere as reason:
        pytest.skip(f"no two network namespaces on this machine: {reason}")
