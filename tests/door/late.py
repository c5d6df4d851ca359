"""A sliding window in pages: pools of two kinds of layers, full of noise, and hand-overs whose first pages are gone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvproto import Cache, DType, Fetch, Options, Parallel, Pool, Prompt, Request, Sink, Source, lay_out, new_ticket
from kvproto.planning.geometry import Geometry

from .doors import address_in

LAYERS, TOKENS, PAGES = 4, 27, 16
WINDOWED = {"full": (0, 2), "window": (1, 3)}
POISON = 0xA5
PROMPT = Prompt(range(TOKENS))
TABLES = {"full": [3, 1, 2, 7, 9, 4, 5, 6, 8], "window": [8, 2, 6, 4, 10, 12, 3, 5, 7]}
"""Of a source, with pages of 4 rows."""
OURS = {"full": [5, 0, 9, 2], "window": [1, 7, 3, 8]}
"""Of a sink, with pages of 8."""


def sided(page: int, parallel: Parallel | None = None) -> Geometry:
    made = [Cache.gqa(n, ids, kv_heads=2, head_dim=4, page=page, dtype=DType.U8) for n, ids in WINDOWED.items()]
    return lay_out(made, parallel, depth=LAYERS)


def gone(table: list[int], pages: int, null: int = 0) -> list[int]:
    """A table whose first pages were given up."""
    return [null] * pages + table[pages:]


class Late:
    """A source of one or more stages, and a sink of one rank."""

    def __init__(self, sources: list[Source], sink: Sink) -> None:
        self.sources, self.sink = sources, sink
        self.poison()

    def turn(self) -> None:
        """A turn of all, which have no threads."""
        for door in (*self.sources, self.sink):
            door.step(0.005)

    def reuse(self, source: Source, group: str, pages: list[int]) -> None:
        """Others write pages that were given up."""
        for layer in set(_layers(source)) & set(WINDOWED[group]):
            for part in ("k", "v"):
                source.pool.array(group, layer, part)[pages] = POISON + 2

    def poison(self) -> None:
        for layer in range(LAYERS):
            for part in ("k", "v"):
                self.sink.pool.array(_group(layer), layer, part)[:] = POISON

    def begin(self, prompt: Prompt = PROMPT, tables: Any = OURS, **fetch: Any) -> tuple[list[Request], Fetch]:
        ticket = new_ticket("prefill")
        requests = [source.request(ticket, prompt) for source in self.sources]
        return requests, self.sink.fetch(ticket, prompt, tables, **fetch)

    def rows(self, layer: int, first: int, tokens: int = TOKENS) -> tuple[Any, Any]:
        """Rows [first, tokens) of a layer at both sides, [part, token, head, byte]."""
        source = next(s for s in self.sources if layer in _layers(s))
        both, at = [], np.arange(first, tokens)
        for pool, table, page in ((source.pool, TABLES, 4), (self.sink.pool, OURS, 8)):
            items = np.array(table[_group(layer)])[at // page]
            both.append(np.stack([pool.array(_group(layer), layer, p)[items, at % page] for p in ("k", "v")]))
        return both[0], both[1]

    def check(self, since: dict[str, int]) -> None:
        """Every row from there on has arrived, and no row before has been written."""
        for layer in range(LAYERS):
            first = since.get(_group(layer), 0)
            ours, theirs = self.rows(layer, first)
            assert np.array_equal(ours, theirs), layer
            assert (self.rows(layer, 0, first)[1] == POISON).all(), layer


def _group(layer: int) -> str:
    return next(name for name, layers in WINDOWED.items() if layer in layers)


def _layers(source: Source) -> list[int]:
    (rank,) = [r for r in source.geometry.ranks if r.rank == source.pool.rank]
    return [int(n) for share in rank.owns for n in share.layers]


@contextmanager
def late(folder: Path, give: Options | None = None, take: Options | None = None, stages: int = 1) -> Iterator[Late]:
    """Both in this process; pages that are null hold what nobody may see."""
    address, parallel = address_in(folder), Parallel(pp=stages)
    with ExitStack() as stack:
        sources = []
        for rank in range(stages):
            pool = Pool.allocate(sided(4, parallel), PAGES, rank=rank)
            source = stack.enter_context(Source("prefill", pool, address + "-{rank}", give))
            sources.append(source)
            for layer in _layers(source):
                for n, part in enumerate(("k", "v")):
                    array = pool.array(_group(layer), layer, part)
                    array[:] = np.random.default_rng([layer, n]).integers(0, POISON, array.shape, np.uint8)
                    array[0] = POISON + 1
        sink = Sink("decode", Pool.allocate(sided(8), 10), {"prefill": f"{address}-0"}, take or give)
        yield Late(sources, stack.enter_context(sink))
