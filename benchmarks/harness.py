"""What the scripts of this folder share: arguments, the machine, samples, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvproto

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


def arguments(document: str | None, *, rounds: int | None = None, quick: str | None = None) -> argparse.ArgumentParser:
    """A parser with --out, --json, and where a script has them --rounds and --quick; `document` is its docstring."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results, with all samples, to this file")
    parser.add_argument("--json", action="store_true", help="print the results as JSON in place of a table")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often to measure (%(default)s)")
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def facts(packages: Iterable[str] = ("numpy", "pyzmq")) -> dict[str, Any]:
    """The date, the commit, the machine and its load, and versions: the head of every file of results."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": f"{cpu()}, {platform.system()}",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in packages},
    }


def cpu() -> str:
    """The processor's name, or its architecture if the system does not tell."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """The commit of the kvproto that is measured, with a plus sign if files differ from it; None outside of git."""
    try:
        tree = Path(kvproto.__file__).parent
        asked = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(asked, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rounded(value: Any, digits: int = 7) -> Any:
    """The same with floats of so many digits behind the point."""
    if isinstance(value, dict):
        return {name: rounded(inner, digits) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner, digits) for inner in value]
    return round(value, digits) if isinstance(value, float) else value


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, an entry of the outermost object a line, so that a new run differs in few lines."""
    lines = (f"{json.dumps(str(name))}: {json.dumps(value, separators=(',', ':'))}" for name, value in results.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
