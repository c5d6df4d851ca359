"""Decode memory that waits for prefill: pages times seconds, with and without intent: `python benchmarks/intent.py [--out]`.

A source and a sink of one host. REQUESTS requests are fetched at once; prefill computes one after the other, chunk by chunk, each chunk
as long as a forward of it might take. Pages are claimed by `fetch` (at once), when prefill is over (intent), or piece by
piece while it runs (spans). A page is held from when it is claimed until its request has arrived. The ways take turns in
rounds, and the figures are medians of them. `late_ms` is what the way costs: from the end of a request's prefill to Arrived.
--out keeps them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import arguments, facts, keep

from kvproto import Cache, Options, Pool, Prompt, Sink, Source, Ticket, lay_out, new_ticket
from kvproto.events import PagesWanted

PAGE, TOKENS, CHUNK, FORWARD = 64, 2048, 256, 0.02
"""Tokens of a page, of a prompt, of a chunk, and seconds of one."""
REQUESTS = 8
GEOMETRY = lay_out([Cache.gqa("kv", 2, kv_heads=8, head_dim=64, page=PAGE)])
"""4 KiB a token: 8 MiB a prompt."""
PAGES = REQUESTS * TOKENS // PAGE
WAYS = ("at once", "intent", "spans")


class Held:
    """Pages that the sink's engine has claimed, and for how long."""

    def __init__(self) -> None:
        self.free = list(range(PAGES))
        self.tables: dict[bytes, list[int]] = {}
        self.since: dict[bytes, list[float]] = {}
        self.seconds = 0.0
        """Pages times seconds."""
        self.most = 0

    def claim(self, ticket: Ticket, pages: int) -> dict[str, list[int]]:
        key = bytes(ticket.key)
        table, since = self.tables.setdefault(key, []), self.since.setdefault(key, [])
        while len(table) < pages:
            table.append(self.free.pop())
            since.append(time.monotonic())
        self.most = max(self.most, PAGES - len(self.free))
        return {"kv": table}

    def over(self, ticket: Ticket) -> None:
        now, key = time.monotonic(), bytes(ticket.key)
        self.seconds += sum(now - began for began in self.since.pop(key))
        self.free += self.tables.pop(key)


def measured(way: str, source: Source, sink: Sink, requests: int) -> dict[str, float]:
    """Run so many requests in one way."""
    held, prompt, began = Held(), Prompt(range(TOKENS)), time.monotonic()
    made = []

    def give(wanted: PagesWanted) -> dict[str, list[int]]:
        return held.claim(wanted.fetch.ticket, wanted.pages["kv"])

    for _ in range(requests):
        ticket = new_ticket("prefill")
        request = source.request(ticket, prompt)
        if way == "at once":
            fetch = sink.fetch(ticket, prompt, held.claim(ticket, TOKENS // PAGE))
        else:
            fetch = sink.fetch(ticket, prompt, claim=give, spans=way == "spans")
        made.append((request, fetch))
    late = []
    for n, (request, fetch) in enumerate(made):
        table = [(n * TOKENS // PAGE + i) % PAGES for i in range(TOKENS // PAGE)]
        for tokens in range(CHUNK, TOKENS + 1, CHUNK):
            time.sleep(FORWARD)
            if tokens < TOKENS:
                request.computed({"kv": table}, tokens)
        ended = time.monotonic()
        request.finish({"kv": table})
        fetch.wait(10)
        late.append(time.monotonic() - ended)
        held.over(request.ticket)
        request.wait(10)
    return {
        "page_seconds": held.seconds, "most_pages": held.most, "late_ms": 1e3 * statistics.median(late),
        "seconds": time.monotonic() - began,
    }  # fmt: skip


def main() -> None:
    """Measure, print, and keep what was measured if requested."""
    args = arguments(__doc__, "intent", rounds=5, quick="few of everything, to see that it works").parse_args()
    requests = 2 if args.quick else REQUESTS
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        address, options = f"ipc://{folder}/prefill", Options(part_bytes=1 << 20, first_part_ratio=0, verify=False)
        with (
            Source("prefill", Pool.allocate(GEOMETRY, PAGES), address, options) as source,
            Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}) as sink,
        ):
            measured("at once", source, sink, requests)
            for _ in range(args.rounds):
                for way in WAYS:
                    found[way].append(measured(way, source, sink, requests))
    ways: dict[str, Any] = {}
    for way, rounds in found.items():
        figures = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        ways[way] = {name: round(value, 2) for name, value in figures.items()}
        shown = "  ".join(f"{name} {value:8.2f}" for name, value in figures.items())
        print(f"{way:8}  {shown}")
    sizes = {"requests": requests, "tokens": TOKENS, "chunk": CHUNK, "forward_seconds": FORWARD, "page_tokens": PAGE}
    sizes |= {"pages_a_request": TOKENS // PAGE, "bytes_a_request": TOKENS << 12, "rounds": args.rounds}
    keep(args.out, facts() | sizes | {"ways": ways})


if __name__ == "__main__":
    main()
