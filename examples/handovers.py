"""Nine hand-overs that today's engines refuse, run for real: `python examples/handovers.py [NAME ...] [--list]`.

Every rank is a separate Source or Sink with its own pool. Before a transfer, each byte of the source's pools says which
model, layer, part, token and KV head it stands for. Afterwards every byte of the sink's pools is compared with what
should be there, including bytes that must not have changed. The rule that places a token here counts tokens one by one
and shares nothing with the planner.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt
from handover_table import HANDOVERS, HandOver

from kvproto import Geometry, Pool, Prompt, Sink, Source, new_ticket
from kvproto.planning.geometry import Group, Owns

PAGES = 48
UNTOUCHED = 0xEE


def held(group: Group, cp_rank: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """For each token that a rank holds: the token, its index in the rank's page table, and its row in the page."""
    row = 0
    turn, left = 0, group.interleave
    for token in range(tokens):
        if group.cp_size == 1 or turn == cp_rank:
            yield token, row // group.rows, row % group.rows
            row += 1
        left -= 1
        if not left:
            turn, left = (turn + 1) % group.cp_size, group.interleave


@lru_cache(maxsize=1 << 16)
def value(model: int, layer: int, part: str, token: int, lane: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of one KV head of one token, [size]."""
    name = f"{model} {layer} {part} {token} {lane}".encode()
    return np.frombuffer(hashlib.shake_128(name).digest(size), np.uint8)


@attrs.frozen
class RankCache:
    """One rank's pool and the page tables of its only request."""

    pool: Pool
    tables: dict[str, npt.NDArray[np.int64]]

    @classmethod
    def of(cls, geometry: Geometry, rank: int, tokens: int, seed: int) -> RankCache:
        """Pages in random order, one page table for all groups: a draft that is whole on each rank has longer pages."""
        pool = Pool.allocate(geometry, PAGES, rank=rank)
        tables = {}
        order = np.random.default_rng(seed + rank).permutation(PAGES)
        for group, share in shares(geometry, rank):
            pages = {index for _, index, _ in held(group, share.cp_rank, tokens)}
            tables[group.name] = order[: len(pages)]
        return cls(pool, tables)

    def image(self, first: int, tokens: int, background: int) -> dict[tuple[str, int, str], npt.NDArray[np.uint8]]:
        """What tokens [first, tokens) should look like here, by group, layer and part: [page, row, lane, byte]."""
        found = {}
        for group, share in shares(self.pool.geometry, self.pool.rank):
            places = [at for at in held(group, share.cp_rank, tokens) if at[0] >= first]
            for p, part in enumerate(group.parts):
                lanes = [lane for span in share.lanes if span.part == p for lane in range(span.lo, span.hi)]
                for layer in share.layers.tolist():
                    made = np.full((PAGES, group.rows, len(lanes), part.lane_bytes), background, np.uint8)
                    for token, index, row in places:
                        for i, lane in enumerate(lanes):
                            bytes_ = value(group.model, layer, part.name, token, lane, part.lane_bytes)
                            made[self.tables[group.name][index], row, i] = bytes_
                    found[group.name, layer, part.name] = made
        return found


def shares(geometry: Geometry, rank: int) -> list[tuple[Group, Owns]]:
    """What a rank owns of each group."""
    groups = {group.id: group for group in geometry.groups}
    return [(groups[s.group], s) for r in geometry.ranks if r.rank == rank for s in r.owns]


def run(case: HandOver) -> dict[str, float]:
    """Hand the prompt over between all ranks and compare every byte; return what moved, and how long it took."""
    prompt, ticket = Prompt(range(1000, 1000 + case.tokens)), new_ticket("prefill")
    addresses = f"ipc://{tempfile.mkdtemp()}/prefill-{{rank}}"
    with ExitStack() as stack:
        sources, sinks = [], []
        for rank in (r.rank for r in case.source.ranks):
            cache = RankCache.of(case.source, rank, case.tokens, 0)
            for place, image in cache.image(0, case.tokens, 0).items():
                cache.pool.array(*place)[:] = image
            sources.append((stack.enter_context(Source("prefill", cache.pool, addresses)), cache))
        for rank in (r.rank for r in case.sink.ranks):
            cache = RankCache.of(case.sink, rank, case.tokens, 100)
            for place in cache.image(0, 0, 0):
                cache.pool.array(*place)[:] = UNTOUCHED
            seed = {"prefill": addresses.replace("{rank}", "0")}
            sinks.append((stack.enter_context(Sink("decode", cache.pool, seed)), cache))
        requests = [source.request(ticket, prompt) for source, _ in sources]
        begin = time.perf_counter()
        fetches = [sink.fetch(ticket, prompt, cache.tables, cached=case.cached) for sink, cache in sinks]
        for request, (_, cache) in zip(requests, sources, strict=True):
            request.finish(cache.tables)
        arrived = [fetch.wait(60) for fetch in fetches]
        seconds = time.perf_counter() - begin
        compared = sum(check(case, cache) for _, cache in sinks)
        moved = sum(sum(each.bytes.values()) for each in arrived)
    return {"bytes": moved, "compared": compared, "seconds": seconds}


def check(case: HandOver, cache: RankCache) -> int:
    """Return the number of bytes compared; raise AssertionError if any byte of a sink's pool is wrong."""
    compared = 0
    for place, image in cache.image(case.cached, case.tokens, UNTOUCHED).items():
        wrong = np.argwhere(cache.pool.array(*place) != image)
        assert not wrong.size, f"rank {cache.pool.rank} {place}: {len(wrong)} bytes differ, first at {wrong[0]}"
        compared += image.size
    return compared


def picture(geometry: Geometry, tokens: int, width: int = 64) -> Iterator[str]:
    """One line for each rank and group: the first tokens, `#` where the rank holds them."""
    for rank in geometry.ranks:
        for group, share in shares(geometry, rank.rank):
            mine = {token for token, _, _ in held(group, share.cp_rank, min(tokens, width))}
            layers = f"layers {share.layers.min()}-{share.layers.max()}"
            lanes = ",".join(f"{s.lo}-{s.hi - 1}" for s in share.lanes if s.part == 0)
            line = "".join("#" if token in mine else "." for token in range(min(tokens, width)))
            yield f"  rank {rank.rank} {group.name:<7}{layers:<12}heads {lanes:<6}{line}"


def main() -> int:
    """Run the named hand-overs, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(c.name for c in HANDOVERS)}")
    parser.add_argument("--list", action="store_true", help="print the table in Markdown and run nothing")
    parser.add_argument("--quiet", action="store_true", help="no pictures")
    args = parser.parse_args()
    if args.list:
        print("| name | hand-over | why engines refuse it |\n|---|---|---|")
        for case in HANDOVERS:
            print(f"| `{case.name}` | {case.what} | {case.refused} |")
        return 0
    known = {case.name: case for case in HANDOVERS}
    if unknown := [name for name in args.names if name not in known]:
        print(f"{unknown[0]}: no such hand-over; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for case in [known[name] for name in args.names] or HANDOVERS:
        print(f"{case.name}: {case.what}")
        if not args.quiet:
            for side, geometry in (("source", case.source), ("sink", case.sink)):
                print(f" {side}", *picture(geometry, case.tokens), sep="\n")
        found = run(case)
        moved, compared = int(found["bytes"]), int(found["compared"])
        print(f"  {moved} bytes moved, {compared} compared, all right; {found['seconds']:.3f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
