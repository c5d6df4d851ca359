"""The suite passes what is right, and fails what is wrong."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from kvproto_conformance import broken_vectors, inline, inline_vectors, late, lowering, negotiation, planner, testee
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import load
from kvproto_conformance.claims import EXTENSIONS, SUITES
from kvproto_conformance.codec import Refusal
from kvproto_conformance.data import spec
from kvproto_conformance.engines import LIVE
from kvproto_conformance.live import list_scenarios
from kvproto_conformance.run import Status, Verdict, run, verdict

TESTEE = str(Path(__file__).parents[2] / "conformance/testees/python_kvproto.py")
SECOND = str(Path(TESTEE).with_name("second_opinion.py"))
SPEC = Path(__file__).parents[2] / "spec/v1"


def test_kvproto_is_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--seed", "1", sys.executable, TESTEE]) == 0
    assert f"{len(load()):,}/{len(load()):,}" in capsys.readouterr().out


def test_the_second_opinion_is_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command; of its codec some cases only, as tests of the codec ask it all of them."""
    suites = [word for suite in SUITES if suite != "codec" for word in ("--suite", suite)]
    assert main(["run", *suites, "--allow-incomplete", sys.executable, SECOND]) == 0
    wanted = sum(case.suite != "codec" for case in load())
    assert (
        f"incomplete: kvproto {spec()} · both · L2 · {' · '.join(EVERY)} · {wanted:,}/{wanted:,}"
        in capsys.readouterr().out
    )
    assert main(["run", "--suite", "codec", "--only", "order/", "--allow-incomplete", sys.executable, SECOND]) == 0


EVERY = sorted(EXTENSIONS.keys() - {"spans", "curve", "large", "resume", "sleep"})
"""Those of vectors; the others are of live engines."""
DEGENERATE: dict[str, dict[str, Any]] = {
    "refuses everything": {"error": "BAD_MAGIC", "path": "@magic"},
    "accepts everything": {"message": "DoneAck", "fields": {}},
    "knows nothing": {"unsupported": True},
    "says nothing": {},
}


