"""Profiles: every case belongs to what its clauses belong to, so that clauses, cases and claims cannot disagree."""

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import pytest

from kvproto_conformance.cases import claimed, load
from kvproto_conformance.claims import EXTENSIONS, Claim
from kvproto_conformance.data import CLAUSES, REGISTRY
from kvproto_conformance.live import list_scenarios, run, scenarios
from kvproto_conformance.live.scenario import SCENARIOS, Scenario
from tools.specgen.registry import load as load_registry
from tools.specgen.registry import profiles

PROFILE_OF = {id: row["profile"] for id, row in json.loads(CLAUSES.read_text()).items()}
PROFILES = json.loads(REGISTRY.read_text())["profile"]
ASKED_IN_JSON = {"codec", "tickets", "writing"}
"""Suites whose questions are in the JSON form, whether or not a testee claims the form of all messages."""
PART_OF = {"sleep": "epochs", "catalogue": "storage"}

for _module in pkgutil.iter_modules(scenarios.__path__):
    importlib.import_module(f"{scenarios.__name__}.{_module.name}")


def belongs(clause: str, needs: set[str]) -> bool:
    """Whether a claim with these extensions has the profile of a clause."""
    profile = PROFILE_OF[clause]
    return profile not in EXTENSIONS or profile in needs | {PART_OF.get(name, name) for name in needs}


def test_each_case_needs_the_profile_of_its_clause() -> None:
    wrong = [
        case.id
        for case in load()
        if not belongs(
            case.clause,
            {*case.needs, *case.either, *(name for name, _ in case.beyond)}
            | ({"json"} if case.suite in ASKED_IN_JSON else set()),
        )
    ]
    assert not wrong


def test_each_scenario_has_a_clause_of_what_it_needs() -> None:
    def needed(scenario: Scenario) -> bool:
        return any(belongs(clause, {name.lower() for name in scenario.extensions}) for clause in scenario.clauses)

    assert [id for id, scenario in SCENARIOS.items() if not needed(scenario)] == []


def test_a_claim_of_the_core_is_asked_about_the_messages_of_the_core_alone() -> None:
    cases = load()
    core = claimed(cases, Claim("codec", "L1", frozenset({"json"})))
    names = {ask.question.get("message") or ask.expected.get("message") for case in core for ask in case.asks}
    messages = json.loads(REGISTRY.read_text())["message"]
    assert names - {None} == {name for name, body in messages.items() if "feature" not in body}
    asked, all_of = (sum(case.suite == "codec" for case in some) for some in (core, cases))
    assert 0.6 < asked / all_of < 0.8


@pytest.mark.parametrize(
    ("claim", "reads"),
    [
        (Claim("codec", "L1", frozenset({"pull"})), {"Offer"}),
        (Claim("codec", "L1", frozenset({"inline"})), {"Credit", "Data"}),
        (Claim("codec", "L1", frozenset({"staged"})), {"Credit", "Chunk"}),
        (Claim("reader", "L1", messages=frozenset({"Data"})), {"Data"}),
    ],
)
def test_an_extension_adds_its_messages(claim: Claim, reads: set[str]) -> None:
    """One of several extensions that have a message is enough, and so is the message's own name."""
    about = {case.about for case in claimed(load(), claim)}
    assert about & {"Offer", "Credit", "Chunk", "Data", "Manifest"} == reads


@pytest.mark.parametrize(
    ("role", "ids"), [("source", ["LIVE-733", "LIVE-734", "LIVE-735", "LIVE-736"]), ("sink", ["LIVE-880"])]
)
def test_an_engine_may_know_no_message_of_an_extension(role: str, ids: list[str]) -> None:
    """KVP-VER-EXTENSION: it answers a request of an unknown type with UNKNOWN_MESSAGE, and a notice not at all."""
    engine = [sys.executable, str(Path(__file__).with_name("core_engine.py")), role]
    results = list(run(engine, [scenario for scenario in list_scenarios(role) if scenario.id in ids]))
    assert [(result.id, result.status, result.text) for result in results] == [(id_, "pass", "") for id_ in ids]
    codes = {fields["code"] for result in results for log in result.log for *_, name, fields in log if name == "Error"}
    assert "UNKNOWN_MESSAGE" in codes


def test_what_several_messages_have_belongs_to_all_of_their_profiles() -> None:
    facts = load_registry()
    assert profiles(facts)["CreditKind"] == ["inline", "staged"]
    assert profiles(facts)["Component"] == ["storage"]
    facts["message"]["Offer"]["field"].append({"type": "list<struct:Component>"})
    assert profiles(facts)["Component"] == ["pull", "storage"]
    facts["message"]["Ping"]["field"].append({"type": "struct:Component"})
    assert profiles(facts)["Component"] == ["codec"]


def test_extensions_are_profiles_or_abilities_of_a_testee() -> None:
    assert EXTENSIONS.keys() - PROFILES.keys() == {"sleep", "large"}
