"""What became of each mutant, and the table of all of them."""

from __future__ import annotations

import fnmatch
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from tools.prove import code
from tools.prove.judging import SURVIVED

__all__ = ["LEAST", "Reasons", "Row", "read_reasons", "summary", "why"]

LEAST = 0.95
"""Share of the mutants of code that have to be noticed."""
Reasons = list[tuple[str, str]]
"""Patterns of names, and why nobody can notice the mutants that have such a name."""


@attrs.frozen
class Row:
    """One mutant: its kind, its name, who noticed it (nobody where empty), and why nobody can, if nobody can."""

    kind: str
    name: str
    noticed: str
    why: str = ""
    seconds: float = 0.0
    """Of CPU."""

    @property
    def verdict(self) -> str:
        if self.noticed != SURVIVED:
            return "KILLED THOUGH EQUIVALENT" if self.why else "killed"
        return "equivalent" if self.why else "SURVIVED"


def read_reasons(path: Path) -> Reasons:
    """Of a file such as `equivalent.toml`."""
    table = tomllib.loads(path.read_text())
    return [(name, row["why"]) for row in table.get("equivalent", []) for name in row["names"]]


def why(name: str, reasons: Reasons) -> str:
    """Why nobody can notice a mutant; empty where somebody should."""
    return next((text for pattern, text in reasons if fnmatch.fnmatchcase(name, pattern)), "")


_COLUMNS = ("mutants", "by cases", "by live", "by tests", "equivalent", "survived", "noticed", "CPU s")


def summary(rows: Sequence[Row]) -> tuple[str, bool]:
    """The table, and whether the suite has proved itself."""
    lines, good = [f"{'':10}" + "".join(f"{column:>12}" for column in _COLUMNS)], True
    for kind in dict.fromkeys(row.kind for row in rows):
        some = [row for row in rows if row.kind == kind]
        count = Counter(row.verdict for row in some)
        tests = sum(row.verdict == "killed" and row.noticed.startswith("tests/") for row in some)
        live = sum(row.verdict == "killed" and row.noticed.startswith("LIVE-") for row in some)
        killed, left = count["killed"], count["SURVIVED"]
        share, seconds = killed / max(1, killed + left), sum(row.seconds for row in some)
        numbers = (len(some), killed - live - tests, live, tests, count["equivalent"], left)
        cells = "".join(f"{number:12,}" for number in numbers)
        lines.append(f"{kind:10}{cells}{share:12.1%}{seconds:12,.0f}")
        good &= not count["KILLED THOUGH EQUIVALENT"] and (share >= LEAST if kind in code.AREAS else not left)
    return "\n".join(lines), good and bool(rows)
