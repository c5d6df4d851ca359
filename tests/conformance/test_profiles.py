"""Profiles: every case belongs to what its clauses belong to, so that clauses, cases and claims cannot disagree."""

import importlib
import json
import pkgutil

import pytest

from kvproto_conformance.cases import load
from kvproto_conformance.claims import EXTENSIONS
from kvproto_conformance.data import CLAUSES, REGISTRY
from kvproto_conformance.live import scenarios
from kvproto_conformance.live.scenario import SCENARIOS

PROFILE_OF = {id: row["profile"] for id, row in json.loads(CLAUSES.read_text()).items()}
PROFILES = json.loads(REGISTRY.read_text())["profile"]
ASKED_IN_JSON = {"codec", "tickets", "writing"}
"""Suites whose questions are in the JSON form, whether or not a testee claims the form of all messages."""
PART_OF = {"sleep": "epochs"}

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
            {*case.needs, *(name for name, _ in case.beyond)} | ({"json"} if case.suite in ASKED_IN_JSON else set()),
        )
    ]
    assert not wrong


@pytest.mark.parametrize("id", SCENARIOS)
def test_each_scenario_has_a_clause_of_what_it_needs(id: str) -> None:
    scenario = SCENARIOS[id]
    assert any(belongs(clause, {name.lower() for name in scenario.extensions}) for clause in scenario.clauses)


def test_extensions_are_profiles_or_abilities_of_a_testee() -> None:
    assert EXTENSIONS.keys() - PROFILES.keys() == {"sleep", "large"}
