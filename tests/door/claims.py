"""Fetches that name their pages when they are of use: caches of every kind of items, and pools that tell who wrote what."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvproto import Cache, DType, Fetch, Options, Pool, Prompt, Request, Sink, Source, lay_out, new_ticket
from kvproto.events import Event
from kvproto.planning.geometry import Geometry

from .doors import address_in

PAGE, RING, TOKENS = {"source": 4, "sink": 8}, 8, 37
NOBODY, NOT_YET = 0xA5, 0xEE
"""What the sink's pages hold that nobody has written, and the source's rows that are not computed."""


def sided(side: str, ring: int = RING) -> Geometry:
    u8 = DType.U8
    return lay_out([
        Cache.gqa("kv", range(2), kv_heads=2, head_dim=4, page=PAGE[side], dtype=u8),
        Cache.compressed("rows", [2], dim=6, tokens_per_row=4, page_rows=2, dtype=u8),
        Cache.window("ring", [3], kv_heads=1, head_dim=4, ring_rows=ring, dtype=u8),
        Cache.state("state", [4], parts={"state": (u8, 1, 24)}),
        Cache.cross("seen", [5], kv_heads=1, head_dim=4, page=4, dtype=u8),
        Cache.handoff("first", {"token": (u8, 4)}),
    ])  # fmt: skip


PLACES = [
    *(("kv", layer, part) for layer in range(2) for part in ("k", "v")), ("rows", 2, "latent"), ("ring", 3, "k"),
    ("ring", 3, "v"), ("state", 4, "state"), ("seen", 5, "cross_k"), ("seen", 5, "cross_v"),
]  # fmt: skip


def prompt(tokens: int = TOKENS, image: int = 6) -> Prompt:
    return Prompt(range(tokens), axes={"image": image})


class Tables:
    """Free pages of a pool, and the page tables of its requests."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.free = {place[0]: list(range(pool.array(*place).shape[0])) for place in PLACES}

    def grow(self, table: dict[str, list[int]], lengths: Mapping[str, int]) -> bool:
        """Append pages to a table up to these lengths: whether there are enough."""
        if any(n - len(table.get(g, [])) > len(self.free[g]) for g, n in lengths.items()):
            return False
        for group, n in lengths.items():
            own = table.setdefault(group, [])
            while len(own) < n:
                own.append(self.free[group].pop(int(self.random.integers(len(self.free[group])))))
        return True

    def back(self, table: Mapping[str, list[int]]) -> None:
        for group, pages in table.items():
            self.free[group] += pages


