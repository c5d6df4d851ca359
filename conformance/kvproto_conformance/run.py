"""Runs the cases and gives the verdict."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import attrs

from kvproto_conformance.cases import Case
from kvproto_conformance.testee import Testee

__all__ = ["Result", "Verdict", "run", "verdict"]


class Verdict(IntEnum):
    """Also the exit status."""

    CONFORMANT = 0
    NONCONFORMANT = 1
    INVALID_RUN = 2


@attrs.frozen
class Result:
    """One case and every answer that was wrong."""

    case: Case
    wrong: tuple[str, ...]


def run(cases: list[Case], testee: Testee) -> list[Result]:
    """Every question of every case."""
    return [Result(case, tuple(_judge(case, testee))) for case in cases]


def _judge(case: Case, testee: Testee) -> list[str]:
    wrong = []
    for ask in case.asks:
        answer = testee.ask(ask.question)
        if ask.more:
            answer = {key: value for key, value in answer.items() if key in ask.expected} or answer
        if not _alike(answer, ask.expected, ask.tolerance):
            wrong.append(f"{ask.question['op']}: wanted {ask.expected}, got {answer}")
    return wrong


def _alike(found: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two answers are equal; with a tolerance, strings are numbers, and NaN is none."""
    match found, wanted:
        case dict(), dict():
            return found.keys() == wanted.keys() and all(_alike(found[k], wanted[k], tolerance) for k in wanted)
        case list(), list():
            pairs = zip(found, wanted, strict=False)
            return len(found) == len(wanted) and all(_alike(a, b, tolerance) for a, b in pairs)
        case str(), str() if tolerance:
            return _near(found, float(wanted), tolerance)
    return type(found) is type(wanted) and bool(found == wanted)


def _near(found: str, wanted: float, tolerance: float) -> bool:
    try:
        number = float(found)
    except ValueError:
        return False
    if math.isinf(wanted) or math.isinf(number):
        return number == wanted
    return abs(number - wanted) <= tolerance * max(1.0, abs(wanted))


def verdict(results: list[Result]) -> Verdict:
    """Nothing run is no success."""
    if not results:
        return Verdict.INVALID_RUN
    return Verdict.NONCONFORMANT if any(r.wrong for r in results) else Verdict.CONFORMANT
