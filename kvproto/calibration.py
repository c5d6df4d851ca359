"""What the transports of this machine cost: measured, kept in a file, and estimated for a program of copies."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import Runs
from kvproto.errors import KvprotoError, LocalError, WireError
from kvproto.transport import find, names
from kvproto.transport.bench import (
    LAYERS,
    Absent,
    BenchJob,
    BenchPath,
    Constants,
    CostedWay,
    CostKind,
    Floor,
    Measured,
    RunOnce,
    Sample,
)
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_json

__all__ = [
    "LEAST_MEMORY",
    "LENGTHS",
    "ORIGIN",
    "Advice",
    "Cost",
    "Estimate",
    "Host",
    "Probe",
    "Slow",
    "Spread",
    "advise",
    "advise_spread",
    "estimates",
    "fit",
    "floors",
    "load",
    "load_costs",
    "probe",
    "reference_costs",
    "samples",
    "save",
    "spread",
]

_VERSION = 1


@cache
def floors() -> tuple[Floor, ...]:
    """The floors of all transports, with which `Probe.slow` compares."""
    return tuple(floor for name in names() for floor in find(name).floors)


@attrs.frozen
class Slow:
    """A path that is slower than it should be; rates are in bytes a second, and None if there is no path at all."""

    what: str
    rate: float | None
    floor: float | None
    advice: str
    """What to look at; if there is no path, also what went wrong."""


@attrs.frozen
class Host:
    """The machine that the figures depend on."""

    cpus: int
    machine: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None


@attrs.frozen
class Probe:
    """The results of one `kvproto probe`."""

    date: str
    """ISO 8601, UTC."""
    quick: bool
    memory: int
    """Bytes that it was allowed to use."""
    host: Host
    measured: tuple[Measured, ...]
    absent: tuple[Absent, ...] = ()

    def slow(self) -> tuple[Slow, ...]:
        """Paths below their floor, and missing paths that should be there."""
        below = [
            Slow(m.name, m.rate, f.floor, f.advice)
            for m in self.measured
            for f in floors()
            if f.transport == m.transport and m.way in f.ways and f.gpus == m.gpus
            and not (m.gpus and m.source == m.sink) and m.rate < f.floor
        ]  # fmt: skip
        missing = [
            Slow(a.what, None, None, "; ".join(filter(None, (a.reason, a.advice)))) for a in self.absent if a.slow
        ]
        return (*below, *missing)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file; its `slow` is for readers, as it follows from the rest."""
        made: dict[str, Any] = {"kvproto_probe": _VERSION, **attrs.asdict(self)}
        return made | {"slow": [attrs.asdict(s) for s in self.slow()]}

    @classmethod
    def from_dict(cls, data: Any) -> Probe:
        """The inverse of `to_dict`; unknown fields are ignored.

        Raises LocalError: UNSUPPORTED_VERSION, or MISSING_FIELD, BAD_TYPE, OUT_OF_RANGE with the path of what is wrong.
        """
        _check(data, (dict,), "an object", "")
        version = _field(data, "", "kvproto_probe", int)
        if version != _VERSION:
            said = str(_VERSION), str(version), "probe with this kvproto"
            raise LocalError(ErrorCode.UNSUPPORTED_VERSION, "kvproto_probe", *said)
        made: Probe = _read(cls, data, "")
        for i, measured in enumerate(made.measured):
            if not measured.samples:
                raise LocalError(ErrorCode.OUT_OF_RANGE, f"measured[{i}].samples", "a sample", "none")
        return made


def save(found: Probe, path: Path) -> None:
    """Write the file; raises OSError."""
    path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def load(path: Path) -> Probe:
    """Read the file; raises LocalError with the path of the file and of what is wrong in it."""
    advice = "write one with `kvproto probe --out FILE`"
    try:
        data = read_json(path.read_bytes(), str(path), finite=False)  # from_dict refuses these, with a path
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise LocalError(ErrorCode.OUT_OF_RANGE, str(path), "a file of `kvproto probe`", said, advice) from None
    except WireError as error:
        raise LocalError(error.code, error.path, error.mine, error.yours, advice) from None
    try:
        return Probe.from_dict(data)
    except LocalError as error:
        where = f"{path}: {error.path}" if error.path else str(path)
        raise LocalError(error.code, where, error.mine, error.yours, error.advice or advice) from None


_SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"), str: ((str,), "a string"),
    bool: ((bool,), "true or false"),
}  # fmt: skip
"""The types that JSON may have for each of ours, and their names in errors."""


