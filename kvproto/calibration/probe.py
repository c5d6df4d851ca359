"""What this machine's transports cost: samples, constants that fit them, slow paths, and the file that keeps it all.

The model is that of `kvproto.calibration.cost`: a program takes start + bytes / link + runs * run seconds. Also here:
programs that are named by their run length, for probes, benchmarks and tests.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import OP, CopyProgram, IntArray, RowMap
from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.nixl.direct import DEVICE_FLOOR
from kvproto.wire.enums import ErrorCode

if TYPE_CHECKING:
    from kvproto.calibration.measure.line import Job

__all__ = [
    "FLOORS", "LEAST_MEMORY", "TRANSPORTS", "Absent", "Constants", "Floor", "Host", "Measured", "Probe", "Sample",
    "Slow", "fit", "load", "probe", "save", "scattered",
]  # fmt: skip

TRANSPORTS = ("shm", "nixl", "cuda")
LENGTHS = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
QUICK_LENGTHS = (256, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
LEAST_MEMORY = 4 << 20
_SECONDS, _QUICK_SECONDS = (40.0, 54.0), (4.0, 8.0)
"""For copying; and until no other job is begun, as starting UCX and compiling a kernel take time too."""
_VERSION = 1


# what was found


@attrs.frozen
class Sample:
    """Seconds of programs of one size, the median of several."""

    run: int
    """Bytes of a run."""
    runs: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.run * self.runs / self.seconds


@attrs.frozen
class Constants:
    """What fits the samples of one way; all are positive."""

    link: float
    """Bytes a second at long runs."""
    run: float
    """Seconds that each run costs more than its bytes."""
    start: float
    """Seconds before the first byte."""
    error: float = 0.0
    """Median of how far the samples are from the fit, as a share of each."""

    def seconds(self, bytes_: float, runs: float) -> float:
        """Of a program of so many bytes in so many runs."""
        return self.start + bytes_ / self.link + runs * self.run


@attrs.frozen
class Measured:
    """One transport's way from one place to another: `host`, or `gpu0`, `gpu1`, ..."""

    transport: str
    way: str
    """shm: copy. nixl: direct (a descriptor a run), packed. cuda: pull, push, engine (a peer copy a run)."""
    source: str
    sink: str
    samples: tuple[Sample, ...]
    constants: Constants

    @property
    def name(self) -> str:
        """For people."""
        ends = f" {self.source} to {self.sink}" if self.gpus else ""
        return f"{self.transport} {self.way}{ends}"

    @property
    def gpus(self) -> bool:
        """Whether it goes between GPUs, or within one."""
        return self.source != "host"

    @property
    def rate(self) -> float:
        """Bytes a second of the best sample."""
        return max(s.rate for s in self.samples)


@attrs.frozen
class Absent:
    """What was not measured, and why."""

    what: str
    reason: str
    advice: str = ""
    slow: bool = False
    """Whether it should have been there: what would take it takes a slower path."""


@attrs.frozen
class Slow:
    """A path that is not what it should be; rates in bytes a second, None where there is no path at all."""

    what: str
    rate: float | None
    floor: float | None
    advice: str
    """What to look at; where there is no path, what went wrong too."""


@attrs.frozen
class Floor:
    """Bytes a second below which the best sample of a way tells that something is wrong."""

    transport: str
    ways: tuple[str, ...]
    gpus: bool
    """Between two GPUs; else on the host."""
    floor: float
    advice: str


FLOORS = (
    Floor("shm", ("copy",), False, 0.5e9, "the cores are busy, or memory is swapped or of another NUMA node"),
    Floor("nixl", ("direct",), False, 0.5e9, "UCX does not use shared memory: see UCX_TLS, and limits of /dev/shm"),
    Floor(
        "nixl", ("direct",), True, DEVICE_FLOOR,
        "UCX goes by sockets or through the host: see UCX_TLS, UCX_NET_DEVICES, and whether UCX was built with CUDA",
    ),
    Floor(
        "cuda", ("pull", "push", "engine"), True, 10e9,
        "less than PCIe 3.0 x16 gives: see `nvidia-smi topo -m`, the slot's width, IOMMU, ACS, others on the GPU",
    ),
)  # fmt: skip
"""What `Probe.slow` compares with."""