class Run:
    """One request: what is computed of it, and what it holds at the sink."""

    def __init__(self, both: "Claims", tokens: int, spans: bool, **fetch: Any) -> None:
        self.both, self.tokens, self.computed, self.finished = both, tokens, 0, False
        self.prompt, self.ticket = prompt(tokens), new_ticket("prefill")
        self.theirs: dict[str, list[int]] = {}
        self.ours: dict[str, list[int]] = {}
        self.given_back = False
        most = {"kv": -(-tokens // 4), "rows": -(-tokens // 8), "ring": 1, "state": 1, "seen": 2}
        assert both.there.grow(self.theirs, most)
        self.values = np.random.default_rng(tokens + len(both.runs)).integers(0, NOBODY, (tokens, 64), np.uint8)
        self.request: Request = both.source.request(self.ticket, self.prompt)
        self.fetch: Fetch = both.sink.fetch(self.ticket, self.prompt, spans=spans, **fetch)
        both.runs.append(self)

    def row(self, group: str, layer: int, part: str, token: int, size: int) -> Any:
        """What the row that ends with a token holds, the state after it too."""
        shift = 7 * layer + ord(part[-1]) + ord(group[0])
        return (self.values[token % self.tokens, :size].astype(int) + shift) % NOBODY

    def compute(self, tokens: int) -> None:
        """The source's engine writes rows of the tokens up to there, and says so."""
        at = self.both.source_rows
        for token in range(self.computed, tokens):
            for layer in range(2):
                for part in ("k", "v"):
                    page = at["kv", layer, part][self.theirs["kv"][token // 4], token % 4]
                    page[:] = self.row("kv", layer, part, token, 8).reshape(page.shape)
            if token % 4 == 3:
                rows = at["rows", 2, "latent"][self.theirs["rows"][token // 8], token // 4 % 2]
                rows[:] = self.row("rows", 2, "latent", token, 6).reshape(rows.shape)
            for part in ("k", "v"):
                ring = at["ring", 3, part][self.theirs["ring"][0], token % RING]
                ring[:] = self.row("ring", 3, part, token, 4).reshape(ring.shape)
        self.computed = tokens
        self.request.computed(self.theirs, tokens)

    def finish(self) -> None:
        self.compute(self.tokens)
        at = self.both.source_rows
        at["state", 4, "state"][self.theirs["state"][0]] = self.row("state", 4, "e", self.tokens - 1, 24)
        for part in ("cross_k", "cross_v"):
            for n in range(6):
                seen = at["seen", 5, part][self.theirs["seen"][n // 4], n % 4]
                seen[:] = self.row("seen", 5, part, n, 4).reshape(seen.shape)
        self.request.finish(self.theirs, handoff={"first": {"token": b"0123"}})
        self.finished = True

    def give(self, wanted: Any) -> dict[str, list[int]] | None:
        """What a scheduler does: pages, if there are enough."""
        return self.ours if self.both.here.grow(self.ours, wanted.pages) else None

    def arrives(self) -> None:
        self.both.until(lambda: self.fetch.done)
        self.arrived()

    def arrived(self) -> None:
        """Every row is what the source's engine computed."""
        at, page = self.both.sink_rows, PAGE["sink"]
        for token in range(self.tokens):
            for layer in range(2):
                for part in ("k", "v"):
                    found = at["kv", layer, part][self.ours["kv"][token // page], token % page]
                    assert (found.ravel() == self.row("kv", layer, part, token, 8)).all(), (layer, part, token)
            if token % 4 == 3:
                found = at["rows", 2, "latent"][self.ours["rows"][token // 8], token // 4 % 2]
                assert (found.ravel() == self.row("rows", 2, "latent", token, 6)).all(), token
            if token >= self.tokens - RING:
                found = at["ring", 3, "k"][self.ours["ring"][0], token % RING]
                assert (found.ravel() == self.row("ring", 3, "k", token, 4)).all(), token
        found = at["state", 4, "state"][self.ours["state"][0]]
        assert (found.ravel() == self.row("state", 4, "e", self.tokens - 1, 24)).all()
        seen = at["seen", 5, "cross_v"][self.ours["seen"][5 // 4], 5 % 4]
        assert (seen.ravel() == self.row("seen", 5, "cross_v", 5, 4)).all()

    def back(self) -> None:
        """The engine of the sink takes its pages back, and wipes them."""
        for place, rows in self.both.sink_rows.items():
            rows[self.ours.get(place[0], [])] = NOBODY
        self.both.here.back(self.ours)
        self.ours, self.given_back = {}, True


class Claims:
    """A source and a sink, their pages, and requests."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self.source, self.sink = source, sink
        self.there, self.here = Tables(source.pool, 1), Tables(sink.pool, 2)
        self.runs: list[Run] = []
        self.told: list[Event] = []
        self.source_rows, self.sink_rows = (
            {place: pool.array(*place) for place in PLACES} for pool in (source.pool, sink.pool)
        )
        for rows, byte in ((self.source_rows, NOT_YET), (self.sink_rows, NOBODY)):
            for array in rows.values():
                array[:] = byte

    def turn(self, times: int = 1) -> None:
        for door in (self.source, self.sink) * times:
            self.told += door.step(0.002)

    def until(self, condition: Any) -> None:
        for _ in range(3000):
            if condition():
                return
            self.turn()
        raise AssertionError(self.told)

    def untouched(self) -> None:
        """No page is written that no request has been granted."""
        for place, rows in self.sink_rows.items():
            assert (rows[self.here.free[place[0]]] == NOBODY).all(), place

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


@contextmanager
def claims(
    folder: Path, give: Options | None = None, take: Options | None = None, pages: int = 12, ring: int = RING
) -> Iterator[Claims]:
    """Both in this process; the sink has `pages` pages of `kv`."""
    address = address_in(folder)
    give = give or Options(thread=False, part_bytes=1, first_part_ratio=0)
    theirs = dict.fromkeys(("kv", "rows", "ring", "state", "seen"), 40)
    ours = {"kv": pages, "rows": 12, "ring": 4, "state": 4, "seen": 8}
    with (
        Source("prefill", Pool.allocate(sided("source"), theirs), address, give) as source,
        Sink("decode", Pool.allocate(sided("sink", ring), ours), {"prefill": address}, take or give) as sink,
    ):
        yield Claims(source, sink)
