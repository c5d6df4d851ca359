"""The table of what one peer can cost: its numbers are the registry's, its clauses are there, and its tests too."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tools.specgen.registry import load

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def table() -> list[list[str]]:
    """The rows, as cells."""
    text = (ROOT / "docs/security.md").read_text().partition("## What one peer can cost")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_each_bound_names_a_test_that_is_there(row: list[str]) -> None:
    _, _, most, _, held = row
    assert most
    tests = TEST.findall(held)
    assert tests
    assert not [name for path, name in tests if name not in functions(path)]


def test_numbers_are_those_of_the_registry() -> None:
    limits, stated = load()["limit"], dict[str, int]()
    for cell in (cell for row in table() for cell in row):
        for name, number in re.findall(r"`(\w+)` ([\d,]+)", cell):
            stated[name] = int(number.replace(",", ""))
    assert len(stated) > 12
    assert {name: limits[name]["value"] for name in stated} == stated


def test_clauses_are_those_of_the_specification() -> None:
    known = (ROOT / "spec/v1/clauses.md").read_text()
    clauses = {clause for row in table() for clause in re.findall(r"KVP-[A-Z-]+", row[3])}
    assert len(clauses) > 12
    assert not [clause for clause in clauses if f"`{clause}`" not in known]
