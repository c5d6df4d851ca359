"""`python -m kvproto_conformance.live --role source -- ADAPTER ...`: run scenarios, and print one line for each."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from kvproto_conformance.claims import EXTENSIONS
from kvproto_conformance.live import Scenario, list_scenarios, run


def needs(scenario: Scenario) -> set[str]:
    """The extensions of a scenario, as they are claimed."""
    return {*map(str.lower, scenario.extensions)}


def chosen_by(asked: argparse.Namespace) -> tuple[list[Scenario], list[Scenario]]:
    """The scenarios to run, and those that only lack an extension; one that is named by its id lacks none."""
    among = [
        s for s in list_scenarios(asked.role, asked.level)
        if asked.only in s.id + s.title and s.id in (asked.id or [s.id]) and s.world in (asked.world or [s.world])
    ]  # fmt: skip
    claimed = [s for s in among if asked.id or needs(s) <= {*asked.extension}]
    return claimed, [s for s in among if s not in claimed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios; the exit status says whether no MUST was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("source", "sink"), default="source")
    parser.add_argument("--level", choices=("L3", "L4"), default="L4")
    parser.add_argument("--extension", action="append", default=[], choices=EXTENSIONS, metavar="NAME",
                        help="scenarios that need this too; may be given again")  # fmt: skip
    parser.add_argument("--only", default="", help="ids or titles with this text")
    parser.add_argument("--id", action="append", help="only this one; may be given again")
    parser.add_argument("--world", action="append", help="only those of this world; may be given again")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("adapter", nargs="+")
    said = parser.parse_args(arguments)
    claimed, others = chosen_by(said)
    chosen = claimed * said.repeat
    by_id, found, checks = {s.id: s for s in chosen}, Counter[str](), 0
    for result in run(said.adapter, chosen):
        scenario = by_id[result.id]
        status = "nonstrict" if result.status == "fail" and not scenario.must else result.status
        found[status] += 1
        checks += len(result.checks)
        print(f"{status:12} {result.id}  {result.seconds:6.2f} s  {scenario.title}", flush=True)
        if result.text:
            print(f"             {result.clause} {result.text}")
    asked = len(chosen) - found["unasked"]
    nonstrict = f", {found['nonstrict']} nonstrict, as no MUST is broken" if found["nonstrict"] else ""
    unasked = f", {found['unasked']} more not asked" if found["unasked"] else ""
    print(f"{found['pass']} of {asked} scenarios{nonstrict}{unasked}, {checks} checks")
    if others:
        names = ", ".join(sorted({name for each in others for name in needs(each) - {*said.extension}}))
        print(f"not run: {len(others)} that need --extension, of {names}")
    return 0 if asked and found["pass"] + found["nonstrict"] == asked else 1


if __name__ == "__main__":
    sys.exit(main())
