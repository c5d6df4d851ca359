"""`python -m tools.model`: searches the models of spec/v1/lifecycle, and shows what breaks without each guard."""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools.files import renew
from tools.model.pan import MODELS, MissingTool, ModelError, Outcome, Program
from tools.model.traces import TRACES, made

_AT_ONCE = 2


def _search(row: dict[str, Any]) -> tuple[Outcome | ModelError, float]:
    began = time.monotonic()
    without = row.get("without", ())
    try:
        found: Outcome | ModelError = Program(row["model"], row["define"], without, shortest=bool(without)).search()
    except ModelError as error:
        found = error
    return found, time.monotonic() - began


def _line(row: dict[str, Any], found: Outcome | ModelError, seconds: float) -> tuple[bool, str]:
    """Whether the result of a row is as expected, and what to print."""
    if isinstance(found, ModelError):
        return False, f"{row['model']:8} {row['about']}: {found}"
    expected, steps = row.get("breaks"), [step for step in found.steps if not step.startswith("row ")]
    figures = f"{found.states:>9,} states {found.megabytes:5.0f} MB {seconds:5.1f} s"
    said = "nothing breaks"
    if expected:
        said = f"{row['clause']}: {expected} breaks without it, in {len(steps)} steps"
    if found.broken == expected:
        return True, f"{row['model']:8} {figures}  {row['about']}: {said}"
    wrong = f"expected {expected or 'nothing'} to break, found {found.broken or 'nothing'}"
    return False, "\n    ".join([f"{row['model']:8} {figures}  {row['about']}: {wrong}", *steps])


def main(argv: list[str] | None = None) -> int:
    """Search, and print one line each; returns 1 if a search breaks a property, or a planted fault does not."""
    parser = argparse.ArgumentParser(prog="python -m tools.model", description=__doc__)
    parser.add_argument("only", nargs="*", help="models to search; all of them where none is named")
    parser.add_argument("--traces", action="store_true", help="write the traces anew, and search nothing else")
    args = parser.parse_args(argv)
    table = tomllib.loads((MODELS / "models.toml").read_text())
    if args.traces:
        renew({TRACES: made(table["trace"])}, check=False)
        return 0
    rows = [row for row in (*table["search"], *table["fault"]) if not args.only or row["model"] in args.only]
    began, good, states = time.monotonic(), 0, 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for row, (found, seconds) in zip(rows, pool.map(_search, rows), strict=True):
            if isinstance(found, MissingTool):
                print(f"error: {found}")
                return 1
            well, line = _line(row, found, seconds)
            print(line, flush=True)
            good += well
            states += found.states if isinstance(found, Outcome) and "breaks" not in row else 0
    stale = not args.only and renew({TRACES: made(table["trace"])}, check=True)
    faults = sum("breaks" in row for row in rows)
    searched = f"{len(rows) - faults} complete searches of {states:,} states, {faults} seeded faults"
    print(f"{good} of {len(rows)} as they should be: {searched}, {time.monotonic() - began:.0f} s")
    return 0 if good == len(rows) and not stale else 1


if __name__ == "__main__":
    sys.exit(main())