@attrs.frozen
class Host:
    """What of a machine the figures depend on."""

    cpus: int
    machine: str
    gpus: tuple[str, ...] = ()
    driver: str | None = None


@attrs.frozen
class Probe:
    """All that was found in one go."""

    date: str
    """ISO 8601, UTC."""
    quick: bool
    memory: int
    """Bytes that it was allowed."""
    host: Host
    measured: tuple[Measured, ...]
    absent: tuple[Absent, ...] = ()

    def slow(self) -> tuple[Slow, ...]:
        """Paths below their floor, and those that should be there."""
        found = [
            Slow(m.name, m.rate, f.floor, f.advice)
            for m in self.measured
            for f in FLOORS
            if f.transport == m.transport and m.way in f.ways and f.gpus == m.gpus
            and not (m.gpus and m.source == m.sink) and m.rate < f.floor
        ]  # fmt: skip
        for a in self.absent:
            if a.slow:
                found.append(Slow(a.what, None, None, "; ".join(filter(None, (a.reason, a.advice)))))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds; `slow` is for readers, and follows from the rest."""
        made: dict[str, Any] = {"kvproto_probe": _VERSION, **attrs.asdict(self)}
        return made | {"slow": [attrs.asdict(s) for s in self.slow()]}

    @classmethod
    def from_dict(cls, data: Any) -> Probe:
        """The inverse; fields that are not known are passed over.

        Raises LocalError: UNSUPPORTED_VERSION, or MISSING_FIELD, BAD_TYPE, OUT_OF_RANGE with the path of what is wrong.
        """
        top = _Reader(data, "")
        version = top.number("kvproto_probe", whole=True)
        if version != _VERSION:
            raise LocalError(
                ErrorCode.UNSUPPORTED_VERSION, "kvproto_probe", str(_VERSION), str(version), "probe with this kvproto"
            )
        host = top.inner("host")
        return cls(
            top.text("date"), top.flag("quick"), int(top.number("memory", whole=True)),
            Host(
                int(host.number("cpus", whole=True)), host.text("machine"),
                host.texts("gpus"), host.text("driver", none=True) or None,
            ),
            tuple(_measured(m) for m in top.each("measured")),
            tuple(_absent(a) for a in top.each("absent")),
        )  # fmt: skip


def save(found: Probe, path: Path) -> None:
    """Write the file; raises OSError."""
    path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")


def load(path: Path) -> Probe:
    """Read the file; raises LocalError with the path of the file and of what is wrong in it."""
    advice = "write one with `kvproto probe --out FILE`"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        said = error.strerror or type(error).__name__
        raise LocalError(ErrorCode.OUT_OF_RANGE, str(path), "a file of `kvproto probe`", said, advice) from None
    except (ValueError, RecursionError) as error:
        raise LocalError(ErrorCode.BAD_TYPE, str(path), "JSON", str(error), advice) from None
    try:
        return Probe.from_dict(data)
    except LocalError as error:
        where = f"{path}: {error.path}" if error.path else str(path)
        raise LocalError(error.code, where, error.mine, error.yours, error.advice or advice) from None


def _absent(data: _Reader) -> Absent:
    return Absent(data.text("what"), data.text("reason"), data.text("advice"), data.flag("slow"))


def _measured(data: _Reader) -> Measured:
    inner = data.inner("constants")
    link, run, start = (inner.number(n) for n in ("link", "run", "start"))
    constants = Constants(link, run, start, inner.number("error", least=0))
    samples = tuple(
        Sample(int(s.number("run", whole=True)), int(s.number("runs", whole=True)), s.number("seconds"))
        for s in data.each("samples")
    )
    if not samples:
        raise LocalError(ErrorCode.OUT_OF_RANGE, f"{data.path}.samples", "a sample", "none")
    transport, way, source, sink = (data.text(n) for n in ("transport", "way", "source", "sink"))
    return Measured(transport, way, source, sink, samples, constants)


@attrs.frozen
class _Reader:
    """An object of JSON, its fields by name and type."""

    data: Any
    path: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.data, dict):
            raise LocalError(ErrorCode.BAD_TYPE, self.path, "an object", type(self.data).__name__)

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def _take(self, name: str, kinds: tuple[type, ...], wanted: str) -> Any:
        if name not in self.data:
            raise LocalError(ErrorCode.MISSING_FIELD, self.at(name), wanted, "nothing")
        value = self.data[name]
        if type(value) not in kinds:
            raise LocalError(ErrorCode.BAD_TYPE, self.at(name), wanted, type(value).__name__)
        return value

    def number(self, name: str, whole: bool = False, least: float | None = None) -> float:
        """A positive one, or one of at least `least`."""
        wanted = "a whole number" if whole else "a number"
        value = self._take(name, (int,) if whole else (int, float), wanted)
        if not 0 < value < 1e300 and not (least is not None and least <= value < 1e300):
            raise LocalError(ErrorCode.OUT_OF_RANGE, self.at(name), "a positive number", f"{value:.6g}"[:40])
        return value if whole else float(value)

    def text(self, name: str, none: bool = False) -> str:
        """A string; with `none` an empty one for null."""
        return self._take(name, (str, type(None)) if none else (str,), "a string") or ""

    def flag(self, name: str) -> bool:
        """True or false."""
        return bool(self._take(name, (bool,), "true or false"))

    def inner(self, name: str) -> _Reader:
        """An object within."""
        return _Reader(self._take(name, (dict,), "an object"), self.at(name))

    def each(self, name: str) -> Iterator[_Reader]:
        """A list of objects."""
        for i, item in enumerate(self._take(name, (list, tuple), "a list")):
            yield _Reader(item, f"{self.at(name)}[{i}]")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        made: Sequence[Any] = self._take(name, (list, tuple), "a list")
        for i, item in enumerate(made):
            if type(item) is not str:
                raise LocalError(ErrorCode.BAD_TYPE, f"{self.at(name)}[{i}]", "a string", type(item).__name__)
        return tuple(made)


# the fit

_LEAST_SECONDS = 1e-12
"""Of a run or a start that no sample shows."""


def fit(samples: Iterable[Sample]) -> Constants:
    """The constants that fit best, all positive: least squares of each sample's share of error.

    Of five samples or more, one is left out where that brings the fit nearer to all of them in sum: a machine does
    other things too. Raises LocalError(OUT_OF_RANGE) without samples.
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
    """Least squares of terms @ x = 1, x >= 0, the first above: of all choices of terms the best that is positive."""
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


