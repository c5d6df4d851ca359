"""The outcome of each mutant, and the table of all of them."""

from __future__ import annotations

import fnmatch
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs

from tools.prove import code
from tools.prove.judging import SURVIVED

LEAST = 0.95
"""Share of the mutants of code that have to be noticed."""


@attrs.frozen
class Row:
    """One mutant.

    Fields:
        kind, name: Which.
        noticed: Who noticed it; empty: nobody.
        why: Why nobody can; empty where somebody should.
        seconds: Of CPU.
        unseen: Why no peer can notice it, but only a test; empty where the suite should.
    """

    kind: str
    name: str
    noticed: str
    why: str = ""
    seconds: float = 0.0
    unseen: str = ""

    @property
    def by(self) -> str:
        """The kind of noticer: cases, live engines or tests, the registry's check among them; empty: nobody."""
        if self.noticed == SURVIVED:
            return ""
        ours = self.noticed.startswith(("tests/", "tools.specgen"))
        return "tests" if ours else "live" if self.noticed.startswith("LIVE-") else "cases"

    @property
    def verdict(self) -> str:
        if not self.by:
            return "equivalent" if self.why else "SURVIVED"
        if self.why:
            return "KILLED THOUGH EQUIVALENT"
        return "SEEN THOUGH UNSEEN" if self.unseen and self.by != "tests" else "killed"


Patterns = list[tuple[str, str]]
"""Of names, and a reason."""


@attrs.frozen
class Reasons:
    """Reasons that mutants of some names are not noticed: `equivalent` by nobody, `unseen` by no peer."""

    equivalent: Patterns = attrs.Factory(list)
    unseen: Patterns = attrs.Factory(list)

    @classmethod
    def read(cls, path: Path) -> Reasons:
        """Of a file such as `equivalent.toml`."""
        table = tomllib.loads(path.read_text())
        kinds = (field.name for field in attrs.fields(cls))
        return cls(*([(name, row["why"]) for row in table.get(kind, []) for name in row["names"]] for kind in kinds))

    def why(self, name: str) -> str:
        """The reason that nobody can notice a mutant; empty if somebody should."""
        return _reason(name, self.equivalent)

    def judged(self, row: Row) -> Row:
        """A row with the reasons of today."""
        return attrs.evolve(row, why=self.why(row.name), unseen=_reason(row.name, self.unseen))


def _reason(name: str, some: Patterns) -> str:
    return next((text for pattern, text in some if fnmatch.fnmatchcase(name, pattern)), "")


_COLUMNS = (
    "mutants", "by cases", "by live", "by tests", "unseen", "equivalent", "survived", "noticed", "by suite", "CPU s",
)  # fmt: skip


def summary(rows: Sequence[Row]) -> tuple[str, bool]:
    """The table, and whether the suite has proved itself.

    `noticed` is the share of the mutants that somebody can notice, `by suite` the share that cases and live engines
    noticed of those that a peer can.
    """
    lines, good = [f"{'':10}" + "".join(f"{column:>12}" for column in _COLUMNS)], True
    for kind in dict.fromkeys(row.kind for row in rows):
        some = [row for row in rows if row.kind == kind]
        count = Counter(row.verdict for row in some)
        left = count["SURVIVED"]
        by = Counter("unseen" if row.unseen else row.by for row in some if row.verdict == "killed")
        suite, seconds = by["cases"] + by["live"], sum(row.seconds for row in some)
        share = by.total() / max(1, by.total() + left)
        numbers = (len(some), *(by[who] for who in ("cases", "live", "tests", "unseen")), count["equivalent"], left)
        cells = "".join(f"{number:12,}" for number in numbers)
        seen = suite / max(1, suite + by["tests"] + left)
        lines.append(f"{kind:10}{cells}{share:12.1%}{seen:12.1%}{seconds:12,.0f}")
        good &= not any("THOUGH" in verdict for verdict in count)
        good &= share >= LEAST if kind in code.AREAS else not left
    return "\n".join(lines), good and bool(rows)
