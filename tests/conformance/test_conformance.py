"""The suite passes what is right, and fails what is wrong."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvproto_conformance import inline, inline_vectors, late, lowering, negotiation, planner, testee
from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import LEVELS, load
from kvproto_conformance.codec import Refusal
from kvproto_conformance.run import Verdict, run, verdict

TESTEE = str(Path(__file__).parents[2] / "conformance/testees/python_kvproto.py")
SECOND = str(Path(TESTEE).with_name("second_opinion.py"))
SPEC = Path(__file__).parents[2] / "spec/v1"


def test_kvproto_is_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([sys.executable, TESTEE]) == 0
    assert f"{len(load())} of {len(load())} cases" in capsys.readouterr().out


def test_the_second_opinion_is_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command; of its codec some cases only, as tests of the codec ask it all of them."""
    levels = [word for level in LEVELS if level != "codec" for word in ("--level", level)]
    assert main([*levels, sys.executable, SECOND]) == 0
    assert main(["--level", "codec", "--only", "order/", sys.executable, SECOND]) == 0
    wanted = sum(case.level != "codec" for case in load())
    assert f"{wanted} of {wanted} cases" in capsys.readouterr().out


DEGENERATE: dict[str, tuple[str, dict[str, Any]]] = {
    # what a program does with each line; how its answer counts
    "refuses everything": (
        "print(json.dumps({'error': 'BAD_MAGIC', 'path': '@magic'}), flush=True)",
        {"error": "BAD_MAGIC", "path": "@magic"},
    ),
    "accepts everything": (
        "print(json.dumps({'message': 'DoneAck', 'fields': {}}), flush=True)",
        {"message": "DoneAck", "fields": {}},
    ),
    "dies": ("sys.exit(1)", {"broken": "it died"}),
    "speaks no JSON": ("print('what?', flush=True)", {"broken": "its answer is not JSON"}),
    "answers with a list": ("print('[]', flush=True)", {"broken": "its answer is not an object"}),
}


class Always(testee.Testee):
    """An implementation within this process that gives one answer to every question."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(["no process"])
        self._answer = answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return self._answer


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ten of the cases, of two questions each: one of each of the first ten messages that the vectors name."""
    chosen: dict[str, Any] = {}
    for path in sorted((SPEC / "vectors/codec").glob("*.json")):
        for case in json.loads(path.read_text())["cases"]:
            if "message" in case and case["message"] != "DoneAck":
                chosen.setdefault(case["message"], case)
    folder = tmp_path_factory.mktemp("ten")
    (folder / "codec").mkdir()
    suite = {"suite": "ten", "cases": [*chosen.values()][:10]}
    (folder / "codec/ten.json").write_text(json.dumps(suite))
    return folder


@pytest.mark.parametrize("kind", DEGENERATE)
def test_a_degenerate_program_is_nonconformant(kind: str, ten: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, answer = DEGENERATE[kind]
    program = f"import json, sys\nfor line in sys.stdin:\n    {line}"
    assert main(["--vectors", str(ten), "--", sys.executable, "-c", program]) == Verdict.NONCONFORMANT
    said = capsys.readouterr().out
    assert "nonconformant: 0 of 10 cases" in said
    assert said.count(f"got {answer}") == 20


@pytest.mark.parametrize("kind", DEGENERATE)
def test_one_answer_to_everything_fails_nearly_every_case(kind: str) -> None:
    _, answer = DEGENERATE[kind]
    results = run(load(), Always(answer))
    right = [result.case for result in results if not result.wrong]
    assert [case for case in right if any(ask.expected != answer for ask in case.asks)] == []
    assert verdict(results) is Verdict.NONCONFORMANT
    assert len(right) < len(results) / 20


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
    ("level", "wrong"),
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
def test_a_mistake_fails_the_cases_that_show_it(level: str, wrong: set[str]) -> None:
    cases = [case for case in load() if case.level == level and "fleets" not in case.id]
    failed = {result.case.id for result in run(cases, Mistaken()) if result.wrong}
    assert wrong <= failed
    assert failed < {case.id for case in cases} or level in ("lowering", "verify")


def test_an_answer_may_say_more_only_where_the_case_allows_it() -> None:
    """Cases of fleets state no routes."""
    right = [case for case in load() if case.level == "plan" and case.id.endswith("tp2, few")][:2]
    answers = [case.asks[0].expected for case in right]
    assert not run(right[:1], Always({**answers[0], "routes": []}))[0].wrong
    assert run(right[:1], Always({"plan": answers[0]["plan"], "routes": []}))[0].wrong
    strict = [attrs.evolve(case, asks=(attrs.evolve(case.asks[0], more=False),)) for case in right[:1]]
    assert run(strict, Always({**answers[0], "routes": []}))[0].wrong


def test_the_vectors_of_data_are_what_their_maker_makes() -> None:
    assert inline_vectors.FILE.read_text() == inline_vectors.made()


def test_the_readme_counts_the_cases_of_each_level() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (SPEC.parents[1] / "conformance/README.md").read_text(), re.M)
    counted = Counter(case.level for case in load())
    assert rows == [(level, f"{counted[level]:,}") for level in LEVELS]


def test_a_run_without_cases_or_testee_is_invalid() -> None:
    assert main(["--only", "no such case", sys.executable, TESTEE]) == 2
    assert main(["--level", "merge", "--only", "owner", sys.executable, TESTEE]) == 2
    assert main(["/no/such/program"]) == 2


def test_a_level_runs_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = sum(case.level == "merge" for case in load())
    assert main(["--level", "merge", sys.executable, TESTEE]) == 0
    assert capsys.readouterr().out == f"conformant: {wanted} of {wanted} cases\n"


def test_every_case_names_a_clause_of_the_prose() -> None:
    prose = "".join(path.read_text() for path in SPEC.glob("*.md"))
    assert not [case.id for case in load() if f"`{case.clause}`" not in prose]
