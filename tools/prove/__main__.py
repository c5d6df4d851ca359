"""`python -m tools.prove`: whether the suite notices what is wrong; the exit status is 0 only if it does.

Facts of the registry are made otherwise one at a time, code is mutated by chance from a seed, and bugs that engines
have had are planted; each change is made in a forked child, and the first case that fails ends it.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import attrs

from tools.prove import bugs, code, facts
from tools.prove.children import LATE, in_children
from tools.prove.judging import SURVIVED, Changes, by_cases, by_tests, cases

__all__ = ["Row", "main", "prove_bugs", "prove_code", "prove_facts"]

_WIRE = ("codec", "writing", "json", "tickets", "streams")
_SUITES = {
    "codec": ("codec", "writing", "json", "tickets", "streams"),
    "planner": ("plan", "deal", "lowering", "late", "verify", "stream"),
}
_SESSION = (
    "tests/session/test_session.py", "tests/session/test_negotiation.py", "tests/session/test_registration.py",
    "tests/session/test_traces.py", "tests/session",
)  # fmt: skip
_LIMIT = 120.0
"""Seconds of a mutant: three times what the slowest takes that nobody notices."""
_LEAST = 0.95
"""Share of the mutants of code that have to be noticed."""


@attrs.frozen
class Row:
    """One mutant: its kind, its name, who noticed it (nobody where empty), and why nobody can, if nobody can."""

    kind: str
    name: str
    noticed: str
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.noticed != SURVIVED:
            return "KILLED THOUGH EQUIVALENT" if self.why else "killed"
        return "equivalent" if self.why else "SURVIVED"


Reasons = list[tuple[str, str]]
"""Patterns of names, and why nobody can notice the mutants that have such a name."""


def _reasons(path: Path) -> Reasons:
    table = tomllib.loads(path.read_text())
    return [(name, row["why"]) for row in table.get("equivalent", []) for name in row["names"]]


def _why(name: str, reasons: Reasons) -> str:
    return next((why for pattern, why in reasons if fnmatch.fnmatchcase(name, pattern)), "")


def _registry(name: str, edit: facts.Edit, excused: bool) -> str:
    """Who notices one fact that is otherwise."""
    try:
        changes = facts.changes_of(edit)
    except KeyError as error:
        return f"does not generate: {error!r}"
    if not changes:
        return SURVIVED
    if any(module.startswith("kvproto.session") for module in changes):
        return by_tests(changes, _SESSION, "-m", "not slow")
    about = name.split(".")[1]
    asked = sorted(cases(*(_WIRE if _of_wire(changes) else ())), key=lambda case: case.about != about)
    if excused and name.startswith(("struct", "message")):  # many; what could notice is about the message itself
        asked = [case for case in asked if case.about == about] or asked
    return by_cases(changes, asked)


def _of_wire(changes: Changes) -> bool:
    return all(module.startswith("kvproto.wire.") and module != "kvproto.wire.enums" for module in changes)


def prove_facts(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Mutants of the registry: all, or so many by chance."""
    found = [mutant for mutant in facts.mutants() if fnmatch.fnmatchcase(mutant[0], only)]
    if number:
        found = random.Random(seed).sample(found, min(number, len(found)))
    tasks = ((name, partial(_registry, name, edit, bool(_why(name, reasons)))) for name, edit in found)
    for name, noticed in in_children(tasks, jobs, _LIMIT):
        yield Row("registry", name, noticed, _why(name, reasons))


def _code(area: str, mutant: code.Mutant) -> str:
    changes: Changes = {mutant.module: mutant.text}
    if area == "session":
        return by_tests(changes, _SESSION, "-m", "not slow")
    return by_cases(changes, sorted(cases(), key=lambda case: case.suite not in _SUITES[area]))


def prove_code(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Mutants of code, so many of each area."""
    for area in code.AREAS:
        drawn = {f"{m.file} {m.key}": m for m in code.sample(area, number, seed)}
        tasks = ((n, partial(_code, area, m)) for n, m in drawn.items() if fnmatch.fnmatchcase(n, only))
        for name, noticed in in_children(tasks, jobs, _LIMIT):
            yield Row(area, name, noticed, _why(name, reasons))


def prove_bugs(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Bugs of real engines: each has to be noticed by all the cases that it names."""
    found = {bug.name: bug for bug in bugs.load() if fnmatch.fnmatchcase(bug.name, only)}
    if number:
        found = dict(random.Random(seed).sample(sorted(found.items()), min(number, len(found))))
    tasks = ((name, partial(bugs.noticed, bug)) for name, bug in found.items())
    for name, noticed in in_children(tasks, jobs, _LIMIT):
        yield Row("bug", name, noticed)


def summary(rows: list[Row]) -> tuple[str, bool]:
    """The table, and whether the suite has proved itself."""
    lines, good = [f"{'':10}{'mutants':>9}{'killed':>9}{'equivalent':>12}{'survived':>10}{'noticed':>10}"], True
    for kind in dict.fromkeys(row.kind for row in rows):
        count = Counter(row.verdict for row in rows if row.kind == kind)
        killed, left = count["killed"], count["SURVIVED"]
        share = killed / max(1, killed + left)
        lines.append(f"{kind:10}{sum(count.values()):9}{killed:9}{count['equivalent']:12}{left:10}{share:10.1%}")
        good &= not count["KILLED THOUGH EQUIVALENT"] and (share >= _LEAST if kind in code.AREAS else not left)
    return "\n".join(lines), good and bool(rows)


_PARTS = {"registry": prove_facts, "code": prove_code, "bugs": prove_bugs}


def main(argv: list[str] | None = None) -> int:
    """Run all parts, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tools.prove", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="all, if none is named")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="mutants whose name is like this")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many facts and bugs, not all")
    parser.add_argument("--code", type=int, default=100, metavar="N", help="mutants of code of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    equivalent = Path(__file__).with_name("equivalent.toml")
    parser.add_argument("--reasons", type=Path, default=equivalent, help="why some mutants cannot be noticed")
    args = parser.parse_args(argv)
    reasons = _reasons(args.reasons)
    sys.dont_write_bytecode = False  # every child imports kvproto anew
    began, rows = time.monotonic(), []
    for _, noticed in in_children([("", partial(by_cases, {}, cases()[:: 20 if args.sample else 1]))], 1, _LIMIT):
        if noticed:
            print(f"without any change {noticed} fails")
            return 1
    for part in args.parts or _PARTS:
        number = args.code if part == "code" else args.sample
        for row in _PARTS[part](args.only, number, args.seed, args.jobs, reasons):
            rows.append(row)
            if row.verdict.isupper() or row.noticed == LATE:
                print(f"{row.verdict}: {row.kind}: {row.name}: {row.noticed or row.why}", flush=True)
    table, good = summary(rows)
    print(f"{table}\n{time.monotonic() - began:.0f} s, seed {args.seed}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
