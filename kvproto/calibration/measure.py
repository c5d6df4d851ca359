"""Takes samples of a path within a budget of time, and fits the constants that explain them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.transport.bench import LAYERS, BenchPath, Constants, RunOnce, Sample
from kvproto.wire.enums import ErrorCode

__all__ = ["fit", "samples"]

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
