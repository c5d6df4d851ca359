"""The exhaustive sweep: `make sweep`. Every mix of heads, ranks, styles of replication, stages, pages and deals, by painting.

A plan is painted onto what each sink rank owns, byte by byte and row by row: each byte exactly once, by a rank that owns it,
and the load within the bound. Nothing here uses the planner's own arithmetic. Prints progress; exit status 1 at a fault.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import lower
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Rank, gqa, mla, owns
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps

Spans = list[tuple[int, int]]


def consecutive(heads: int, ranks: int, rank: int) -> Spans:
    """Shares of the heads; more ranks than heads: runs of ranks hold one alike."""
    lo = heads * rank // ranks
    return [(lo, max(heads * (rank + 1) // ranks, lo + 1))]


def cyclic(heads: int, ranks: int, rank: int) -> Spans:
    """Head h on ranks h, h + heads, ...; fewer ranks than heads: every ranks-th head."""
    return (
        [(h, h + 1) for h in range(heads) if h % ranks == rank]
        if ranks <= heads
        else [(rank % heads, rank % heads + 1)]
    )


def first_ranks(heads: int, ranks: int, rank: int) -> Spans:
    """Shares rounded up: the last ranks hold less, or nothing."""
    size = -(-heads // ranks)
    return [(rank * size, min(heads, (rank + 1) * size))] if rank * size < heads else []


STYLES = {"consecutive": consecutive, "cyclic": cyclic, "first": first_ranks}


def engine(group: Group, ranks: int, style: str, stages: list[int], replica: int = 0) -> Geometry:
    """`ranks` per stage; stages of so many layers each."""
    made, first = [], 0
    for layers in stages:
        for rank in range(ranks):
            spans = STYLES[style](group.parts[0].lanes, ranks, rank)
            lanes = tuple(LaneSpan(part=p, lo=lo, hi=hi) for p in range(len(group.parts)) for lo, hi in spans)
            share = attrs.evolve(owns(group, range(first, first + layers)), lanes=lanes)
            made.append(Rank(rank=len(made), owns=(share,) if spans else ()))
        first += layers
    return Geometry(replica=replica, facts=(), groups=(group,), ranks=tuple(made))


def owned(geometry: Geometry, layers: int) -> dict[tuple[int, int], Any]:
    """Of each rank and group, a picture [layer, part, byte] of what it owns."""
    groups = {g.id: g for g in geometry.groups}
    found = {}
    for rank in geometry.ranks:
        for id, group in groups.items():
            found[rank.rank, id] = np.zeros(
                (layers, len(group.parts), group.parts[0].lanes * group.parts[0].lane_bytes), np.int8
            )
        for share in rank.owns:
            for span in share.lanes:
                size = groups[share.group].parts[span.part].lane_bytes
                found[rank.rank, share.group][share.layers, span.part, span.lo * size : span.hi * size] = 1
    return found


def painted(source: Geometry, sink: Geometry, layers: int, bound: bool) -> None:
    """Assert that a plan covers exactly what the sink owns, from what the source owns."""
    made = plan(source, sink)
    have, want = owned(source, layers), owned(sink, layers)
    covered = {key: np.zeros_like(picture) for key, picture in want.items()}
    load: dict[int, int] = {}
    for route in made.routes:
        for box in route.boxes:
            at = slice(box.layer_lo, box.layer_hi), box.part, slice(box.lo, box.hi)
            assert have[route.source, box.source_group][at].all(), "a source that does not own what it sends"
            covered[route.sink, route.group][at] += 1
            load[route.source] = load.get(route.source, 0) + box.layer_hi - box.layer_lo
    for key, picture in want.items():
        assert np.array_equal(covered[key], picture), f"sink rank and group {key} are not covered exactly once"
    if bound:
        mean = sum(load.values()) / len(source.ranks)
        assert max(load.values()) <= mean + -(-layers // len(source.ranks)), "the load is not spread"


def drafts() -> Iterator[tuple[str, Any]]:
    """MLA and GQA targets with MLA and GQA drafts, 1 to 8 ranks on each side."""
    kinds = {"mla": mla(0, "t", 0, 8, 4), "gqa": gqa(0, "t", 0, 4, 4, 4)}
    for target, draft, p, d in itertools.product(kinds, kinds, range(1, 9), range(1, 9)):
        groups = kinds[target], attrs.evolve(kinds[draft], id=1, name="d", model=1)
        sides = []
        for ranks in (p, d):
            ones = [engine(g, ranks, "consecutive", [layers]) for g, layers in zip(groups, (5, 1), strict=True)]
            both = tuple(Rank(rank=r, owns=tuple(e.ranks[r].owns[0] for e in ones)) for r in range(ranks))
            sides.append(Geometry(replica=0, facts=(), groups=groups, ranks=both))
        yield f"{target} with {draft} draft, {p} to {d}", (*sides, 5, False)


def heads_and_ranks() -> Iterator[tuple[str, Any]]:
    """Heads 1 to 12, ranks 1 to 12 on each side, styles of replication."""
    for heads, p, d in itertools.product(range(1, 13), repeat=3):
        for one, other in (("consecutive", "consecutive"), ("cyclic", "consecutive"), ("first", "cyclic")):
            group = gqa(0, "t", 0, heads, 4, 4)
            yield (
                f"{heads} heads, {p} {one} to {d} {other}",
                (engine(group, p, one, [3]), engine(group, d, other, [3], p), 3, False),
            )


def replicas() -> Iterator[tuple[str, Any]]:
    """One lane on every rank, 1 to 12 on each side, sink replicas 0 to 3."""
    group = mla(0, "t", 0, 8, 4)
    for p, d, replica in itertools.product(range(1, 13), range(1, 13), range(4)):
        yield (
            f"latent {p} to {d}, replica {replica}",
            (engine(group, p, "cyclic", [13]), engine(group, d, "cyclic", [13], replica), 13, d < p),
        )


def stages() -> Iterator[tuple[str, Any]]:
    """Seven layers in every split into up to four stages, both sides."""
    splits = [list(s) for n in range(1, 5) for s in itertools.product(range(1, 8), repeat=n) if sum(s) == 7]
    group = gqa(0, "t", 0, 2, 4, 4)
    for one, other in itertools.product(splits, splits):
        yield (
            f"stages {one} to {other}",
            (engine(group, 2, "consecutive", one), engine(group, 1, "consecutive", other), 7, False),
        )


def deals() -> Iterator[tuple[str, Any]]:
    """Deals of 1 to 8 ranks, interleaves, page sizes: rows painted on the axis of rows."""
    for (n, run, page), (m, other, page_d) in itertools.product(
        itertools.product(range(1, 9), range(1, 65), (1, 16)),
        itertools.product((1, 2, 5, 8), (1, 6, 16), (7,)),
    ):
        yield f"cp {n}x{run} pages of {page} to {m}x{other} pages of {page_d}", (n, run, page, m, other, page_d)
    for n, run, m, other, page in itertools.product(range(2, 9), (1, 3, 16, 64), (2, 5), (1, 6), (1, 4)):
        for one, two in itertools.product(tables(n), tables(m)):
            yield f"cp {one or n}x{run} to {two or m}x{other} pages of {page}", (n, run, page, m, other, 7, one, two)


def tables(ranks: int) -> list[list[int] | None]:
    """In turn, there and back, and shares of 1, 2, 3 and so on runs."""
    there = list(range(ranks))
    return [None, there + there[::-1], [rank for rank in there for _ in range(rank + 1)]]


def dealt(
    n: int, run: int, page: int, m: int, other: int, page_d: int, one: list[int] | None = None, two: list[int] | None = None
) -> None:  # fmt: skip
    """Assert that every row of a window goes once, from where its owner keeps it to where its owner wants it."""
    groups = [
        attrs.evolve(
            mla(0, "t", 0, 1, size), cp_size=c, interleave=i, order=None if o is None else np.array(o, np.uint32)
        )
        for c, i, size, o in ((n, run, page, one), (m, other, page_d, two))
    ]
    ours, theirs = one or list(range(n)), two or list(range(m))
    sides = [
        Geometry(
            replica=0,
            facts=(),
            groups=(g,),
            ranks=tuple(Rank(rank=r, owns=(owns(g, [0], cp_rank=r),)) for r in range(g.cp_size)),
        )
        for g in groups
    ]
    first, count = 5, 150
    rows = np.arange(first, first + count)
    made = plan(*sides)
    seen = np.zeros(first + count, np.int64)
    for d in range(m):
        for p in made.required(d):
            views, windows = [], []
            for geometry, rank, start, number in ((sides[0], p, 0, first + count), (sides[1], d, first, count)):
                (group,) = geometry.groups
                need = items_needed(group, rank, start, number)
                views.append(RankLayout(geometry, rank, columns_without_gaps(geometry, rank, {0: need + 1})[0]))
                windows.append({0: Window(start, number, np.arange(need))})
            program = lower(made.between(p, d), views[0], views[1], windows[0], windows[1])
            for rmap in program.maps:
                seen[rmap.global_rows] += 1
                mine = rmap.global_rows
                assert all(ours[row // run % len(ours)] == p for row in mine.tolist())
                assert all(theirs[row // other % len(theirs)] == d for row in mine.tolist())
                # pools touch and items are in order: the local row is the address
                at = np.repeat(rmap.source_row - np.cumsum(rmap.rows) + rmap.rows, rmap.rows) + np.arange(rmap.size)
                held = [row for row in range(first + count) if ours[row // run % len(ours)] == p]
                assert np.array_equal(at, np.searchsorted(held, mine))
    assert (seen[rows] == 1).all()
    assert not seen[:first].any()


def main() -> int:
    """All of it, with a line a thousand."""
    start, done = time.monotonic(), 0
    for family, check in (
        (heads_and_ranks, painted),
        (replicas, painted),
        (drafts, painted),
        (stages, painted),
        (deals, dealt),
    ):
        for name, case in family():
            try:
                check(*case)
            except Exception as error:
                print(f"\n{name}: {type(error).__name__}: {error}")
                return 1
            done += 1
            if done % 500 == 0:
                print(f"\r{done} mixes, {time.monotonic() - start:.0f} s: {name[:60]:60}", end="", flush=True)
    print(f"\r{done} mixes in {time.monotonic() - start:.0f} s: every byte once, from a rank that owns it{'':20}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
