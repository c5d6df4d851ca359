"""Chaos on real processes: a few seeds have no violation, and every fault that is built into the engines is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvproto_reference.chaos.__main__ import BREAKS
from kvproto_reference.chaos.plan import boundaries, make


def chaos(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvproto_reference.chaos", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_a_plan_follows_from_its_seed() -> None:
    assert make(7, 2.0) == make(7, 2.0)
    assert make(7, 2.0) != make(8, 2.0)
    ran = chaos("--seed", 7, "--seconds", 2.0, "--show")
    assert ran.stdout == "\n".join(make(7, 2.0).lines()) + "\n"


def test_seeds_kill_at_every_boundary() -> None:
    plans = [make(seed, 2.0) for seed in range(1000)]
    for way in {plan.way for plan in plans}:
        killed = {
            (f.message, f.moment, f.whom)
            for plan in plans if plan.way == way for f in plan.faults if f.kind == "kill at"
        }  # fmt: skip
        assert killed >= set(boundaries(way))


def test_seeds_without_violations(tmp_path: Path) -> None:
    ran = chaos("--seeds", "0..5", "--seconds", 1.0, "--jobs", 2, "--json", tmp_path / "chaos.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "chaos.json").read_text())
    assert (summary["seeds"], summary["violations"]) == (6, [])
    assert summary["arrived"] >= 6 * 4
    assert summary["kills at boundaries"]


@pytest.mark.parametrize("broken", BREAKS)
def test_a_fault_in_the_engines_is_found(broken: str) -> None:
    ran = chaos("--seeds", "1..8", "--seconds", 1.0, "--break", broken)
    assert ran.returncode == 0, ran.stdout + ran.stderr
