"""A source and a sink in one thread, connected over ipc; a step is taken only when there is something to do."""

from __future__ import annotations

import select
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from kvproto import Fetch, Options, Pool, Prompt, Request, Sink, Source, new_ticket

PATIENCE = 20.0
"""Seconds without anything to do after which a hand-over has failed."""
Side = Source | Sink


def readable(sides: Iterable[Side], seconds: float) -> list[Side]:
    """Sides that have something to do, after waiting so long at most."""
    poll, of = select.poll(), {side.fileno(): side for side in sides}
    for descriptor in of:
        poll.register(descriptor, select.POLLIN)
    return [of[descriptor] for descriptor, _ in poll.poll(1e3 * seconds)]


def due(side: Side) -> bool:
    """Whether a timer of this side has run out."""
    timer = side.next_timer()
    return timer is not None and timer <= 0


class Pair:
    """Both sides, connected; the sink may have options of its own."""

    def __init__(
        self, stack: ExitStack, pools: tuple[Pool, Pool], options: Options, sink_options: Options | None = None
    ) -> None:
        address = f"ipc://{stack.enter_context(tempfile.TemporaryDirectory())}/source"
        self.source = stack.enter_context(Source("prefill", pools[0], address, options))
        self.sink = stack.enter_context(Sink("decode", pools[1], {"prefill": address}, sink_options or options))
        self.longest = {"source": 0.0, "sink": 0.0}
        """The most seconds of CPU of this thread that a step has taken."""
        self.until(lambda: ("prefill", 0) in self.sink.ready)

    def until(self, done: Callable[[], bool]) -> None:
        """Step the side that has something to do until `done`."""
        sides: dict[str, Side] = {"source": self.source, "sink": self.sink}
        last = time.monotonic()
        while not done():
            timers = [timer for side in sides.values() if (timer := side.next_timer()) is not None]
            ready = readable(sides.values(), min([*timers, 1.0]))
            for name, side in sides.items():
                if side in ready or due(side):
                    began = time.thread_time()
                    side.step()
                    self.longest[name] = max(self.longest[name], time.thread_time() - began)
                    last = time.monotonic()
            if time.monotonic() - last > PATIENCE:
                raise RuntimeError(f"nothing has happened for {PATIENCE:.0f} s")

    def settle(self, seconds: float = 0.02) -> None:
        """Step both sides until nothing has come for so long."""
        while ready := readable((self.source, self.sink), seconds):
            for side in ready:
                side.step()

    def ask(self, prompt: Prompt, pages: dict[str, list[int]]) -> tuple[Request, Fetch]:
        """The next request, announced at the source, and a fetch of it into these pages."""
        ticket = new_ticket("prefill")
        return self.source.request(ticket, prompt), self.sink.fetch(ticket, prompt, pages)

    def hand_over(self, prompt: Prompt, pages: dict[str, list[int]]) -> None:
        """One request, from the announcement at the source to the end at both, from and into the same page numbers."""
        request, fetch = self.ask(prompt, pages)
        request.finish(pages)
        self.until(lambda: fetch.done and request.done)
        fetch.wait(0), request.wait(0)
