"""The programs of a plan without an engine: for pools without gaps, and a request whose items are in random order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from kvproto.calibration import Cost, estimates
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Runs, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Plan, plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import Feature

__all__ = ["Moved", "Request", "Spread", "advise_spread", "as_data", "programs", "shown", "spread", "spreads"]

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
        if KINDS[group.kind].wraps:
            count = min(tokens, group.rows * group.tokens_per_row)
        need = items_needed(group, share.cp_rank, first + tokens - count, count)
        counts[group.id] = max(2 * need, 1)
        windows[group.id] = Window(first + tokens - count, count, dice.permutation(counts[group.id])[:need])
    return RankLayout(geometry, rank, columns_without_gaps(geometry, rank, counts, heads_first)[0]), windows


ANSWER = 300e-6
"""Seconds that a sink rank spends on each source that it awaits, in addition to the bytes: benchmarks/spread.py."""
SHARE = 0.7
"""The share of a source's time that it can send before requests wait for one another."""


@attrs.frozen
class Spread:
    """The cost of a rule of election for one request that one sink replica fetches."""

    rule: str
    """"even", "few" or "one", as in `kvproto.Options.spread`."""
    awaited: int
    """Sources of the sink rank that awaits most."""
    source: float
    """Seconds that the busiest source sends."""
    sink: float
    """Seconds that the busiest sink rank receives."""

    @property
    def seconds(self) -> float:
        """Seconds of the request by itself: the busier side, then the answers."""
        return max(self.source, self.sink) + self.awaited * ANSWER

    @property
    def rate(self) -> float:
        """The requests a second up to which they hardly wait for each other at the source."""
        return SHARE / self.source if self.source else float("inf")


def spread(rule: str, pairs: Mapping[tuple[int, int], Runs], costs: Sequence[Cost]) -> Spread:
    """Cost a rule by the runs of each (source, sink) rank pair, each moved the fastest way."""
    sides = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for pair, runs in pairs.items():
        seconds = estimates(runs, costs)[0].seconds
        for side, rank in zip(sides, pair, strict=True):
            side[rank].append(seconds)
    source, sink = (max(map(sum, side.values()), default=0.0) for side in sides)
    return Spread(rule, max(map(len, sides[1].values()), default=0), source, sink)


def advise_spread(rules: Iterable[Spread]) -> str:
    """Which rule serves a request fastest, and up to which rate of requests it does."""
    ranked = sorted(rules, key=lambda rule: (round(rule.seconds, 6), -rule.rate))
    fastest, most = ranked[0], max(ranked, key=lambda rule: rule.rate)
    if fastest.rate >= most.rate:
        return f"{fastest.rule}: the fastest, and no rule bears more requests"
    bounds = f"{fastest.rate:,.0f} requests a second from one source replica", f"up to {most.rate:,.0f}"
    return f"{fastest.rule} up to {bounds[0]}, {most.rule} beyond, {bounds[1]}"


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
