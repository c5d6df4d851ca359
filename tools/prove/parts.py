"""The three parts: facts of the registry, code, and bugs; each finds who notices its mutants."""

from __future__ import annotations

import fnmatch
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import attrs

from kvproto_conformance.live.scenario import SCENARIOS
from tools.prove import bugs, code, facts
from tools.prove.changing import Changes
from tools.prove.children import in_children
from tools.prove.judging import SURVIVED, by_both_codecs, by_cases, by_tests, cases, doubts
from tools.prove.passing import Passing, trace
from tools.prove.playing import Played, by_scenarios
from tools.prove.rows import Reasons, Row
from tools.prove.state import State, read_hints
from tools.specgen.registry import ROOT

AS_IT_IS = "without any change"
_WIRE = ("codec", "writing", "json", "tickets", "streams")
_SUITES = {
    "codec": _WIRE,
    "planner": ("plan", "deal", "lowering", "late", "verify", "stream"),
}
"""Suites that are asked first of an area; the rest comes after them."""
_ROOMS = {
    # package to its tests
    "kvproto.wire.": "tests/wire",
    "kvproto.planning.": "tests/plan",
    "kvproto.copying.": "tests/plan",
    "kvproto.session.": "tests/session",
    "kvproto.net.": "tests/net",
    "kvproto.observability.": "tests/observability",
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
LIMIT = 120.0
"""Seconds of the cases for one mutant: thirty times what all of them take."""
_ENOUGH = 900.0
"""Seconds of tests for one mutant, each of which has a limit of its own: to take long is no sign of anything."""
_BATCH = 400
"""Mutants that go through all stages before the next do: what an interrupted run has found is kept."""
_WAITING = 3
"""The number of live engines that a core may have: mostly they wait for an answer that does not come."""
Judge = Callable[[], str]
T = TypeVar("T")


@attrs.frozen
class Stage:
    """Some who are asked, in `seconds`, of those mutants that nobody of the stages before has noticed."""

    judges: Callable[[list[str]], Mapping[str, Judge]]
    seconds: float = _ENOUGH
    waiting: int = 1
    """The number at once for each job."""


@attrs.frozen
class Asked:
    """The mutants that are asked, and the way in which they are."""

    only: str
    number: int
    seed: int
    part: tuple[int, int]
    jobs: int
    reasons: Reasons
    state: State
    loaded: frozenset[str]
    """Modules of kvproto that the cases load: what is otherwise elsewhere they cannot see."""

    def chosen(self, found: Mapping[str, T]) -> dict[str, T]:
        """Entries that have such a name, and are of this part."""
        which, of = self.part
        names = [name for name in found if fnmatch.fnmatchcase(name, self.only)]
        return {name: found[name] for name in names[which - 1 :: of]}

    def drawn(self, found: Mapping[str, T]) -> dict[str, T]:
        """All of such a name, or so many by chance; of those the ones of this part."""
        names = [name for name in found if fnmatch.fnmatchcase(name, self.only)]
        if self.number:
            names = random.Random(self.seed).sample(names, min(self.number, len(names)))
        return self.chosen({name: found[name] for name in names})

    def known(self, kind: str, names: Mapping[str, object]) -> dict[str, Row]:
        """Rows of earlier runs."""
        found = {name: self.state.known(kind, name) for name in names}
        return {name: self.reasons.judged(row) for name, row in found.items() if row is not None}


Found = Iterator[tuple[Row, bool]]
"""Rows, and whether each was known before."""


def _judged(asked: Asked, kind: str, names: Mapping[str, object], *stages: Stage) -> Found:
    """Yield who noticed each mutant: a stage is asked of those that nobody of the stages before has noticed."""
    known = asked.known(kind, names)
    yield from ((row, True) for row in known.values())
    asked_now = [name for name in names if name not in known]
    for begin in range(0, len(asked_now), _BATCH):
        yield from _batch(asked, kind, asked_now[begin : begin + _BATCH], stages)


def _batch(asked: Asked, kind: str, left: list[str], stages: Sequence[Stage]) -> Found:
    spent = defaultdict[str, float](float)
    for stage in stages:
        judges = stage.judges(left) if left else {}
        for name, noticed, seconds in in_children(judges.items(), asked.jobs * stage.waiting, stage.seconds):
            spent[name] += seconds
            if noticed != SURVIVED:
                left.remove(name)
                yield asked.reasons.judged(Row(kind, name, noticed, seconds=round(spent[name], 2))), False
    for name in left:
        yield asked.reasons.judged(Row(kind, name, SURVIVED, seconds=round(spent[name], 2))), False


def _hinted(jobs: int, changes: Callable[[str], Changes], left: list[str]) -> dict[str, Judge]:
    """The test or scenario that noticed each the last time; raises SystemExit if one fails without any change."""
    known = read_hints()
    hints = {name: known[name] for name in left if name in known and _is_there(known[name])}
    asked = sorted(set(hints.values()))
    ways = (by_scenarios, [hint for hint in asked if hint in SCENARIOS]), (by_tests, sorted({*asked} - {*SCENARIOS}))
    checks = [(AS_IT_IS, partial(way, {}, some)) for way, some in ways if some]
    for _, failed, _ in in_children(checks, jobs, _ENOUGH):
        if failed in asked:
            raise SystemExit(f"{AS_IT_IS} {failed} fails")
    return {name: partial(_by_hint, changes, name, hint) for name, hint in hints.items()}


def _is_there(hint: str) -> bool:
    file, _, name = hint.partition("::")
    there = (ROOT / file).is_file() and f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
    return there or hint in SCENARIOS


def _by_hint(changes: Callable[[str], Changes], name: str, hint: str) -> str:
    way = by_scenarios if hint in SCENARIOS else by_tests
    return hint if way(changes(name), [hint]) == hint else SURVIVED


def _by_rooms(changes: Changes) -> str:
    """Return which test notices a change, of the rooms in which it is."""
    rooms = dict.fromkeys(room for package, room in _ROOMS.items() for m in changes if m.startswith(package))
    words = [f"{room}/test_numbers.py" for room in rooms]  # the first that are asked
    return by_tests(changes, [*words, *rooms, *_QUICK]) if rooms else SURVIVED


def _fact(name: str, edit: facts.Edit, excused: bool, loaded: frozenset[str]) -> str:
    """Return which case notices one fact that is otherwise; for one that no code says, the registry's own check."""
    try:
        changes = facts.changes_of(edit)
    except KeyError as error:
        return f"does not generate: {error!r}"
    if not changes and not excused:
        return facts.refused(edit)
    if not changes.keys() & loaded:
        return SURVIVED
    about, field = facts.homes(name), name.split(".")[2].split()[-1] if name.count(".") > 1 else ""
    asked = sorted(
        cases(*(_WIRE if _of_wire(changes) else ())), key=lambda case: (case.about not in about, field not in case.id)
    )
    if excused and name.startswith(("struct", "message")):  # many; what could notice is about the message itself
        asked = [case for case in asked if case.about in about] or asked
    return by_cases(changes, asked)


def _fact_by_rooms(name: str, edit: facts.Edit) -> str:
    """The same of the tests, then of the registry's own check; of how a message is delivered those of sessions."""
    changes = facts.changes_of(edit)
    if name.endswith(".delivery"):
        return by_tests(changes, ["tests/session/test_delivery.py", "tests/session/test_numbers.py"])
    return _by_rooms(changes) or facts.refused(edit)


def _of_wire(changes: Changes) -> bool:
    return all(module.startswith("kvproto.wire.") and module != "kvproto.wire.enums" for module in changes)


def prove_facts(asked: Asked) -> Found:
    """Mutants of the registry: all, or so many by chance."""
    found = asked.drawn(dict(facts.mutants()))
    excused = {name for name in found if asked.reasons.why(name)}  # of which the cases are asked alone

    def by_the_cases(left: list[str]) -> dict[str, Judge]:
        return {name: partial(_fact, name, found[name], name in excused, asked.loaded) for name in left}

    def by_hints(left: list[str]) -> dict[str, Judge]:
        return _hinted(asked.jobs, lambda name: facts.changes_of(found[name]), [n for n in left if n not in excused])

    def by_the_tests(left: list[str]) -> dict[str, Judge]:
        return {name: partial(_fact_by_rooms, name, found[name]) for name in left if name not in excused}

    stages = Stage(by_the_cases, LIMIT), Stage(by_hints), Stage(by_the_tests)
    yield from _judged(asked, "registry", found, *stages)


Ask = Callable[[code.Mutant], str]


def _by_cases(area: str) -> Ask:
    """Ask which case notices a mutant of an area."""
    asked = sorted(cases(), key=lambda case: case.suite not in _SUITES[area])
    if area == "codec":
        ((_, text, _),) = in_children([(AS_IT_IS, partial(doubts, asked))], 1, LIMIT)
        told = json.loads(text)
        return lambda mutant: by_both_codecs({mutant.module: mutant.text}, asked, told)
    return lambda mutant: by_cases({mutant.module: mutant.text}, asked)


def _by_tests(area: str, mutants: list[code.Mutant], jobs: int) -> Ask:
    """Ask which test notices a mutant, of those that pass its line."""
    lines = sorted({(mutant.file, mutant.line) for mutant in mutants})
    runs = ((f"{AS_IT_IS}, {words[0]}", partial(trace, lines, words)) for words in _TESTS[area])
    passing = Passing.read([answer.text for answer in in_children(runs, jobs, _ENOUGH)])

    def ask(mutant: code.Mutant) -> str:
        order = passing.tests(mutant.file, mutant.line)
        words = dict.fromkeys(test.partition("::")[0] for test in order)
        return by_tests({mutant.module: mutant.text}, list(words), order)

    return ask


def _by_scenarios(mutants: list[code.Mutant], jobs: int) -> Ask:
    """Ask which scenario notices a mutant, of those that pass its line."""
    playing = Played.trace(sorted({(mutant.file, mutant.line) for mutant in mutants}), jobs, LIMIT)
    return lambda mutant: by_scenarios({mutant.module: mutant.text}, playing.scenarios((mutant.file, mutant.line)))


def prove_code(asked: Asked) -> Found:
    """Mutants of code, so many of each area."""
    for area in code.AREAS:
        mutants = code.sample(area, asked.number, asked.seed)
        yield from _of_area(asked, area, asked.chosen({f"{m.file} {m.key}": m for m in mutants}))


def _of_area(asked: Asked, area: str, drawn: Mapping[str, code.Mutant]) -> Found:
    def by_the_cases(left: list[str]) -> dict[str, Judge]:
        judge = _by_cases(area) if area in _SUITES else None  # no case is about sessions
        return {name: partial(judge, drawn[name]) for name in left} if judge else {}

    def by_hints(left: list[str]) -> dict[str, Judge]:
        return _hinted(asked.jobs, lambda name: {drawn[name].module: drawn[name].text}, left)

    def by_the_scenarios(left: list[str]) -> dict[str, Judge]:
        left = [name for name in left if not asked.reasons.why(name)]  # these would take longer than all others
        judge = _by_scenarios([drawn[name] for name in left], asked.jobs * _WAITING) if left else None
        return {name: partial(judge, drawn[name]) for name in left} if judge else {}

    def by_the_tests(left: list[str]) -> dict[str, Judge]:
        judge = _by_tests(area, [drawn[name] for name in left], asked.jobs)
        return {name: partial(judge, drawn[name]) for name in left}

    stages = (
        Stage(by_the_cases, LIMIT), Stage(by_hints, waiting=_WAITING), Stage(by_the_scenarios, waiting=_WAITING),
        Stage(by_the_tests),
    )  # fmt: skip
    yield from _judged(asked, area, drawn, *stages)


def prove_bugs(asked: Asked) -> Found:
    """Bugs of real engines: each has to be noticed by all the cases that it names."""
    found = asked.drawn({bug.name: bug for bug in bugs.load()})
    judges = Stage(lambda left: {name: partial(bugs.noticed, found[name]) for name in left}, LIMIT)
    yield from _judged(asked, "bug", found, judges)


PARTS: dict[str, Callable[[Asked], Found]] = {"registry": prove_facts, "code": prove_code, "bugs": prove_bugs}
