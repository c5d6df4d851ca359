"""Clauses of the prose: sentences with an id, a role, one key word and at most one error."""

from __future__ import annotations

import hashlib
import json
import re
from fnmatch import fnmatchcase

import attrs

from tools.specgen.lint import RegistryError
from tools.specgen.registry import SPEC, Facts

_BULLET = re.compile(r"^\* `(KVP-[A-Z0-9-]+)` (.*?)(?=\n(?:\n|\* |#|<!--)|\Z)", re.MULTILINE | re.DOTALL)
_ID = re.compile(r"`(KVP-[A-Z0-9-]+)`")
_KEYWORD = re.compile(r"\b(MUST NOT|MUST|SHOULD NOT|SHOULD|MAY)\b")
_ROLE = re.compile(
    r"\b(?:An?|The) (?:[a-z]+ )*?(writer|reader|source|sink|side|owner|holder|maker|implementation|testee)\b"
)
_NAME = re.compile(r"`([A-Z][A-Z_]+)`")
_UNQUOTABLE = re.compile(
    r"\bwhere\b.*\bchosen\b|\b(clauses?|sentences?|table|rule) (above|below)\b|\bwhere (the field|stdin)\b"
)
"""Words that no clause has: a condition that begins with where, and a reference that is lost where it is quoted."""

_TABLE = re.compile(r"^(\|.* refused by \|.*)\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


@attrs.frozen
class Clause:
    """One clause, as it stands in its page."""

    id: str
    page: str
    role: str
    keyword: str
    error: str | None
    profile: str
    text: str

    @property
    def digest(self) -> str:
        """The digest of its words, however they are broken into lines."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:16]


def clauses(facts: Facts) -> dict[str, Clause]:
    """Every clause by its id; raises RegistryError for a sentence that breaks the rules of clauses."""
    by_id: dict[str, Clause] = {}
    patterns = [(f"KVP-{pattern}", name) for name, row in facts["profile"].items() for pattern in row["clauses"]]
    patterns.sort(key=lambda each: (len(each[0]), each[1]), reverse=True)
    for path in sorted(SPEC.glob("*.md")):
        for id_, text in _BULLET.findall(path.read_text()):
            keywords, role = _KEYWORD.findall(text), _ROLE.search(text)
            errors = {n for n in _NAME.findall(text) if n in facts["error"]}
            at = f"{path.name}: {id_}"
            _need(id_ not in by_id, f"{at}: the id comes twice")
            _need(not _UNQUOTABLE.search(text), f"{at}: not understood alone, or where in place of if")
            _need(len(keywords) == 1, f"{at}: one key word, not {keywords}")
            _need(role is not None, f"{at}: no role")
            _need(len(errors) <= 1, f"{at}: one error, not {sorted(errors)}")
            profile = next((name for pattern, name in patterns if fnmatchcase(id_, pattern)), "")
            _need(profile != "", f"{at}: no profile of registry/profiles.toml has it")
            error = min(errors, default=None)
            by_id[id_] = Clause(id_, path.name, role[1] if role else "", keywords[0], error, profile, text)
    return by_id


_BINDS = {
    "source": {"source"},
    "sink": {"sink"},
    "owner": {"sink"},
    "holder": {"source"},
    "maker": set(),
    "testee": set(),
}
"""The sides that a role stands for; others stand for both. In a push, the sink owns the memory and the source holds it."""
_EITHER = {"pull", "epochs"}
"""Profiles in which each side may own memory, and hold that of the other."""


def binds(clause: Clause, side: str) -> bool:
    """Whether a side, "source" or "sink", has a clause to keep; what it MAY do is none."""
    if clause.keyword == "MAY":
        return False
    either = clause.role in ("owner", "holder") and clause.profile in _EITHER
    return either or side in _BINDS.get(clause.role, {"source", "sink"})


def as_json(facts: Facts) -> str:
    """Every clause as JSON: its page, profile, role, key word, the sides that keep it, its error, and its sentence."""
    rows = {
        c.id: {
            "page": c.page,
            "profile": c.profile,
            "role": c.role,
            "keyword": c.keyword,
            "binds": [side for side in ("source", "sink") if binds(c, side)],
            "error": c.error or "",
            "text": " ".join(c.text.split()),
        }
        for c in clauses(facts).values()
    }
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def _tabled() -> set[str]:
    """The errors in the column "refused by" of a page's table."""
    tables = [table for path in SPEC.glob("*.md") for table in _TABLE.findall(path.read_text())]
    cells = [
        (head.split("|").index(" refused by "), row.split("|")) for head, rows in tables for row in rows.splitlines()
    ]
    return {name for column, row in cells for name in _NAME.findall(row[column])}


def check(facts: Facts) -> None:
    """Raise RegistryError if registry and prose do not match."""
    known = clauses(facts)
    for name, body in (facts["struct"] | facts["message"]).items():
        for field in body["field"]:
            for id_ in field.get("clauses", ()):
                _need(id_ in known, f"{name}.{field['name']}: no clause {id_}")
    for name, row in facts["profile"].items():
        for pattern in row["clauses"]:
            used = any(fnmatchcase(id_, f"KVP-{pattern}") and c.profile == name for id_, c in known.items())
            _need(used, f"profile {name}: no clause of it fits {pattern}")
    said = {c.error for c in known.values()} | _tabled()
    said |= {r["error"] for b in (facts["struct"] | facts["message"]).values() for r in b.get("rule", ())}
    for name in facts["error"]:
        _need(name in said, f"error {name}: no clause says it")
    for path in sorted(SPEC.glob("*.md")):
        for id_ in _ID.findall(path.read_text()):
            _need(id_ in known, f"{path.name}: {id_} is no clause")


def _need(good: bool, what: str) -> None:
    if not good:
        raise RegistryError(what)
