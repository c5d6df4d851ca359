"""`kvproto-conformance -- COMMAND...`: the cases against a testee."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvproto_conformance.cases import LEVELS, VECTORS, load
from kvproto_conformance.run import Verdict, run, verdict
from kvproto_conformance.testee import Testee


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0 conformant, 1 nonconformant, 2 the run itself is invalid."""
    parser = argparse.ArgumentParser(prog="kvproto-conformance", description=__doc__)
    parser.add_argument("--vectors", type=Path, default=VECTORS, help="folder of cases")
    parser.add_argument("--only", default="", help="run the cases whose id contains this")
    parser.add_argument("--level", action="append", choices=LEVELS, help="run these levels only; all by default")
    parser.add_argument("testee", nargs="+", help="command of the implementation under test")
    args = parser.parse_args(argv)
    levels = args.level or LEVELS
    cases = [case for case in load(args.vectors) if args.only in case.id and case.level in levels]
    try:
        with Testee(args.testee) as testee:
            results = run(cases, testee)
    except OSError as error:
        print(f"error: {args.testee[0]}: {error.strerror}", file=sys.stderr)
        return Verdict.INVALID_RUN
    for result in results:
        for line in result.wrong:
            print(f"{result.case.id} ({result.case.clause}; {result.case.note}): {line}")
    found = verdict(results)
    good = sum(not r.wrong for r in results)
    print(f"{found.name.lower().replace('_', ' ')}: {good} of {len(results)} cases")
    return found


if __name__ == "__main__":
    sys.exit(main())
