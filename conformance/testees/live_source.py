"""The adapter of a live prefill engine, made with `kvproto.Source`, with any `EngineCache`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cache import EngineCache
from toy_engine import Toy, is_free, options_of, serve, ticket_of

from kvproto import Geometry, ItemKind, Pool, Prompt, Request, Source, Tiers
from kvproto.events import Freed
from kvproto.planning.geometry import encode_geometry

Ask = dict[str, Any]
PAGES, HOST = 64, 1280
"""The numbers of kept pages that the device and the host hold: more than one message names."""
NAMES = {"weights.target": "toy", "rope.target": "none", "dtype.target": "U8"}


def kept_pages(geometry: Geometry) -> Tiers:
    """Pages of requests that are over, which are kept apart from those that are handed over."""
    page = max(group.rows * group.tokens_per_row for group in geometry.groups if group.kind is ItemKind.PAGE)
    return Tiers(Pool.allocate(geometry, PAGES), NAMES, page=page, host=HOST)


class Prefill:
    """Handlers of the suite's commands to an engine that computes prompts."""

    source_type = Source

    def __init__(self, cache: Callable[..., EngineCache] = Toy) -> None:
        """`cache` makes the caches of a world."""
        self.cache = cache

    def on_open(self, ask: Ask) -> Ask:
        self.toy = self.cache(ask["world"], heads_first=True)
        self.folder = tempfile.TemporaryDirectory(prefix="kvproto-keys-")
        options = options_of(ask, Path(self.folder.name))
        self.source = self.source_type(ask["name"], self.toy.pool, ask["listen"], options)
        self.tiers = kept_pages(self.toy.geometry) if ask["world"] == "gqa" else None
        if self.tiers is not None:
            self.source.tell(self.tiers)
        self.requests: dict[str, tuple[Request, dict[str, list[int]], EngineCache]] = {}
        return {"geometry": encode_geometry(self.toy.geometry).hex()}

    def on_request(self, ask: Ask) -> None:
        request = self.source.request(ticket_of(ask), Prompt(ask["tokens"]))
        self.requests[ask["id"]] = request, self.toy.take(len(ask["tokens"])), self.toy

    def on_fill(self, ask: Ask) -> None:
        _, table, toy = self.requests[ask["id"]]
        toy.write(table, ask)

    def on_computed(self, ask: Ask) -> None:
        request, table, _ = self.requests[ask["id"]]
        request.computed(table, ask["tokens"])

    def on_finish(self, ask: Ask) -> None:
        request, table, _ = self.requests[ask["id"]]
        handoff = {g: {p: bytes.fromhex(d) for p, d in parts.items()} for g, parts in ask["handoff"].items()}
        request.finish(table, handoff=handoff, finished=ask.get("finished", False))

    def on_fail(self, ask: Ask) -> None:
        self.requests[ask["id"]][0].fail(ask["reason"])

    def on_wait(self, ask: Ask) -> Ask:
        try:
            over = self.requests[ask["id"]][0].wait(ask["seconds"])
        except TimeoutError:
            return {"state": "held"}
        _, table, toy = self.requests.pop(ask["id"])
        toy.give_back(table)
        return {"state": "freed" if isinstance(over, Freed) else type(over).__name__.lower()}

    def on_keep(self, ask: Ask) -> None:
        if self.tiers is None:
            raise NotImplementedError("pages that are kept, in another world than gqa")
        chain = self.tiers.chain(ask["tokens"])
        lease = self.tiers.open(chain, -(-len(ask["tokens"]) // self.tiers.device.layout.page))
        if lease is None:
            raise MemoryError(f"no room for {len(ask['tokens'])} tokens")
        self.tiers.step()
        lease.leave(len(ask["tokens"]))
        for _ in range(2):  # to the host, and then it is there
            self.tiers.step()
            self.tiers.drain()
        self.tiers.step()

    def on_sleep(self, ask: Ask) -> None:
        self.taken = self.source.sleep("the suite says so")

    def on_returned(self, ask: Ask) -> Ask:
        return is_free(self.taken, ask["seconds"])

    def on_wake(self, ask: Ask) -> Ask:
        self.toy = self.cache(ask["world"], heads_first=True)
        self.source.wake(self.toy.pool)
        return {"geometry": encode_geometry(self.toy.geometry).hex()}

    def on_drain(self, ask: Ask) -> None:
        self.source.drain()

    def on_stop(self, ask: Ask) -> None:
        self.source.close()
        if self.tiers is not None:
            self.tiers.close()


if __name__ == "__main__":
    serve(Prefill())
