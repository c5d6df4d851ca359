"""Whether a changed kvproto is noticed: by the vectors, asked in this process, or by the tests of sessions.

All of this runs in a forked child, whose parent has loaded the cases and the libraries, and nothing of kvproto.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvproto_conformance.cases import Case, load
from kvproto_conformance.run import Result, run
from kvproto_conformance.testee import Testee
from tools.prove.changing import Changes, change
from tools.prove.children import crowding
from tools.specgen.registry import ROOT

Json = dict[str, Any]
SURVIVED = ""
"""The answer where nobody noticed; any other is who did."""
TEST_LIMIT = 30
"""Seconds of one test: ten times what the longest takes."""
_TESTEE = ROOT / "conformance/testees/python_kvproto.py"
_ALL = load()


def cases(*suites: str) -> list[Case]:
    """Cases of the suites, of all if none is named."""
    return [case for case in _ALL if not suites or case.suite in suites]


class _Within(Testee):
    """kvproto's own testee, in this process."""

    def __init__(self) -> None:
        super().__init__(["no process"])
        stdin, sys.stdin = sys.stdin, io.StringIO()
        made: Json = {"__name__": "testee"}
        try:
            exec(compile(_TESTEE.read_text(), _TESTEE, "exec"), made)
        finally:
            sys.stdin = stdin
        self._answer: Callable[[Json], Json] = made["answer"]

    def ask(self, question: Json) -> Json:
        try:
            return self._answer(question)
        except Exception as error:
            return {"broken": repr(error)}


def within() -> Testee:
    """The testee of this process, which has imported kvproto."""
    return _Within()


class _Noticed(Exception):
    pass


def by_cases(changes: Changes, asked: Sequence[Case]) -> str:
    """The first case that fails, or what keeps the changed package from being imported."""
    return _asked(changes, asked, _first)


def as_it_is(asked: Sequence[Case]) -> str:
    """Without any change, as JSON: what fails, and which modules of kvproto the cases have loaded."""
    failed = by_cases({}, asked)
    return json.dumps([failed, sorted(name for name in sys.modules if name.split(".")[0] == "kvproto")])


def by_both_codecs(changes: Changes, asked: Sequence[Case], doubts: Mapping[str, int]) -> str:
    """The same, of a codec whose readers are judged apart, as each would hide what is wrong with the other.

    The canonical reader may leave a case to the strict one no more often than `doubts` says; then the strict one is
    asked alone.
    """

    def halves(asked: Sequence[Case], testee: Testee) -> str:
        doubted = _counted()
        found = _first(asked, testee, lambda case: doubted() > doubts[case.id])
        if found == SURVIVED:
            _strict_alone()
            found = _first(asked, testee)
        return found

    return _asked(changes, asked, halves)


def doubts(asked: Sequence[Case]) -> str:
    """The number of times that the canonical reader leaves each case to the strict one, as JSON."""
    testee, told = _Within(), {}
    doubted = _counted()
    run(asked, testee, lambda result: told.update({result.case.id: doubted()}))
    return json.dumps(told)


def _asked(changes: Changes, asked: Sequence[Case], way: Callable[[Sequence[Case], Testee], str]) -> str:
    change(changes)
    gc.disable()  # a child lives for a moment
    try:
        return way(asked, _Within())
    except Exception as error:
        return f"does not start: {type(error).__name__}"


def _first(asked: Sequence[Case], testee: Testee, also: Callable[[Case], bool] = lambda case: False) -> str:
    def told(result: Result) -> None:
        if result.wrong or also(result.case):
            raise _Noticed(result.case.id)

    try:
        run(asked, testee, told)
    except _Noticed as noticed:
        return str(noticed)
    return SURVIVED


def _counted() -> Callable[[], int]:
    """A function that returns how often the strict reader was asked since its last call."""
    codec = importlib.import_module("kvproto.wire.codec")
    read_whole, times = codec.read_whole, [0]

    def counted(*args: Any) -> Any:
        times[0] += 1
        return read_whole(*args)

    def since() -> int:
        asked, times[0] = times[0], 0
        return asked

    vars(codec).update(read_whole=counted)
    return since


def _strict_alone() -> None:
    """Let the strict reader read all bodies."""
    vars(importlib.import_module("kvproto.wire.codec")).update(read_canonical=lambda name, body: None)


def failing(changes: Changes, asked: Sequence[Case]) -> str:
    """All cases that fail, a line each."""
    change(changes)
    return "\n".join(result.case.id for result in run(asked, _Within()) if result.wrong)


class _First:
    """Tests in the order in which they are named, and the first that fails."""

    def __init__(self, order: Sequence[str]) -> None:
        self.name = ""
        self._order = {test: i for i, test in enumerate(order)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._order:
            items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda i: self._order[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"{report.nodeid} is not collected"


def by_tests(changes: Changes, words: Sequence[str], order: Sequence[str] = ()) -> str:
    """The first test that fails, of files, tests and options that `words` name to pytest.

    With `order`, of those tests alone, in this order. A test that takes longer than `TEST_LIMIT` on an idle machine has
    failed.
    """
    change(changes)
    first = _First(order)
    named = [str(ROOT / word) if "/" in word else word for word in words]
    limit = f"--timeout={TEST_LIMIT * crowding():.0f}"
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", limit, f"--rootdir={ROOT}"]
    status = pytest.main([*options, *named], plugins=[first])
    if status == pytest.ExitCode.OK:
        return SURVIVED
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ValueError(f"no test of {', '.join(words)}")
    return first.name or f"does not start: {status!r}"
