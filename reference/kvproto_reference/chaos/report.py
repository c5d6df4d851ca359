"""The results of seeds: a line for each, and a summary in JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Result", "Violation", "line", "summary", "write"]


@attrs.frozen
class Violation:
    """Something that must never happen."""

    kind: str
    text: str


@attrs.frozen
class Result:
    """The result of one seed."""

    seed: int
    broken: str
    way: str
    transport: str
    wall: float
    asked: int
    arrived: int
    lost: dict[str, int]
    counts: dict[str, int]
    weather: dict[str, int]
    frames: dict[str, int]
    boundaries: list[str]
    planned: list[str]
    """Boundaries at which an engine was to be killed."""
    excused: list[str]
    violations: list[Violation]

    @classmethod
    def of(cls, form: dict[str, Any]) -> Result:
        """The inverse of `attrs.asdict`."""
        return cls(**{**form, "violations": [Violation(**each) for each in form["violations"]]})


def line(result: Result) -> str:
    """The result of one seed on a line."""
    faults = sum(n for name, n in result.counts.items() if name.startswith("fault "))
    frames, weather = sum(result.frames.values()), sum(result.weather.values())
    said = f"seed {result.seed:5} {result.broken or result.transport:15} {result.wall:5.1f} s  "
    said += f"{result.arrived:3} of {result.asked:3} arrived  {faults:2} faults, {weather:3} of {frames:4} frames"
    return said + (f"  {len(result.violations)} VIOLATIONS" if result.violations else "")


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """All seeds together."""
    found = list(results)
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("lost", "counts", "weather", "frames")}
    for result in found:
        for name, counter in sums.items():
            counter.update(getattr(result, name))
    bounds = Counter(each for result in found for each in result.boundaries)
    never = {each for result in found for each in result.planned} - set(bounds)
    violations = [{"seed": r.seed, "kind": v.kind, "text": v.text} for r in found for v in r.violations]
    return {
        "seeds": len(found), "seconds": round(sum(r.wall for r in found), 1),
        "transports": dict(Counter(r.transport for r in found)), "asked": sum(r.asked for r in found),
        "arrived": sum(r.arrived for r in found), "lost": dict(sums["lost"].most_common()),
        "happened": dict(sorted(sums["counts"].items())), "weather": dict(sorted(sums["weather"].items())),
        "frames": dict(sums["frames"].most_common()), "boundaries": len(bounds),
        "boundaries that never came": sorted(never),
        "kills at boundaries": sum(bounds.values()), "excused by lies": sum(len(r.excused) for r in found),
        "violations": violations,
    }  # fmt: skip


def write(path: Path, results: Iterable[Result]) -> None:
    """Write the summary and the result of each seed."""
    some = list(results)
    made = summary(some) | {"each": [attrs.asdict(r) for r in some]}
    path.write_text(json.dumps(made, indent=1) + "\n")
