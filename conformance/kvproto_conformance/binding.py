"""The clauses that a claim has to keep, each with the levels at which the suite tests it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Iterator

from kvproto_conformance import engines
from kvproto_conformance.cases import Case, claimed, load
from kvproto_conformance.claims import HIGHEST, SUITES, Claim
from kvproto_conformance.data import CLAUSES, REGISTRY, VECTORS

_CORE = {
    "reader": ("codec",), "codec": ("codec",), "router": ("router",), "planner": ("planner",),
    "source": ("engine",), "sink": ("engine",), "both": ("engine",),
}  # fmt: skip
"""The profile that a role is, which needs others."""


def clausal(args: Namespace) -> int:
    """`clauses`: what a claim has to keep, each clause with the levels that test it."""
    claim = Claim(args.role, HIGHEST.get(args.role, "L4"), frozenset(args.extension or ()))
    levels = tested(claim)
    rows = list(bound(claim))
    for id, page, text in rows:
        print(f"{id:<24} {' '.join(sorted(levels.get(id, ()))) or '-':<12} {page:<18} {text}")
    print(f"\n{len(rows)} clauses. `-`: no case names it, because it is about what no peer sees, or because every case")
    print("would show it; spec/v1/clauses.md has the reasons of those that have no test at all.")
    return 0


def bound(claim: Claim) -> Iterator[tuple[str, str, str]]:
    """Id, page and sentence of each clause of a claim."""
    profiles = json.loads(REGISTRY.read_text(encoding="utf-8"))["profile"]
    waiting, wanted = [*_CORE[claim.role], *claim.extensions & profiles.keys()], set[str]()
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += profiles[name]["needs"]
    sides = {"source", "sink"} if claim.role not in ("source", "sink") else {claim.role}
    for id, row in json.loads(CLAUSES.read_text(encoding="utf-8")).items():
        if row["profile"] in wanted and sides & {*row["binds"]}:
            yield id, row["page"], row["text"]


def tested(claim: Claim) -> dict[str, set[str]]:
    """By clause, the levels with a case of a claim that names it."""
    from kvproto_conformance.live.scenario import SCENARIOS

    found: dict[str, set[str]] = {}
    for case in _cases(claim):
        scenario = SCENARIOS.get(case.id)
        for clause in scenario.clauses if scenario is not None else (case.clause,):
            found.setdefault(clause, set()).add(SUITES[case.suite].level)
    return found


def _cases(claim: Claim) -> Iterable[Case]:
    return claimed([*load(VECTORS), *engines.scenarios()], claim)
