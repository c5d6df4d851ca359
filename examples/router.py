"""A router chooses a prefill engine, makes the ticket, gives ticket and prompt to both sides, and retries.

`python examples/router.py`. Several requests are under way at once. One of the two prefill engines is out of memory and
refuses what it gets. A retry needs a new ticket, and may go to another engine; kvproto itself never retries a prompt.
The first token, which the prefill engine samples, comes with the pages.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from engine import BYTES, Engine

from kvproto import (
    Cache,
    DType,
    Fetch,
    KvprotoError,
    Pool,
    Prompt,
    Request,
    Sink,
    Source,
    Ticket,
    allocate,
    lay_out,
    new_ticket,
)

GEOMETRY = lay_out(
    [
        Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16, dtype=DType.F32),
        Cache.handoff("first", {"token": (DType.U8, 4)}),
    ]
)


def sampled(tokens: Sequence[int]) -> int:
    """The first token of the answer, in place of a forward pass and a sampler."""
    return sum(tokens) % 1000


def pool_of(engine: Engine) -> Pool:
    """The engine's cache."""
    return Pool(GEOMETRY, {"kv": engine.layers}, axes="part page token head dim")


class Prefill:
    """A prefill engine behind whatever carries requests, such as HTTP."""

    def __init__(self, name: str, address: str, full: bool = False) -> None:
        self.engine, self.full = Engine(allocate(BYTES)), full
        self.lock = threading.Lock()  # several threads submit requests; the I/O thread calls `on_free`
        self.source = Source(name, pool_of(self.engine), address)

    def submit(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Compute a prompt for the sinks that have the ticket."""
        if self.full:
            self.source.request(ticket, Prompt(tokens)).fail("no free pages")
            return
        with self.lock:
            pages = self.engine.prefill(tokens)

        def free(_: Request) -> None:  # each request frees its own pages
            with self.lock:
                self.engine.release(pages)

        request = self.source.request(ticket, Prompt(tokens), on_free=free)
        request.finish({"kv": pages}, handoff={"first": {"token": sampled(tokens).to_bytes(4, "little")}})


class Decode:
    """A decode engine: its cache, and a lock, because several threads send requests."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.engine, self.lock = Engine(allocate(BYTES)), threading.Lock()
        self.sink = Sink("decode", pool_of(self.engine), addresses)
        self._lost: list[tuple[Fetch, list[int]]] = []

    def take(self, tokens: int) -> list[int]:
        """Allocate pages for this many tokens; reuse those of lost requests once nobody can write them any more."""
        with self.lock:
            for lost in [each for each in self._lost if each[0].pages_free]:
                self._lost.remove(lost)
                self.engine.release(lost[1])
            return self.engine.take(tokens)

    def lose(self, fetch: Fetch, pages: list[int]) -> None:
        """Note a request that did not arrive; a peer may still write its pages."""
        with self.lock:
            self._lost.append((fetch, pages))

    def release(self, pages: Sequence[int]) -> None:
        """Free pages that nobody needs any more."""
        with self.lock:
            self.engine.release(pages)


class Router:
    """Sends a prompt to one prefill engine after another until one of them hands it over."""

    def __init__(self, engines: dict[str, Prefill], decode: Decode, tries: int = 3) -> None:
        self._engines, self._decode, self._tries = engines, decode, tries

    def serve(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The decode engine's pages that hold the prompt, and the first token; raises the error of the last attempt."""
        names = itertools.cycle(self._engines)
        for left in reversed(range(self._tries)):
            name, pages = next(names), self._decode.take(len(tokens))
            ticket = new_ticket(name, deadline=30)
            fetch = self._decode.sink.fetch(ticket, Prompt(tokens), {"kv": pages})
            self._engines[name].submit(ticket, tokens)
            try:
                arrived = fetch.wait(30)
            except KvprotoError as error:
                print(f"{name}: {error}\n", end="")  # one write, as other threads print too
                self._decode.lose(fetch, pages)
                if not left:
                    raise
            else:
                print(f"{name}: arrived\n", end="")
                return pages, int.from_bytes(arrived.handoff["first"]["token"], "little")
        raise AssertionError("not reached: the last try returns or raises")


def main() -> None:
    """Six prompts, three at a time, two prefill engines, one decode engine."""
    folder = tempfile.mkdtemp()
    prompts = [list(range(n, n + 60)) for n in range(6)]
    with ExitStack() as stack:
        addresses = {name: f"ipc://{folder}/{name}" for name in ("red", "blue")}
        engines = {name: Prefill(name, address, full=name == "red") for name, address in addresses.items()}
        for engine in engines.values():
            stack.enter_context(engine.source)
        decode = Decode(addresses)
        stack.enter_context(decode.sink)
        router = Router(engines, decode)

        def answer(tokens: Sequence[int]) -> None:
            pages, first = router.serve(tokens)
            assert decode.engine.holds(tokens, pages)
            assert first == sampled(tokens)
            decode.release(pages)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(answer, prompts))


if __name__ == "__main__":
    main()
