"""What a transfer costs: bytes over a link, and a price for each contiguous run, for each way of each transport."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import attrs

from kvproto.calibration import results
from kvproto.copying.program import Runs
from kvproto.errors import LocalError
from kvproto.transport import find, names
from kvproto.transport.bench import Constants, CostedWay, CostKind
from kvproto.wire.enums import ErrorCode

__all__ = [
    "ORIGIN", "Advice", "Cost", "Estimate", "Spread", "advise", "advise_spread", "estimates", "load", "reference_costs",
    "spread",
]  # fmt: skip

ORIGIN = "measured on a pair of H200"
"""Where `reference_costs` come from."""


@attrs.frozen
class Cost:
    """The constants of one way to move bytes between two places of a host."""

    name: str
    constants: Constants
    doc: str
    kind: CostKind


@cache
def _ways() -> dict[tuple[str, str], CostedWay]:
    """The ways that plans are costed by, by transport and way."""
    return {(name, cost.way): cost for name in names() for cost in find(name).costs}


def reference_costs() -> tuple[Cost, ...]:
    """Medians of measurements of 2026-11 between two H200 over NVLink; `kvproto probe` measures the machine at hand."""
    return tuple(Cost(c.name, c.reference, c.doc, c.kind) for c in _ways().values() if c.reference is not None)


def load(path: Path) -> tuple[Cost, ...]:
    """The constants in a file of `kvproto probe`: between GPUs if it has any, else on the host.

    Of several pairs of GPUs the slowest counts. Raises LocalError with the path of the file and of what is wrong in it.
    """
    found = results.load(path)
    known = [m for m in found.measured if (m.transport, m.way) in _ways()]
    gpus = any(m.gpus for m in known)
    made: dict[str, Cost] = {}
    for m in known:
        way = _ways()[m.transport, m.way]
        if m.gpus == gpus and (way.name not in made or m.constants.link < made[way.name].constants.link):
            made[way.name] = Cost(way.name, m.constants, f"{m.name}, {found.date[:10]}", way.kind)
    if not made:
        ways = ", ".join(" ".join(w) for w in _ways())
        seen = ", ".join(m.name for m in found.measured) or "none"
        raise LocalError(ErrorCode.OUT_OF_RANGE, f"{path}: measured", f"one of {ways}", seen, "probe again")
    return tuple(made.values())


@attrs.frozen
class Estimate:
    """The seconds that one way takes."""

    name: str
    seconds: float
    kind: CostKind


def estimates(runs: Runs, costs: Iterable[Cost] | None = None) -> tuple[Estimate, ...]:
    """The seconds that each way takes for the runs of one program, fastest first; by default of `reference_costs`."""
    chosen = reference_costs() if costs is None else costs
    made = [Estimate(c.name, c.constants.seconds(runs.bytes, runs.count), c.kind) for c in chosen]
    return tuple(sorted(made, key=lambda e: e.seconds))


@attrs.frozen
class Advice:
    """How to send, and why."""

    kind: Literal["direct", "pack", "copy"]
    """By descriptors; through staging slots; or copied by the side that maps the other's memory."""
    why: str


SIMPLE = 1.5
"""Descriptors need no staging, so they are advised even if they take this many times as long as packing."""


def advise(ways: tuple[Estimate, ...]) -> Advice:
    """The way to send a program, from the estimates of its ways, fastest first."""
    first = {kind: next((w for w in ways if w.kind == kind), None) for kind in ("direct", "packed", "copy")}
    direct, other = first["direct"], first["packed"] or first["copy"]
    fastest = "" if ways[0] in (direct, first["packed"]) else f"; fastest where memory can be mapped: {ways[0].name}"
    if direct is None:
        if first["packed"] is None:
            return Advice("copy", f"by {ways[0].name}, as no other way was measured")
        return Advice("pack", f"no way by descriptors was measured{fastest}")
    if other is None or direct.seconds <= SIMPLE * other.seconds:
        return Advice("direct", f"runs are long enough for descriptors{fastest}")
    times = direct.seconds / other.seconds
    return Advice("pack", f"descriptors take {times:,.1f} times as long as {other.name}{fastest}")


ANSWER = 300e-6
"""Seconds that a sink rank spends on each source that it awaits, in addition to the bytes: benchmarks/spread.py."""
SHARE = 0.7
"""The share of a source's time that it can send before requests wait for one another."""


@attrs.frozen
class Spread:
    """What a rule of election costs for one request that one sink replica fetches."""

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


def spread(rule: str, pairs: Mapping[tuple[int, int], Runs], costs: Iterable[Cost]) -> Spread:
    """Cost a rule by the runs of each (source, sink) rank pair, each moved the fastest way."""
    chosen, sides = tuple(costs), (defaultdict[int, list[float]](list), defaultdict[int, list[float]](list))
    for pair, runs in pairs.items():
        seconds = estimates(runs, chosen)[0].seconds
        for side, rank in zip(sides, pair, strict=True):
            side[rank].append(seconds)
    sent, received = ([sum(some) for some in side.values()] for side in sides)
    awaited = max(map(len, sides[1].values()), default=0)
    return Spread(rule, awaited, max(sent, default=0.0), max(received, default=0.0))


def advise_spread(rules: Iterable[Spread]) -> str:
    """Which rule serves a request fastest, and up to which rate of requests it does."""
    found = sorted(rules, key=lambda rule: (round(rule.seconds, 6), -rule.rate))
    first, most = found[0], max(found, key=lambda rule: rule.rate)
    if first.rate >= most.rate:
        return f"{first.rule}: the fastest, and no rule bears more requests"
    return (
        f"{first.rule} up to {first.rate:,.0f} requests a second from one source replica, {most.rule} beyond, up to "
        f"{most.rate:,.0f}"
    )
