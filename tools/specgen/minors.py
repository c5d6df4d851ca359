"""Vectors of every minor version: those of an earlier one stay as they are, and a later one adds to them.

The vectors of each minor version are made from what the registry had then. A case that a later version has for the first
time is `as_of` it; one that it makes otherwise, or not at all, is `until` then. An implementation is asked the cases of its own version.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tools.specgen import forms
from tools.specgen import vectors as codec
from tools.specgen.registry import SPEC, Facts, number, of_core, version

Case = dict[str, Any]
_CASES = '"cases": [\n'


def vectors(facts: Facts) -> dict[Path, str]:
    """The files of boundary vectors, JSON forms, streams, enums and edges, with the cases of all minor versions."""
    texts: dict[Path, str] = {}
    cases: dict[Path, list[Case]] = {}
    major, minor = number(facts)
    for each in range(minor + 1):
        made = _made(at(facts, each))
        since = f"{major}.{each}"
        for path in {**cases, **made}:
            rows = json.loads(made[path])["cases"] if path in made else []
            cases[path] = _grown(cases.get(path), rows, since)
        texts |= made
    return {path: _text(text, cases[path]) for path, text in texts.items()} if minor else texts


def at(facts: Facts, minor: int) -> Facts:
    """The registry as it was in an earlier minor version: without what has come since."""
    made, limit = copy.deepcopy(facts), (facts["protocol"]["major"], minor)
    made["protocol"]["minor"] = minor

    def old(version: str) -> bool:
        return tuple(map(int, version.split("."))) <= limit

    for table in ("message", "struct", "error", "feature", "fact", "part"):
        made[table] = {name: row for name, row in made[table].items() if old(row["since"])}
    for body in (made["message"] | made["struct"]).values():
        body["field"] = [field for field in body["field"] if old(field["since"])]
    for enum in made["enum"].values():
        gone = {word for word, version in enum.get("since", {}).items() if not old(version)}
        for key in ("values", "docs"):
            enum[key] = {word: value for word, value in enum[key].items() if word not in gone}
    return made


def _made(facts: Facts) -> dict[Path, str]:
    core = of_core(facts)
    boundary = codec.vectors(core)
    return boundary | forms.forms(core, boundary) | _of_drafts(facts, boundary)


def _of_drafts(facts: Facts, core: dict[Path, str]) -> dict[Path, str]:
    """The boundary vectors of fields that belong to drafts, for whoever has the profile: those that the core lacks."""
    profile = {feature: name for name, row in facts["profile"].items() for feature in row.get("features", ())}
    bodies = (facts["struct"] | facts["message"]).values()
    fields = {f["name"]: profile[f["feature"]] for body in bodies for f in body["field"] if "feature" in f}
    rows = []
    for path, text in codec.vectors(facts).items() if fields else ():
        known = {case["id"] for case in json.loads(core[path])["cases"]}
        for case in (case for case in json.loads(text)["cases"] if case["id"] not in known):
            rows.append(case | {"extensions": [next(of for name, of in fields.items() if name in case["id"])]})
    head = f'{{"suite": "Drafts", "version": "{version(facts)}", "made": "by tools.specgen from the registry", {_CASES}]}}\n'
    return {SPEC / "vectors/codec/drafts.json": _text(head, rows)} if rows else {}


def _grown(held: list[Case] | None, rows: list[Case], since: str) -> list[Case]:
    """The cases until now and those of a later version: what is the same, is one case."""
    if held is None:
        return rows if since.endswith(".0") else [row | {"as_of": since} for row in rows]
    now = {row["id"]: row for row in rows}
    current = {_id(case): case for case in held if "until" not in case}
    found = [case if "until" in case or _same(case, now.get(_id(case))) else case | {"until": since} for case in held]
    for id_, row in now.items():
        before = current.get(id_)
        if before is None:
            found.append(row | {"as_of": since})
        elif not _same(before, row):
            found.append(row | {"id": f"{id_}@{since}", "as_of": since})
    return found


def _id(case: Case) -> str:
    return str(case["id"]).partition("@")[0]


def _same(case: Case, row: Case | None) -> bool:
    return row is not None and {k: v for k, v in case.items() if k != "as_of"} | {"id": row["id"]} == row


def _text(text: str, cases: list[Case]) -> str:
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    return f"{text.partition(_CASES)[0]}{_CASES}{lines}\n]}}\n"
