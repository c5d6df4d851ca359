"""Each mapping fault of the field is a case that passes, and that fails when the planner has the faulty rule."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvproto
from tests.plan.faults import CASES, MUTANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES)
def test_fault(case: str) -> None:
    CASES[case]()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_case_kills_the_faulty_rule(mutant: str, tmp_path: Path) -> None:
    case, file, rule, faulty = MUTANTS[mutant]
    package = Path(kvproto.__file__).parent
    shutil.copytree(package, tmp_path / "kvproto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests/plan", tmp_path / "tests/plan", ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / file).read_text()
    assert text.count(rule) == 1
    (tmp_path / "kvproto" / file).write_text(text.replace(rule, faulty))
    run = subprocess.run(
        [sys.executable, "-m", "tests.plan.faults", case], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    assert run.stdout.startswith(str(tmp_path))
    assert run.stderr.splitlines()[-1].split(":")[0] in (
        "AssertionError",
        "kvproto.errors.PlanError",
        "kvproto.errors.RemoteError",
    )


def test_the_cases_pass_in_a_copy_without_change(tmp_path: Path) -> None:
    shutil.copytree(Path(kvproto.__file__).parent, tmp_path / "kvproto")
    shutil.copytree(ROOT / "tests/plan", tmp_path / "tests/plan")
    run = subprocess.run(
        [sys.executable, "-m", "tests.plan.faults", "v_over_k"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
