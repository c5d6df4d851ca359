"""`python -m kvproto_conformance.live --role source -- ADAPTER ...`: run scenarios, and print one line for each."""

from __future__ import annotations

import argparse
import sys

from kvproto_conformance.live import list_scenarios, run


def main() -> int:
    """Run the scenarios; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("source", "sink"), default="source")
    parser.add_argument("--level", choices=("L3", "L4"), default="L4")
    parser.add_argument("--only", default="", help="ids or titles with this text")
    parser.add_argument("--id", action="append", help="only this one; may be given again")
    parser.add_argument("--world", action="append", help="only those of this world; may be given again")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("adapter", nargs="+")
    asked = parser.parse_args()
    chosen = [
        s for s in list_scenarios(asked.role, asked.level)
        if asked.only in s.id + s.title and s.id in (asked.id or [s.id]) and s.world in (asked.world or [s.world])
    ] * asked.repeat  # fmt: skip
    titles = {s.id: s.title for s in chosen}
    passed = checks = 0
    for result in run(asked.adapter, chosen):
        passed += result.status == "pass"
        checks += len(result.checks)
        print(f"{result.status:12} {result.id}  {result.seconds:6.2f} s  {titles[result.id]}", flush=True)
        if result.text:
            print(f"             {result.clause} {result.text}")
    print(f"{passed} of {len(chosen)} scenarios, {checks} checks")
    return 0 if chosen and passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