# measuring


def probe(
    transports: Sequence[str] = TRANSPORTS,
    quick: bool = False,
    memory: int = 512 << 20,
    tell: Callable[[str, int, int], None] = lambda what, done, all_: None,
) -> Probe:
    """Measure the transports that this machine has, in under 60 s, or under 10 s where `quick`.

    memory: bytes of all pools and staging slots at any time, host and devices together. `tell` hears what is next, and
    how many ways of how many are done. Raises LocalError: OUT_OF_RANGE for other transports or too little memory,
    NO_TRANSPORT where none of the transports is here. A transport that fails is absent, as are ways without time left.
    """
    strange = [t for t in transports if t not in TRANSPORTS]
    if strange or not transports:
        known = ", ".join(TRANSPORTS)
        raise LocalError(ErrorCode.OUT_OF_RANGE, "transports", f"some of {known}", ", ".join(strange) or "none")
    if memory < LEAST_MEMORY:
        raise LocalError(ErrorCode.OUT_OF_RANGE, "memory", f"{LEAST_MEMORY} bytes at least", str(memory))
    from kvproto.calibration.measure.line import samples

    host = _host()
    jobs, absent = _jobs(transports, memory, host)
    total, done = sum(j.lines for j in jobs), 0
    copying, end = _QUICK_SECONDS if quick else _SECONDS
    until = time.monotonic() + end
    measured: list[Measured] = []
    for job in jobs:
        tell(job.name, done, total)
        if time.monotonic() > until:
            absent.append(Absent(job.name, "no time left", "leave out --quick" if quick else "name fewer transports"))
            continue
        try:
            with job.open() as lines:
                for i, line in enumerate(lines):
                    tell(f"{job.name}, {line.way}", done + i, total)
                    budget = min(copying / total, (until - time.monotonic()) / (total - done - i))
                    taken = tuple(samples(line, QUICK_LENGTHS if quick else LENGTHS, budget))
                    measured.append(Measured(line.transport, line.way, line.source, line.sink, taken, fit(taken)))
        except (KvprotoError, OSError) as error:
            said = error.between("wanted", "found", " ") if isinstance(error, KvprotoError) else str(error)
            absent.append(Absent(job.name, said, slow=True))
        done += job.lines
    if not measured:
        why = "; ".join(f"{a.what}: {a.reason}" for a in absent)
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "a transport of " + ", ".join(transports), why)
    tell("done", total, total)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Probe(date, quick, memory, host, tuple(measured), tuple(absent))


