"""A way between two places that can be timed, and how samples of it are taken within a budget of time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median

import attrs

from kvproto.calibration.probe import Sample, scattered
from kvproto.copying.program import CopyProgram

__all__ = ["HOST", "Go", "Job", "Line", "program", "samples"]

Go = Callable[[], float]
"""Copies once; seconds."""
HOST = "host"
"""The place that is no GPU; those are `gpu0`, `gpu1`, ..."""
_LAYERS = 64
_ROUNDS = 4, 31
"""Rounds that a program's size must leave time for, and the most that are made."""


class Line(ABC):
    """One transport's way of copying from one place to another."""

    transport: str
    way: str
    source: str
    sink: str

    @abstractmethod
    def most(self, run: int) -> int:
        """Runs of `run` bytes that a program may have; 0 where not one fits."""

    @abstractmethod
    def ready(self, run: int, runs: int) -> Go:
        """A program of `runs` runs of `run` bytes, to be copied again and again."""


@attrs.frozen
class Job:
    """Lines that are set up and torn down together."""

    name: str
    lines: int
    open: Callable[[], AbstractContextManager[Sequence[Line]]]


def program(run: int, runs: int, pool: int) -> CopyProgram:
    """`runs` scattered runs of `run` bytes in pools of `pool` bytes; as many layers as a model has, if they divide."""
    width = min(run, 4096)
    layers = _LAYERS if not runs % _LAYERS else 1
    return scattered(width, runs // layers, layers, pool // layers // width, seed=run, run=run // width)


def samples(line: Line, lengths: Sequence[int], budget: float) -> Iterator[Sample]:
    """One of the smallest program, then one of each length that fits, in about `budget` seconds."""
    until = time.perf_counter() + budget
    yield _sample(line.ready(lengths[0], 1), lengths[0], 1, budget / (len(lengths) + 1))
    for i, run in enumerate(lengths):
        most = line.most(run)
        share = (until - time.perf_counter()) / (len(lengths) - i)
        if most < 1 or (share <= 0 and i > 1):
            continue
        runs = _affordable(line, run, most, share / _ROUNDS[0])
        yield _sample(line.ready(run, runs), run, runs, share)


def _affordable(line: Line, run: int, most: int, seconds: float) -> int:
    """Runs that take at most `seconds`, as a smaller program foretells."""
    few = max(most // 16, 1)
    go = line.ready(run, few)
    go()  # touches, connects, compiles
    runs = max(min(most, int(few * seconds / max(go(), 1e-9))), 1)
    return runs - runs % _LAYERS if runs > _LAYERS else runs


def _sample(go: Go, run: int, runs: int, seconds: float) -> Sample:
    until = time.perf_counter() + seconds
    go()
    found = [go()]
    while len(found) < _ROUNDS[1] and time.perf_counter() < until:
        found.append(go())
    return Sample(run, runs, median(found))
