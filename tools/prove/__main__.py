"""`python -m tools.prove`: whether the suite notices what is wrong; the exit status is 0 only if it does.

Facts of the registry are made otherwise one at a time, code is mutated by chance from a seed, and bugs that engines
have had are planted; each change is made in a forked child, and the first case that fails ends it. What no case
notices, the tests of its room are asked of; of sessions there are tests alone, of both ends in one process and in
virtual time.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs

from tools.prove import bugs, code, facts
from tools.prove.children import LATE, in_children
from tools.prove.judging import SURVIVED, Changes, by_both_codecs, by_cases, by_tests, cases, doubts
from tools.prove.passing import Passing, trace
from tools.specgen.registry import ROOT

__all__ = ["Row", "main", "prove_bugs", "prove_code", "prove_facts"]

_WIRE = ("codec", "writing", "json", "tickets", "streams")
_SUITES = {
    "codec": _WIRE,
    "planner": ("plan", "deal", "lowering", "late", "verify", "stream"),
}
"""What is asked first of an area; the rest comes after it."""
_ROOMS = {
    # package to its tests
    "kvproto.wire.": "tests/wire",
    "kvproto.planning.": "tests/plan",
    "kvproto.copying.": "tests/plan",
    "kvproto.session.": "tests/session",
    "kvproto.net.": "tests/net",
    "kvproto.seeing.": "tests/seeing",
}
_QUICK = ("-m", "not slow")
_TESTS = {
    # area to runs of tests, of which those are asked that pass the line
    "codec": (("tests/wire", *_QUICK),),
    "planner": (
        ("tests/plan", "tests/session", *_QUICK),
        ("tests/plan/test_deals.py", "tests/conformance/test_planner.py"),
    ),
    "session": (("tests/session",), ("tests/node", "tests/door", *_QUICK)),
}
_LIMIT = 120.0
"""Seconds of the cases for one mutant: thirty times what all of them take."""
_ENOUGH = 900.0
"""Seconds of tests for one mutant, each of which has a limit of its own: to take long is no sign of anything."""
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
Judge = Callable[[], str]


def _reasons(path: Path) -> Reasons:
    table = tomllib.loads(path.read_text())
    return [(name, row["why"]) for row in table.get("equivalent", []) for name in row["names"]]


def _why(name: str, reasons: Reasons) -> str:
    return next((why for pattern, why in reasons if fnmatch.fnmatchcase(name, pattern)), "")


def _judged(
    first: Mapping[str, Judge], then: Mapping[str, Judge], jobs: int, limit: float
) -> Iterator[tuple[str, str]]:
    """Who noticed each mutant: the first judges within the limit, or else the tests, where there are some."""
    left = []
    for name, noticed in in_children(first.items(), jobs, limit):
        if noticed == SURVIVED and name in then:
            left.append(name)
        else:
            yield name, noticed
    yield from in_children(((name, then[name]) for name in left), jobs, _ENOUGH)


def _by_rooms(changes: Changes) -> str:
    """Who of the tests of the rooms in which something is otherwise."""
    rooms = dict.fromkeys(room for package, room in _ROOMS.items() for m in changes if m.startswith(package))
    words = [f"{room}/test_numbers.py" for room in rooms]  # the first that are asked
    return by_tests(changes, [*words, *rooms, *_QUICK]) if rooms else SURVIVED


def _fact(name: str, edit: facts.Edit, excused: bool) -> str:
    """Who of the cases notices one fact that is otherwise."""
    try:
        changes = facts.changes_of(edit)
    except KeyError as error:
        return f"does not generate: {error!r}"
    if not changes:
        return SURVIVED
    about = name.split(".")[1]
    asked = sorted(cases(*(_WIRE if _of_wire(changes) else ())), key=lambda case: case.about != about)
    if excused and name.startswith(("struct", "message")):  # many; what could notice is about the message itself
        asked = [case for case in asked if case.about == about] or asked
    return by_cases(changes, asked)


def _fact_by_rooms(name: str, edit: facts.Edit) -> str:
    """The same of the tests; of how a message is delivered those of sessions."""
    changes = facts.changes_of(edit)
    if name.endswith(".delivery"):
        return by_tests(changes, ["tests/session/test_delivery.py", "tests/session/test_numbers.py"])
    return _by_rooms(changes)


def _of_wire(changes: Changes) -> bool:
    return all(module.startswith("kvproto.wire.") and module != "kvproto.wire.enums" for module in changes)


def prove_facts(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Mutants of the registry: all, or so many by chance."""
    found = [mutant for mutant in facts.mutants() if fnmatch.fnmatchcase(mutant[0], only)]
    if number:
        found = random.Random(seed).sample(found, min(number, len(found)))
    excused = {name for name, _ in found if _why(name, reasons)}
    first = {name: partial(_fact, name, edit, name in excused) for name, edit in found}
    then = {name: partial(_fact_by_rooms, name, edit) for name, edit in found if name not in excused}
    for name, noticed in _judged(first, then, jobs, _LIMIT):
        yield Row("registry", name, noticed, _why(name, reasons))


