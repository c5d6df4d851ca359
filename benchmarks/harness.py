"""Shared parts of the scripts of this folder: arguments, the machine, processes, samples, and files of results.

`python benchmarks/harness.py BEFORE NOW` compares two files of results, such as those of two commits: for every list of
samples that both have, the medians, the least, and how many times as large they are now.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import kvproto

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


def arguments(document: str | None, name: str, *, rounds: int = 0, quick: str = "") -> argparse.ArgumentParser:
    """A parser of --out, and of --rounds and --quick in scripts that have them; `document` is the script's docstring."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = f"keep the results, with all samples; without FILE in benchmarks/results/{name}.json"
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS / f"{name}.json", metavar="FILE", help=out)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often to measure (%(default)s)")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def facts(*packages: str) -> dict[str, Any]:
    """The head of a file of results: the date, the commit, the machine with its load, and versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": f"{cpu()}, {platform.system()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions("numpy", "pyzmq", *packages),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of those that are installed."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: installed(package) for package in packages}


def cpu() -> str:
    """The processor's name, or its architecture if the system does not tell."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """The commit of the kvproto that is measured, with a plus sign if files differ from it; None outside of git."""
    try:
        tree = Path(kvproto.__file__).parent
        command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def child(work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Run `work(pipe, *args)` in another process; gives the pipe's other end, and ends the process.

    It is forked from a process that has imported the script, and nothing else: no thread, no connection and no CUDA.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=work, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(20)
        process.kill()
        process.join()


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Results of each way in each round but the first `warm`; in a round all have their turn."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(-warm, rounds):
        for name, way in ways.items():
            sample = way()
            if n >= 0:
                samples[name].append(sample)
    return samples


def rounded(value: Any, digits: int = 7) -> Any:
    """The same with floats of so many digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(inner, digits) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    return round(value, digits) if isinstance(value, float) else value


def results(name: str) -> Any:
    """A committed file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def keep(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write results if there is a path, an entry of the outermost object a line, so that new ones differ in few lines."""
    if path is not None:
        entries = (f"{json.dumps(str(name))}: {json.dumps(of, separators=(',', ':'))}" for name, of in figures.items())
        path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def samples_of(figures: Any, name: str = "") -> Iterator[tuple[str, list[float]]]:
    """Every list of numbers in results, by the names that lead to it."""
    if isinstance(figures, dict):
        for key, inner in figures.items():
            yield from samples_of(inner, f"{name}, {key}" if name else key)
    elif isinstance(figures, list) and figures and all(isinstance(sample, int | float) for sample in figures):
        yield name, figures


def compare(before: Path, now: Path) -> Iterable[str]:
    """Lines of a table of both."""
    old, new = (dict(samples_of(json.loads(path.read_text()))) for path in (before, now))
    yield f"{'':70}" + "".join(f"{head:>12}" for head in ("median", "now", "times", "least", "now", "times"))
    for name in [name for name in new if name in old]:
        pairs = [(take(old[name]), take(new[name])) for take in (median, min)]
        yield f"{name:70}" + "".join(f"{a:12.5g}{b:12.5g}{b / a if a else 1:12.2f}" for a, b in pairs)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print("\n".join(compare(Path(sys.argv[1]), Path(sys.argv[2]))))
