"""`python -m tools.prove`: whether the suite notices what is wrong; the exit status is 0 only if it does.

Facts of the registry are made otherwise one at a time, code is mutated by chance from a seed, and bugs that engines
have had are planted; each change is made in a forked child, and the first case that fails ends it. What no case
notices of code, live engines play; what nothing of the suite notices, the tests of its room are asked of.

Rows are kept in a folder as they come: an interrupted run goes on where it was. With `--part 1/4`, a quarter of all
mutants is asked; whoever has the files of all four in one folder gets the whole table without asking any again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tools.prove.children import LATE, in_children
from tools.prove.judging import as_it_is, cases
from tools.prove.parts import AS_IT_IS, LIMIT, PARTS, Asked
from tools.prove.rows import Reasons, Row, summary
from tools.prove.state import HINTS, State, read_hints, sources
from tools.prove.warm import warm
from tools.specgen.registry import ROOT

_EVERY = 15.0
"""Seconds between two lines that say how far the run is."""


def _part(text: str) -> tuple[int, int]:
    which, _, of = text.partition("/")
    if not (which.isdecimal() and of.isdecimal() and 1 <= int(which) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: the second of four is 2/4")
    return int(which), int(of)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.prove", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, if none is named")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="mutants whose name is like this")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many facts and bugs, not all")
    parser.add_argument("--code", type=int, default=100, metavar="N", help="mutants of code of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="every Nth mutant, from the Ith on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--state", type=Path, default=ROOT / "build/prove", metavar="DIR", help="of rows (build/prove)")
    parser.add_argument("--fresh", action="store_true", help="ask again what the folder has")
    equivalent = Path(__file__).with_name("equivalent.toml")
    parser.add_argument("--reasons", type=Path, default=equivalent, help="why some mutants are not noticed")
    parser.add_argument("--write-hints", action="store_true", help=f"keep in {HINTS.name} which test noticed what")
    return parser


class _Progress:
    """Says on stderr how far it is, each `_EVERY` seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _EVERY

    def __call__(self, rows: Sequence[Row]) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        seconds = sum(row.seconds for row in rows)
        print(
            f"{len(rows):,} mutants, of {rows[-1].kind} the last; {seconds:,.0f} s of CPU", file=sys.stderr, flush=True
        )


def _rows(args: argparse.Namespace, state: State, loaded: frozenset[str]) -> Iterator[tuple[Row, bool]]:
    """Each row, and whether it was known."""
    reasons = Reasons.read(args.reasons)
    for part in args.parts or PARTS:
        number = args.code if part == "code" else args.sample
        yield from PARTS[part](Asked(args.only, number, args.seed, args.part, args.jobs, reasons, state, loaded))


def main(argv: list[str] | None = None) -> int:
    """Run all parts, or those that are named."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # children end too
    sys.dont_write_bytecode = False  # every child imports kvproto anew
    began, state = time.monotonic(), State(args.state, sources())
    if args.fresh:
        state.forget()
    warm()
    some = cases()[:: 20 if args.sample else 1]
    ((_, said, _),) = in_children([(AS_IT_IS, partial(as_it_is, some))], 1, LIMIT)
    failed, loaded = json.loads(said)
    if failed:
        print(f"{AS_IT_IS} {failed} fails")
        return 1
    rows, before, progress = list[Row](), 0, _Progress()
    for row, known in _rows(args, state, frozenset(loaded)):
        rows.append(row)
        before += known
        if not known:
            state.keep(row)
        if row.verdict.isupper() or row.noticed == LATE:
            print(f"{row.verdict}: {row.kind}: {row.name}: {row.noticed or row.why}", flush=True)
        progress(rows)
    table, good = summary(rows)
    seconds = sum(row.seconds for row in rows)
    print(f"{table}\n{time.monotonic() - began:.0f} s, {seconds:,.0f} s of CPU, seed {args.seed}")
    if before:
        print(f"{before:,} of them by earlier runs over the same sources, from {args.state}")
    if args.part != (1, 1):
        print("a part alone: the whole is judged by a run that finds the rows of all parts")
    if args.write_hints:
        hints = dict(sorted((read_hints() | state.killers(rows)).items()))
        HINTS.write_text(json.dumps(hints, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
