"""Rules that the registry itself must keep."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["RegistryError", "lint"]

_PLAIN = {"u8", "u16", "u32", "u64", "bool", "str", "bytes", "array<u32>", "array<u64>", "list<str>", "list<bytes>"}
_BLOCKS = {"malformed": 1, "invalid": 2, "incompatible": 3, "state": 4, "limit": 5, "internal": 6}
_SECRET = {"address", "ticket", "key", "base"}


class RegistryError(Exception):
    """The registry contradicts itself."""


def lint(facts: dict[str, Any]) -> None:
    """Raise RegistryError at the first rule that is broken."""
    ids = [m["id"] for m in facts["message"].values()]
    _need(len(set(ids)) == len(ids), "message ids repeat")
    codes = [e["code"] for e in facts["error"].values()]
    _need(len(set(codes)) == len(codes), "error codes repeat")
    for name, error in facts["error"].items():
        _need(error["code"] >> 8 == _BLOCKS.get(error["class"]), f"error {name} is not in the block of its class")
    for kind in ("message", "struct"):
        for name, body in facts[kind].items():
            numbers = [f["id"] for f in body["field"]]
            _need(numbers == sorted(set(numbers)), f"{name}: field ids do not ascend")
            for f in body["field"]:
                at = f"{name}.{f['name']}"
                _need({"type", "unit", "presence", "since", "doc"} <= f.keys(), f"{at}: a fact is missing")
                _need(f["presence"] in ("required", "optional"), f"{at}: presence")
                _need(_known(f["type"], facts), f"{at}: type {f['type']}")
                _need(f["name"] not in _SECRET or bool(f.get("secret")), f"{at} must be secret")
    for name, enum in facts["enum"].items():
        _need(0 not in enum["values"].values(), f"enum {name}: 0 is not a value")


def _known(type_: str, facts: dict[str, Any]) -> bool:
    inner = re.fullmatch(r"(?:list<)?(struct|enum):(\w+)>?", type_)
    if inner is None:
        return type_ in _PLAIN
    kind, name = inner.groups()
    return name in facts[kind] or (kind, name) == ("enum", "ErrorCode")


def _need(good: bool, what: str) -> None:
    if not good:
        raise RegistryError(what)
