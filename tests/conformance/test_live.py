"""The driver for live engines: the reference passes, and engines with a fault fail where the scenario says so."""

from __future__ import annotations

import sys
from pathlib import Path

from kvproto_conformance.live import list_scenarios, run

TESTEES = Path(__file__).parents[2] / "conformance/testees"


def adapter(name: str) -> list[str]:
    return [sys.executable, str(TESTEES / name)]


def test_the_reference_source_hands_over_every_byte() -> None:
    chosen = [s for s in list_scenarios("source") if s.id in ("LIVE-101", "LIVE-104")]
    results = list(run(adapter("live_source.py"), chosen))
    assert [(r.id, r.status, r.text) for r in results] == [("LIVE-101", "pass", ""), ("LIVE-104", "pass", "")]
    assert all(len(result.checks) > 10 for result in results)


def test_a_program_that_is_none_is_an_error() -> None:
    chosen = list_scenarios("source")[:1]
    assert [r.status for r in run(["/no/such/program"], chosen)] == ["error"]
    assert [r.status for r in run([sys.executable, "-c", "print('hello')"], chosen)] == ["error"]
