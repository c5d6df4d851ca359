"""Runs tests/gpu on this machine's GPUs, and keeps what was run, with what, and how it ended.

`python benchmarks/tests_gpu.py [--out] [--sanitize]`: a process for each file of tests, --jobs of them at once. With --sanitize
the tests of the copy and exchange kernels run again under compute-sanitizer's memcheck. (Its racecheck looks at shared memory, which no kernel
here uses.) --out keeps it in benchmarks/results/tests_gpu_N.json, N the GPUs that this process sees. Exit status 0: all passed;
2: there is no GPU, or no compute-sanitizer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu import gpu_facts
from harness import ROOT, arguments, keep

from kvproto.transport.cuda.bench import count

SANITIZED = {
    ("tests/gpu/test_copier.py", "tests/gpu/test_packer.py"): "not late",
    ("tests/gpu/test_dcp_exchange.py",): "attention_over_all or replays",
}
"""Files whose kernels are ours, and which of their tests: not those that hold the GPU back, or wait for a rank in vain."""
ALONE = ("tests/gpu/test_sleep.py",)
"""Files that look at how much memory of the GPU is free, which tests beside them would change: they run last, one at a time."""
MEMCHECK = (
    *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"),
    *("--report-api-errors", "no"),  # libraries ask the driver for what a version may lack
)


def run(files: Sequence[str], before: Sequence[str] = (), options: Sequence[str] = ()) -> dict[str, Any]:
    """One pytest: the outcome and the seconds of each test, and the end of what it printed where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        plain = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [*before, sys.executable, "-m", "pytest", *files, *plain, *options]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        cases = {
            f"{c.get('classname')}::{c.get('name')}": c
            for c in (ElementTree.parse(report).iter("testcase") if report.exists() else ())
        }
        tests = {
            name: [next((e.tag for e in c if e.tag != "properties"), "passed"), float(c.get("time", 0))]
            for name, c in cases.items()
        }
        told = {name: {p.get("name"): p.get("value") for p in c.iter("property")} for name, c in cases.items()}
    print(
        f"{'ok ' if done.returncode == 0 else 'BAD'} {len(tests):4} tests {seconds:6.1f} s  {' '.join(files)}",
        file=sys.stderr,
        flush=True,
    )
    said = done.stdout + done.stderr
    found: dict[str, Any] = {"files": list(files), "rc": done.returncode, "seconds": round(seconds, 1), "tests": tests}
    if any(told.values()):
        found["measured"] = {name: values for name, values in told.items() if values}
    if before:
        found["sanitizer"] = re.findall(r"ERROR SUMMARY: .*", said)
        print("\n".join(found["sanitizer"]))
    if done.returncode:
        found["output"] = said[-4000:]
        print(found["output"], flush=True)
    return found


def main() -> int:
    parser = arguments(__doc__, f"tests_gpu_{count()}")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--jobs", type=int, default=3, help="files at once")
    args = parser.parse_args()
    if not count() or (args.sanitize and not shutil.which(MEMCHECK[0])):
        print("no GPU" if not count() else f"no {MEMCHECK[0]}", file=sys.stderr)
        return 2
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/gpu").glob("test_*.py"))
    runs: list[dict[str, Any]] = []

    def note(done: dict[str, Any]) -> None:
        """Keep what there is, as a machine may be gone before the last file is done."""
        runs.append(done)
        keep(args.out, gpu_facts() | {"runs": sorted(runs, key=lambda each: ("sanitizer" in each, each["files"]))})

    with ThreadPoolExecutor(args.jobs) as pool:
        for done in as_completed(pool.submit(run, [file]) for file in files if file not in ALONE):
            note(done.result())
    for file in ALONE:
        note(run([file]))
    for chosen, wanted in SANITIZED.items() if args.sanitize else ():
        note(run(chosen, MEMCHECK, ["-k", wanted]))
    total = [outcome for r in runs for outcome, _ in r["tests"].values() or [("did not run", 0)]]
    print(
        f"{count()} GPUs: {total.count('passed')} passed, {total.count('skipped')} skipped, {len(total) - total.count('passed') - total.count('skipped')} failed"
    )
    return 1 if any(r["rc"] for r in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
