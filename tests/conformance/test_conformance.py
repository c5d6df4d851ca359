"""The suite passes what is right, and fails what is wrong."""

import sys
from pathlib import Path

import pytest

from kvproto_conformance.__main__ import main
from kvproto_conformance.cases import load

TESTEE = str(Path(__file__).parents[2] / "conformance/testees/python_kvproto.py")
SPEC = Path(__file__).parents[2] / "spec/v1"


def test_kvproto_is_conformant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([sys.executable, TESTEE]) == 0
    assert f"{len(load())} of {len(load())} cases" in capsys.readouterr().out


DEGENERATE = {
    "refuses everything": "print(json.dumps({'error': 'BAD_MAGIC', 'path': '@magic'}), flush=True)",
    "accepts everything": "print(json.dumps({'message': 'DoneAck', 'fields': {}}), flush=True)",
    "dies": "sys.exit(1)",
    "speaks no JSON": "print('what?', flush=True)",
    "answers with a list": "print('[]', flush=True)",
}


@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_testees_are_not(kind: str) -> None:
    program = f"import json, sys\nfor line in sys.stdin:\n    {DEGENERATE[kind]}"
    assert main(["--only", "m", "--", sys.executable, "-c", program]) == 1


def test_a_run_without_cases_or_testee_is_invalid() -> None:
    assert main(["--only", "no such case", sys.executable, TESTEE]) == 2
    assert main(["/no/such/program"]) == 2


def test_every_case_names_a_clause_of_the_prose() -> None:
    prose = "".join(path.read_text() for path in SPEC.glob("*.md"))
    assert not [case.id for case in load() if f"`{case.clause}`" not in prose]
