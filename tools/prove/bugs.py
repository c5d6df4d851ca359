"""Bugs that engines and connectors have had, planted one at a time: `bugs.toml` says where, and who has to notice."""

from __future__ import annotations

import tomllib
from pathlib import Path

import attrs

from kvproto_conformance.live import list_scenarios
from tools.prove.changing import Changes, module_of
from tools.prove.judging import SURVIVED, by_tests, cases, failing
from tools.prove.playing import played
from tools.specgen.registry import ROOT


@attrs.frozen
class Bug:
    """In `file`, `new` stands in place of `old`; all of `cases` or `scenarios` have to fail, or a test of `tests`."""

    name: str
    report: str
    """The symptom, and where it was seen."""
    file: str
    old: str
    new: str
    cases: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    scenarios: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """Of live engines, by id."""
    says: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """The beginning of each failure."""
    tests: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    @property
    def changes(self) -> Changes:
        """The module that is otherwise."""
        return {module_of(self.file): (ROOT / self.file).read_text().replace(self.old, self.new)}


def load() -> list[Bug]:
    """All of them; raises ValueError where a bug is not at its place any more, as the code has changed."""
    table = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())
    found = [Bug(**row) for row in table["bug"]]
    for bug in found:
        times = (ROOT / bug.file).read_text().count(bug.old)
        if times != 1:
            raise ValueError(
                f"tools/prove/bugs.toml: {bug.name!r} replaces {bug.old!r}, which {bug.file} has {times} times: "
                f"state its `old` and `new` as the code is now"
            )
    return found


def noticed(bug: Bug) -> str:
    """The case, test or scenario that noticed a bug; nobody, unless all did that are named."""
    if bug.scenarios:
        return _played(bug)
    if bug.tests:
        found_by = by_tests(bug.changes, bug.tests)
        return found_by if found_by in bug.tests else SURVIVED
    asked = [case for case in cases() if case.id in bug.cases]
    if len(asked) != len(bug.cases):
        raise ValueError(f"{bug.name}: there is no {set(bug.cases) - {case.id for case in asked}}")
    found = failing(bug.changes, asked).splitlines()
    return ", ".join(found) if set(found) == set(bug.cases) else SURVIVED


def _played(bug: Bug) -> str:
    """The scenarios that a live engine with the bug fails for the reason that is stated; nobody, unless all do."""
    known = {scenario.id: scenario for scenario in list_scenarios()}
    for id, says in zip(bug.scenarios, bug.says, strict=True):
        (result,) = played(bug.changes, [known[id]])
        if result.status == "suite-error":
            raise RuntimeError(f"{id}: {result.text}")
        if result.status != "fail" or not result.text.startswith(says):
            return SURVIVED
    return ", ".join(bug.scenarios)
