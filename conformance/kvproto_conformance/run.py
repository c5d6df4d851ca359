"""Runs the cases and gives the verdict."""

from __future__ import annotations

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
    """Every case; what a reader accepts, a writer must write again byte by byte, but for fields that may be ignored."""
    return [Result(case, tuple(_judge(case, testee))) for case in cases]


def _judge(case: Case, testee: Testee) -> list[str]:
    wrong = []
    if case.struct is not None:
        question = {"op": "decode_struct", "struct": case.struct, "bytes": case.frame}
        written_as = {"op": "encode_struct", "struct": case.struct, "fields": case.expected.get("fields")}
    else:
        question = {"op": "decode", "frame": case.frame}
        written_as = {"op": "encode", **case.expected}
    answer = testee.ask(question)
    if answer != case.expected:
        wrong.append(f"decode: wanted {case.expected}, got {answer}")
    if "fields" in case.expected and case.canonical:
        made = testee.ask(written_as)
        written: Any = made.get("bytes" if case.struct is not None else "frame")
        if written != case.frame:
            wrong.append(f"encode: wanted {case.frame}, got {written}")
    return wrong


def verdict(results: list[Result]) -> Verdict:
    """Nothing run is no success."""
    if not results:
        return Verdict.INVALID_RUN
    return Verdict.NONCONFORMANT if any(r.wrong for r in results) else Verdict.CONFORMANT
