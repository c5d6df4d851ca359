"""Chaos on real processes: a few seeds have no violation, and every fault that is built into the engines is found."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest

from kvproto.wire import encode
from kvproto.wire import messages as m
from kvproto_reference.chaos.__main__ import BREAKS, keys_in
from kvproto_reference.chaos.book import Finding
from kvproto_reference.chaos.judge import Judge
from kvproto_reference.chaos.plan import WAYS, Fault, Weather, boundaries, make, rare_boundaries, router_boundaries
from kvproto_reference.chaos.proxy import Pair, Passing
from kvproto_reference.chaos.world import World
from tests.processes import Command


def chaos(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvproto_reference.chaos", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=190, check=False)


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
    rare = {(t, *b) for t in WAYS for b in (*rare_boundaries(t), *router_boundaries())}
    at = {(p.transports["prefill0"], f.message, f.moment, f.whom) for p in plans for f in p.faults}
    assert at >= rare
    assert {message for _, message, _, _ in at} - {""} == {
        name for name, each in vars(m).items() if hasattr(each, "TYPE")
    }


def test_seeds_without_violations(tmp_path: Path) -> None:
    ran = chaos("--seeds", "0..5", "--seconds", 1.0, "--jobs", 2, "--json", tmp_path / "chaos.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "chaos.json").read_text())
    assert (summary["seeds"], summary["violations"]) == (6, [])
    assert summary["arrived"] >= 6 * 4
    assert summary["kills at boundaries"]


def old_clock() -> int:
    """A seed in which an engine is down when the faults end, and was to start again with an old clock."""
    fault = Fault("old clock", "decode1", at=0.2, seconds=0.3, amount=-3600.0)
    plan = attrs.evolve(make(0, 0.3), weather=Weather(), orders=(), faults=(fault,))
    with tempfile.TemporaryDirectory() as folder:
        violations = World(plan, keys_in(Path(folder))).run().violations
    print(violations, file=sys.stderr)
    return len(violations)


def test_an_engine_that_starts_when_the_faults_are_over_has_a_right_clock() -> None:
    """Nobody would set it right any more, and no source would serve it."""
    status, _, said = Command(old_clock, []).wait()
    assert status == 0, said


def test_a_sink_that_is_told_of_another_writer_is_started_again() -> None:
    """It never sees the end of the real one, and rightly never uses the pages again: no run of it can be judged by that."""
    process = m.Process(boot=bytes(16), namespace=1, pid=2, start=3)
    ids = {"session": 1, "request": 1, "epoch": 1, "transport": 1, "routes": (), "plan": bytes(32)}
    said, judge = m.Registered(**ids, process=process), Judge(make(0, 1.0))
    passing = Passing(Pair("prefill0", "decode1"), False, encode(said), b"")
    judge.lied(passing, said, attrs.evolve(said, epoch=2))
    assert judge.misled == set()
    judge.lied(passing, said, attrs.evolve(said, process=attrs.evolve(process, pid=4)))
    assert judge.misled == {"decode1"}


@pytest.mark.parametrize(("torn", "lied"), [(True, False), (True, True), (False, True)])
def test_halves_of_labels_are_excused_where_the_pool_was_lied_about_alone(torn: bool, lied: bool) -> None:
    """A source writes where Register says: in the pages of whom it speaks for, and of nobody else, labels may meet."""
    said, judge = m.Register(**{field.name: None for field in attrs.fields(m.Register)}), Judge(make(0, 1.0))
    if lied:
        judge.lied(Passing(Pair("prefill0", "decode1"), True, b"", b""), said, said)
    judge.finding("decode0", Finding("write after proof", "", torn=True))
    judge.finding("decode1", Finding("stray write", "", torn=torn))
    assert judge.kinds == {"write after proof"} | ({"stray write"} if not (torn and lied) else set())


SHOWN_BY = {"late write": 8, "no proof": 3}
"""Of faults that the first seed mostly does not show."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_fault_in_the_engines_is_found(broken: str) -> None:
    """By the seed that mostly kills an engine at the moment that shows it, or within 24."""
    for seeds in (f"{SHOWN_BY.get(broken, 1)}", "1..8", "9..24"):
        ran = chaos("--seeds", seeds, "--seconds", 1.0, "--break", broken)
        if not ran.returncode:
            break
    assert ran.returncode == 0, ran.stdout + ran.stderr
