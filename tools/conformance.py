"""`python -m tools.conformance`: every testee of this repository by the suite, and a page of who keeps the contract.

The pages are in build/conformance; --write makes docs/results.md of them. --live runs the reference engine too, as a
source and as a sink, with faults, and L3 with its pools and attention in torch and in JAX; --frameworks runs, and
writes, nothing else. The exit status is 0 only if all are conformant in what they claim, and with the candidates that
are kept. Testees that need a compiler, an interpreter or a package that is not here are left out, which is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvproto_conformance import html, report
from kvproto_conformance.__main__ import main as conformance
from kvproto_conformance.claims import SUITES
from kvproto_conformance.live import list_scenarios, run
from tools import c_programs
from tools.specgen.registry import ROOT

TESTEES = ROOT / "conformance/testees"
PAGES = ROOT / "build/conformance"
RESULTS = ROOT / "docs/results.md"
SOCKETS = Path("/usr/include/zmq.h")
"""From Debian's libzmq3-dev, the only library that the engines in C need."""
Run = tuple[str, list[str], list[str]]
KVPROTO = [sys.executable, str(TESTEES / "python_kvproto.py")]
LIVE = [
    "--role", "both", "--level", "L4", "--extension", "inline", "--extension", "verify",
    "--extension", "intent", "--extension", "spans", "--extension", "epochs",
    "--extension", "curve", "--extension", "pull", "--extension", "large", "--extension", "catalogue",
    "--extension", "sleep", "--extension", "deals", "--extension", "sections", "--extension", "resume",
    "--extension", "conversion",
    "--live-source", f"{sys.executable} {TESTEES / 'live_source.py'}",
    "--live-sink", f"{sys.executable} {TESTEES / 'live_sink.py'}",
    *(["--extension", "staged"] if importlib.util.find_spec("nixl") else []),
]  # fmt: skip
FRAMEWORKS = {"torch": TESTEES / "live_torch.py", "jax": TESTEES / "live_jax.py"}
WORLDS = "gqa", "mla", "long"
"""Of paged caches alone, which the reference engines have."""
PAGE = """# Conformance results

Reports of the [conformance suite](../conformance/README.md), made by `make conformance ARGS="--live --write"`.
A number alone means that all of these cases passed; an empty cell is not claimed.
Suite {suite}, vectors {vectors}…, spec {spec}.

{table}
Seconds on {cores} cores, of cases alone:

{times}
{frameworks}
| | what it is |
|---|---|
| kvproto | the library of this repository; where `session` and `robust` have numbers, its engines, live over ZeroMQ |
| second opinion | written from the prose a second time, in plain Python; it shares no code with the library |
| libkvproto | the [library in C](libkvproto.md): codec, plans, copy programs, from the prose alone: a third opinion |
| source.c, sink.c | engines in C over shm and inline, from the prose alone; they need libkvproto and libzmq |
| codec.mjs | a strict reader and writer, in one file: [where to begin](implement.md) |
| planner.py | the planner of the core alone, without token deals, sections and encodings, in plain Python |
| crate kvproto | the [crate in Rust](crate.md): all that two engines compute alike, from the prose alone: a fourth opinion |
| codec.pl, planner.pl | a codec, and the planner of the core, in Perl: by an agent, from [its page](agents.md) and the pages that it names |

Yours belongs here: run the suite with `--report report.json`, and send the report with your change to this page.
In GitHub's actions [conformance/action.yml](../conformance/action.yml) runs the suite on `testee: ./my-testee`, keeps
report, page, JUnit and badge, and writes the summary.
"""


_MARKS = "<!-- begin frameworks -->", "<!-- end frameworks -->"
_FRAMEWORKS = """Pools and attention of the reference engine in each framework, live: scenarios of L3 with paged caches
(`gqa`, `mla` and `long`), in which rows go through the engine's own tensors and page tables.

| framework | claim | verdict | scenarios | checks | seconds | date |
|---|---|---|---:|---:|---:|---|
{rows}
"""


