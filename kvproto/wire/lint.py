"""Rules that the registry itself must keep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["RegistryError", "lint"]

_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_PLAIN = {*_BITS, "bool", "str", "bytes", "array<u32>", "array<u64>", "list<str>", "list<bytes>"}
_BLOCKS = {"malformed": 1, "invalid": 2, "incompatible": 3, "state": 4, "limit": 5, "internal": 6}
_SECRET = {"address", "ticket", "key", "base", "Handle.data"}
_FACTS = {"id", "name", "type", "unit", "presence", "since", "doc"}


class RegistryError(Exception):
    """The registry contradicts itself."""


def lint(facts: dict[str, Any]) -> None:
    """Raise RegistryError at the first rule that is broken."""
    messages, errors = facts["message"], facts["error"]
    _ascend([m["id"] for m in messages.values()], "message ids")
    _ascend([e["code"] for e in errors.values()], "error codes")
    _need(len(set(facts["ext"].values())) == len(facts["ext"]), "ext codes repeat")
    for name, error in errors.items():
        _need({"code", "class", "recovery", "since", "doc"} <= error.keys(), f"error {name}: a fact is missing")
        _need(error["code"] >> 8 == _BLOCKS.get(error["class"]), f"error {name} is not in the block of its class")
    for name, enum in facts["enum"].items():
        values = list(enum["values"].values())
        _need(0 not in values, f"enum {name}: 0 is not a value")
        _need(len(set(values)) == len(values) and max(values) <= 0xFFFF, f"enum {name}: values")
        _need(enum["docs"].keys() == enum["values"].keys(), f"enum {name}: docs")
    for name, message in messages.items():
        _need(set(message["reply"]) <= messages.keys(), f"{name}: reply")
        _need(message["delivery"] in ("request", "reply", "notice"), f"{name}: delivery")
    _need(not facts["struct"].keys() & messages.keys(), "a struct has the name of a message")
    for name, body in (facts["struct"] | messages).items():
        _need({"since", "doc"} <= body.keys(), f"{name}: a fact is missing")
        _ascend([f["id"] for f in body["field"]], f"{name}: field ids")
        _need(len({f["name"] for f in body["field"]}) == len(body["field"]), f"{name}: field names repeat")
        for f in body["field"]:
            _field(name, f, facts)


def _field(owner: str, f: dict[str, Any], facts: dict[str, Any]) -> None:
    at = f"{owner}.{f.get('name')}"
    _need(f.keys() >= _FACTS, f"{at}: a fact is missing")
    _need(f["presence"] in ("required", "optional"), f"{at}: presence")
    _need(_known(f["type"], facts), f"{at}: type {f['type']}")
    _need(0 < f["id"] <= 0xFFFF and (not f["id"] & 0x8000 or f["presence"] == "optional"), f"{at}: id")
    _need(not {f["name"], at} & _SECRET or bool(f.get("secret")), f"{at} must be secret")
    _need("length" not in f or f["type"] == "bytes", f"{at}: length is for bytes")
    if "min" in f or "max" in f:
        _need(f["type"] == "str" or f["type"] in _BITS, f"{at}: min and max are for numbers and strings")
        top = (1 << _BITS[f["type"]]) - 1 if f["type"] in _BITS else facts["limit"]["max_string"]["value"]
        _need(0 <= f.get("min", 0) <= f.get("max", top) <= top, f"{at}: range")


def _known(type_: str, facts: dict[str, Any]) -> bool:
    inner = re.fullmatch(r"(struct|enum):(\w+)|list<(struct|enum):(\w+)>", type_)
    if inner is None:
        return type_ in _PLAIN
    kind, name = (part for part in inner.groups() if part)
    return name in facts[kind] or (kind, name) == ("enum", "ErrorCode")


def _ascend(numbers: Sequence[int], what: str) -> None:
    _need(list(numbers) == sorted(set(numbers)), f"{what} do not ascend")


def _need(good: bool, what: str) -> None:
    if not good:
        raise RegistryError(what)
