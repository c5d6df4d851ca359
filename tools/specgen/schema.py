"""JSON Schemas of what travels as JSON outside of sessions: Descriptions and tickets.

A schema has the form and the ranges of every field. Rules between fields, the order of lists and the size of the whole
are beyond it: a reader may still refuse what validates, and nothing that a reader accepts is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.specgen.registry import SPEC, Facts, version

SCHEMAS = {"description": "Geometry", "ticket": "Ticket"}
"""Structs by the name of their schema."""
_LIMIT_OF = {"str": "max_string", "bytes": "max_bytes", "list": "max_list", "array": "max_array"}
_EXACT = (1 << 53) - 1
"""The greatest integer that may be a JSON number (KVP-JSON-INT)."""
_END = r"$(?!\n)"
"""The end of a text, in dialects too in which `$` matches before a last line break."""
_TITLES = {"description": "A Description of an engine's caches", "ticket": "A ticket of a prompt"}


def schemas(facts: Facts) -> dict[Path, str]:
    """The schema files and their texts."""
    return {path(name): json.dumps(_schema(facts, name), indent=1) + "\n" for name in SCHEMAS}


def path(name: str) -> Path:
    """The file of a schema."""
    return SPEC / f"{name}.schema.json"


def _schema(facts: Facts, name: str) -> dict[str, Any]:
    reached: dict[str, Any] = {}
    _reach(facts, SCHEMAS[name], reached)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:kvproto:{version(facts)}:{name}",
        "title": f"{_TITLES[name]}, kvproto {version(facts)}",
        "$comment": "Made from the registry by tools/specgen. What validates may still break a rule of spec/v1/messages.md.",
        "$ref": f"#/$defs/{SCHEMAS[name]}",
        "$defs": dict(sorted(reached.items())),
    }


def _reach(facts: Facts, struct: str, reached: dict[str, Any]) -> None:
    """Add the schema of a struct, and of all structs in it."""
    body = facts["struct"][struct]
    reached[struct] = {
        "type": "object",
        "description": body["doc"],
        "properties": {field["name"]: _field(facts, field, reached) for field in body["field"]},
        "required": [field["name"] for field in body["field"] if field["presence"] == "required"],
        "patternProperties": {"^x_": True},
        "additionalProperties": False,
    }


def _field(facts: Facts, field: dict[str, Any], reached: dict[str, Any]) -> dict[str, Any]:
    unit = f" Unit: {field['unit']}." if field["unit"] != "none" else ""
    return {"description": field["doc"] + unit, **_value(facts, field["type"], field, reached)}


def _value(facts: Facts, type_: str, field: dict[str, Any], reached: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value; what `field` says of ranges is of the value as a whole, not of its elements."""
    kind, _, inner = type_.rstrip(">").replace("<", " ", 1).partition(" ")
    least = field.get("length", field.get("min", 0))
    if kind in ("list", "array"):
        most = field.get("max", facts["limit"][_LIMIT_OF[kind]]["value"])
        return {"type": "array", "items": _value(facts, inner, {}, reached), "minItems": least, "maxItems": most}
    if kind == "bytes":
        most = field.get("length", field.get("max", facts["limit"]["max_bytes"]["value"]))
        return {"type": "string", "pattern": f"^([0-9a-f]{{2}})*{_END}", "minLength": 2 * least, "maxLength": 2 * most}
    if kind == "str":
        most = field.get("max", facts["limit"]["max_string"]["value"])
        return {"type": "string", "minLength": least, "maxLength": most}
    if kind == "bool":
        return {"type": "boolean"}
    name = kind.rpartition(":")[2]
    if kind.startswith("struct:"):
        if name not in reached:
            _reach(facts, name, reached)
    elif kind.startswith("enum:"):
        reached[name] = _enum(facts["enum"][name])
    else:
        most = field.get("max", (1 << int(kind[1:])) - 1)
        name = kind if most == (1 << int(kind[1:])) - 1 and not least else f"{kind}_{least}_to_{most}"
        reached[name] = _integer(least, most)
    return {"$ref": f"#/$defs/{name}"}


def _enum(enum: dict[str, Any]) -> dict[str, Any]:
    names = {"description": enum["doc"], "enum": list(enum["values"])}
    if not enum["open"]:
        return names
    known = list(enum["values"].values())
    unknown = {**_integer(0, 0xFFFF), "not": {"enum": [*known, *map(str, known)]}}
    other = {
        "type": "object",
        "properties": {"unknown": unknown},
        "required": ["unknown"],
        "additionalProperties": False,
    }
    return {"anyOf": [names, other]}


def _integer(least: int, most: int) -> dict[str, Any]:
    """An integer: a string of decimal digits, or below 2^53 a number."""
    number = {"type": "integer", "minimum": least, "maximum": min(most, _EXACT)}
    return {"anyOf": [{"type": "string", "pattern": f"^({decimals(least, most)}){_END}"}, number]}


def decimals(least: int, most: int) -> str:
    """A regular expression of the decimal digits of the integers from 0 or 1 to `most`, which has two digits or more."""
    if least not in (0, 1) or most < 10:
        raise ValueError(f"no expression for {least} to {most}")
    text = str(most)
    forms = ["0"] if not least else []
    forms.append(f"[1-9][0-9]{{0,{len(text) - 2}}}")
    for i, digit in enumerate(text):
        lowest = 0 if i else 1
        if int(digit) > lowest:
            rest = "[0-9]" * (len(text) - i - 1) if len(text) - i < 3 else f"[0-9]{{{len(text) - i - 1}}}"
            forms.append(f"{text[:i]}[{lowest}-{int(digit) - 1}]{rest}")
    return "|".join([*forms, text])