def times(reports: list[dict[str, Any]]) -> str:
    """Seconds that the cases of each implementation took, by level, as a table."""
    columns = {"L1 and L2": ("L1", "L2"), "L3": ("L3",), "L4": ("L4",)}
    lines = [f"| implementation | claim | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for one in reports:
        cells = []
        for levels in columns.values():
            taken = [
                r["seconds"] for r in one["results"] if r["suite"] in SUITES and SUITES[r["suite"]].level in levels
            ]
            cells.append(f"{sum(taken):.1f}" if taken else "")
        name, claim = one["testee"]["name"], one["claim"]
        lines.append(f"| {name} | {claim['role']} · {claim['level']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def runs(live: bool) -> Iterator[Run]:
    """The name of each testee, what is claimed beyond what it says itself, and its command."""
    yield "kvproto", [], KVPROTO
    if live:
        yield "kvproto-live", LIVE, KVPROTO
    yield "second-opinion", [], [sys.executable, str(TESTEES / "second_opinion.py")]
    yield "planner-py", [], [sys.executable, str(TESTEES / "planner.py")]
    if shutil.which("gcc"):
        program = PAGES / "testee"
        subprocess.run(c_programs.command("testee", program), check=True)
        yield "libkvproto", [], [str(program)]
    if shutil.which("gcc") and SOCKETS.exists():
        for role in ("source", "sink"):
            program = PAGES / role
            subprocess.run(c_programs.command(role, program), check=True)
            yield f"{role}-c", [f"--live-{role}", str(program)], [str(program)]
    if shutil.which("node"):
        yield "javascript", [], ["node", str(TESTEES / "node/codec.mjs")]
    if shutil.which("perl"):
        for name in ("codec", "planner"):
            yield f"{name}-pl", [], ["perl", str(TESTEES / f"perl/{name}.pl")]
    if shutil.which("rustc"):
        program = PAGES / "testee-rs"
        rust_testee(TESTEES / "rust", program, "-O")
        yield "crate", [], [str(program)]


def rust_testee(folder: Path, program: Path, *flags: str) -> None:
    """Compile the testee in Rust of a folder, and the crate that lies in it, by rustc alone."""
    rustc, library = ["rustc", "--edition", "2021", *flags], str(program.with_name("libkvproto.rlib"))
    crate = ["--crate-type", "rlib", "--crate-name", "kvproto", "-o", library, str(folder / "kvproto/lib.rs")]
    subprocess.run([*rustc, *crate], check=True, timeout=600)
    linked = ["--extern", f"kvproto={library}", "-o", str(program), str(folder / "testee.rs")]
    subprocess.run([*rustc, *linked], check=True, timeout=600)


def meets(claim: list[str], command: list[str]) -> int:
    """Have a testee, and its live engines, meet the candidates that are kept; returns the exit status."""
    live = [word for pair in pairwise(claim) if pair[0].startswith("--live-") for word in pair]
    return conformance(["meet", *live, "--", *command])


def frameworks(names: Collection[str]) -> tuple[int, list[str]]:
    """Run L3 with the reference engine's pools and attention in these frameworks; returns the exit status, and rows."""
    rows, worst = list[str](), 0
    for name in names:
        for role in ("source", "sink") if importlib.util.find_spec(name) else ():
            print(f"\n{name}, {role}", flush=True)
            scenarios = {each.id: each for each in list_scenarios(role, "L3") if each.world in WORLDS}
            found, checks, seconds = Counter[str](), 0, 0.0
            for result in run([sys.executable, str(FRAMEWORKS[name])], list(scenarios.values())):
                scenario = scenarios[result.id]
                status = "nonstrict" if result.status == "fail" and not scenario.must else result.status
                print(f"{status:12} {result.id}  {scenario.title} {result.text}", flush=True)
                found[status] += 1
                checks, seconds = checks + len(result.checks), seconds + result.seconds
            asked, passed = len(scenarios) - found["unasked"], found["pass"]
            good = asked > 0 and passed + found["nonstrict"] == asked
            verdict, of = "conformant" if good else "nonconformant", "" if passed == asked else f" of {asked}"
            cells = f"{name} {metadata.version(name)}", f"{role} · L3", verdict, f"{passed}{of}", f"{checks:,}"
            rows.append(f"| {' | '.join(cells)} | {seconds:.1f} | {datetime.now(UTC):%Y-%m-%d} |")
            worst = max(worst, not good)
    return worst, rows


def section(rows: list[str]) -> str:
    """The part of the page about frameworks, between its marks."""
    return "\n".join([_MARKS[0], "", _FRAMEWORKS.format(rows="\n".join(sorted(rows))), _MARKS[1], ""])


def renew(rows: list[str]) -> None:
    """Put rows of frameworks into the page, in place of those of the same frameworks."""
    before, middle, after = re.split("|".join(f"{mark}\n" for mark in _MARKS), RESULTS.read_text(encoding="utf-8"))
    newer = {row.split()[1] for row in rows}
    older = [row for row in middle.splitlines() if " · " in row and row.split()[1] not in newer]
    RESULTS.write_text(before + section(older + rows) + after, encoding="utf-8")


def main() -> int:
    """Run all, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="the reference engine too, which takes minutes")
    parser.add_argument("--write", action="store_true", help=f"make {RESULTS.relative_to(ROOT)} of the reports")
    only = "L3 with the reference engine's pools in these frameworks, and nothing else (default: both)"
    parser.add_argument("--frameworks", nargs="*", choices=FRAMEWORKS, help=only)
    args = parser.parse_args()
    if args.frameworks is not None:
        worst, rows = frameworks(args.frameworks or FRAMEWORKS)
        if args.write:
            renew(rows)
        return worst
    PAGES.mkdir(parents=True, exist_ok=True)
    worst, reports = 0, []
    for name, claim, command in runs(args.live):
        made = PAGES / f"{name}.json"
        pages = ["--report", str(made), "--html", str(PAGES / f"{name}.html")]
        status = conformance(["run", *pages, *claim, "--", *command])
        worst = max(worst, status, meets(claim, command))
        reports.append(report.read(made))
    live, rows = frameworks(FRAMEWORKS) if args.live else (0, [])
    worst = max(worst, live)
    (PAGES / "index.html").write_text(html.matrix(reports), encoding="utf-8")
    print(f"\n{html.matrix_text(reports)}\nopen {PAGES / 'index.html'}")
    if args.write:
        one = reports[0]
        page = PAGE.format(
            table=html.matrix_text(reports),
            times=times(reports),
            frameworks=section(rows),
            cores=os.cpu_count(),
            suite=one["suite"],
            spec=one["spec"],
            vectors=one["vectors"][:12],
        )
        RESULTS.write_text(page, encoding="utf-8")
    missing = [tool for tool in ("gcc", "node", "perl", "rustc") if not shutil.which(tool)]
    missing += [] if SOCKETS.exists() else ["libzmq3-dev"]
    print(f"left out for want of {' and '.join(missing)}" if missing else "", end="\n" if missing else "")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