def _host() -> Host:
    gpus: tuple[str, ...] = ()
    driver = None
    if _installed("cuda", "cuda.core"):
        from kvproto.calibration.measure import cuda

        gpus = cuda.names()
        driver = cuda.driver_version() if gpus else None
    return Host(os.cpu_count() or 1, f"{platform.machine()}, {platform.system()}", gpus, driver)


def _installed(*modules: str) -> bool:
    """Outermost first."""
    return all(importlib.util.find_spec(m) for m in modules)


def _jobs(transports: Sequence[str], memory: int, host: Host) -> tuple[list[Job], list[Absent]]:
    jobs: list[Job] = []
    absent: list[Absent] = []
    if "shm" in transports:
        from kvproto.calibration.measure import shm

        jobs.append(shm.job(memory))
    if "nixl" in transports:
        if _installed("nixl"):
            from kvproto.calibration.measure import nixl

            jobs.append(nixl.job(memory))
            if len(host.gpus) > 1:
                jobs.append(nixl.job(memory, "gpu0", "gpu1"))
        else:
            absent.append(Absent("nixl", "not installed", "pip install 'kvproto[nixl]'"))
    if "cuda" in transports:
        if host.gpus:
            from kvproto.calibration.measure import cuda

            reach, apart = cuda.pairs()
            jobs += [cuda.job(memory, a, b) for a, b in reach]
            advice = "use transport nixl between them; see `nvidia-smi topo -p2p r`"
            absent += [Absent(f"cuda gpu{a} to gpu{b}", "no peer access", advice, slow=True) for a, b in apart]
        elif _installed("cuda", "cuda.core"):
            absent.append(Absent("cuda", "no GPU"))
        else:
            absent.append(Absent("cuda", "not installed", "pip install 'kvproto[cuda]'"))
    return jobs, absent


# programs


def scattered(
    width: int, number: int, layers: int = 1, pool: int | None = None, seed: int = 0, run: int = 1
) -> CopyProgram:
    """`number` runs of `run` rows of `width` bytes, of each layer, between places in no order of pools of `pool` rows.

    A pool holds layer after layer without gaps, in region 0.
    """
    dice = np.random.default_rng(seed)
    room = (pool or number * run) // run
    places = [dice.permutation(room)[:number] if room < 1 << 24 else _some(dice, room, number) for _ in range(2)]
    zero = np.zeros(number, np.int64)
    ops = np.zeros(layers, OP)
    size = room * run
    ops["layer"], ops["lanes"], ops["lane_bytes"] = np.arange(layers), 1, width
    for side in ("source", "sink"):
        ops[f"{side}_offset"] = np.arange(layers) * size * width
        ops[f"{side}_item_stride"] = size * width
        ops[f"{side}_row_stride"] = ops[f"{side}_lane_stride"] = width
        ops[f"{side}_items"], ops[f"{side}_rows"] = 1, size
    first = np.array([0])
    made = RowMap(zero, places[0] * run, zero, places[1] * run, np.full(number, run), first, np.array([number * run]))
    return CopyProgram((made,), ops, (1,))


def _some(dice: np.random.Generator, room: int, number: int) -> IntArray:
    """Distinct random places of a room that is too large to permute."""
    found: IntArray = np.unique(dice.integers(0, room, number + number // 8 + 64))
    some: IntArray = dice.permutation(found)[:number]
    return some
