"""The adapter of a live decode engine, made with `kvproto.Sink`; its cache is that of `toy_engine`."""

from __future__ import annotations

from typing import Any

from toy_engine import Toy, serve, ticket_of

from kvproto import Fetch, KvprotoError, Options, Prompt, Sink
from kvproto.planning.geometry import encode_geometry

Ask = dict[str, Any]


class Decode:
    """What the suite may ask of it."""

    sink_type = Sink

    def on_open(self, ask: Ask) -> Ask:
        self.toy = Toy(ask["world"], heads_first=False)
        options = Options(transports=[ask["transport"].lower()], verify=ask.get("verify", True))
        self.sink = self.sink_type(ask["name"], self.toy.pool, {}, options)
        self.fetches: dict[str, tuple[Fetch, dict[str, list[int]]]] = {}
        return {"geometry": encode_geometry(self.toy.geometry).hex()}

    def on_connect(self, ask: Ask) -> None:
        self.sink.connect(ask["engine"], address=ask["address"])

    def on_disconnect(self, ask: Ask) -> None:
        self.sink.disconnect(ask["engine"])

    def on_fetch(self, ask: Ask) -> None:
        table = self.toy.take(len(ask["tokens"]))
        fetch = self.sink.fetch(ticket_of(ask), Prompt(ask["tokens"]), table, cached=ask.get("first", 0))
        self.fetches[ask["id"]] = fetch, table

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
        return {"data": self.toy.read(self.fetches[ask["id"]][1], ask)}

    def on_abort(self, ask: Ask) -> None:
        self.fetches[ask["id"]][0].abort("the suite says so")

    def on_release(self, ask: Ask) -> None:
        self.toy.give_back(self.fetches.pop(ask["id"])[1])

    def on_stop(self, ask: Ask) -> None:
        self.sink.close()


if __name__ == "__main__":
    serve(Decode())
