"""`kvproto-conformance replay`: one case of a report again, as it was asked or played."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import attrs

from kvproto_conformance import engines, report, terminal
from kvproto_conformance.cases import Case, claimed, easier, load
from kvproto_conformance.claims import EXTENSIONS, Claim
from kvproto_conformance.commands import Wrong, case_of, greeted
from kvproto_conformance.data import sentence
from kvproto_conformance.fresh import PREFIX, freshened
from kvproto_conformance.run import PROTOCOL, Verdict, probes, run
from kvproto_conformance.testee import Testee

Json = dict[str, Any]


def replayed(args: Namespace) -> int:
    """`replay REPORT ID`: one case of a report again, by the command that it has; of a live engine, by its adapter."""
    found = report.read(args.report)
    row = next((row for row in found["results"] if row["id"] == args.id), None)
    if row is None:
        raise Wrong(f"{args.report}: no case {args.id} in it")
    if row["suite"] in engines.LIVE.values():
        return _played_again(found, row, args.testee)
    asked = _asked_again(args, found)
    if asked is None:
        raise Wrong(f"{args.id} is not a case that can be asked alone")
    if found["claim"]["role"] == "reader" and asked.suite != PROTOCOL:
        claim = Claim("reader", "L1", frozenset(EXTENSIONS))
        (asked,) = claimed([attrs.evolve(asked, needs=frozenset())], claim) or [asked]
    asked = easier(asked, found["claim"]["extensions"])
    with Testee(args.testee or found["command"], args.patience) as testee:
        greeted(testee, found["seed"])
        (result,) = run([asked], testee)
    print(f"{result.status} {asked.id} ({row['status']} in the report)")
    for wrong in result.wrong:
        terminal.wrong({"question": wrong.question, "expected": wrong.expected, "got": wrong.got})
    return Verdict.NONCONFORMANT if result.wrong else Verdict.CONFORMANT


def _asked_again(args: Namespace, found: Json) -> Case | None:
    """The case of a report with this id, as it was asked."""
    cases, seed, said = load(args.vectors), found["seed"], found["claim"]
    if not args.id.startswith(PREFIX):
        return next((case for case in [*cases, *probes(seed)] if case.id == args.id), None)
    claim = Claim(said["role"], said["level"], frozenset(said["extensions"]), frozenset(said["messages"]))
    plain = next((case for case in claimed(cases, claim) if PREFIX + case.id == args.id), None)
    return freshened(seed, plain) if plain else None


def _played_again(found: Json, row: Json, command: list[str]) -> Verdict:
    """Replay a scenario of a live engine, and print what both sides said."""
    case = case_of(row["id"], engines.scenarios())
    adapter = command or found.get("engines", {}).get(case.role)
    if not adapter:
        raise Wrong(f"the report has no adapter of a live {case.role}: say it after --")
    said = engines.played_alone(case.id, adapter)
    print(f"{said.status} {case.id} ({row['status']} in the report): {case.note}")
    for check in said.checks:
        print(f"  {'good' if check.good else 'BAD '}  {check.name}  {check.text}".rstrip())
    print("\n".join(engines.heard(said)))
    if said.text:
        print(f"{said.clause} {sentence(said.clause)['text'] if said.clause else ''}\n{said.text}")
    return Verdict.CONFORMANT if said.status == "pass" else Verdict.NONCONFORMANT
