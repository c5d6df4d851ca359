"""A few of what `make prove` asks for in full: the suite notices what is wrong."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.prove import bugs, code, facts
from tools.prove.children import DIED, LATE, in_children

ROOT = Path(__file__).parents[2]


def proved(*words: str) -> subprocess.CompletedProcess[str]:
    """The command: it forks before kvproto is imported, which it is here."""
    command = [sys.executable, "-m", "tools.prove", "--jobs", "1", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_bugs_and_facts_are_noticed() -> None:
    ended = proved("bugs", "registry", "--sample", "2", "--seed", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^bug +2 .*\n^registry +2 ", ended.stdout, re.MULTILINE)


def test_what_nobody_notices_and_a_reason_that_is_not_true_fail_the_command(tmp_path: Path) -> None:
    """A mutant of a unit changes no byte, but it has no reason here; a field that need not be there is noticed."""
    reasons = tmp_path / "reasons.toml"
    reasons.write_text('[[equivalent]]\nnames = ["*.presence"]\nwhy = "None."\n')
    which = "struct.Limits.max_body.[pu]*"
    ended = proved("registry", "--sample", "2", "--only", which, "--reasons", str(reasons))
    assert ended.returncode == 1
    assert "SURVIVED: registry: struct.Limits.max_body.unit" in ended.stdout
    assert "KILLED THOUGH EQUIVALENT: registry: struct.Limits.max_body.presence" in ended.stdout


def test_every_bug_is_where_it_says() -> None:
    found = bugs.load()
    assert len(found) >= 40
    assert len({bug.name for bug in found}) == len(found)
    for bug in found:
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug.name
        assert bool(bug.cases) != bool(bug.tests), bug.name


def test_a_bug_that_is_not_at_its_place_any_more_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever moves code is told which row to mend."""
    row = {"name": "gone", "report": "", "file": "README.md", "old": "no such \nline", "new": ""}
    monkeypatch.setattr(bugs.tomllib, "loads", lambda text: {"bug": [row]})
    with pytest.raises(ValueError, match=r"bugs.toml: 'gone' replaces .* which README.md has 0 times"):
        bugs.load()


def test_what_only_people_read_is_not_mutated() -> None:
    text = "def f(a):\n    if a:\n        mine, yours = str(a + 1), 'x'\n    raise Error(mine, a > 1)\n"
    lines = [node.lineno for node in code._nodes(ast.parse(text)) if code._changes(node)]
    assert lines == [4]  # the raise itself, and nothing that it says


def test_mutants_of_code_are_the_same_for_a_seed_and_compile() -> None:
    for area in code.AREAS:
        drawn = code.sample(area, 4, 1)
        assert drawn == code.sample(area, 4, 1)
        assert [m.key for m in drawn] != [m.key for m in code.sample(area, 4, 2)]
        for mutant in drawn:
            compile(mutant.text, mutant.file, "exec")


def test_mutants_of_the_registry_have_names_of_their_own() -> None:
    names = [name for name, _ in facts.mutants()]
    assert len(names) == len(set(names)) > 3000


def forever() -> str:
    while True:
        pass


def dies() -> str:
    raise SystemExit(3)


def raises() -> str:
    raise ValueError("a fault of the tool")


def test_a_fault_of_the_tool_counts_for_nobody() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)asked: .*a fault of the tool"):
        list(in_children([("asked", raises)], 1, 5.0))


@pytest.mark.parametrize("jobs", [1, 3])
def test_children_that_never_end_or_die_have_no_answer(jobs: int) -> None:
    tasks = [("right", lambda: json.dumps("yes")), ("late", forever), ("dead", dies), ("again", lambda: "too")]
    answers = dict(in_children(tasks, jobs, 0.5))
    assert answers == {"right": '"yes"', "late": LATE, "dead": DIED, "again": "too"}
