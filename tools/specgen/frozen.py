"""Frozen facts: all that is stable in the last candidate, as `conformance/versions` keeps it.

A fact, clause or vector that is frozen neither changes nor goes until the next candidate is opened. What is new beside it
must be what conventions.md lets a minor version add. What belongs to draft extensions alone is free.
"""

from __future__ import annotations

import json
import lzma
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import attrs

from kvproto_conformance.cases import Case
from kvproto_conformance.cases import load as load_cases
from tools.specgen.clauses import as_json
from tools.specgen.lock import registry_rows
from tools.specgen.registry import CORE, ROOT, SPEC, Facts, number, profiles, version

KEPT = ROOT / "conformance/versions"
_VECTORS = "vectors.json.xz"
_FOLDERS = ("codec", "plan")
"""Folders of vectors that are kept; those of layouts and stored pages are not about bytes between two sides."""
_FILES = ("json", "streams", "negotiation", "dcp", "lowering", "lowering-pools", "late", "inline")


@attrs.frozen
class Snapshot:
    """All that a version says: its registry, its clauses, and its cases."""

    facts: Facts
    clauses: Mapping[str, Mapping[str, str]]
    cases: list[Case]

    def rows(self) -> dict[str, tuple[str, bool]]:
        """Every fact, clause and case: its text, and whether it is stable."""
        has = partial(self._has, profiles(self.facts))
        rows = {f"registry: {key}": (text, self._stable(has(key, text))) for key, text in registry_rows(self.facts)}
        del rows["registry: protocol.minor"]
        for id_, clause in self.clauses.items():
            text = f"{clause['role']} {clause['keyword']} {clause['error'] or '-'} {clause['text']}"
            rows[f"clause: {id_}"] = text, self._stable({clause["profile"]})
        for case in self.cases:
            asks = json.dumps([[ask.question, ask.expected, ask.tolerance] for ask in case.asks], sort_keys=True)
            rows[f"vector: {case.id}"] = asks, self._is_asked(case)
        return rows

    def _stable(self, names: Iterable[str]) -> bool:
        """Whether one of these profiles is stable: it says so, or one of its features is."""
        of = (self.facts["profile"][name] for name in names)
        return any(row.get("status", "stable") == "stable" and self._has_stable(row.get("features", ())) for row in of)

    def _has_stable(self, features: Iterable[str]) -> bool:
        said = [self.facts["feature"][name]["status"] for name in features]
        return not said or "stable" in said

    def _is_asked(self, case: Case) -> bool:
        """Whether a case is about what is stable: its clause, the extensions that it needs, and its message or struct."""
        needs = all(self._stable({name}) for name in case.needs if name in self.facts["profile"])
        either = not case.either or self._stable(case.either & self.facts["profile"].keys())
        clause = self.clauses.get(case.clause, {"profile": CORE})
        return needs and either and self._stable({clause["profile"]})

    def _has(self, of: Mapping[str, list[str]], key: str, text: str) -> set[str]:
        """The profiles that a row of the registry belongs to."""
        kind, _, rest = key.partition(".")
        name = rest.partition(",")[0].partition(".")[0]
        features = {f: n for n, row in self.facts["profile"].items() for f in row.get("features", ())}
        if kind == "conversion":
            return {features["CONVERT"]}
        if kind in ("struct", "message") and (of_field := self._feature_of(rest)):
            return {features[of_field]}
        if kind == "machine":
            return {features[f] for f in text.partition(" ")[2].split(" or ") if f != "-"} or {CORE}
        if kind == "error":
            bodies = [n for n in of if any(r["error"] == name for r in self._body(n).get("rule", ()))]
            said = {clause["profile"] for clause in self.clauses.values() if clause["error"] == name}
            return said.union(*(of[body] for body in bodies)) or {CORE}
        found: dict[str, Callable[[], Iterable[str]]] = {
            "message": lambda: of[name], "struct": lambda: of[name], "enum": lambda: of.get(name, [CORE]),
            "feature": lambda: [features[name]], "profile": lambda: [name],
            "limit": lambda: [self.facts["limit"][name].get("profile", CORE)],
        }  # fmt: skip
        return set(found.get(kind, lambda: [CORE])())

    def _feature_of(self, rest: str) -> str:
        """The draft feature that a field belongs to; empty if it belongs to none, or the row is of no field."""
        owner, _, name = rest.partition(".")
        return next((f.get("feature", "") for f in self._body(owner).get("field", ()) if f["name"] == name), "")

    def _body(self, name: str) -> Facts:
        body: Facts = (self.facts["struct"] | self.facts["message"]).get(name, {})
        return body


