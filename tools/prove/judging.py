"""Whether a changed kvproto is noticed: by the vectors, asked in this process, or by the tests of sessions.

A change is a module's name and the text that stands in its place. kvproto must not be imported before: all of this runs
in a forked child, whose parent has loaded the cases and the libraries, and nothing of kvproto.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from kvproto_conformance.cases import Case, load
from kvproto_conformance.run import Result, run
from kvproto_conformance.testee import Testee
from tools.specgen.registry import ROOT

__all__ = ["SURVIVED", "Changes", "by_cases", "by_tests", "cases", "failing", "module_of"]

Json = dict[str, Any]
Changes = Mapping[str, str]
SURVIVED = ""
"""The answer where nobody noticed; any other is who did."""
_TESTEE = ROOT / "conformance/testees/python_kvproto.py"
_ALL = load()


def cases(*suites: str) -> list[Case]:
    """Those of the suites, of all where none is named."""
    return [case for case in _ALL if not suites or case.suite in suites]


def module_of(file: str) -> str:
    """Name of the module of a file of the repository."""
    return file.removesuffix(".py").replace("/", ".")


class _Loader(importlib.abc.InspectLoader):
    def __init__(self, text: str, path: str) -> None:
        self._text, self._path = text, path

    def get_source(self, fullname: str) -> str:
        return self._text

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._text, self._path, "exec"), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        file = str(ROOT / name.replace(".", "/")) + ".py"
        spec = importlib.util.spec_from_loader(name, _Loader(self._changes[name], file), origin=file)
        assert spec is not None
        spec.has_location = True
        return spec


def change(changes: Changes) -> None:
    """Let the modules be these from now on."""
    assert not any(name.split(".")[0] == "kvproto" for name in sys.modules), "kvproto is imported already"
    sys.meta_path.insert(0, _Finder(changes))


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


class _Noticed(Exception):
    pass


def by_cases(changes: Changes, asked: Sequence[Case]) -> str:
    """The first case that fails, or what keeps the changed package from being imported."""
    change(changes)

    def told(result: Result) -> None:
        if result.wrong:
            raise _Noticed(result.case.id)

    try:
        run(asked, _Within(), told)
    except _Noticed as noticed:
        return str(noticed)
    except Exception as error:
        return f"does not start: {type(error).__name__}"
    return SURVIVED


def failing(changes: Changes, asked: Sequence[Case]) -> str:
    """All cases that fail, a line each."""
    change(changes)
    return "\n".join(result.case.id for result in run(asked, _Within()) if result.wrong)


class _First:
    """The first test that fails."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.name = self.name or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.name = self.name or f"{report.nodeid} is not collected"


def by_tests(changes: Changes, names: Sequence[str], *more: str) -> str:
    """The first test that fails, of files or tests of the repository, as pytest with `more` options finds them."""
    change(changes)
    first = _First()
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}", *more]
    status = pytest.main([*words, *(str(ROOT / name) for name in names)], plugins=[first])
    if status == pytest.ExitCode.OK:
        return SURVIVED
    return first.name or f"does not start: {status!r}"
