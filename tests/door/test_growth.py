"""What a Source and a Sink keep of transfers and sessions that are over: nothing, counted in blocks of Python's allocator.

benchmarks/session.py watches memory and descriptors of processes over a million of them.
"""

import gc
import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import kvproto.session.limits
import kvproto.session.source_endpoint
import kvproto.session.timers
from kvproto import Pool, Sink, new_ticket
from kvproto.events import Arrived
from tests.door.doors import GEOMETRY, PAGES, PROMPT, STEPPED, Two, address_in, two


def transfer(both: Two, sink: Sink | None = None) -> None:
    """One, from its ticket to pages that are free."""
    sink, ticket = sink or both.sink, new_ticket("prefill")
    request = both.source.request(ticket, PROMPT)
    request.finish({"kv": [3, 1, 2]})
    fetch = sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
    while not (fetch.done and request.done):
        both.source.step()
        sink.step()
    assert isinstance(fetch.result, Arrived)
    both.source.events()
    sink.events()


def descriptors() -> int:
    """Those that are open, but for connections whose other end has just closed."""
    return min(len(os.listdir("/proc/self/fd")) for _ in range(30) if not any(select.select([], [], [], 0.01)))


def grown(work: Callable[[], None], times: int) -> tuple[float, int]:
    """Blocks that one more call keeps, and descriptors that many do, once as many calls have come before.

    The least of three rounds: what is kept for a while, such as timers that were cancelled, comes and goes.
    """
    found = []
    for _ in range(4):
        for _ in range(times):
            work()
        gc.collect()
        found.append((sys.getallocatedblocks(), descriptors()))
    more = min(later[0] - before[0] for before, later in pairwise(found))
    return more / times, found[-1][1] - found[0][1]


def test_nothing_is_kept_of_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for tickets that were used, of which a bounded number is remembered until their deadlines (KVP-TKT-USED)."""
    monkeypatch.setattr(kvproto.session.limits, "MAX_USED_TICKETS", 32)
    monkeypatch.setattr(kvproto.session.timers, "_SPARE", 0)
    with two(tmp_path, STEPPED) as both:
        blocks, fds = grown(lambda: transfer(both), 40)
    assert blocks < 0.5
    assert fds == 0


def test_nothing_is_kept_of_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvproto.session.limits, "MAX_USED_TICKETS", 8)
    monkeypatch.setattr(kvproto.session.source_endpoint, "_MAX_REMEMBERED", 8)
    monkeypatch.setattr(kvproto.session.timers, "_SPARE", 0)
    monkeypatch.setattr(logging.getLogger("kvproto.events"), "disabled", True)  # pytest keeps each warning
    with two(tmp_path, STEPPED) as both:

        def come_and_go() -> None:
            pool = Pool.allocate(GEOMETRY, PAGES)
            with Sink("other", pool, {"prefill": address_in(tmp_path)}, STEPPED) as sink:
                transfer(both, sink)

        blocks, fds = grown(come_and_go, 40)
    assert blocks < 1
    assert fds == 0


def test_the_benchmark_that_watches_processes_runs() -> None:
    script = Path(__file__).parents[2] / "benchmarks/session.py"
    done = subprocess.run([sys.executable, script, "messages", "--quick"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "rss_grown" in done.stdout
