"""The predicates of cross-field rules, over the JSON form of one map."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec.facts import BODIES, enum_of, fields_of, join
from kvproto_conformance.codec.refusal import Refusal

__all__ = ["check_rules"]


def check_rules(name: str, fields: dict[str, Any], path: str) -> None:
    """Refuse at the first rule, in the order of the table, that the fields break."""
    types = {f["name"]: f["type"] for f in fields_of(name)}
    for rule in BODIES[name].get("rule", []):
        at = _broken(rule["rule"], rule["args"], fields, types)
        if at is not None:
            raise Refusal(rule["error"], join(path, at))


def _broken(rule: str, args: list[Any], fields: dict[str, Any], types: dict[str, str]) -> str | None:
    """Where the rule is broken, below the map; None where it holds."""
    first = args[0]
    if rule in ("present_iff", "only_if"):
        wanted = fields.get(args[1]) == args[2]
        if (first in fields) == wanted or (rule == "only_if" and first not in fields):
            return None
        return str(first)
    if first not in fields:
        return None
    if rule in ("ascend", "rise", "unique"):
        return _ordered(rule, args, fields[first], types)
    if rule == "subset":
        inner = types[first][len("list<enum:") : -1]
        known = {_enum_number(inner, v) for v in fields[args[1]]}
        return next((f"{first}[{i}]" for i, v in enumerate(fields[first]) if _enum_number(inner, v) not in known), None)
    if rule == "same_length":
        return next((str(a) for a in args[1:] if a in fields and len(fields[a]) != len(fields[first])), None)
    if any(isinstance(a, str) and a not in fields for a in args):
        return None
    numbers = [int(fields[a]) if isinstance(a, str) else a for a in args]
    holds = {
        "le": lambda: numbers[0] <= numbers[1],
        "lt": lambda: numbers[0] < numbers[1],
        "sum_le": lambda: numbers[0] + numbers[1] <= numbers[2],
    }[rule]()
    return None if holds else [str(a) for a in args if isinstance(a, str)][-1]


def _ordered(rule: str, args: list[Any], values: list[Any], types: dict[str, str]) -> str | None:
    type_ = types[args[0]]
    tail = f".{args[1]}" if len(args) > 1 else ""
    if len(args) > 1:
        inner = type_[len("list<struct:") : -1]
        key_type = next(f["type"] for f in fields_of(inner) if f["name"] == args[1])
        keys = [_key(v[args[1]], key_type) for v in values]
    else:
        keys = [_key(v, type_[type_.index("<") + 1 : -1]) for v in values]
    seen: list[Any] = []
    for i, key in enumerate(keys):
        bad = {
            "unique": key in seen,
            "ascend": bool(seen) and key <= seen[-1],
            "rise": bool(seen) and key < seen[-1],
        }[rule]
        if bad:
            return f"{args[0]}[{i}]{tail}"
        seen.append(key)
    return None


def _key(value: Any, type_: str) -> Any:
    if type_.startswith("enum:"):
        return _enum_number(type_[5:], value)
    return value.encode() if type_ == "str" else int(value)


def _enum_number(enum: str, value: Any) -> int:
    return int(value["unknown"]) if isinstance(value, dict) else enum_of(enum)[value]
