"""Costs of this machine's transports: measured, kept in a file, and estimated for a program of copies."""

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from kvproto.errors import KvprotoError, LocalError, WireError, bad
from kvproto.transport import bench, find, names
from kvproto.transport.bench import LAYERS, Absent, BenchPath, Constants, CostedWay, CostKind, Floor, Measured, Sample
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import read_file, read_json

LENGTHS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
_QUICK_LENGTHS = (256, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
LEAST_MEMORY = 4 << 20
_SECONDS, _QUICK_SECONDS = (40.0, 54.0), (4.0, 8.0)
"""Seconds for copying, and after which no other job begins, as starting UCX and compiling a kernel take time too."""
_ROUNDS = 4, 31
"""The rounds for which a program must be small enough, and the most that are run."""


# Results, and the file that keeps them.


@attrs.frozen
class Slow:
    """A path that is slower than it should be; rates are in bytes a second, and None if there is no path at all."""

    what: str
    rate: float | None
    floor: float | None
    advice: str
    """Advice on the path; if there is none, also the reason."""


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
        pairs = [(m, f) for m in self.measured for f in floors() if f.transport == m.transport and m.way in f.ways]
        below = [
            Slow(m.name, m.rate, f.floor, f.advice)
            for m, f in pairs
            if f.gpus == m.gpus and not (m.gpus and m.source == m.sink) and m.rate < f.floor
        ]
        absent = [
            Slow(a.what, None, None, "; ".join(filter(None, (a.reason, a.advice)))) for a in self.absent if a.slow
        ]
        return (*below, *absent)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file; its `slow` is for readers, as it follows from the rest."""
        return {"kvproto_probe": 1, **attrs.asdict(self), "slow": [attrs.asdict(slow) for slow in self.slow()]}

    @classmethod
    def from_dict(cls, data: Any) -> "Probe":
        """The inverse of `to_dict`, which ignores unknown fields; raises LocalError with the path of what is wrong."""
        _check_type(data, (dict,), "an object", "")
        if (version := _field(data, "", "kvproto_probe", int)) != 1:
            advice = "probe with this kvproto"
            raise LocalError(ErrorCode.UNSUPPORTED_VERSION, "kvproto_probe", "1", str(version), advice)
        probe: Probe = _value(cls, data, "")
        for i, measured in enumerate(probe.measured):
            if not measured.samples:
                raise bad(f"measured[{i}].samples", "a sample", "none")
        return probe


@cache
def floors() -> tuple[Floor, ...]:
    """The floors of all transports, with which `Probe.slow` compares."""
    return tuple(floor for name in names() for floor in find(name).floors)


def save(probe: Probe, path: Path) -> None:
    """Write the file; raises OSError."""
    path.write_text(json.dumps(probe.to_dict(), indent=1) + "\n")


def load(path: Path) -> Probe:
    """Read the file; raises LocalError with the path of the file and of what is wrong in it."""
    advice = "write one with `kvproto probe --out FILE`"
    try:
        return Probe.from_dict(
            read_json(read_file(path), str(path), finite=False)
        )  # from_dict refuses NaN, with a path
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise bad(str(path), "a file of `kvproto probe`", reason, advice) from None
    except WireError as error:
        raise LocalError(error.code, error.path, error.mine, error.yours, advice) from None
    except LocalError as error:
        place = f"{path}: {error.path}" if error.path else str(path)
        raise LocalError(error.code, place, error.mine, error.yours, error.advice or advice) from None


_SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
    bool: ((bool,), "true or false"),
}
"""The types that JSON may have for each of ours, and their names in errors."""


def _value(kind: Any, data: Any, path: str, least: float | None = None) -> Any:
    """A value of type `kind` from what `attrs.asdict` and JSON made of it; numbers are positive, or equal `least`."""
    if attrs.has(kind):
        _check_type(data, (dict,), "an object", path)
        types = get_type_hints(kind)
        return kind(**{f.name: _field(data, path, f.name, types[f.name], f.default) for f in attrs.fields(kind)})
    if get_origin(kind) is tuple:
        _check_type(data, (list, tuple), "a list", path)
        return tuple(_value(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if get_origin(kind) is UnionType:
        return None if data is None else _value(get_args(kind)[0], data, path)
    _check_type(data, *_SCALARS[kind], path)
    if kind in (int, float) and not 0 < data < 1e300 and data != least:
        raise bad(path, "a positive number", str(data)[:40])
    return kind(data)


def _field(data: dict[str, Any], path: str, name: str, kind: Any, least: float | None = None) -> Any:
    place = f"{path}.{name}" if path else name
    if name not in data:
        raise LocalError(ErrorCode.MISSING_FIELD, place, _SCALARS.get(kind, (None, "a value"))[1], "nothing")
    return _value(kind, data[name], place, least)


def _check_type(value: Any, types: tuple[type, ...], wanted: str, path: str) -> None:
    if type(value) not in types:
        raise LocalError(ErrorCode.BAD_TYPE, path, wanted, type(value).__name__)


# Measuring.


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
    strange = [name for name in transports if name not in names()]
    if strange or not transports:
        known = ", ".join(names())
        raise bad("transports", f"some of {known}", ", ".join(strange) or "none")
    if memory < LEAST_MEMORY:
        raise bad("memory", f"at least {LEAST_MEMORY} bytes", memory)
    gpus, driver = next((seen for name in names() if (seen := find(name).gpus())[0]), ((), None))
    host = Host(os.cpu_count() or 1, f"{platform.machine()}, {platform.system()}", gpus, driver)
    absent = [Absent(n, "not installed", find(n).install) for n in transports if find(n).missing() is not None]
    providers = [find(name) for name in transports if find(name).missing() is None]
    # Those that start fastest come first.
    benches = [p.bench(memory, len(gpus)) for p in sorted(providers, key=lambda p: len(p.requires))]
    jobs = [job for timed, _ in benches for job in timed]
    absent += [path for _, missing in benches for path in missing]
    total, done, measured = sum(job.paths for job in jobs), 0, list[Measured]()
    copying, end = _QUICK_SECONDS if quick else _SECONDS
    until = time.monotonic() + end
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
                    samples = tuple(_samples(path, _QUICK_LENGTHS if quick else LENGTHS, budget))
                    measured.append(Measured(path.transport, path.way, path.source, path.sink, samples, fit(samples)))
        except (KvprotoError, OSError) as error:
            reason = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else str(error)
            absent.append(Absent(job.name, reason, slow=True))
        done += job.paths
    if not measured:
        reasons = "; ".join(f"{path.what}: {path.reason}" for path in absent)
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "a transport of " + ", ".join(transports), reasons)
    tell("done", total, total)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Probe(date, quick, memory, host, tuple(measured), tuple(absent))


def _samples(path: BenchPath, lengths: Sequence[int], budget: float) -> Iterator[Sample]:
    """A sample of the smallest program, then one for each length that fits, in about `budget` seconds."""
    until = time.perf_counter() + budget
    yield _sample(path, lengths[0], 1, budget / (len(lengths) + 1))
    for i, run in enumerate(lengths):
        most = min(path.pool // run, path.most)
        share = (until - time.perf_counter()) / (len(lengths) - i)
        if most and (share > 0 or i < 2):
            yield _sample(path, run, _affordable(path, run, most, share / _ROUNDS[0]), share)


def _affordable(path: BenchPath, run: int, most: int, seconds: float) -> int:
    """The number of runs that take at most `seconds`, judged by a smaller program."""
    few = max(most // 16, 1)
    copy = path.prepare(bench.program(run, few, path.pool))
    copy()  # the first run touches memory, connects and compiles
    runs = max(min(most, int(few * seconds / max(copy(), 1e-9))), 1)
    return runs - runs % LAYERS if runs > LAYERS else runs


def _sample(path: BenchPath, run: int, runs: int, seconds: float) -> Sample:
    until = time.perf_counter() + seconds
    copy = path.prepare(bench.program(run, runs, path.pool))
    copy()
    times = [copy()]
    while len(times) < _ROUNDS[1] and time.perf_counter() < until:
        times.append(copy())
    return Sample(run, runs, median(times))


def fit(samples: Iterable[Sample]) -> Constants:
    """The positive constants that fit best by least squares of relative errors; of five samples one may be left out."""
    rows = [np.array([s.run * s.runs, s.runs, 1]) / s.seconds for s in samples]
    if not rows:
        raise bad("samples", "a sample", "none")
    terms = np.array(rows, np.float64)
    fits = [_positive(terms)]
    if len(rows) > 4:
        fits += [_positive(np.delete(terms, i, axis=0)) for i in range(len(rows))]
    best = min(fits, key=lambda x: float(np.abs(np.log(terms @ x)).sum()))
    byte, run, start = best.tolist()
    error = float(np.median(np.abs(terms @ best - 1)))
    return Constants(1 / byte, max(run, 1e-12), max(start, 1e-12), error)  # a cost may be too small to measure


def _positive(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The least squares solution of terms @ x = 1 with x >= 0 and x[0] > 0, the best of all subsets of the terms."""
    scale = np.sqrt((terms**2).sum(axis=0))
    solutions = []
    for rest in itertools.product((False, True), repeat=len(scale) - 1):
        kept = np.array([True, *rest])
        x = np.zeros(len(kept))
        x[kept] = np.linalg.lstsq((terms / scale)[:, kept], np.ones(len(terms)), rcond=None)[0]
        if (x[kept] > 0).all():
            solutions.append(x / scale)
    return min(solutions, key=lambda x: float(((terms @ x - 1) ** 2).sum()))


# Costs of programs.

ORIGIN = "measured on a pair of H200"
"""Origin of `reference_costs`."""


@cache
def _ways() -> dict[tuple[str, str], CostedWay]:
    """The ways that plans are costed by, by transport and way."""
    return {(name, cost.way): cost for name in names() for cost in find(name).costs}


def reference_costs() -> tuple[CostedWay, ...]:
    """Medians of measurements of 2026-11 between two H200 over NVLink; `kvproto probe` measures the machine at hand."""
    return tuple(way for way in _ways().values() if way.constants is not None)


def load_costs(path: Path) -> tuple[CostedWay, ...]:
    """The constants in a file of `kvproto probe`, of the slowest pair of GPUs or else the host; raises LocalError."""
    measured = load(path).measured
    known = [m for m in measured if (m.transport, m.way) in _ways()]
    if not known:
        wanted = "one of " + ", ".join(map(" ".join, _ways()))
        named = ", ".join(m.name for m in measured) or "none"
        raise bad(f"{path}: measured", wanted, named, "probe again")
    gpus = any(m.gpus for m in known)
    slowest: dict[CostedWay, Measured] = {}
    for m in known:
        way = _ways()[m.transport, m.way]
        if m.gpus == gpus and (way not in slowest or m.constants.link < slowest[way].constants.link):
            slowest[way] = m
    return tuple(attrs.evolve(way, constants=m.constants) for way, m in slowest.items())


@attrs.frozen
class Estimate:
    """The seconds that one way takes."""

    name: str
    kind: CostKind
    seconds: float


def estimates(runs: Runs, costs: Iterable[CostedWay] | None = None) -> tuple[Estimate, ...]:
    """The seconds that each way takes for the runs of one program, fastest first; by default of `reference_costs`."""
    ways = reference_costs() if costs is None else costs
    times = [
        Estimate(way.name, way.kind, way.constants.seconds(runs.bytes, runs.count))
        for way in ways
        if way.constants is not None
    ]
    return tuple(sorted(times, key=lambda estimate: estimate.seconds))


@attrs.frozen
class Advice:
    """The advised way to send, and its reason."""

    kind: Literal["direct", "pack", "copy"]
    """By descriptors; through staging slots; or copied by the side that maps the other's memory."""
    why: str


_SIMPLE = 1.5
"""Descriptors need no staging, so they are advised even if they take this many times as long as packing."""


def advise(ways: tuple[Estimate, ...]) -> Advice:
    """The way to send a program, from the estimates of its ways, fastest first."""
    direct, packed, copied = (next((w for w in ways if w.kind == kind), None) for kind in ("direct", "packed", "copy"))
    other = packed or copied
    fastest = "" if ways[0] in (direct, packed) else f"; fastest where memory can be mapped: {ways[0].name}"
    if direct is None and packed is None:
        return Advice("copy", f"by {ways[0].name}, as no other way was measured")
    if direct is None:
        return Advice("pack", f"no way by descriptors was measured{fastest}")
    if other is None or direct.seconds <= _SIMPLE * other.seconds:
        return Advice("direct", f"runs are long enough for descriptors{fastest}")
    times = direct.seconds / other.seconds
    return Advice("pack", f"descriptors take {times:,.1f} times as long as {other.name}{fastest}")