def now(facts: Facts) -> Snapshot:
    """Today's registry, clauses and vectors."""
    return Snapshot(facts, json.loads(as_json(facts)), load_cases(SPEC / "vectors"))


def kept(folder: Path) -> Snapshot:
    """A candidate's registry, clauses and vectors, from its folder."""
    held = json.loads(lzma.decompress((folder / _VECTORS).read_bytes()))
    with tempfile.TemporaryDirectory(prefix="kvproto-kept-") as place:
        for name, file in held.items():
            path = Path(place, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(file), encoding="utf-8")
        cases = load_cases(Path(place))
    facts, said = (json.loads((folder / f"{name}.json").read_text()) for name in ("registry", "clauses"))
    return Snapshot(facts, said, cases)


def keep(facts: Facts) -> Path:
    """Write what today's candidate says to its folder, of which no file but its own is needed to speak it."""
    folder, vectors = KEPT / version(facts), SPEC / "vectors"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("registry.json", "clauses.json"):
        (folder / name).write_text((SPEC / name).read_text())
    paths = [path for name in _FOLDERS for path in sorted((vectors / name).glob("*.json"))]
    paths += [vectors / f"{name}.json" for name in _FILES]
    held = {path.relative_to(vectors).as_posix(): json.loads(path.read_text()) for path in paths}
    packed = json.dumps(held, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    (folder / _VECTORS).write_bytes(lzma.compress(packed, preset=9))
    return folder


def broken(facts: Facts) -> list[str]:
    """Differences from the last candidate in frozen facts, and additions that may not be made; one line each."""
    if not facts["candidate"]:
        return []
    name = facts["candidate"][-1]["version"]
    if not (KEPT / name / _VECTORS).exists():
        return [f"{name} is not kept: python -m tools.specgen --open {name.partition('-')[2]} WHY"]
    return compared(kept(KEPT / name), now(facts))


def compared(before: Snapshot, today: Snapshot) -> list[str]:
    """Changes, removals and additions that today's version may not have; one line each."""
    held, rows = before.rows(), today.rows()
    lines = []
    for key, (text, stable) in held.items():
        if stable and key not in rows:
            lines.append(f"{key} is gone")
        elif stable and rows[key][0] != text:
            lines.append(f"{key} was {_short(text)}, is {_short(rows[key][0])}")
    for key, (_, stable) in rows.items():
        if stable and key not in held and (wrong := _added(key, before.facts, today.facts)):
            lines.append(f"{key} is new: {wrong}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def _added(key: str, before: Facts, facts: Facts) -> str:
    """The reason that this may not be new beside what is frozen; empty if it may."""
    what, _, rest = key.partition(": ")
    kind, _, name = rest.partition(".")
    later = number(facts) > number(before)
    may = "" if later else f"it needs a minor version above {'.'.join(map(str, number(before)))}"
    if what == "vector":
        return ""
    if what == "clause":
        return may
    return _ADDED[kind](name, before, facts) if kind in _ADDED else may


def _member(name: str, before: Facts, facts: Facts, kind: str) -> str:
    """The reason that a message or struct, or a field or rule of it, may not be new."""
    body, _, field = name.partition(".")
    owner, _, rule = body.partition(", ")
    if owner not in before[kind]:
        return "" if kind == "struct" or "feature" in facts[kind][owner] else "a later message belongs to a feature"
    if rule:
        return "a later rule refuses what was accepted"
    row = next(row for row in facts[kind][owner]["field"] if row["name"] == field)
    if tuple(map(int, row["since"].split("."))) <= number(before):
        return f"its `since` is not above {'.'.join(map(str, number(before)))}"
    return "" if row["presence"] == "optional" else "a later field is optional, as an older side does not send it"


_ADDED: dict[str, Callable[[str, Facts, Facts], str]] = {
    "message": partial(_member, kind="message"),
    "struct": partial(_member, kind="struct"),
    "machine": lambda *_: "a change of behaviour belongs to a feature",
    **dict.fromkeys(("part", "metric", "metric_label", "profile"), lambda *_: ""),
}
"""By table, why a new row may not be; tables that are not here grow with a minor version."""
