"""`python -m tools.prove.source_c`: how many of the bugs that are planted in the source in C the live suite notices.

The bugs are in source_c.toml, and each is planted alone: a copy of the source is changed, compiled, and plays the
scenarios until one fails: first the one that noticed it before, then those of the clause that it breaks, and others,
which have to fail twice. Rows are kept in a file as they come, and an interrupted run goes on. The exit status is 0
only if all bugs that break a clause are noticed, but those with a `reason`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.live import Scenario, list_scenarios, run
from tools import c_programs
from tools.specgen.registry import ROOT

FOLDER = ROOT / "conformance/testees/c"
CLAIMED = {"DEALS", "INLINE", "RESUME", "SECTIONS", "VERIFY"}
FLAGS = ["-std=c11", "-O0", "-w"]
_SECONDS = 240.0
"""Of all scenarios of one bug."""


@attrs.frozen
class Bug:
    """In `file`, `new` stands in place of `old`."""

    name: str
    file: str
    old: str
    new: str
    breaks: str = ""
    """The clause that does not hold any more; empty where nothing is broken that is a MUST."""
    reason: str = ""
    """The reason that no scenario can notice it."""


def load() -> list[Bug]:
    """All of them; raises ValueError where a bug is not at its place any more."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    bugs = [Bug(**row) for row in table["bug"]]
    for bug in bugs:
        if (times := (FOLDER / bug.file).read_text().count(bug.old)) != 1:
            raise ValueError(f"source_c.toml: {bug.name!r} replaces what {bug.file} has {times} times")
    return bugs


def scenarios() -> list[Scenario]:
    """All that the source claims: quick ones first, and those of one engine one after the other."""
    some = [each for each in list_scenarios("source") if {*each.extensions} <= CLAIMED and each.id != "LIVE-1641"]
    return sorted(some, key=lambda each: (each.slow, each.must is False, each.world, each.transport))


def compiled(bug: Bug, folder: Path) -> str:
    """The program with a bug; raises CalledProcessError if it is no C any more."""
    for path in (FOLDER, ROOT / "libkvproto"):
        shutil.copytree(path, folder / path.relative_to(ROOT), dirs_exist_ok=True)
    planted = folder / FOLDER.relative_to(ROOT) / bug.file
    planted.write_text(planted.read_text().replace(bug.old, bug.new))
    subprocess.run(c_programs.command("source", folder / "source", FLAGS, folder), check=True, timeout=120)
    return str(folder / "source")


def noticed(bug: Bug, before: str) -> tuple[str, str]:
    """The scenario that fails, and why; empty if all pass. `before`: the one to ask first."""
    with tempfile.TemporaryDirectory(prefix="kvproto-bug-") as folder:
        program = compiled(bug, Path(folder))
        some = sorted(scenarios(), key=lambda each: (each.id != before, each.slow, bug.breaks not in each.clauses))
        for id, text in _failing(program, some):
            (it,) = (each for each in some if each.id == id)
            if bug.breaks in it.clauses or any(_failing(program, [it])):  # not for the machine's load
                return id, text
    return "", ""


def _failing(program: str, some: Iterable[Scenario]) -> Iterator[tuple[str, str]]:
    for result in run([program], some, _SECONDS):
        if result.status not in ("pass", "suite-error"):
            yield result.id, result.text


def main() -> int:
    """Plant what has no row yet, and say how many are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="bugs with this text in their name")
    parser.add_argument("--state", type=Path, default=ROOT / "build/prove/source_c.json", help="of rows, by bug")
    parser.add_argument("--fresh", action="store_true", help="ask again what the file has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no bug is begun")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    args.state.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, list[str]] = json.loads(args.state.read_text()) if args.state.exists() else {}
    rows: dict[str, list[str]] = {}
    bugs = [bug for bug in load() if args.only in bug.name]
    for bug in bugs:
        before = known.get(bug.name, ["", ""])
        if bug.name in known and not args.fresh:
            rows[bug.name] = before
        elif time.monotonic() < end:
            rows[bug.name] = known[bug.name] = [*noticed(bug, before[0])]
            args.state.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{rows[bug.name][0] or 'NOT NOTICED'}: {bug.name}: {rows[bug.name][1][:120]}", flush=True)
    return _summary(bugs, rows)


def _summary(bugs: list[Bug], rows: dict[str, Any]) -> int:
    asked = [bug for bug in bugs if bug.name in rows]
    missed = [bug for bug in asked if not rows[bug.name][0]]
    for bug in missed:
        print(f"not noticed: {bug.name} ({bug.breaks or 'no MUST'}) {bug.reason}")
    print(f"{len(asked) - len(missed)} of {len(asked)} are noticed, of {len(bugs)} that are planted")
    return any(bug.breaks and not bug.reason for bug in missed) or len(asked) < len(bugs)


if __name__ == "__main__":
    raise SystemExit(main())
