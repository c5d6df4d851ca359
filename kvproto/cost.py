"""What a transfer costs: bytes over a link plus a price for each contiguous run, by transport."""

from __future__ import annotations

import attrs

from kvproto.program import Runs

__all__ = ["COSTS", "Cost", "Estimate", "estimates"]


@attrs.frozen
class Cost:
    """Constants of a way to move bytes between two GPUs of a host; measured on a pair of H200, NVLink."""

    name: str
    link: float
    """Bytes a second that the link gives at long runs."""
    run: float
    """Seconds that each run costs more than its bytes."""
    start: float
    """Seconds before the first byte."""
    doc: str


COSTS = (
    Cost("kernel", 370e9, 1.0e-11, 15e-6, "one gather-scatter kernel, pull"),
    Cost("pack + copy + unpack", 264e9, 1.0e-11, 60e-6, "index_select, one peer copy, index_copy"),
    Cost("descriptors", 335e9, 6.5e-6, 50e-6, "a descriptor a run, as UCX takes them"),
)
"""Medians of measurements of 2026-11; `kvproto probe` will measure the machine at hand."""


@attrs.frozen
class Estimate:
    """Seconds of one way."""

    name: str
    seconds: float


def estimates(runs: Runs, costs: tuple[Cost, ...] = COSTS) -> tuple[Estimate, ...]:
    """Each way's seconds for the runs of one program, fastest first."""
    made = [Estimate(c.name, c.start + runs.bytes / c.link + runs.count * c.run) for c in costs]
    return tuple(sorted(made, key=lambda e: e.seconds))
