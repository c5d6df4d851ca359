"""The adapter of a live decode engine, made with `kvproto.Sink`, with any `EngineCache`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cache import EngineCache
from toy_engine import Toy, is_free, options_of, serve, ticket_of

from kvproto import Fetch, Finder, KvprotoError, Prompt, Sink
from kvproto.events import PagesWanted
from kvproto.planning.geometry import encode_geometry

Ask = dict[str, Any]


class Decode:
    """Handlers of the suite's commands to an engine that fetches."""

    sink_type = Sink

    def __init__(self, cache: Callable[..., EngineCache] = Toy) -> None:
        """`cache` makes the caches of a world."""
        self.cache = cache

    def on_open(self, ask: Ask) -> Ask:
        self.world = ask["world"]
        self.toy = self.cache(self.world, heads_first=False)
        self.folder = tempfile.TemporaryDirectory(prefix="kvproto-keys-")
        self.options = options_of(ask, Path(self.folder.name))
        self.sink = self.sink_type(ask["name"], self.toy.pool, {}, self.options)
        self.finders: dict[str, Finder] = {}
        self.fetches: dict[str, tuple[Fetch, dict[str, list[int]], EngineCache]] = {}
        return {"geometry": encode_geometry(self.toy.geometry).hex()}

    def on_connect(self, ask: Ask) -> None:
        self.sink.connect(ask["engine"], address=ask["address"], key=ask.get("key"))

    def on_disconnect(self, ask: Ask) -> None:
        finder = self.finders.pop(ask["engine"], None)
        self.sink.disconnect(ask["engine"]) if finder is None else finder.close()

    def on_watch(self, ask: Ask) -> None:
        self.finders[ask["engine"]] = Finder({ask["address"]: ask.get("key")}, options=self.options)

    def on_held(self, ask: Ask) -> Ask:
        found = self.finders[ask["engine"]].find(ask["tokens"])
        return {"tokens": found[0].tokens, "device": found[0].device} if found else {"tokens": 0, "device": 0}

    def on_fetch(self, ask: Ask) -> None:
        ticket, prompt, toy = ticket_of(ask), Prompt(ask["tokens"]), self.toy
        table: dict[str, list[int]] = {}

        def claim(_: PagesWanted | None = None) -> dict[str, list[int]]:
            if not table:
                table.update(toy.take(len(ask["tokens"])))
            return table

        if ask.get("intent"):
            fetch = self.sink.fetch(ticket, prompt, claim=claim, spans=ask.get("spans", False))
        else:
            fetch = self.sink.fetch(ticket, prompt, claim(), cached=ask.get("first", 0))
        self.fetches[ask["id"]] = fetch, table, toy

    def on_move(self, ask: Ask) -> None:
        self.toy = self.cache(self.world, heads_first=False)
        self.taken = self.sink.move(self.toy.pool)

    def on_sleep(self, ask: Ask) -> None:
        self.taken = self.sink.sleep("the suite says so")

    def on_returned(self, ask: Ask) -> Ask:
        return is_free(self.taken, ask["seconds"])

    def on_wake(self, ask: Ask) -> Ask:
        self.toy = self.cache(ask["world"], heads_first=False)
        self.sink.wake(self.toy.pool)
        return {"geometry": encode_geometry(self.toy.geometry).hex()}

    def on_wait(self, ask: Ask) -> Ask:
        fetch = self.fetches[ask["id"]][0]
        try:
            arrived = fetch.wait(ask["seconds"])
        except TimeoutError:
            return {"state": "waiting"}
        except KvprotoError as error:
            return {"state": "lost", "code": error.code.name, "free": fetch.pages_free}
        handoff = {g: {p: d.hex() for p, d in parts.items()} for g, parts in arrived.handoff.items()}
        return {"state": "arrived", "handoff": handoff, "finished": arrived.finished, "free": fetch.pages_free}

    def on_read(self, ask: Ask) -> Ask:
        _, table, toy = self.fetches[ask["id"]]
        return {"data": toy.read(table, ask)}

    def on_abort(self, ask: Ask) -> None:
        self.fetches[ask["id"]][0].abort("the suite says so")

    def on_release(self, ask: Ask) -> None:
        _, table, toy = self.fetches.pop(ask["id"])
        toy.give_back(table)

    def on_stop(self, ask: Ask) -> None:
        for door in (self.sink, *self.finders.values()):
            door.close()


if __name__ == "__main__":
    serve(Decode())
