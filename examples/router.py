"""A router: it chooses a prefill engine, makes the ticket, hands it to both sides beside the prompt, and tries again.

`python examples/router.py`. One of the two prefill engines is out of memory, so what is sent there is refused; a
second try is a new ticket, for an engine that may be another one. kvproto itself never tries a prompt again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from engine import BYTES, Engine

from kvproto import (
    Cache,
    DType,
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

GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16, dtype=DType.F32)])


def pool_of(engine: Engine) -> Pool:
    """The engine's cache."""
    return Pool(GEOMETRY, {"kv": engine.layers}, axes="part page token head dim")


class Prefill:
    """A prefill engine behind whatever carries requests: HTTP, say."""

    def __init__(self, name: str, address: str, full: bool = False) -> None:
        self.engine, self.full = Engine(allocate(BYTES)), full
        self.source = Source(name, pool_of(self.engine), address)

    def submit(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Compute a prompt for whoever has the ticket."""
        request = self.source.request(ticket, Prompt(tokens), on_free=self._free)
        if self.full:
            request.fail("no free pages")
            return
        self.pages = self.engine.prefill(tokens)
        request.finish({"kv": self.pages})

    def _free(self, request: Request) -> None:
        if not self.full:
            self.engine.release(self.pages)


class Router:
    """Sends a prompt to one prefill engine after another until one of them hands it over."""

    def __init__(self, engines: dict[str, Prefill], sink: Sink, decode: Engine, tries: int = 3) -> None:
        self._engines, self._sink, self._decode, self._tries = engines, sink, decode, tries
        self._turn = itertools.cycle(engines)

    def serve(self, tokens: Sequence[int]) -> list[int]:
        """The decode engine's pages that hold the prompt; raises what the last try failed with."""
        pages = self._decode.take(len(tokens))
        for left in reversed(range(self._tries)):
            name = next(self._turn)
            ticket = new_ticket(name, deadline=30)
            fetch = self._sink.fetch(ticket, Prompt(tokens), {"kv": pages})
            self._engines[name].submit(ticket, tokens)
            try:
                fetch.wait(30)
            except KvprotoError as error:
                print(f"{name}: {error}")
                if not fetch.pages_free:  # a peer may still write them: take others for the next try
                    pages = self._decode.take(len(tokens))
                if not left:
                    raise
            else:
                print(f"{name}: arrived")
                break
        return pages


def main() -> None:
    """Three prompts, two prefill engines, one decode engine."""
    folder, tokens = tempfile.mkdtemp(), list(range(60))
    with ExitStack() as stack:
        addresses = {name: f"ipc://{folder}/{name}" for name in ("red", "blue")}
        engines = {name: Prefill(name, address, full=name == "red") for name, address in addresses.items()}
        for engine in engines.values():
            stack.enter_context(engine.source)
        decode = Engine(allocate(BYTES))
        sink = stack.enter_context(Sink("decode", pool_of(decode), addresses))
        router = Router(engines, sink, decode)
        for _ in range(3):
            pages = router.serve(tokens)
            assert decode.holds(tokens, pages)
            decode.release(pages)


if __name__ == "__main__":
    main()
