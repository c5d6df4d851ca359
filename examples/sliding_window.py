"""A sliding window whose old pages are given up while the prompt is computed: `python examples/sliding_window.py`.

Prefill has 6 pages for the window, too few for a prompt of 12 pages. It gives a page up as soon as the window has left
it, and reports that by `since`. Decode fetches only the last tokens, the ones that its next token attends to.
"""

from __future__ import annotations

import tempfile
from collections import deque
from typing import Any

import numpy as np

from kvproto import Cache, DType, Pool, Prompt, Sink, Source, lay_out, new_ticket

PAGE, WINDOW, TOKENS, CHUNK = 16, 48, 190, 32
NULL = 0
"""The page that a table names where it has none."""


class Engine:
    """A pool of two groups: layers 0 and 2 attend to all tokens, 1 and 3 to the last WINDOW."""

    def __init__(self, full: int, window: int) -> None:
        layers = {"full": [0, 2], "window": [1, 3]}
        caches = [Cache.gqa(n, ids, kv_heads=2, head_dim=8, page=PAGE, dtype=DType.U8) for n, ids in layers.items()]
        self.pool = Pool.allocate(lay_out(caches), {"full": full, "window": window})
        self.places = [(n, layer, part) for n, ids in layers.items() for layer in ids for part in ("k", "v")]
        self.free = {"full": deque(range(1, full)), "window": deque(range(1, window))}
        self.pages: dict[str, list[int]] = {"full": [], "window": []}

    def grow(self, group: str, tokens: int, since: int) -> None:
        """Give up the pages before token `since`, then allocate enough for `tokens`."""
        table = self.pages[group]
        for i in range(min(since // PAGE, len(table))):
            if table[i] != NULL:
                self.free[group].append(table[i])
                table[i] = NULL
        while len(table) < -(-tokens // PAGE):
            table.append(self.free[group].popleft() if len(table) >= since // PAGE else NULL)

    def rows(self, group: str, layer: int, part: str, first: int, tokens: int) -> tuple[Any, Any]:
        """Where rows [first, tokens) of a layer are: an index into its array."""
        at = np.arange(first, tokens)
        return np.array(self.pages[group])[at // PAGE], at % PAGE


def main() -> None:
    """Compute a prompt in chunks, hand it over, and compare."""
    prefill, decode = Engine(full=16, window=6), Engine(full=16, window=6)
    computed = np.random.default_rng(0).integers(0, 256, (len(prefill.places), TOKENS, 2, 8), np.uint8)
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    with (
        Source("prefill", prefill.pool, address) as source,
        Sink("decode", decode.pool, {"prefill": address}) as sink,
    ):
        ticket, prompt = new_ticket("prefill"), Prompt(range(TOKENS))
        request = source.request(ticket, prompt)
        first = TOKENS - WINDOW
        decode.grow("full", TOKENS, 0)
        decode.grow("window", TOKENS, first)
        fetch = sink.fetch(ticket, prompt, decode.pages, cached={"window": first})
        for done in range(0, TOKENS, CHUNK):
            end, since = min(done + CHUNK, TOKENS), max(done - WINDOW, 0)
            prefill.grow("full", end, 0)
            prefill.grow("window", end, since)
            for place, rows in zip(prefill.places, computed, strict=True):
                prefill.pool.array(*place)[prefill.rows(*place, done, end)] = rows[done:end]
            request.computed(prefill.pages, end, since={"window": since})
        request.finish(prefill.pages)
        arrived = fetch.wait(60)
        request.wait(60)
    for place, rows in zip(decode.places, computed, strict=True):
        begin = first if place[0] == "window" else 0
        assert np.array_equal(decode.pool.array(*place)[decode.rows(*place, begin, TOKENS)], rows[begin:])
    print(f"{sum(arrived.bytes.values())} bytes, equal")


if __name__ == "__main__":
    main()
