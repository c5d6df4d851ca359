"""Measures the transports that this machine has: samples, constants that fit them, and what is absent."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from kvproto.calibration.measure import fit, samples
from kvproto.calibration.results import Host, Probe
from kvproto.errors import KvprotoError, LocalError
from kvproto.transport import find, names
from kvproto.transport.bench import Absent, BenchJob, Measured
from kvproto.wire.enums import ErrorCode

__all__ = ["LEAST_MEMORY", "LENGTHS", "probe"]

LENGTHS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
QUICK_LENGTHS = (256, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
LEAST_MEMORY = 4 << 20
_SECONDS, _QUICK_SECONDS = (40.0, 54.0), (4.0, 8.0)
"""Seconds for copying, and after which no other job begins, as starting UCX and compiling a kernel take time too."""


def probe(
    transports: Sequence[str] | None = None,
    quick: bool = False,
    memory: int = 512 << 20,
    tell: Callable[[str, int, int], None] = lambda what, done, all_: None,
) -> Probe:
    """Measure the transports of this machine in under 60 s, or under 10 s if `quick`.

    `transports` are names, all by default. `memory` is the most bytes of all pools and staging slots, on the host and
    devices together. `tell` is called with what is measured next, and how many paths of how many are done. A transport
    that fails is absent from the result, as are paths for which no time is left. Raises LocalError: OUT_OF_RANGE for
    unknown transports or too little memory, NO_TRANSPORT if none of them could be measured.
    """
    transports = names() if transports is None else transports
    strange = [t for t in transports if t not in names()]
    if strange or not transports:
        known = ", ".join(names())
        raise LocalError(ErrorCode.OUT_OF_RANGE, "transports", f"some of {known}", ", ".join(strange) or "none")
    if memory < LEAST_MEMORY:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "memory", f"at least {LEAST_MEMORY} bytes", str(memory))
    host = _host()
    jobs, absent = _jobs(transports, memory, host)
    total, done = sum(j.paths for j in jobs), 0
    copying, end = _QUICK_SECONDS if quick else _SECONDS
    until = time.monotonic() + end
    measured: list[Measured] = []
    for job in jobs:
        tell(job.name, done, total)
        if time.monotonic() > until:
            absent.append(Absent(job.name, "no time left", "leave out --quick" if quick else "name fewer transports"))
            continue
        try:
            with job.open() as paths:
                for i, path in enumerate(paths):
                    tell(f"{job.name}, {path.way}", done + i, total)
                    budget = min(copying / total, (until - time.monotonic()) / (total - done - i))
                    taken = tuple(samples(path, QUICK_LENGTHS if quick else LENGTHS, budget))
                    measured.append(Measured(path.transport, path.way, path.source, path.sink, taken, fit(taken)))
        except (KvprotoError, OSError) as error:
            said = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else str(error)
            absent.append(Absent(job.name, said, slow=True))
        done += job.paths
    if not measured:
        why = "; ".join(f"{a.what}: {a.reason}" for a in absent)
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "a transport of " + ", ".join(transports), why)
    tell("done", total, total)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Probe(date, quick, memory, host, tuple(measured), tuple(absent))


def _host() -> Host:
    gpus, driver = next((found for name in names() if (found := find(name).gpus())[0]), ((), None))
    return Host(os.cpu_count() or 1, f"{platform.machine()}, {platform.system()}", gpus, driver)


def _jobs(transports: Sequence[str], memory: int, host: Host) -> tuple[list[BenchJob], list[Absent]]:
    jobs: list[BenchJob] = []
    absent: list[Absent] = []
    for name in sorted(transports, key=lambda name: len(find(name).requires)):  # those that start fastest come first
        provider = find(name)
        if provider.missing() is not None:
            absent.append(Absent(name, "not installed", provider.install))
            continue
        some, others = provider.bench(memory, len(host.gpus))
        jobs += some
        absent += others
    return jobs, absent