Ask = Callable[[code.Mutant], str]


def _by_cases(area: str) -> Ask:
    """Who of the cases notices a mutant of an area; none is about sessions."""
    if area not in _SUITES:
        return lambda mutant: SURVIVED
    asked = sorted(cases(), key=lambda case: case.suite not in _SUITES[area])
    if area == "codec":
        ((_, text),) = in_children([(_AS_IT_IS, partial(doubts, asked))], 1, _LIMIT)
        told = json.loads(text)
        return lambda mutant: by_both_codecs({mutant.module: mutant.text}, asked, told)
    return lambda mutant: by_cases({mutant.module: mutant.text}, asked)


def _by_tests(area: str, jobs: int) -> Ask:
    """Who of the tests that pass its line."""
    files = [path.relative_to(ROOT).as_posix() for path in code.files(area)]
    runs = ((f"{_AS_IT_IS}, {words[0]}", partial(trace, files, words)) for words in _TESTS[area])
    passing = Passing.read([text for _, text in in_children(runs, jobs, _ENOUGH)])

    def ask(mutant: code.Mutant) -> str:
        order = passing.tests(mutant.file, mutant.line)
        words = dict.fromkeys(test.partition("::")[0] for test in order)
        return by_tests({mutant.module: mutant.text}, list(words), order)

    return ask


_AS_IT_IS = "without any change"


def prove_code(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Mutants of code, so many of each area."""
    for area in code.AREAS:
        drawn = {f"{m.file} {m.key}": m for m in code.sample(area, number, seed)}
        drawn = {name: mutant for name, mutant in drawn.items() if fnmatch.fnmatchcase(name, only)}
        if drawn:
            ask, ask_tests = _by_cases(area), _by_tests(area, jobs)
            first = {name: partial(ask, mutant) for name, mutant in drawn.items()}
            then = {name: partial(ask_tests, mutant) for name, mutant in drawn.items()}
            for name, noticed in _judged(first, then, jobs, _LIMIT):
                yield Row(area, name, noticed, _why(name, reasons))


def prove_bugs(only: str, number: int, seed: int, jobs: int, reasons: Reasons) -> Iterator[Row]:
    """Bugs of real engines: each has to be noticed by all the cases that it names."""
    found = {bug.name: bug for bug in bugs.load() if fnmatch.fnmatchcase(bug.name, only)}
    if number:
        found = dict(random.Random(seed).sample(sorted(found.items()), min(number, len(found))))
    tasks = ((name, partial(bugs.noticed, bug)) for name, bug in found.items())
    for name, noticed in in_children(tasks, jobs, _LIMIT):
        yield Row("bug", name, noticed)


def summary(rows: Sequence[Row]) -> tuple[str, bool]:
    """The table, and whether the suite has proved itself."""
    columns = ("mutants", "by cases", "by tests", "equivalent", "survived", "noticed")
    lines, good = [f"{'':10}" + "".join(f"{column:>12}" for column in columns)], True
    for kind in dict.fromkeys(row.kind for row in rows):
        some = [row for row in rows if row.kind == kind]
        count = Counter(row.verdict for row in some)
        tests = sum(row.verdict == "killed" and row.noticed.startswith("tests/") for row in some)
        killed, left = count["killed"], count["SURVIVED"]
        share = killed / max(1, killed + left)
        numbers = (len(some), killed - tests, tests, count["equivalent"], left)
        lines.append(f"{kind:10}" + "".join(f"{number:12,}" for number in numbers) + f"{share:12.1%}")
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
    some = cases()[:: 20 if args.sample else 1]
    for _, noticed in in_children([(_AS_IT_IS, partial(by_cases, {}, some))], 1, _LIMIT):
        if noticed:
            print(f"{_AS_IT_IS} {noticed} fails")
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
