"""What does not grow, and how a sink recovers: a million transfers, ten thousand sessions, a source that stops or dies."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from session_bare import Bare
from session_sides import PAGES, PROMPT, Far, Place, far, state, ticket

from kvproto import KvprotoError, Sink
from kvproto.events import Recovered, Suspected

__all__ = ["flat", "messages", "recovery", "sessions", "transfers"]

_BATCH = 256
_SAMPLES = 100
_ROOM = 4 << 20
"""By how many bytes resident memory may differ: what the allocator keeps for itself."""


def flat(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Whether memory and descriptors are the same in the last quarter as in the second one, the first being warm-up.

    The least of each counts: a sample may fall into the opening or closing of a sink, what leaks is there in all of them.
    """
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    rss = min(s["rss"] for s in late) - min(s["rss"] for s in early)
    fds = min(s["fds"] for s in late) - min(s["fds"] for s in early)
    return {"rss_grown": rss, "fds_grown": fds, "flat": rss <= _ROOM and fds <= 0}


def _sampled(
    theirs: Callable[[], dict[str, int]], total: int, work: Callable[[int, int], None], each: int
) -> dict[str, Any]:
    """Do `work` (first, count) until there was so much; samples of both processes on the way."""
    found: dict[str, list[dict[str, int]]] = {"source": [], "sink": []}
    began, done = time.monotonic(), 0
    while done < total:
        count = min(each, total - done)
        work(1 + done, count)
        done += count
        if len(found["sink"]) < done * _SAMPLES // total:
            found["source"].append({"done": done} | theirs())
            found["sink"].append({"done": done} | state())
    verdicts = {side: flat(some) for side, some in found.items()}
    return {"number": total, "seconds": time.monotonic() - began, "verdicts": verdicts, "samples": found}


def messages(total: int) -> dict[str, Any]:
    """So many transfers of sessions alone, 256 at once."""
    with ExitStack() as stack:
        bare = Bare(stack, Place.of("curve", stack.enter_context(tempfile.TemporaryDirectory())))
        return _sampled(bare.state, total, lambda _, count: bare.at_once(count), _BATCH)


def transfers(total: int) -> dict[str, Any]:
    """So many small transfers of a Source and a Sink, 256 at once."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        other = stack.enter_context(far(Place.of("curve", folder)))
        sink = stack.enter_context(other.place.sink())

        def work(first: int, count: int) -> None:
            other.ask("finish", first, count)
            fetches = [sink.fetch(ticket(n), PROMPT, {"kv": [n % PAGES]}) for n in range(first, first + count)]
            for fetch in fetches:
                fetch.wait(60)
            other.ask("wait", first, count)
            sink.events()

        return _sampled(lambda: other.ask("state"), total, work, _BATCH)


def sessions(total: int) -> dict[str, Any]:
    """So many sinks, each of which connects, fetches one request and goes."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        other = stack.enter_context(far(Place.of("curve", folder)))

        def work(first: int, count: int) -> None:
            other.ask("finish", first, count)
            for n in range(first, first + count):
                with other.place.sink(n % 8, 4, thread=False) as sink:
                    sink.fetch(ticket(n), PROMPT, {"kv": [n % 4]}).wait(60)
            other.ask("wait", first, count)

        return _sampled(lambda: other.ask("state"), total, work, 10)


# a source that stops, and one that dies


@contextmanager
def _asking(sink: Sink, other: Callable[[], Far | None], numbers: Iterator[int]) -> Iterator[list[tuple[float, float]]]:
    """Requests one after the other, each asked again under a new ticket until it is here; when each began and ended."""
    over, found = threading.Event(), list[tuple[float, float]]()

    def ask() -> None:
        while not over.is_set():
            began = time.monotonic()
            source, n = other(), next(numbers)
            try:
                if source is None:
                    continue
                source.ask("finish", n, 1)
                sink.fetch(ticket(n), PROMPT, {"kv": [n % PAGES]}).wait(30)
                source.ask("wait", n, 1)
                found.append((began, time.monotonic()))
            except (KvprotoError, EOFError, OSError, TimeoutError):
                over.wait(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def recovery(rounds: int) -> dict[str, Any]:
    """Seconds until a stopped source is suspect, and until a killed one that was started again serves."""
    found: dict[str, list[float]] = {
        "suspect": [],
        "recovered": [],
        "heard": [],
        "started": [],
        "served": [],
        "outage": [],
    }
    for kind in ("curve",) * rounds:
        with ExitStack() as stack:
            place = Place.of(kind, stack.enter_context(tempfile.TemporaryDirectory()))
            first = Far(place)
            sink = stack.enter_context(first.place.sink())
            numbers = itertools.count(1)
            first.ask("finish", 1, 1)
            sink.fetch(ticket(next(numbers)), PROMPT, {"kv": [0]}).wait(30)
            first.ask("wait", 1, 1)
            sink.events()
            assert first.process.pid is not None
            began = time.monotonic()
            os.kill(first.process.pid, signal.SIGSTOP)
            _told(sink, Suspected)
            found["suspect"].append(time.monotonic() - began)
            began = time.monotonic()
            os.kill(first.process.pid, signal.SIGCONT)
            _told(sink, Recovered)
            found["recovered"].append(time.monotonic() - began)
            now: list[Far | None] = [first]
            with _asking(sink, lambda now=now: now[0], numbers) as served:  # type: ignore[misc]
                while not served:
                    time.sleep(0.001)
                killed = time.monotonic()
                first.process.kill()
                now[0] = None
                with contextlib.suppress(KvprotoError):
                    sink.fetch(ticket(next(numbers)), PROMPT, {"kv": [1]}).wait(30)
                found["heard"].append(time.monotonic() - killed)
                first.process.join()
                began = time.monotonic()
                second = Far(first.place)
                found["started"].append(time.monotonic() - began)
                stack.callback(second.close)
                began, before, now[0] = time.monotonic(), len(served), second
                while len(served) == before:
                    time.sleep(0.001)
                found["served"].append(served[before][1] - began)
                found["outage"].append(served[before][1] - killed)
    return found


def _told(sink: Sink, kind: type) -> None:
    end = time.monotonic() + 60
    while not any(isinstance(event, kind) for event in sink.events()):
        assert time.monotonic() < end, f"no {kind.__name__}"
        time.sleep(0.001)
