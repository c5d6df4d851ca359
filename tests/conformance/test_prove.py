"""A few of what `make prove` asks for in full: the suite notices what is wrong."""

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest

from kvproto_conformance.live.scenario import SCENARIOS, Run
from tools.prove import bugs, changing, code, facts, playing
from tools.prove.__main__ import _part
from tools.prove.children import DIED, LATE, crowding, in_children
from tools.prove.judging import SURVIVED
from tools.prove.rows import Reasons, Row, summary
from tools.prove.state import State

ROOT = Path(__file__).parents[2]


def proved(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command: it forks before kvproto is imported, which it is here."""
    command = [sys.executable, "-m", "tools.prove", "--jobs", "1", "--state", str(state), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_bugs_and_facts_are_noticed(tmp_path: Path) -> None:
    ended = proved(tmp_path, "bugs", "registry", "--sample", "2", "--seed", "5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^bug +2 .*\n^registry +2 ", ended.stdout, re.MULTILINE)


def test_what_nobody_notices_and_a_reason_that_is_not_true_fail_the_command(tmp_path: Path) -> None:
    """A mutant of a unit changes no byte, but it has no reason here; a field that need not be there is noticed."""
    reasons = tmp_path / "reasons.toml"
    reasons.write_text('[[equivalent]]\nnames = ["*.presence"]\nwhy = "None."\n')
    which = "struct.Limits.max_body.[pu]*"
    ended = proved(tmp_path, "registry", "--sample", "2", "--only", which, "--reasons", str(reasons))
    assert ended.returncode == 1
    assert "SURVIVED: registry: struct.Limits.max_body.unit" in ended.stdout
    assert "KILLED THOUGH EQUIVALENT: registry: struct.Limits.max_body.presence" in ended.stdout


def test_what_no_peer_can_see_is_noticed_by_a_test_and_not_by_the_suite() -> None:
    """It counts for the whole, and not for what the suite should have noticed."""
    reasons = Reasons(unseen=[("hidden*", "Only the engine is told.")])

    def table(*rows: tuple[str, str]) -> tuple[list[str], bool]:
        text, good = summary([reasons.judged(Row("planner", name, noticed)) for name, noticed in rows])
        return text.splitlines()[1].split(), good

    shown = ("open", "PLAN-1"), ("hidden 1", "tests/plan/test_plan.py::test_a")
    row, good = table(*shown)
    assert good
    assert row[:10] == ["planner", "2", "1", "0", "0", "1", "0", "0", "100.0%", "100.0%"]
    row, good = table(*shown, ("open too", "tests/plan/test_plan.py::test_b"))
    assert (row[4], row[9], good) == ("1", "50.0%", True)
    assert not table(*shown, ("hidden 2", SURVIVED))[1]
    for who in ("LIVE-301", "PLAN-1"):
        assert reasons.judged(Row("planner", "hidden 3", who)).verdict == "SEEN THOUGH UNSEEN"
        assert not table(*shown, ("hidden 3", who))[1]


@pytest.mark.parametrize(("failures", "noticed"), [(1, SURVIVED), (2, "LIVE-101")])
def test_a_scenario_notices_what_it_fails_by_twice(
    failures: int, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once may be the load of the machine."""
    left = iter([False] * failures)
    script = partial(_checked, left)
    monkeypatch.setitem(SCENARIOS, "LIVE-101", attrs.evolve(SCENARIOS["LIVE-101"], script=script))
    assert playing.by_scenarios({}, ["LIVE-101"]) == noticed
    assert next(left, None) is None


def _checked(left: Iterator[bool], run: Run) -> None:
    run.check("so", next(left, True))


def test_every_bug_is_where_it_says() -> None:
    found = bugs.load()
    assert len(found) >= 40
    assert len({bug.name for bug in found}) == len(found)
    for bug in found:
        assert (ROOT / bug.file).read_text().count(bug.old) == 1, bug.name
        assert [bool(bug.cases), bool(bug.scenarios), bool(bug.tests)].count(True) == 1, bug.name
        assert len(bug.scenarios) == len(bug.says), bug.name


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
    while time.process_time() < 0.3:  # a child's begins at 0
        pass
    while True:
        signal.pause()


def dies() -> str:
    raise SystemExit(3)


def raises() -> str:
    raise ValueError("a fault of the tool")


def test_a_scenario_that_passes_a_line_notices_what_is_otherwise_there() -> None:
    file, line = "kvproto/session/pull.py", "        loan = attempt.loan if attempt is not None else None"
    lines = (ROOT / file).read_text().splitlines()
    wanted = [(file, n + 1) for n, text in enumerate(lines) if text == line]
    assert len(wanted) == 1
    changes = {changing.module_of(file): "\n".join(lines).replace(line, line.replace("is not None", "is None"))}
    passed = {id: json.loads(playing._traced(SCENARIOS[id], wanted)) for id in ("LIVE-101", "LIVE-1061")}
    assert passed == {"LIVE-101": [], "LIVE-1061": [[file, wanted[0][1]]]}
    assert playing.by_scenarios({}, ["LIVE-1061"]) == SURVIVED
    assert playing.by_scenarios(changes, ["LIVE-101", "LIVE-1061"]) == "LIVE-1061"


def test_a_fault_of_the_tool_counts_for_nobody() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)asked: .*a fault of the tool"):
        list(in_children([("asked", raises)], 1, 5.0))


@pytest.mark.parametrize(("load", "longer"), [(0.1, 1.0), (1.0, 1.0), (7.5, 7.5)])
def test_limits_grow_with_the_processes_that_want_each_core(
    load: float, longer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is slow because others work is no sign of anything."""
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    assert crowding() == pytest.approx(longer)


@pytest.mark.parametrize("jobs", [1, 3])
def test_children_that_never_end_or_die_have_no_answer(jobs: int) -> None:
    tasks = [("right", lambda: json.dumps("yes")), ("late", forever), ("dead", dies), ("again", lambda: "too")]
    answers = list(in_children(tasks, jobs, 1.0))
    assert {a.name: a.text for a in answers} == {"right": '"yes"', "late": LATE, "dead": DIED, "again": "too"}
    seconds = {a.name: a.seconds for a in answers}
    assert seconds["late"] > seconds["right"] >= 0  # of CPU, also of one that was ended


def test_parts_make_the_whole_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Rows are kept as they come: those of all parts, in one folder, are the table, and no mutant is asked again."""
    words = ["registry", "--only", "struct.Ticket.deadline.[iop]*", "--sample", "3"]
    for part in ("1/2", "2/2"):
        assert proved(tmp_path, *words, "--part", part).returncode == 0
    whole = proved(tmp_path, *words)
    asked = re.search(r"^registry +(\d+)", whole.stdout, re.MULTILINE)
    assert asked is not None
    assert f"{asked[1]} of them by earlier runs over the same sources" in whole.stdout
    first = next(tmp_path.glob("*.jsonl"))
    first.write_text("\n".join(first.read_text().splitlines()[:1]) + '\n{"kind": "regis')
    fewer = proved(tmp_path, *words)
    assert fewer.returncode == 0
    assert re.search(rf"^registry +{asked[1]} ", fewer.stdout, re.MULTILINE)
    assert f"{asked[1]} of them" not in fewer.stdout


def test_rows_of_other_sources_count_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('{"sources": "other"}\n' + json.dumps(attrs.asdict(Row("bug", "a", "b"))))
    assert State(tmp_path, "these").known("bug", "a") is None
    assert State(tmp_path, "other").known("bug", "a") == Row("bug", "a", "b")


def test_a_part_that_is_none_is_refused() -> None:
    for text in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError):
            _part(text)
