"""Versions that do not exist: registries with additions, and kvproto and its testees generated from them.

Old and new versions must be able to meet before a new one exists. A minor version adds everything that conventions.md
allows, everywhere; a major version changes what is not frozen.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path
from typing import Any

from tools.specgen import minors, rust, testees
from tools.specgen.__main__ import modules
from tools.specgen.lint import DIGESTED, lint
from tools.specgen.registry import ROOT, SPEC, Facts, as_json

Row = dict[str, Any]
NEEDED = 0x0010
_FIRST = 0x8002
"""The first id of a field that may be ignored; see lint."""
_TYPES = ("u64", "str", "bytes", "bool", "array<u32>", "struct:MadeUpStruct", "list<struct:MadeUpStruct>", "list<str>")
"""The ids of fields that may be ignored, in turn."""


def minor(facts: Facts) -> Facts:
    """The next minor version, with everything that it may add.

    A field that may be ignored in each message and struct, a value in each open enum, a feature with a message, an
    error, and a field of Accepted that only a session of that minor version may have.
    """
    made: Facts = copy.deepcopy(facts)
    made["protocol"]["minor"] += 1
    since = f"{made['protocol']['major']}.{made['protocol']['minor']}"
    growing = {name: body for name, body in (made["struct"] | made["message"]).items() if name not in DIGESTED}
    for body, type_ in zip(growing.values(), itertools.cycle(_TYPES), strict=False):
        body["field"].append(_field(ignored(body), "x_made_up", type_, since))
    made["struct"] = {"MadeUpStruct": _struct(since), **made["struct"]}
    made["message"]["Accepted"]["field"].insert(-1, _field(NEEDED, "made_up", "u32", since))
    value = max(row["value"] for row in made["feature"].values()) + 1
    doc = {"since": since, "doc": "Made up."}
    made["feature"]["MADE_UP"] = {"value": value, "status": "draft", **doc}
    pull = made["profile"]["pull"]
    made["profile"]["pull"] = {**pull, "features": [*pull["features"], "MADE_UP"]}
    made["error"] = dict(
        sorted(
            {**made["error"], "MADE_UP": {"code": 0x04F0, "class": "state", "recovery": "give-up", **doc}}.items(),
            key=lambda row: int(row[1]["code"]),
        )
    )
    for enum in made["enum"].values():
        if enum["open"]:
            enum["values"]["MADE_UP"] = max(enum["values"].values()) + 1
            enum["docs"]["MADE_UP"] = "Made up."
            enum.setdefault("since", {})["MADE_UP"] = since
    session = _field(1, "session", "u64", since) | {"presence": "required"}
    made["message"]["MadeUp"] = {
        "id": max(m["id"] for m in facts["message"].values()) + 0x100, "status": "draft", "feature": ["MADE_UP"],
        "sender": "both", "delivery": "notice", "reply": [], "frozen": False, **doc,
        "field": [session, _field(3, "why", "str", since), _field(_FIRST, "x_made_up", "u64", since)],
    }  # fmt: skip
    made["machine"]["session"]["move"].append({"from": "ready", "message": "MadeUp", "to": "ready"})
    lint(made)
    return made


def major(facts: Facts) -> Facts:
    """The next major version: frozen messages gain fields that may be ignored; everything else changes in some way."""
    made: Facts = copy.deepcopy(facts)
    made["protocol"] |= {"major": made["protocol"]["major"] + 1, "minor": 0}
    for message in made["message"].values():
        if message["frozen"]:
            message["field"].append(_field(ignored(message), "x_made_up", "u64", "2.0"))
        else:
            message["field"].append(_field(NEEDED, "made_up", "u32", "2.0") | {"presence": "required"})
    values = made["enum"]["DType"]["values"]
    made["enum"]["DType"]["values"] = {word: value + 100 for word, value in values.items()}
    lint(made)
    return made


def ignored(body: Facts) -> int:
    """The next id of a field that may be ignored."""
    return max(_FIRST, *(int(field["id"]) + 1 for field in body["field"]))


def _field(number: int, name: str, type_: str, since: str) -> Row:
    return {
        "id": number, "name": name, "type": type_, "unit": "none", "presence": "optional", "since": since,
        "doc": "Made up.",
    }  # fmt: skip


def _struct(since: str) -> Row:
    return {
        "since": since,
        "doc": "Made up.",
        "field": [_field(1, "number", "u64", since) | {"presence": "required"}, _field(2, "name", "str", since)],
    }


def build(facts: Facts, folder: Path) -> None:
    """Write a whole version to a folder: registry, vectors of its codec, kvproto, libraries in C and Rust, testees."""
    shutil.copytree(ROOT / "kvproto", folder / "kvproto", ignore=shutil.ignore_patterns("__pycache__"))
    for copied in ("conformance/testees", "libkvproto", "crates/kvproto/src"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / copied, folder / copied, symlinks=True, ignore=ignored)
    made = {**modules(facts), **testees.testees(facts), **rust.crate(facts), **minors.vectors(facts)}
    made[SPEC / "registry.json"] = as_json(facts)
    for path, text in made.items():
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
