"""The cases of the conformance suite that show each MUST of the pages that vectors can show; the others need a reason.

A clause that names an error is shown by a case that is refused if another of the same message, struct or suite is accepted; any other clause
by a case that is accepted. Clauses of sessions are shown by scenarios of live engines, and are not counted here.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict

from kvproto_conformance.cases import Case, load
from tools.specgen.clauses import Clause, clauses
from tools.specgen.registry import SPEC, Facts

PAGES = ("framing.md", "json.md", "model.md", "parts.md", "planning.md", "dcp.md", "negotiation.md")
EXCEPTIONS = SPEC / "unshown.toml"
REASONS = {
    "inside": "what an implementation does within itself; no answer of a testee shows it",
    "meaning": "about what a field stands for, which a codec does not know",
    "live": "visible only in a session; a scenario of a live engine covers it",
    "large": "a vector of it would be larger than all others together; a test of the library shows it",
}
_BY_WRITING = ("KVP-FRAME-W-MAJOR", "KVP-FRAME-W-ZERO", "KVP-BODY-W-FORM")
"""Clauses of a writer that hold whenever its bytes are exactly those of the vector."""
_BY_READING = ("KVP-JSON-W-KEYS", "KVP-JSON-W-INT", "KVP-JSON-W-BYTES", "KVP-JSON-W-ENUM")
"""Clauses of the JSON form that hold whenever the fields are exactly those of the vector."""


def counts() -> dict[str, tuple[int, int]]:
    """The number of accepted and of refused cases, by clause."""
    cases = load()
    accepting = {(case.suite, case.about) for case in cases if not _refuses(case)}
    tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for case in cases:
        tally["KVP-GEO-UNSUPPORTED"][1] += bool(case.beyond)
        if not _refuses(case):
            tally[case.clause][0] += 1
            ops = {ask.question["op"] for ask in case.asks}
            for id_ in (*(_BY_WRITING if "encode" in ops else ()), *(_BY_READING if "decode" in ops else ())):
                tally[id_][0] += 1
        elif (case.suite, case.about) in accepting or not case.about:
            tally[case.clause][1] += 1
    return {id_: (accepted, refused) for id_, (accepted, refused) in tally.items()}


def _refuses(case: Case) -> bool:
    """Tell if a case refuses something: the question, a frame of a stream, or Data."""
    return any(
        "error" in ask.expected
        or "refused" in ask.expected
        or any("error" in f for f in ask.expected.get("frames", ()))
        for ask in case.asks
    )


def unshown(facts: Facts) -> list[str]:
    """Mistakes, one line each: clauses that no case shows, and exceptions that are not needed or not valid."""
    shown, lines = counts(), []
    excepted = tomllib.loads(EXCEPTIONS.read_text())
    known = clauses(facts)
    for clause in known.values():
        if clause.page not in PAGES or not clause.keyword.startswith("MUST"):
            continue
        good = _is_shown(clause, shown.get(clause.id, (0, 0)))
        if not good and clause.id not in excepted:
            lines.append(f"{clause.page}: {clause.id} is shown by no case of the suite")
        if good and clause.id in excepted:
            lines.append(f"unshown.toml: {clause.id} is shown by a case")
    for id_, row in excepted.items():
        if id_ not in known or known[id_].page not in PAGES:
            lines.append(f"unshown.toml: there is no clause {id_} on the pages that count")
        if row.get("reason") not in REASONS or not row.get("note"):
            lines.append(f"unshown.toml, {id_}: a note, and a reason of {sorted(REASONS)}")
    return lines


def _is_shown(clause: Clause, count: tuple[int, int]) -> bool:
    accepted, refused = count
    return bool(refused if clause.error else accepted or refused)
