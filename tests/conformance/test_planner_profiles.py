"""Planners that lack an extension: what they may refuse, and what the suite makes of it (KVP-GEO-UNSUPPORTED)."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from kvproto_conformance import planner, testee
from kvproto_conformance.cases import Case, claimed, easier, load
from kvproto_conformance.checking import beyond, check
from kvproto_conformance.claims import Claim
from kvproto_conformance.codec import Refusal, write_struct
from kvproto_conformance.run import Status, Verdict, run, verdict

PLANS = [case for case in load() if case.suite == "plan" and not case.needs]
DEALT = {case.id for case in PLANS if "deals" in dict(case.beyond)}
CUT = {case.id for case in PLANS if "sections" in dict(case.beyond)}
Answer = dict[str, Any]


def once(work: Callable[..., Any]) -> Callable[..., Any]:
    """What this makes of each question, or its refusal, found once for all tests of this file."""

    @cache
    def outcome(asked: str) -> Any:
        try:
            return work(*json.loads(asked))
        except Refusal as refusal:
            return refusal

    def found(*asked: Any) -> Any:
        made = outcome(json.dumps(asked))
        if isinstance(made, Refusal):
            raise Refusal(made.code, made.path)
        return made

    return found


written = once(lambda side: write_struct("Geometry", side))
checked, planned = once(check), once(planner.plan)


class Core(testee.Testee):
    """A planner within this process that declines what belongs to these extensions."""

    def __init__(self, lacks: set[str], code: str = "LAYOUT_UNSUPPORTED", below: str = "") -> None:
        super().__init__(["no process"])
        self._lacks, self._code, self._below = lacks, code, below

    def ask(self, question: Answer) -> Answer:
        sides = question["source"], question["sink"]
        try:
            for side in sides:
                written(side)
                for row in beyond(side).get("beyond", ()):
                    if row["extension"] in self._lacks:
                        raise Refusal(self._code, row["path"] + self._below)
                checked(side)
            return planned(*sides, question["features"])
        except Refusal as refusal:
            return {"error": refusal.code, "path": refusal.path, "text": "for people"}


def judged(testee: testee.Testee, *extensions: str) -> dict[Status, set[str]]:
    """The ids of all plans that need no feature, by what becomes of them in a claim."""
    found = run([easier(case, extensions) for case in PLANS], testee)
    return {status: {r.case.id for r in found if r.status is status} for status in {r.status for r in found}}


def test_a_planner_of_the_core_may_decline_what_the_extensions_are_about_and_nothing_else() -> None:
    every = {case.id for case in PLANS}
    found = judged(Core({"deals", "sections"}))
    assert found[Status.DECLINED] | found[Status.PASS] == every
    assert found[Status.DECLINED] <= DEALT | CUT
    assert {"plan/zigzag-alike", "plan/opaque-alike"} <= found[Status.DECLINED]
    assert every - DEALT - CUT <= found[Status.PASS]


def test_it_may_plan_them_too() -> None:
    assert set(judged(Core(set()))) == {Status.PASS}


def test_a_claim_of_one_extension_demands_its_answers() -> None:
    assert set(judged(Core({"sections"}), "deals")) == {Status.PASS, Status.DECLINED}
    failed = judged(Core({"deals"}), "deals")[Status.FAIL]
    assert failed
    assert failed <= DEALT


@pytest.mark.parametrize("wrong", [{"code": "BAD_GEOMETRY"}, {"below": ".x"}])
def test_another_code_or_place_is_wrong(wrong: dict[str, str]) -> None:
    assert judged(Core({"deals", "sections"}, **wrong))[Status.FAIL] <= DEALT | CUT


def test_who_declines_everything_earns_nothing() -> None:
    class Declines(testee.Testee):
        def ask(self, question: Answer) -> Answer:
            rows = beyond(question["source"], question["sink"]).get("beyond") or [{"path": ""}]
            return {"error": "LAYOUT_UNSUPPORTED", "path": rows[0]["path"]}

    found = run([easier(case, ()) for case in PLANS], Declines(["no process"]))
    assert {result.status for result in found} <= {Status.FAIL, Status.UNEARNED}
    assert verdict(found) is Verdict.NONCONFORMANT


def test_a_claim_without_deals_is_not_asked_for_them() -> None:
    suites: dict[str, list[Case]] = {}
    for case in claimed(load(), Claim("both", "L2")):
        suites.setdefault(case.suite, []).append(case)
    assert "deal" not in suites
    assert not [case for case in suites["lowering"] + suites["late"] if case.clause.startswith("KVP-DCP-OWNER")]