def _read(kind: Any, data: Any, path: str, least: float | None = None) -> Any:
    """A value of type `kind` from what `attrs.asdict` and JSON made of it; numbers are positive, or equal `least`."""
    if attrs.has(kind):
        _check(data, (dict,), "an object", path)
        types = get_type_hints(kind)
        return kind(**{f.name: _field(data, path, f.name, types[f.name], f.default) for f in attrs.fields(kind)})
    if get_origin(kind) is tuple:
        _check(data, (list, tuple), "a list", path)
        return tuple(_read(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if get_origin(kind) is UnionType:
        return None if data is None else _read(get_args(kind)[0], data, path)
    _check(data, *_SCALARS[kind], path)
    if kind in (int, float):
        if not 0 < data < 1e300 and data != least:
            raise LocalError(ErrorCode.OUT_OF_RANGE, path, "a positive number", str(data)[:40])
        return kind(data)
    return data


def _field(data: dict[str, Any], path: str, name: str, kind: Any, least: float | None = None) -> Any:
    where = f"{path}.{name}" if path else name
    if name not in data:
        raise LocalError(ErrorCode.MISSING_FIELD, where, _SCALARS.get(kind, (None, "a value"))[1], "nothing")
    return _read(kind, data[name], where, least)


def _check(value: Any, types: tuple[type, ...], wanted: str, path: str) -> None:
    if type(value) not in types:
        raise LocalError(ErrorCode.BAD_TYPE, path, wanted, type(value).__name__)


_ROUNDS = 4, 31
"""The rounds for which a program must be small enough, and the most that are made."""


def samples(path: BenchPath, lengths: Sequence[int], budget: float) -> Iterator[Sample]:
    """A sample of the smallest program, then one for each length that fits, in about `budget` seconds."""
    until = time.perf_counter() + budget
    yield _sample(path.runner(lengths[0], 1), lengths[0], 1, budget / (len(lengths) + 1))
    for i, run in enumerate(lengths):
        most = path.most_runs(run)
        share = (until - time.perf_counter()) / (len(lengths) - i)
        if most < 1 or (share <= 0 and i > 1):
            continue
        runs = _affordable(path, run, most, share / _ROUNDS[0])
        yield _sample(path.runner(run, runs), run, runs, share)


def _affordable(path: BenchPath, run: int, most: int, seconds: float) -> int:
    """How many runs take at most `seconds`, judged by a smaller program."""
    few = max(most // 16, 1)
    go = path.runner(run, few)
    go()  # the first run touches memory, connects and compiles
    runs = max(min(most, int(few * seconds / max(go(), 1e-9))), 1)
    return runs - runs % LAYERS if runs > LAYERS else runs


def _sample(go: RunOnce, run: int, runs: int, seconds: float) -> Sample:
    until = time.perf_counter() + seconds
    go()
    found = [go()]
    while len(found) < _ROUNDS[1] and time.perf_counter() < until:
        found.append(go())
    return Sample(run, runs, median(found))


_LEAST_SECONDS = 1e-12
"""The cost of a run or a start that is too small to measure."""


def fit(samples: Iterable[Sample]) -> Constants:
    """The positive constants that fit best, by least squares of the relative errors.

    Of five samples or more, one outlier is left out if that improves the fit to all of them. Raises
    LocalError(OUT_OF_RANGE) without samples.
    """
    some = list(samples)
    if not some:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "samples", "a sample", "none")
    seconds = np.array([s.seconds for s in some], np.float64)
    terms = np.array([(s.run * s.runs, s.runs, 1) for s in some], np.float64) / seconds[:, None]
    fits = [_positive(terms)]
    if len(some) > 4:
        fits += [_positive(np.delete(terms, i, axis=0)) for i in range(len(some))]
    best = min(fits, key=lambda x: float(np.abs(np.log(terms @ x)).sum()))
    byte, run, start = best.tolist()
    off = float(np.median(np.abs(terms @ best - 1)))
    return Constants(1 / byte, max(run, _LEAST_SECONDS), max(start, _LEAST_SECONDS), off)


def _positive(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The least squares solution of terms @ x = 1 with x >= 0 and x[0] > 0, the best of all subsets of the terms."""
    scale = np.sqrt((terms**2).sum(axis=0))
    scaled = terms / scale
    best, least = np.zeros(len(scale)), math.inf
    for rest in itertools.product((False, True), repeat=len(scale) - 1):
        kept = np.array([True, *rest])
        x = np.zeros(len(kept))
        x[kept] = np.linalg.lstsq(scaled[:, kept], np.ones(len(terms)), rcond=None)[0]
        missed = float(((scaled @ x - 1) ** 2).sum())
        if (x[kept] > 0).all() and missed < least:
            best, least = x, missed
    made: npt.NDArray[np.float64] = best / scale
    return made


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


def load_costs(path: Path) -> tuple[Cost, ...]:
    """The constants in a file of `kvproto probe`: between GPUs if it has any, else on the host.

    Of several pairs of GPUs the slowest counts. Raises LocalError with the path of the file and of what is wrong in it.
    """
    found = load(path)
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
