"""What measured costs say to transport `cuda`: from which length on runs go by the copy engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvproto.transport.bench import Measured, same_path

__all__ = ["long_runs"]

NEVER = sys.maxsize


def long_runs(measured: Sequence[Measured]) -> int | None:
    """Bytes of a run from which on the copy engine is no slower than the kernel, between any two GPUs.

    For `CudaTransport(long=...)`. More than any run has, where it never is; None where that was not measured.
    """
    longest = []
    for engine in measured:
        if (engine.transport, engine.way) == ("cuda", "engine") and engine.source != engine.sink:
            longest += [
                _from(engine, kernel) for way in ("pull", "push") for kernel in same_path(engine, measured, way)
            ]
    return max(longest, default=None)


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
