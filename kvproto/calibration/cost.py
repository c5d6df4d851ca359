"""What a transfer costs: bytes over a link plus a price for each contiguous run, by transport."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import attrs

from kvproto.calibration import results
from kvproto.copying.program import Runs
from kvproto.errors import LocalError
from kvproto.transport import find, names
from kvproto.transport.bench import CostKind
from kvproto.wire.enums import ErrorCode

__all__ = ["COSTS", "ORIGIN", "Advice", "Cost", "Estimate", "advise", "estimates", "load"]


@attrs.frozen
class Cost:
    """Constants of a way to move bytes between two places of a host."""

    name: str
    link: float
    """Bytes a second that the link gives at long runs."""
    run: float
    """Seconds that each run costs more than its bytes."""
    start: float
    """Seconds before the first byte."""
    doc: str
    kind: CostKind


COSTS = (
    Cost("kernel", 370e9, 1.0e-11, 15e-6, "one gather-scatter kernel, pull", "copy"),
    Cost("pack + copy + unpack", 264e9, 1.0e-11, 60e-6, "index_select, one peer copy, index_copy", "packed"),
    Cost("descriptors", 335e9, 6.5e-6, 50e-6, "a descriptor a run, as UCX takes them", "direct"),
)
"""Medians of measurements of 2026-11 between two H200, NVLink; `kvproto probe` measures the machine at hand."""
ORIGIN = "measured on a pair of H200"
"""Of COSTS."""


@cache
def _ways() -> dict[tuple[str, str], tuple[str, CostKind]]:
    """What a plan is costed with, by transport and way."""
    return {(name, way): cost for name in names() for way, cost in find(name).costs.items()}


def load(path: Path) -> tuple[Cost, ...]:
    """The constants of a file of `kvproto probe`: between GPUs where it has any, else on the host.

    Of several pairs of GPUs the slowest counts. Raises LocalError with the path of the file and of what is wrong in it.
    """
    found = results.load(path)
    known = [m for m in found.measured if (m.transport, m.way) in _ways()]
    gpus = any(m.gpus for m in known)
    made: dict[str, Cost] = {}
    for m in known:
        name, kind = _ways()[m.transport, m.way]
        c = m.constants
        if m.gpus == gpus and (name not in made or c.link < made[name].link):
            made[name] = Cost(name, c.link, c.run, c.start, f"{m.name}, {found.date[:10]}", kind)
    if not made:
        ways = ", ".join(" ".join(w) for w in _ways())
        seen = ", ".join(m.name for m in found.measured) or "none"
        raise LocalError(ErrorCode.OUT_OF_RANGE, f"{path}: measured", f"one of {ways}", seen, "probe again")
    return tuple(made.values())


@attrs.frozen
class Estimate:
    """Seconds of one way."""

    name: str
    seconds: float
    kind: CostKind


def estimates(runs: Runs, costs: Iterable[Cost] = COSTS) -> tuple[Estimate, ...]:
    """Each way's seconds for the runs of one program, fastest first."""
    made = [Estimate(c.name, c.start + runs.bytes / c.link + runs.count * c.run, c.kind) for c in costs]
    return tuple(sorted(made, key=lambda e: e.seconds))


@attrs.frozen
class Advice:
    """How to send, and why."""

    kind: Literal["direct", "pack", "copy"]
    """Descriptors; through staging slots; or let the side that maps the other's memory copy."""
    why: str


SIMPLE = 1.5
"""How many times as long as packing descriptors may take and still be advised: they need no staging."""


def advise(ways: tuple[Estimate, ...]) -> Advice:
    """What the estimates of one program, fastest first, come to."""
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
