"""Bugs that engines and connectors have had, planted one at a time: `bugs.toml` says where, and who has to notice."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs

from tools.prove.judging import SURVIVED, by_tests, cases, failing, module_of
from tools.specgen.registry import ROOT

__all__ = ["Bug", "load", "noticed"]


@attrs.frozen
class Bug:
    """In `file`, `new` stands in place of `old`; all of `cases` have to fail, or the test that is named."""

    name: str
    report: str
    """What went wrong, and where it was seen."""
    file: str
    old: str
    new: str
    cases: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    tests: tuple[str, ...] = attrs.field(default=(), converter=tuple)


def load() -> list[Bug]:
    """All of them."""
    table = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())
    return [Bug(**row) for row in table["bug"]]


def noticed(bug: Bug) -> str:
    """Who noticed; nobody, unless all did that are named."""
    text = (ROOT / bug.file).read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: {bug.file} has what is replaced {text.count(bug.old)} times")
    changes = {module_of(bug.file): text.replace(bug.old, bug.new)}
    if bug.tests:
        return by_tests(changes, bug.tests)
    asked = [case for case in cases() if case.id in bug.cases]
    if len(asked) != len(bug.cases):
        raise ValueError(f"{bug.name}: there is no {set(bug.cases) - {case.id for case in asked}}")
    found = failing(changes, asked).splitlines()
    return ", ".join(found) if set(found) == set(bug.cases) else SURVIVED
