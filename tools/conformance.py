"""`python -m tools.conformance`: every testee of this repository by the suite, and a page of who keeps the contract.

The pages are in build/conformance. The exit status is 0 only if all are conformant in what they claim.
Testees that need a compiler or an interpreter that is not here are left out, which is said.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

from kvproto_conformance import html, report
from kvproto_conformance.__main__ import main as conformance
from tools.specgen.registry import ROOT

TESTEES = ROOT / "conformance/testees"
PAGES = ROOT / "build/conformance"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Name and command of each."""
    yield "kvproto", [sys.executable, str(TESTEES / "python_kvproto.py")]
    yield "second-opinion", [sys.executable, str(TESTEES / "second_opinion.py")]
    if shutil.which("gcc"):
        program = PAGES / "codec"
        subprocess.run(["gcc", "-std=c11", "-O2", "-o", program, TESTEES / "c/codec.c"], check=True)
        yield "c", [str(program)]
    if shutil.which("node"):
        yield "javascript", ["node", str(TESTEES / "node/codec.mjs")]


def main() -> int:
    """Run all, and write the pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    worst, reports = 0, []
    for name, command in commands():
        made = PAGES / f"{name}.json"
        status = conformance(["run", "--report", str(made), "--html", str(PAGES / f"{name}.html"), "--", *command])
        worst = max(worst, status)
        reports.append(report.read(made))
    (PAGES / "index.html").write_text(html.matrix(reports), encoding="utf-8")
    print(f"\n{html.matrix_text(reports)}\nopen {PAGES / 'index.html'}")
    missing = [tool for tool in ("gcc", "node") if not shutil.which(tool)]
    print(f"left out for want of {' and '.join(missing)}" if missing else "", end="\n" if missing else "")
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
