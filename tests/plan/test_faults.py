"""Each mapping fault of the field is a case that passes, and that fails when the planner has the faulty rule."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto.errors import PlanError, RemoteError
from kvproto.planning.plan import plan
from tests.plan.faults import CASES, MUTANTS
from tests.plan.mutant import PACKAGE, mutant

ROOT = Path(__file__).parents[2]
MODULE = "tests.plan.faults"


@pytest.mark.parametrize("case", CASES)
def test_fault(case: str) -> None:
    CASES[case]()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_case_kills_the_faulty_rule(name: str) -> None:
    case, file, rule, faulty = MUTANTS[name]
    with mutant(file, rule, faulty, MODULE) as faults:
        assert faults.plan is not plan
        with pytest.raises((AssertionError, PlanError, RemoteError)):
            faults.CASES[case]()


def test_a_mutant_that_changes_nothing_passes_and_leaves_nothing_behind() -> None:
    case, file, rule, _ = MUTANTS["the first n pages"]
    modules = dict(sys.modules)
    with mutant(file, rule, rule, MODULE) as faults:
        faults.CASES[case]()
    assert {key: value for key, value in sys.modules.items() if key in modules} == modules
    assert sys.modules[MODULE].CASES is CASES


@pytest.mark.parametrize("rule", ["as it is", "faulty"])
def test_a_copy_on_disk_in_a_process_of_its_own_agrees(rule: str, tmp_path: Path) -> None:
    case, file, right, faulty = MUTANTS["the first n pages"]
    shutil.copytree(PACKAGE, tmp_path / "kvproto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests/plan", tmp_path / "tests/plan", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/__init__.py").touch()
    if rule == "faulty":
        copy = tmp_path / "kvproto" / file
        copy.write_text(copy.read_text().replace(right, faulty))
    run = subprocess.run(
        [sys.executable, "-m", MODULE, case], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.stdout.startswith(str(tmp_path)), run.stderr
    assert run.returncode == (rule == "faulty"), run.stderr
