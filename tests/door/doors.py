"""Sources and sinks for the tests of the door: one small cache, pools whose bytes say which page they are, and ways to drive."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import kvproto
from kvproto.errors import LocalError
from kvproto.events import Event

PAGE, PAGES = 4, 16
GEOMETRY = kvproto.lay_out([kvproto.Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=PAGE, dtype=kvproto.DType.U8)])
PROMPT = kvproto.Prompt(range(10))
"""Three pages, the last one half full."""
STEPPED = kvproto.Options(thread=False)


def filled(pages: int = PAGES, geometry: kvproto.Geometry = GEOMETRY) -> kvproto.Pool:
    """A pool each byte of which is different, near enough; of any geometry with the same places."""
    pool = kvproto.Pool.allocate(geometry, pages)
    for n, place in enumerate(places()):
        array = pool.array(*place)
        array[:] = np.random.default_rng(n).integers(1, 256, array.shape, np.uint8)
    return pool


def places() -> list[tuple[str, int, str]]:
    return [("kv", layer, part) for layer in range(2) for part in ("k", "v")]


def rows(pool: kvproto.Pool, table: list[int], first: int = 0, tokens: int = len(PROMPT)) -> np.ndarray[Any, Any]:
    """What the pages of a request hold, [layer and part, token, head, byte]."""
    at = np.arange(first, tokens)
    return np.stack([pool.array(*place)[np.array(table)[at // PAGE], at % PAGE] for place in places()])


class Two:
    """A source and a sink, and the pools of each."""

    def __init__(self, source: kvproto.Source, sink: kvproto.Sink) -> None:
        self.source, self.sink = source, sink
        self.ticket: kvproto.Ticket = kvproto.new_ticket(source.name)
        self.told: list[Event] = []

    def turn(self, times: int = 1, longest: float = 0.005) -> None:
        """Turns of those that have no thread, each after no longer than this; their events are kept."""
        for door in (self.source, self.sink) * times:
            self.told += door.events() if door.options.thread else door.step(longest)

    def asked(
        self, pages: list[int], made: kvproto.Ticket | None = None, **fetch: Any
    ) -> tuple[kvproto.Request, kvproto.Fetch]:
        """A request of the source, and its fetch into these pages."""
        made = made or self.ticket
        return self.source.request(made, PROMPT), self.sink.fetch(made, PROMPT, {"kv": pages}, **fetch)

    def ends(self, handle: Any) -> Any:
        """What a request, a fetch or a sleep has come to."""
        self.until(lambda: handle.done)
        return handle.wait(0)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Turns, as soon as either side has something to do, until it is true; what it returned."""
        end = time.monotonic() + 40
        while time.monotonic() < end:
            self.turn(longest=0.0)
            if found := condition():
                return found
            self._rest()
        raise AssertionError("it never came")

    def settle(self) -> None:
        """Turns until neither side has had anything to do for some milliseconds."""
        quiet = 0
        for _ in range(400):
            self.turn(longest=0.0)
            for door in (self.source, self.sink):
                with door._driver._lock:  # no turn is under way
                    pass
            for background in (self.source._node._background, self.sink._node._context.background):
                if background._thread is not None:
                    background._thread.submit(int).result()  # all before it is done
            quiet = 0 if self._rest() else quiet + 1
            if quiet == 10:
                return

    def _rest(self) -> bool:
        """Whether either side has something to do; waits for it, though not for long."""
        poll, pause = select.poll(), 0.005
        for driver in (self.source._driver, self.sink._driver):
            with contextlib.suppress(LocalError):  # closed
                poll.register(driver.fileno(), select.POLLIN)
                pause = min(pause, pause if (timer := driver.next_timer()) is None else timer)
        return bool(poll.poll(1000 * pause)) or not pause


@contextmanager
def two(folder: Path, options: kvproto.Options | None = None, theirs: kvproto.Options | None = None) -> Iterator[Two]:
    """Both in this process."""
    address = address_in(folder)
    with (
        kvproto.Source("prefill", filled(), address, options) as source,
        kvproto.Sink("decode", kvproto.Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, theirs or options) as sink,
    ):
        yield Two(source, sink)


def address_in(folder: Path, name: str = "prefill") -> str:
    return f"ipc://{folder}/{name}"


def left_over() -> tuple[set[str], set[str], int, int]:
    """Threads, files in /dev/shm, descriptors, and mappings of kvproto's memory in this process."""
    threads = {t.name for t in threading.enumerate() if t.name.startswith("kvproto")}
    maps = Path("/proc/self/maps").read_text().count("memfd:kvproto")
    others = ("ucx", "tmp", "torch_", "sem.", "psm_")  # of processes beside this one
    return (
        threads,
        {n for n in os.listdir("/dev/shm") if not n.startswith(others)},
        len(os.listdir("/proc/self/fd")),
        maps,
    )
