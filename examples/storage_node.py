"""A storage node without an engine fetches pages from one engine and serves another: `python examples/storage_node.py`.

It is an ordinary Sink to the engines that compute, an ordinary Source to those that fetch, with Tiers in between.
Engines need no changes: to them it is one more peer. Here the node restarts before it serves, so that pages come from
its folder, and prefill is gone by then.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine import BYTES, PAGE, Engine

from kvproto import (
    Cache,
    DType,
    Fetch,
    KvprotoError,
    Pool,
    Prompt,
    Sink,
    Source,
    Ticket,
    Tiers,
    allocate,
    lay_out,
    new_ticket,
)
from kvproto.tiers import PageLease

GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=PAGE, dtype=DType.F32)])
NAMES = {"weights.target": "example 1", "rope.target": "none", "dtype.target": "F32"}
"""What its pages were computed with."""
WAIT = 60.0


class StorageNode:
    """A pool through which pages come and go, and the tiers that keep them."""

    def __init__(self, name: str, storage: Path, listen: str, sources: dict[str, str]) -> None:
        """`sources`: addresses of the engines to fetch pages from."""
        pool = Pool.allocate(GEOMETRY, 32)
        self.tiers = Tiers(pool, NAMES, page=PAGE, host=64, storage=storage)
        self.source, self.sink = Source(name, pool, listen), Sink(name, pool, sources)
        self.source.tell(self.tiers)  # routers find what it has, as with an engine
        self._lost: list[tuple[Fetch, PageLease]] = []
        """Fetches that were lost, whose pages a source may still write."""

    def take(self, ticket: Ticket, prompt: Prompt) -> int:
        """Fetch what is missing of a prompt, keep its full pages; return how many tokens came. Raises KvprotoError."""
        self._give_back()
        lease = self._open(prompt)
        had = lease.pages * PAGE
        try:
            fetch = self.sink.fetch(ticket, prompt, {"kv": lease.slots}, cached=had)
        except KvprotoError:
            lease.leave()
            raise
        try:
            fetch.wait()  # it ends by itself, at its ticket's deadline or with its source
        except KvprotoError:
            self._lost.append((fetch, lease))
            raise
        lease.leave(len(prompt))
        self.tiers.drain()
        return len(prompt) - had

    def _give_back(self) -> None:
        """Give back the pages of lost fetches that nobody can write any more; nobody waits for the rest."""
        for fetch, lease in [each for each in self._lost if each[0].pages_free]:
            lease.leave()
            self._lost.remove((fetch, lease))

    def serve(self, ticket: Ticket, prompt: Prompt) -> str:
        """Hand a prompt over if all of it is here; return where it was."""
        request = self.source.request(ticket, prompt)
        lease = self._open(prompt)
        try:
            if lease.pages * PAGE < len(prompt):
                request.fail(f"{lease.pages * PAGE} of {len(prompt)} tokens are here: compute it")
                return "not all here"
            request.finish({"kv": lease.slots})
            request.wait()  # it ends by itself, at its ticket's deadline
        finally:
            lease.leave()
            self.tiers.step()
        return f"{lease.found['device']} pages of the device, {lease.found['host']} of the host"

    def close(self) -> None:
        """Close, once storage has everything."""
        self.source.close()
        self.sink.close()
        self.tiers.drain()
        self.tiers.close()

    def _open(self, prompt: Prompt) -> PageLease:
        """The prompt's pages: load those that are here, and make room for the rest."""
        chain = self.tiers.chain(prompt.tokens)
        fetch = self.tiers.fetch(chain, deadline=time.monotonic() + WAIT)
        while not fetch.over(time.monotonic()):
            time.sleep(0.001)
        fetch.take()
        lease = self.tiers.open(chain, room=-(-len(prompt) // PAGE))
        if lease is None:
            raise MemoryError("other requests have the pages: let this one wait")
        self.tiers.drain()
        return lease


def pool_of(engine: Engine) -> Pool:
    """An engine's own tensors."""
    return Pool(GEOMETRY, {"kv": engine.layers}, axes="part page token head dim")


def prefill(node: StorageNode, listen: str, prompts: Sequence[Sequence[int]]) -> None:
    """An engine computes prompts, the node fetches each of them, and the engine ends."""
    engine = Engine(allocate(BYTES))
    with Source("prefill", pool_of(engine), listen) as source:
        for tokens in prompts:
            ticket, prompt = new_ticket("prefill"), Prompt(tokens)
            request = source.request(ticket, prompt)
            request.finish({"kv": engine.prefill(tokens)})
            print(f"the node took {node.take(ticket, prompt)} tokens of prefill")
            request.wait(WAIT)


def decode(node: StorageNode, listen: str, tokens: Sequence[int]) -> None:
    """An engine fetches a prompt from the node, as from any source."""
    engine = Engine(allocate(BYTES))
    with Sink("decode", pool_of(engine), {"store": listen}) as sink:
        ticket, prompt, pages = new_ticket("store"), Prompt(tokens), engine.take(len(tokens))
        fetch = sink.fetch(ticket, prompt, {"kv": pages})
        print(f"the node served {node.serve(ticket, prompt)}")
        try:
            fetch.wait(WAIT)
            print(f"decode has {len(tokens)} tokens, {engine.holds(tokens, pages)}")
        except KvprotoError as error:
            print(f"decode computes: {error.code.name}")


def main() -> None:
    """Two turns of a conversation, of which decode fetches the second, and a prompt that nobody has computed."""
    text = [n * 7 % 11 for n in range(16 * PAGE)]
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = f"ipc://{folder}/prefill", f"ipc://{folder}/store"
        node = StorageNode("store", Path(folder, "pages"), ours, {"prefill": theirs})
        prefill(node, theirs, [text[: 12 * PAGE], text])
        node.close()
        node = StorageNode("store", Path(folder, "pages"), ours, {})
        for tokens in (text, text, text[PAGE:]):
            decode(node, ours, tokens)
        node.close()


if __name__ == "__main__":
    main()
