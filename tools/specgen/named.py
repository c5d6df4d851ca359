"""The tests, vectors and cases that name each clause; a clause that none of them names needs an exemption with a reason.

A clause is named by its id in the source of a test under tests/ or conformance/, or in a vector. tests/gpu does not count, since it
does not run everywhere; a clause that only it holds is exempt, and the exemption names the test.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict

from tools.specgen.clauses import clauses
from tools.specgen.lint import RegistryError
from tools.specgen.registry import ROOT, SPEC, Facts

EXEMPTIONS = SPEC / "exemptions.toml"
REASONS = {
    "people": "advice to people or to their programs; no message and no memory shows whether it is kept",
    "optional": "SHOULD or MAY without an effect on the wire",
    "hardware": "checked by a test that needs hardware, which `shown` names",
    "draft": "about a draft feature that has no code yet, which `shown` names",
}
_ID = re.compile(r"\bKVP(?:-[A-Z0-9]+)+\b")
_OF_GENERATOR = "tests/wire/test_make.py"
"""The ids in this file are examples, some of them wrong on purpose."""


def named() -> dict[str, set[str]]:
    """By clause id: the tests, files of the conformance suite, and vectors that name it."""
    names: dict[str, set[str]] = defaultdict(set)
    paths = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("conformance/**/*.py"), *SPEC.glob("vectors/**/*.json")]
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("tests/gpu/") and name != _OF_GENERATOR:
            for id_ in _ID.findall(path.read_text()):
                names[id_].add(name)
    return names


def exemptions(facts: Facts) -> dict[str, dict[str, str]]:
    """By clause id: the reason and note of each exemption, and the tests that show it; raises RegistryError for an invalid one."""
    rows: dict[str, dict[str, str]] = tomllib.loads(EXEMPTIONS.read_text())
    known = clauses(facts)
    for id_, row in rows.items():
        at = f"exemptions.toml, {id_}"
        _need(id_ in known, f"{at}: no such clause")
        _need(row.keys() <= {"reason", "note", "shown"} and bool(row.get("note")), f"{at}: reason, note, perhaps shown")
        reason = row.get("reason")
        _need(reason in REASONS, f"{at}: the reason is one of {sorted(REASONS)}")
        _need(reason != "optional" or known[id_].keyword.startswith(("SHOULD", "MAY")), f"{at}: {known[id_].keyword}")
        if reason == "hardware":
            path, _, test = row.get("shown", "").partition("::")
            held = (
                path.startswith("tests/gpu/") and (ROOT / path).exists() and f"def {test}(" in (ROOT / path).read_text()
            )
            _need(held, f"{at}: no test {row.get('shown')!r}")
        if reason == "draft":
            feature = facts["feature"].get(row.get("shown", ""), {})
            _need(feature.get("status") == "draft", f"{at}: {row.get('shown')!r} is no draft feature")
    return rows


def unnamed(facts: Facts) -> list[str]:
    """Mistakes, one line each: clauses that nothing names, names of clauses that are gone, needless exemptions."""
    known, seen, exempt = clauses(facts), named(), exemptions(facts)
    lines = [
        f"{c.page}: {c.id} is named by no test, vector or case" for c in known.values() if c.id not in seen | exempt
    ]
    lines += [f"{', '.join(sorted(seen[i]))}: there is no clause {i}" for i in sorted(seen.keys() - known.keys())]
    return lines + [f"exemptions.toml: {i} is named by {min(seen[i])}" for i in exempt if i in seen]


def _need(good: bool, what: str) -> None:
    if not good:
        raise RegistryError(what)
