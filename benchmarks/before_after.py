"""Planning, lowering and the codec of an earlier commit and of this one, in one run.

`python benchmarks/before_after.py --before PATH [--rounds N] [--write]`: PATH is a checkout of the earlier commit. Runs
`plan.py` and `codec.py` of both trees in turn, N times, and prints the median and the fastest sample of what both measure;
--write keeps all samples in benchmarks/results/before_after.json. On a shared machine the fastest tells more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/before_after.json"
SCRIPTS = ("plan", "codec")


def rows(found: Any, name: str = "") -> Iterator[tuple[str, list[float]]]:
    """The name and samples of kvproto's own entries in a result file, without the contenders."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from rows(value, f"{name}, {key}" if name else key)
    elif isinstance(found, list) and found and isinstance(found[0], float) and not any(n in name for n in _OTHERS):
        yield name, found


_OTHERS = ("msgspec", "frames", "today")


def measure(tree: Path, script: str) -> dict[str, list[float]]:
    """Run a tree's script, which writes a result file, and restore that file."""
    file = tree / "benchmarks/results" / f"{script}.json"
    kept = file.read_bytes()
    path = os.pathsep.join(str(tree / name) for name in ("", "reference", "conformance"))
    try:
        command = [sys.executable, f"benchmarks/{script}.py", "--write"]
        subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True)
        return dict(rows(json.loads(file.read_text())))
    finally:
        file.write_bytes(kept)


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "now": ROOT}
    samples: dict[str, dict[str, list[float]]] = {s: defaultdict(list) for s in trees}
    for n in range(args.rounds):
        for state, tree in trees.items():
            for script in SCRIPTS:
                print(f"  round {n + 1} of {args.rounds}: {script}, {state} ...", file=sys.stderr, flush=True)
                for name, found in measure(tree, script).items():
                    samples[state][name] += found
    both = [name for name in samples["now"] if name in samples["before"]]
    heads = ("median", "now", "ratio", "fastest", "now", "ratio")
    print(f"{'ms, and of the codec us':76}" + "".join(f"{head:>9}" for head in heads))
    for name in both:
        before, now = samples["before"][name], samples["now"][name]
        pairs = [(take(before), take(now)) for take in (median, min)]
        print(f"{name:76}" + "".join(f"{a:9.3f}{b:9.3f}{b / a:9.2f}" for a, b in pairs))
    if args.write:
        head = {
            "benchmark": "before_after", "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
            "commit_before": _commit(trees["before"]), "commit_now": _commit(ROOT),
        }  # fmt: skip
        RESULTS.write_text(json.dumps(head | {s: {n: found[n] for n in both} for s, found in samples.items()}) + "\n")
    return 0


def _commit(tree: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
