"""Two engines in two network namespaces, each with its own address, over a link that delays and loses packets."""

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvproto import Cache, DType, Options, Pool, Seed, Sink, Source, lay_out, new_ticket, read_ticket, write_ticket
from tests.processes import FORKED, imported

from .doors import PAGE, PAGES, PROMPT, filled, places, rows
from .keyed import allow, entry, host
from .namespaces import ADDRESSES, NotHere, Weather, enter, linked, sent

imported(__name__)

REQUESTS = 10
ADDRESS = f"tcp://{ADDRESSES[0]}:7100"
WIDE = lay_out([Cache.gqa("kv", 2, kv_heads=8, head_dim=64, page=PAGE, dtype=DType.U8)])
"""Requests of 20 KiB, beside which the frames of the session are few."""
WEATHER = {"near": Weather(), "far": Weather(delay=0.01), "lossy": Weather(0.002, jitter=0.005, loss=0.05)}


def prefill(name: str, folder: Path, transports: Sequence[str], line: Connection) -> None:
    """Computes whatever ticket comes, until there is none; then says how many bytes went over the link."""
    enter(name)
    with Source("prefill", filled(PAGES, WIDE), ADDRESS, Options(keys=folder, transports=transports)) as source:
        while (ticket := line.recv()) is not None:
            source.request(read_ticket(ticket), PROMPT).finish({"kv": [3, 1, 2]})
        line.send(sent())


def decode(name: str, folder: Path, transports: Sequence[str], seed: Seed, line: Connection) -> None:
    """Fetches whatever ticket comes, and says which bytes it got."""
    enter(name)
    options = Options(keys=folder, transports=transports)
    with Sink("decode", Pool.allocate(WIDE, PAGES), {"prefill": seed}, options) as sink:
        while (ticket := line.recv()) is not None:
            sink.fetch(read_ticket(ticket), PROMPT, {"kv": [9, 0, 5]}).wait(30)
            line.send(rows(sink.pool, [9, 0, 5]))
            for place in places():
                sink.pool.array(*place)[:] = 0


def started(target: Callable[..., None], *arguments: object) -> Connection:
    here, there = FORKED.Pipe()
    FORKED.Process(target=_run, args=(target, dict(os.environ), *arguments, there), daemon=True).start()
    there.close()
    return here


def _run(target: Callable[..., None], environment: dict[str, str], *arguments: object) -> None:
    os.environ |= environment
    target(*arguments)


def handed_over(tmp_path: Path, weather: Weather, transports: Sequence[str] = ()) -> int:
    """Hand REQUESTS over between two hosts that know each other by their keys; bytes that prefill's host has sent."""
    ours, theirs = host(tmp_path, "prefill"), host(tmp_path, "decode")
    allow(ours, [entry(theirs)])
    right = rows(filled(PAGES, WIDE), [3, 1, 2])
    try:
        with linked(weather) as (first, second):
            source = started(prefill, first, ours.folder, transports)
            sink = started(decode, second, theirs.folder, transports, Seed(ADDRESS, ours.public))
            for _ in range(REQUESTS):
                ticket = write_ticket(new_ticket("prefill"))
                source.send(ticket)
                sink.send(ticket)
                assert sink.poll(60)
                assert np.array_equal(sink.recv(), right)
            for each in (sink, source):
                each.send(None)
            return int(source.recv())
    except NotHere as reason:
        pytest.skip(f"no two network namespaces on this machine: {reason}")


@pytest.mark.parametrize("weather", WEATHER)
def test_two_namespaces(tmp_path: Path, weather: str) -> None:
    """KVP-NET-CURVE: two hosts meet by their keys alone, and every byte of each request arrives."""
    began = time.monotonic()
    handed_over(tmp_path, WEATHER[weather])
    assert time.monotonic() - began >= REQUESTS * 2 * WEATHER[weather].delay


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_between_two_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX finds the link by itself, and all bytes of the pages go over it."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between two machines: UCX would notice that it shares memory here
    assert handed_over(tmp_path, Weather(), ["nixl"]) > REQUESTS * rows(filled(PAGES, WIDE), [3, 1, 2]).nbytes
