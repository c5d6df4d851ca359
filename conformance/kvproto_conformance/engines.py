"""Scenarios of live engines as cases of a claim, alongside those of vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs

from kvproto_conformance.cases import Case
from kvproto_conformance.run import Result, Status, Wrong
from kvproto_conformance.testee import NOT_ASKED

LIVE = {"L3": "session", "L4": "robust"}
"""By level, the suite. The code that runs them needs pyzmq and numpy, and is imported only for a run that has them."""
_LINES = 300
"""The number of the last messages of both sides that a report keeps."""
_STATUS = {
    "pass": Status.PASS,
    "unasked": Status.UNASKED,
    "fail": Status.FAIL,
    "unsupported": Status.FAIL,
    "error": Status.ERROR,
    "suite-error": Status.SUITE_ERROR,
}


def scenarios() -> list[Case]:
    """All scenarios, as cases of the suites `session` and `robust`."""
    from kvproto_conformance.live import list_scenarios

    return [
        Case(s.id, s.clauses[0], LIVE[s.level], (), s.title, needs=frozenset(map(str.lower, s.extensions)), role=s.role)
        for s in list_scenarios()
    ]


def steps(id: str) -> str:
    """The script of a scenario, as the suite's side plays it; empty for a case of vectors."""
    if not id.startswith("LIVE-"):
        return ""
    from kvproto_conformance.live.scenario import SCENARIOS
    from kvproto_conformance.live.scripts import described

    return described(SCENARIOS[id])


def played(
    cases: Sequence[Case], commands: Mapping[str, Sequence[str]], told: Callable[[Result], object], seconds: float
) -> list[Result]:
    """Run the cases of roles that have a command, as far as they begin within so many `seconds`.

    The clause of a result is the one that was broken, where that is known, even if its scenario is about another.
    """
    from kvproto_conformance.live import list_scenarios, run, wirelog

    by_id, found, end = {case.id: case for case in cases}, [], time.monotonic() + seconds
    for role, command in commands.items():
        chosen = [scenario for scenario in list_scenarios(role) if scenario.id in by_id]
        for said, scenario in zip(run(command, chosen, end - time.monotonic()), chosen, strict=True):
            status = _STATUS[said.status]
            if status is Status.FAIL and not scenario.must:
                status = Status.NONSTRICT
            wrong = () if said.status in ("pass", "unasked") else (_wrong(said, scenario.title),)
            wire = tuple(wirelog.lines(said))[-_LINES:] if wrong else ()
            case = attrs.evolve(by_id[said.id], clause=said.clause or by_id[said.id].clause)
            why = said.text if said.status == "unasked" else ""
            found.append(Result(case, wrong, status, said.seconds, wire, why))
            told(found[-1])
    return found


def unplayable(cases: Sequence[Case], roles: Collection[str]) -> dict[str, str]:
    """By id, what the cases that cannot run here need. `roles` are those with an adapter."""
    from kvproto_conformance.live import lacks, list_scenarios

    by_id = {scenario.id: scenario for scenario in list_scenarios()}
    said = {
        c.id: lacks(by_id[c.id]) if c.role in roles else f"--live-{c.role}, the command of an adapter" for c in cases
    }
    return {id: why for id, why in said.items() if why}


def played_alone(id: str, command: Sequence[str]) -> Any:
    """The outcome of one scenario (`live.Result`)."""
    from kvproto_conformance.live import list_scenarios, run

    (said,) = run(command, [scenario for scenario in list_scenarios() if scenario.id == id])
    return said


def heard(said: Any) -> list[str]:
    """Messages of both sides of a scenario, one per line."""
    from kvproto_conformance.live import wirelog

    return list(wirelog.lines(said))


def _wrong(said: Any, title: str) -> Wrong:
    """The failure that a scenario showed, with the checks that passed before it."""
    asked = {
        "op": "scenario",
        "id": said.id,
        "title": title,
        "checks": [check.name for check in said.checks if check.good],
    }
    got = {"unsupported": said.text} if said.status == "unsupported" else {"status": said.status, "text": said.text}
    if said.text.startswith(NOT_ASKED):
        got = {"broken": said.text}
    return Wrong(asked, {"clause": said.clause} if said.clause else {}, got, "" if said.status != "error" else "engine")
