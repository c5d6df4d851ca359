"""Runs the cases, and judges each answer."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum, StrEnum
from typing import Any

import attrs

from kvproto_conformance.cases import Ask, Case
from kvproto_conformance.codec.facts import MAJOR
from kvproto_conformance.testee import Broken, Testee

Json = dict[str, Any]
DRIVER = 1
"""The version of the testee protocol."""
PROTOCOL = "testee"
"""The suite of questions about the testee itself: it earns nothing, and a run fails without it."""


class Verdict(IntEnum):
    """Also the exit status."""

    CONFORMANT = 0
    NONCONFORMANT = 1
    INVALID_RUN = 2
    INCOMPLETE = 3


class Status(StrEnum):
    """The outcome of a case."""

    PASS = "pass"
    NONSTRICT = "nonstrict"
    """It breaks a SHOULD."""
    DECLINED = "declined"
    """Refused as what the claim does not plan (KVP-GEO-UNSUPPORTED)."""
    UNEARNED = "unearned"
    """A correct refusal by a testee that accepts nothing of the kind."""
    FAIL = "fail"
    """A wrong answer, or `unsupported` for something that is claimed."""
    ERROR = "error"
    """No answer: the testee crashed, was silent, or wrote garbage."""
    UNASKED = "unasked"
    """About what this engine cannot have: it counts neither as passed nor as a case of the claim."""
    SUITE_ERROR = "suite-error"
    """The suite itself failed, which says nothing about the engine."""
    KNOWN = "known"
    """It failed as the baseline says."""


@attrs.frozen
class Wrong:
    """One question whose answer was wrong."""

    question: Json
    expected: Json
    got: Json
    """The answer; `{"broken": WHY}` if there was none."""
    kind: str = ""
    """The way in which it broke: crash, timeout, garbage or given-up."""

    def __str__(self) -> str:
        return f"{self.question['op']}: expected {self.expected}, got {self.got}"


@attrs.frozen
class Result:
    """One case and every answer that was wrong."""

    case: Case
    wrong: tuple[Wrong, ...] = ()
    status: Status = Status.PASS
    seconds: float = 0.0
    wire: tuple[str, ...] = ()
    """For a live engine whose case did not pass, what both sides said."""
    why: str = ""
    """The reason that it was not asked."""


class BadGreeting(Exception):
    """A wrong answer to hello, or none at all."""


@attrs.frozen
class Greeting:
    """The answer of a testee to hello."""

    name: str = "?"
    version: str = "?"
    language: str = "?"
    role: str = ""
    level: str = ""
    extensions: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    spec: str = f"{MAJOR}.0"
    """The version of the specification that it was made for."""


def greet(testee: Testee, suite: str, seed: int) -> Greeting:
    """Start a testee; raises BadGreeting, CannotStart."""
    answer = testee.greet({"op": "hello", "driver": DRIVER, "suite": suite, "seed": seed})
    if isinstance(answer, Broken):
        raise BadGreeting(f"no answer to hello: {answer.why}")
    if answer.get("driver") != DRIVER or isinstance(answer["driver"], bool):
        raise BadGreeting(f'hello must be answered with "driver": {DRIVER}; it said {json.dumps(answer)[:200]}')
    said: Json = {}
    for field in attrs.fields(Greeting):
        if field.name not in answer:
            continue
        value, several = answer[field.name], isinstance(field.default, tuple)
        words = value if several and isinstance(value, list) else [] if several else [value]
        if isinstance(value, list) != several or not all(isinstance(word, str) for word in words):
            raise BadGreeting(f"hello: {field.name} must be {'a list of strings' if several else 'a string'}")
        if field.name == "messages" and not words:
            raise BadGreeting("hello: messages names one at least; leave it out where all are read")
        said[field.name] = tuple(words) if several else value
    return Greeting(**said)


def probes(seed: int) -> list[Case]:
    """Questions with made-up names: a testee that answers one is guessing, so its other answers prove nothing."""
    rng = random.Random(seed)
    word = "".join(rng.choice("bcdfgklmnprst") + rng.choice("aeiou") for _ in range(4))
    unknown: Json = {"unsupported": True}
    asked: dict[str, Json] = {
        "op": {"op": word},
        "message": {"op": "encode", "message": word.title(), "fields": {}},
        "struct": {"op": "decode_struct", "struct": word.title(), "bytes": "80"},
    }
    note = "a name that was made up"
    return [
        Case(f"testee/unknown-{what}", "KVP-TST-UNSUPPORTED", PROTOCOL, (Ask(question, unknown),), note)
        for what, question in asked.items()
    ]


def run(cases: Iterable[Case], testee: Testee, told: Callable[[Result], object] = lambda _: None) -> list[Result]:
    """Ask every question of every case; a refusal is earned only if something of the kind is accepted."""
    found = []
    for case in cases:
        begun = time.monotonic()
        answers = [(ask, testee.ask(ask.question)) for ask in case.asks]
        declined = any(_declines(ask, answer) for ask, answer in answers)
        wrong = tuple(wrong for ask, answer in answers for wrong in _judge(ask, answer))
        status = Status.DECLINED if declined else Status.PASS
        if wrong:
            status = Status.FAIL if case.must else Status.NONSTRICT
            if any(each.kind for each in wrong):
                status = Status.ERROR
        found.append(Result(case, wrong, status, time.monotonic() - begun))
        told(found[-1])
    return _earned(found)


def ended(testee: Testee) -> Result:
    """Whether it ends when told to."""
    answer = testee.stop()
    case = Case("testee/stop", "KVP-TST-STOP", PROTOCOL, (), "processes that nobody ends")
    if not isinstance(answer, Broken):
        return Result(case)
    wrong = Wrong({"op": "stop"}, {}, {"broken": answer.why}, answer.kind)
    return Result(case, (wrong,), Status.ERROR)


def _earned(results: list[Result]) -> list[Result]:
    """The results; a testee that refuses everything has understood nothing, and earns nothing by it."""
    asked = [r for r in results if not r.case.refusing and r.status is not Status.DECLINED]
    kinds = Counter(_kind(r.case) for r in asked)
    right = Counter(_kind(r.case) for r in asked if not r.wrong)
    suites = Counter(r.case.suite for r in asked)
    right_suites = Counter(r.case.suite for r in asked if not r.wrong)

    def unearned(result: Result) -> bool:
        case, kind = result.case, _kind(result.case)
        refused = case.refusing or result.status is Status.DECLINED
        if result.wrong or not refused or not asked:
            return False
        return not right[kind] if kinds[kind] else bool(suites[case.suite] and not right_suites[case.suite])

    return [attrs.evolve(r, status=Status.UNEARNED) if unearned(r) else r for r in results]


def _kind(case: Case) -> tuple[str, str]:
    return case.suite, case.about


def _judge(ask: Ask, answer: Json | Broken) -> Iterable[Wrong]:
    if isinstance(answer, Broken):
        yield Wrong(ask.question, ask.expected, {"broken": answer.why}, answer.kind)
        return
    answer = _plain(answer)
    if ask.more:
        answer = {key: value for key, value in answer.items() if key in ask.expected} or answer
    if not _alike(answer, ask.expected, ask.tolerance) and not _declines(ask, answer):
        yield Wrong(ask.question, ask.expected, answer)


def _declines(ask: Ask, answer: Json | Broken) -> bool:
    return ask.declined is not None and not isinstance(answer, Broken) and _plain(answer) == ask.declined


def _plain(answer: Json) -> Json:
    """An answer without the text of a refusal, which is not compared."""
    return {key: value for key, value in answer.items() if key != "text"} if "error" in answer else answer


def _alike(found: Any, wanted: Any, tolerance: float) -> bool:
    """Whether two answers are equal; with a tolerance, strings are read as numbers, and NaN equals nothing."""
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


def verdict(results: list[Result], incomplete: bool = False) -> Verdict:
    """The verdict: a run of nothing is no success, and known failures or cases left out rule conformance out."""
    good = {Status.PASS, Status.NONSTRICT, Status.DECLINED, Status.KNOWN, Status.UNASKED}
    asked = [result for result in results if result.case.suite != PROTOCOL and result.status is not Status.UNASKED]
    if not asked or Status.SUITE_ERROR in {r.status for r in results}:
        return Verdict.INVALID_RUN
    if any(result.status not in good for result in results):
        return Verdict.NONCONFORMANT
    known = any(result.status is Status.KNOWN for result in results)
    return Verdict.INCOMPLETE if incomplete or known else Verdict.CONFORMANT
