"""Tests that pass a line of some files: a mutant of a line is noticed by one of those, or by none."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import attrs
import pytest

from tools.prove.lines import Line, Lines
from tools.specgen.registry import ROOT

_OPTIONS = ("-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}")


@attrs.frozen
class Passing:
    """The lines that some runs of tests have passed."""

    seconds: dict[str, float]
    """Of each test."""
    lines: dict[Line, list[str]]
    """Line to the tests that pass it."""

    def tests(self, file: str, line: int) -> list[str]:
        """Tests that pass a line, in virtual time first, then the quickest first.

        All of them, where none passes it: what is done while a module is imported concerns all.
        """
        found = self.lines.get((file, line)) or list(self.seconds)
        return sorted(found, key=lambda test: (not test.startswith(_VIRTUAL), self.seconds[test]))

    @classmethod
    def read(cls, texts: Sequence[str]) -> Passing:
        """Read the output of runs of `trace`."""
        seconds: dict[str, float] = {}
        lines: dict[Line, list[str]] = defaultdict(list)
        for text in texts:
            took, files = json.loads(text)
            names = list(took)
            seconds |= took
            for file, rows in files.items():
                for line, numbers in rows.items():
                    lines[file, int(line)] += [names[n] for n in numbers]
        return cls(seconds, lines)


_VIRTUAL = ("tests/session", "tests/plan", "tests/wire")
"""Tests that wait for nothing."""


class _Tracer:
    """A plugin of pytest that notes which of some lines each test passes."""

    def __init__(self, wanted: Iterable[Line]) -> None:
        self._lines = Lines(wanted)
        self.seconds: dict[str, float] = {}
        self.passed: dict[str, set[Line]] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._lines.passed, began = set(), time.perf_counter()
        sys.settrace(self._lines.enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.seconds[item.nodeid] = time.perf_counter() - began
            self.passed[item.nodeid] = self._lines.passed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def trace(wanted: Iterable[Line], words: Sequence[str]) -> str:
    """Run the tests that `words` name to pytest, as they are; what `Passing.read` reads.

    Functions with a wanted line are followed, which makes them several times slower: a test that waits for the clock,
    and fails for it, is not asked, nor is a file that needs a library which is not here. Raises ValueError if another
    fails.
    """
    tracer = _Tracer(wanted)
    status = pytest.main([*_OPTIONS, *(str(ROOT / word) if "/" in word else word for word in words)], plugins=[tracer])
    failed = [test for test in tracer.failed if test.startswith(_VIRTUAL)]
    if failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ValueError(f"without any change {', '.join(failed) or repr(status)} fails")
    for test in tracer.failed:
        tracer.seconds.pop(test, None)  # of a file that is not collected there is none
        tracer.passed.pop(test, None)
    lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, passed in enumerate(tracer.passed.values()):
        for file, line in passed:
            lines[file][line].append(number)
    return json.dumps([tracer.seconds, lines])
