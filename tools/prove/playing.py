"""Whether a changed kvproto is noticed by scenarios: the reference's adapters of live engines play them with it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs

from kvproto_conformance.live import list_scenarios, run
from kvproto_conformance.live.running import Result, lacks
from kvproto_conformance.live.scenario import SCENARIOS, Scenario
from tools.prove.changing import Changes
from tools.prove.children import in_children
from tools.prove.judging import SURVIVED
from tools.prove.lines import Line


@contextmanager
def _engine(changes: Changes, wanted: Iterable[Line] = ()) -> Iterator[tuple[list[str], Path]]:
    """The command of an engine, less its role, and the file to which it adds the wanted lines that it passes."""
    with tempfile.TemporaryDirectory(prefix="kvproto-prove-") as folder:
        planted, passed = Path(folder, "planted.json"), Path(folder, "passed")
        planted.write_text(json.dumps({"changes": dict(changes), "wanted": [*wanted], "passed": str(passed)}))
        passed.touch()
        yield [sys.executable, "-m", "tools.prove.planted", str(planted)], passed


def played(changes: Changes, scenarios: Iterable[Scenario]) -> Iterator[Result]:
    """The results of scenarios with an engine that has these changes."""
    some = list(scenarios)
    with _engine(changes) as (command, _):
        for role in dict.fromkeys(scenario.role for scenario in some):
            yield from run([*command, role], [scenario for scenario in some if scenario.role == role])


def by_scenarios(changes: Changes, ids: Sequence[str]) -> str:
    """The first of these scenarios that fails twice; what is the suite's own fault counts for nobody."""
    for result in played(changes, [SCENARIOS[id] for id in ids]):
        if _fails(result) and all(map(_fails, played(changes, [SCENARIOS[result.id]]))):  # not for the machine's load
            return result.id
    return SURVIVED


def _fails(result: Result) -> bool:
    return result.status not in ("pass", "suite-error")


@attrs.frozen
class Played:
    """The scenarios that pass each of some lines."""

    lines: dict[Line, list[str]]
    """Slow ones last, of the others those of L3 first, and those of an engine one after the other."""

    @classmethod
    def trace(cls, wanted: Sequence[Line], jobs: int, limit: float) -> Played:
        """Play every scenario that does not need much memory, as it is."""
        some = [s for s in list_scenarios() if "LARGE" not in s.extensions and not lacks(s)]
        some.sort(key=lambda s: (s.slow, s.level, s.role, s.world, s.transport, "CURVE" in s.extensions))  # few engines
        found: dict[Line, list[str]] = {}
        answers = {
            answer.name: answer.text
            for answer in in_children([(s.id, partial(_traced, s, wanted)) for s in some], jobs, limit)
        }
        for each in some:
            for line in json.loads(answers[each.id]):
                found.setdefault((line[0], line[1]), []).append(each.id)
        return cls(found)

    def scenarios(self, line: Line) -> list[str]:
        """Scenarios that pass a line; all, if none does."""
        return self.lines.get(line) or [*dict.fromkeys(id for ids in self.lines.values() for id in ids)]


def _traced(scenario: Scenario, wanted: Sequence[Line]) -> str:
    """The wanted lines that a scenario passes, as JSON, whether or not it passes while its engine is so slow."""
    with _engine({}, wanted) as (command, passed):
        list(run([*command, scenario.role], [scenario]))
        return json.dumps([json.loads(line) for line in passed.read_text().splitlines()])
