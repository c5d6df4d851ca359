"""The programs of a plan without an engine: for pools without gaps, and a request whose items are in random order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvproto.calibration import Cost, Spread, advise_spread, spread
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Plan, plan
from kvproto.rank.rank_pool import pack
from kvproto.wire.enums import Feature

__all__ = ["Moved", "Request", "as_data", "programs", "shown", "spreads"]

Moved = dict[tuple[int, int], CopyProgram]
"""The program of each routed (source, sink) rank pair."""
Request = tuple[int, int, Sequence[str]]
"""The first token, the number of tokens, and NHD or HND for each side."""
_RULES: dict[str, tuple[Feature, ...]] = {"even": (), "few": (Feature.FEW_SOURCES,), "one": (Feature.SPREAD_ONE,)}


def programs(source: Geometry, sink: Geometry, made: Plan, request: Request) -> Moved:
    """The program of each routed rank pair; raises KvprotoError for a request that is not possible."""
    first, tokens, layouts = request
    sides = [
        {r.rank: _side(g, r.rank, first, tokens, layout == "HND") for r in g.ranks}
        for g, layout in zip((source, sink), layouts, strict=True)
    ]
    found = {}
    for a, b in sorted({(r.source, r.sink) for r in made.routes}):
        (here, from_), (there, to) = sides[0][a], sides[1][b]
        found[a, b] = Pair(made.between(a, b), here, there).lower(from_, to)
    return found


def _side(
    geometry: Geometry, rank: int, first: int, tokens: int, heads_first: bool
) -> tuple[RankLayout, dict[int, Window]]:
    groups = {g.id: g for g in geometry.groups}
    dice = np.random.default_rng(rank)
    windows, counts = {}, {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        count = tokens
        if kind_of(group).wraps:
            count = min(tokens, group.rows * group.tokens_per_row)
        need = items_needed(group, share.cp_rank, first + tokens - count, count)
        counts[group.id] = max(2 * need, 1)
        windows[group.id] = Window(first + tokens - count, count, dice.permutation(counts[group.id])[:need])
    return RankLayout(geometry, rank, pack(geometry, rank, counts, heads_first)[0]), windows


def spreads(
    source: Geometry, sink: Geometry, features: Collection[Feature], request: Request, costs: Sequence[Cost]
) -> list[Spread]:
    """The cost of a request by each rule of election; empty if all rules make the same plan."""
    others = set(features) - {Feature.FEW_SOURCES, Feature.SPREAD_ONE}
    plans = {name: plan(source, sink, {*others, *chosen}) for name, chosen in _RULES.items()}
    if len({made.digest for made in plans.values()}) == 1:
        return []
    found = []
    for name, made in plans.items():
        runs = {pair: program.runs() for pair, program in programs(source, sink, made, request).items()}
        found.append(spread(name, runs, costs))
    return found


def as_data(found: Sequence[Spread]) -> dict[str, dict[str, float]]:
    """The costs by rule as JSON data; times are in seconds."""
    return {
        rule.rule: {"awaited": rule.awaited, "source_s": rule.source, "request_s": rule.seconds, "rate": rule.rate}
        for rule in found
    }


def shown(found: Sequence[Spread]) -> Iterator[str]:
    """A table of the rules, and advice on which to use when."""
    if not found:
        return
    yield ""
    yield "rules of election:  awaits   busiest source     one request   requests a second, at most"
    for rule in found:
        times = f"{rule.source * 1e3:14.3f} ms {rule.seconds * 1e3:12.3f} ms"
        yield f"  {rule.rule:<18}{rule.awaited:6} {times} {rule.rate:28,.0f}"
    yield f"  advice: {advise_spread(found)}"