class Always(testee.Testee):
    """An implementation within this process that gives one answer to every question."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(["no process"])
        self._answer = answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return dict(self._answer)


@pytest.mark.parametrize("kind", DEGENERATE)
def test_one_answer_to_everything_earns_nothing(kind: str) -> None:
    results = run(load(), Always(DEGENERATE[kind]))
    assert {result.status for result in results} <= {Status.FAIL, Status.UNEARNED}
    assert verdict(results) is Verdict.NONCONFORMANT


class Mistaken(testee.Testee):
    """An implementation within this process that is wrong in one thing at each level."""

    def __init__(self) -> None:
        super().__init__(["no process"])

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return MISTAKES[question["op"]](question)
        except Refusal as refusal:
            return {"error": refusal.code, "path": refusal.path}


MISTAKES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "negotiate": lambda q: negotiation.negotiated(q["source"], q["sink"]),
    "plan": lambda q: planner.plan(q["source"], q["sink"], ()),
    "lower": lambda q: {"copies": lowering.copies(q["source"], q["sink"])[:-1]},
    "checksums": lambda q: {"checksums": dict.fromkeys(lowering.sums(q["source"], q["sink"]), "0")},
    "stream": lambda q: {"stream": sorted(lowering.stream(q["source"], q["sink"]))},
    "inline": lambda q: inline.taken(int(q["length"]), int(q["total"]) + 1, q["data"]),
    "late": lambda q: late.served(q["group"], q["cp_rank"], {**q["grant"], "late": True}, [*map(int, q["since"])]),
}


@pytest.mark.parametrize(
    ("suite", "wrong"),
    [
        (
            "negotiation",
            {"negotiation/first-of-sink", "negotiation/sink-needs-missing", "negotiation/source-needs-missing"},
        ),
        ("plan", {"plan/mla-gqa-8-4-few", "plan/mla-gqa-8-4-one", "plan/draft-cold"}),
        ("lowering", {"lowering/ring-to-pages", "lowering/zigzag-alike"}),
        ("verify", {"verify/ring-to-pages", "verify/zigzag-alike"}),
        ("late", {"late/pages-0-9-0", "late/tiled-dealt-1-9-0"}),
        ("stream", {"stream/layers-of-two-models", "stream/ring-to-pages"}),
        ("inline", {"inline/beyond-credit", "inline/beyond-then-within"}),
    ],
)
def test_a_mistake_fails_the_cases_that_show_it(suite: str, wrong: set[str]) -> None:
    cases = [case for case in load() if case.suite == suite and "fleets" not in case.id]
    failed = {result.case.id for result in run(cases, Mistaken()) if result.wrong}
    assert wrong <= failed
    assert failed < {case.id for case in cases} or suite in ("lowering", "verify")


def test_an_answer_may_say_more_only_where_the_case_allows_it() -> None:
    """Cases of fleets state no routes."""
    right = [case for case in load() if case.suite == "plan" and case.id.endswith("tp2, few")][:2]
    answers = [case.asks[0].expected for case in right]
    assert not run(right[:1], Always({**answers[0], "routes": []}))[0].wrong
    assert run(right[:1], Always({"plan": answers[0]["plan"], "routes": []}))[0].wrong
    strict = [attrs.evolve(case, asks=(attrs.evolve(case.asks[0], more=False),)) for case in right[:1]]
    assert run(strict, Always({**answers[0], "routes": []}))[0].wrong


@pytest.mark.parametrize("maker", [inline_vectors, broken_vectors])
def test_vectors_are_what_their_maker_makes(maker: ModuleType) -> None:
    assert maker.FILE.read_text() == maker.made()


def test_the_readme_counts_the_cases_of_each_suite() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (SPEC.parents[1] / "conformance/README.md").read_text(), re.M)
    counted = Counter(case.suite for case in load())
    assert rows == [(suite, f"{counted[suite]:,}") for suite in SUITES if suite not in LIVE.values()]


def test_the_readme_counts_the_scenarios() -> None:
    text = (SPEC.parents[1] / "conformance/README.md").read_text()
    sources, sinks = (len(list_scenarios(role)) for role in ("source", "sink"))
    assert f"There are {sources} scenarios for sources and {sinks} for sinks." in text


def test_a_page_says_what_the_keys_of_the_registry_mean() -> None:
    """Tables are made by it in languages that nobody here knows."""
    section = (SPEC / "messages.md").read_text().partition("## As data")[2].partition("<!-- begin")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    said = {table: set(re.findall(r"`([^`]+)`", says)) for head, says in rows for table in re.findall(r"`(\w+)`", head)}
    facts = json.loads((SPEC / "registry.json").read_text())
    bodies = [*facts["message"].values(), *facts["struct"].values()]
    has: dict[str, list[dict[str, Any]]] = {
        "message": bodies, "enum": [*facts["enum"].values()], "protocol": [facts["protocol"]],
        "field": [field for body in bodies for field in body["field"]],
        "rule": [rule for body in bodies for rule in body.get("rule", ())],
    }  # fmt: skip
    people = {
        "doc",
        "docs",
        "since",
        "unit",
        "status",
        "feature",
        "sender",
        "delivery",
        "reply",
        "clause",
        "id",
        "profile",
    }
    for table, some in has.items():
        assert {key for row in some for key in row} - people - said[table] == set(), table
    assert {form(field["type"]) for field in has["field"]} <= {form(word) for word in said["type"]}


def form(type_: str) -> str:
    """A type without sizes and names."""
    return re.sub(r":\w+", ":", re.sub(r"u\d+", "u", type_))


def test_the_page_for_implementers_names_every_struct_that_is_asked() -> None:
    page = (SPEC.parents[1] / "docs/implement.md").read_text()
    asked = {ask.question["struct"] for case in load() for ask in case.asks if ask.question["op"] == "decode_struct"}
    assert {name for name in asked if name not in page} == set()


def test_an_id_is_of_one_case() -> None:
    assert [id_ for id_, number in Counter(case.id for case in load()).items() if number > 1] == []


def test_every_case_names_a_clause_of_the_prose() -> None:
    prose = "".join(path.read_text() for path in SPEC.glob("*.md"))
    assert not [case.id for case in load() if f"`{case.clause}`" not in prose]
