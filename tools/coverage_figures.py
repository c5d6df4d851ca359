"""Measures branch coverage of the whole test suite, child processes included, and records it by room.

    python -m tools.coverage_figures [--tree DIR] [--label NAME] [-- PYTEST ARGUMENTS]

The figures go to benchmarks/results/coverage.json under the label, next to those of other states of the code. `--tree`
measures another checkout: its tests run there, with its own packages first on the path.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks/results/coverage.json"
PACKAGES = ("kvproto", "reference/kvproto_reference", "conformance/kvproto_conformance")
CONFIG = """\
[run]
branch = true
parallel = true
sigterm = true
patch = subprocess, fork, _exit
data_file = {data}/coverage
source = {source}
disable_warnings = no-data-collected, module-not-imported, module-not-measured, no-ctracer, couldnt-parse
[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    ^\\s*\\.\\.\\.$
"""


def room(path: Path) -> str:
    """The room that a file counts for: the package, and within kvproto its folder."""
    parts = path.parts
    if parts[0] != "kvproto":
        return parts[1]
    return "/".join(parts[:2]) if len(parts) > 2 else "kvproto"


def summarise(report: dict[str, Any], tree: Path) -> dict[str, dict[str, float]]:
    """Sums lines and branches of each room, and of all."""
    sums: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for name, file in report["files"].items():
        path = Path(name)
        where = room(path.relative_to(tree) if path.is_absolute() else path)
        for key in ("num_statements", "covered_lines", "num_branches", "covered_branches"):
            for row in (where, "all"):
                sums[row][key] += file["summary"].get(key, 0)
    return {
        name: {
            "lines": row["num_statements"],
            "line_share": round(row["covered_lines"] / max(row["num_statements"], 1), 4),
            "branches": row["num_branches"],
            "branch_share": round(row["covered_branches"] / max(row["num_branches"], 1), 4),
        }
        for name, row in sorted(sums.items())
    }


def main() -> int:
    """Runs the tests under coverage and adds the figures to the committed file."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    ask.add_argument("--label", default="now", help="the name of the figures in the file")
    ask.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    given = ask.parse_args()
    tree = given.tree.resolve()
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        config = Path(folder) / "config.ini"
        config.write_text(CONFIG.format(data=folder, source=",".join(str(tree / name) for name in PACKAGES)))
        path = os.pathsep.join(str(tree / name) for name in ("", "reference", "conformance"))
        env = {**os.environ, "PYTHONPATH": path}
        tool = [sys.executable, "-m", "coverage"]
        start = time.monotonic()
        run = subprocess.run(
            [*tool, "run", f"--rcfile={config}", "-m", "pytest", "--timeout=900", *given.pytest], cwd=tree, env=env
        )
        seconds = time.monotonic() - start
        subprocess.run([*tool, "combine", "-q", f"--rcfile={config}", folder], cwd=tree, check=True)
        subprocess.run([*tool, "json", "-q", f"--rcfile={config}", "-o", f"{folder}/report.json"], cwd=tree, check=True)
        report = json.loads((Path(folder) / "report.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
    figures = json.loads(OUT.read_text()) if OUT.exists() else {}
    figures[given.label] = {
        "commit": commit.stdout.strip(),
        "tests": "passed" if run.returncode == 0 else f"exit status {run.returncode}",
        "seconds": round(seconds),
        "rooms": summarise(report, tree),
    }
    OUT.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures[given.label]["rooms"]["all"]))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
