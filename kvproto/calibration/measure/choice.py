"""What a probe's file says to movers: how long runs are that go by the copy engine, or by NIXL's own descriptors."""

from __future__ import annotations

import sys

import attrs

from kvproto.calibration.probe import Measured, Probe
from kvproto.transport.nixl.direct import Costs

__all__ = ["long_runs", "nixl_costs"]

NEVER = sys.maxsize


def long_runs(found: Probe) -> int | None:
    """Bytes of a run from which on the copy engine is no slower than the kernel, between any two GPUs.

    For `CudaTransport(long=...)`. More than any run has, where it never is; None where that was not measured.
    """
    longest = []
    for engine in found.measured:
        if (engine.transport, engine.way) == ("cuda", "engine") and engine.source != engine.sink:
            longest += [_from(engine, kernel) for way in ("pull", "push") for kernel in _beside(engine, found, way)]
    return max(longest, default=None)


def nixl_costs(found: Probe, gpus: bool) -> Costs | None:
    """The costs of NIXL's descriptors and of packing, of the slowest pair of GPUs, or of the host.

    For `NixlTransport(way=...)`. None where either was not measured.
    """
    made = []
    for direct in found.measured:
        within = gpus and direct.source == direct.sink
        if (direct.transport, direct.way, direct.gpus) == ("nixl", "direct", gpus) and not within:
            cost = direct.constants
            for packed in _beside(direct, found, "packed"):
                made.append(Costs(cost.run, cost.link, min(packed.constants.link / cost.link, 0.99)))
    return min(made, key=lambda c: c.link, default=None)


def _beside(this: Measured, found: Probe, way: str) -> list[Measured]:
    """Another way of the same transport, from the same place to the same."""
    wanted = attrs.evolve(this, way=way).name
    return [m for m in found.measured if m.name == wanted]


def _from(engine: Measured, kernel: Measured) -> int:
    """The shortest run from which on the engine is no slower at any length that both have."""
    of_kernel = {s.run: s.rate for s in kernel.samples}  # of one length the larger program comes last
    of_engine = {s.run: s.rate for s in engine.samples}
    found = NEVER
    for run in sorted(of_kernel.keys() & of_engine.keys(), reverse=True):
        if of_engine[run] < of_kernel[run]:
            break
        found = run
    return found
