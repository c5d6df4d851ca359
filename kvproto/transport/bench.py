"""Results, paths and programs for measuring: a copy takes start + bytes / link + runs * run seconds."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import attrs
import numpy as np

from kvproto.copying.program import OP, CopyProgram, IntArray, Operations, RowMap

RunOnce = Callable[[], float]
"""Copies once and returns the seconds that it took."""
Prepare = Callable[[CopyProgram], RunOnce]
HOST = "host"
"""The place of host memory; those of GPUs are `gpu0`, `gpu1`, ..."""
CostKind = Literal["direct", "packed", "copy"]
"""direct: one descriptor for each run. packed: gathered and scattered. copy: by a side that maps the other's memory."""
LAYERS = 64
"""Layers of a program for measuring, if they divide its runs."""


@attrs.frozen
class Sample:
    """The median time of several runs of a program."""

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
    """The constants of one way; all are positive."""

    link: float
    """Bytes a second at long runs."""
    run: float
    """Seconds that each run costs in addition to its bytes."""
    start: float
    """Seconds before the first byte."""
    error: float = 0.0
    """The median relative error of the fit."""

    def seconds(self, bytes_: float, runs: float) -> float:
        """The time that a program of so many bytes in so many runs takes."""
        return self.start + bytes_ / self.link + runs * self.run


@attrs.frozen
class CostedWay:
    """A way of copying that plans are compared by."""

    way: str
    """The transport's name for it."""
    name: str
    """Its name in reports."""
    kind: CostKind
    constants: Constants | None = None
    """At first those measured between two H200; None if only `kvproto probe` can tell."""


@attrs.frozen
class Measured:
    """One transport's way from one place to another: `host`, or `gpu0`, `gpu1`, ..."""

    transport: str
    way: str
    """The transport's name for it, such as `pull`."""
    source: str
    sink: str
    samples: tuple[Sample, ...]
    constants: Constants

    @property
    def name(self) -> str:
        """Its name in reports."""
        ends = f" {self.source} to {self.sink}" if self.gpus else ""
        return f"{self.transport} {self.way}{ends}"

    @property
    def gpus(self) -> bool:
        """Whether it goes between GPUs, or within one."""
        return self.source != HOST

    @property
    def rate(self) -> float:
        """Bytes a second of the best sample."""
        return max(s.rate for s in self.samples)


@attrs.frozen
class Absent:
    """The paths that were not measured, each with its reason."""

    what: str
    reason: str
    advice: str = ""
    slow: bool = False
    """Whether it should be there, because transfers take a slower path without it."""


@attrs.frozen
class Floor:
    """The rate in bytes a second below which something is wrong with a way."""

    transport: str
    ways: tuple[str, ...]
    gpus: bool
    """Whether it holds for ways between GPUs, or on the host."""
    floor: float
    advice: str


def same_path(this: Measured, measured: Iterable[Measured], way: str) -> list[Measured]:
    """The measurements of another way of the same transport between the same places."""
    wanted = attrs.evolve(this, way=way).name
    return [m for m in measured if m.name == wanted]


@attrs.frozen
class BenchPath:
    """One transport's way of copying from one place to another."""

    transport: str
    way: str
    source: str
    sink: str
    pool: int
    """Bytes of the pool at either end."""
    most: int
    """Runs that a program may have."""
    prepare: Prepare
    """Prepare a program between the pools; returns a function that copies it each time."""


@attrs.frozen
class BenchJob:
    """Paths that are set up and released together."""

    name: str
    paths: int
    open: Callable[[], AbstractContextManager[Sequence[BenchPath]]]


def program(run: int, runs: int, pool: int) -> CopyProgram:
    """`runs` scattered runs of `run` bytes in pools of `pool` bytes, over `LAYERS` layers if they divide `runs`."""
    width = min(run, 4096)
    layers = LAYERS if not runs % LAYERS else 1
    return scattered(width, runs // layers, layers, pool // layers // width, seed=run, run=run // width)


def scattered(
    width: int, number: int, layers: int = 1, pool: int | None = None, seed: int = 0, run: int = 1
) -> CopyProgram:
    """For each layer, one after the other, `number` runs of `run` rows of `width` bytes at random places of pools."""
    dice = np.random.default_rng(seed)
    places = (pool or number * run) // run
    source, sink = (_distinct(dice, places, number) * run for _ in range(2))
    ops = np.zeros(layers, OP)
    ops["layer"], ops["lanes"], ops["lane_bytes"] = np.arange(layers), 1, width
    for side in ("source", "sink"):
        ops[f"{side}_offset"] = np.arange(layers) * places * run * width
        ops[f"{side}_item_stride"] = places * run * width
        ops[f"{side}_row_stride"] = ops[f"{side}_lane_stride"] = width
        ops[f"{side}_items"], ops[f"{side}_rows"] = 1, places * run
    item = np.zeros(number, np.int64)
    rows = RowMap(item, source, item, sink, np.full(number, run), np.array([0]), np.array([number * run]))
    return CopyProgram((rows,), Operations(ops), (1,))


def _distinct(dice: np.random.Generator, places: int, number: int) -> IntArray:
    """Distinct random places of a pool, which may be too large to permute."""
    drawn = np.arange(places) if places < 1 << 24 else np.unique(dice.integers(0, places, number + number // 8 + 64))
    return dice.permutation(drawn)[:number]
