"""The JSON form of messages and structs: names as keys, integers as decimal strings, bytes as hex, enums by name."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from kvproto.wire import enums, messages, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import refuse

__all__ = ["from_json", "to_json"]

T = TypeVar("T")


def to_json(value: Any, redact: bool = False) -> dict[str, Any]:
    """Plain JSON data; `redact` replaces secret fields by "(secret)"."""
    secret = {a.name for a in value.__attrs_attrs__ if not a.repr}
    found: dict[str, Any] = {}
    for _, name, type_, *_ in tables.FIELDS[type(value).__name__]:
        item = getattr(value, name)
        if item is not None:
            found[name] = "(secret)" if redact and name in secret else _out(item, type_, redact)
    return found


def _out(value: Any, type_: str, redact: bool) -> Any:
    if type_.startswith("list<"):
        return [_out(v, type_[5:-1], redact) for v in value]
    if type_.startswith("struct:"):
        return to_json(value, redact)
    if type_.startswith("array<"):
        return [str(int(v)) for v in value]
    if type_.startswith("enum:"):
        cls = getattr(enums, type_[5:])
        return cls(value).name if value in set(cls) else {"unknown": int(value)}
    if type_ == "bytes":
        return bytes(value).hex()
    return value if type_ in ("str", "bool") else str(int(value))


def from_json(cls: type[T], data: Any) -> T:
    """The message or struct; raises WireError with the path of what is wrong."""
    return cls(**_fields(cls.__name__, data, ""))


def _fields(name: str, data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise refuse(ErrorCode.BAD_TYPE, path, "an object", type(data).__name__)
    found = {}
    rows = {row[1]: row for row in tables.FIELDS[name]}
    for key in data:
        if key not in rows:
            raise refuse(ErrorCode.UNKNOWN_FIELD, f"{path}.{key}" if path else key, "a known field", key)
    for field, row in rows.items():
        at = f"{path}.{field}" if path else field
        if field in data:
            found[field] = _in(data[field], row[2], at)
        elif row[3]:
            raise refuse(ErrorCode.MISSING_FIELD, at, "required", "absent")
    return found


def _in(value: Any, type_: str, path: str) -> Any:
    if type_.startswith(("list<", "array<")):
        if not isinstance(value, list):
            raise refuse(ErrorCode.BAD_TYPE, path, "a list", type(value).__name__)
        inner = type_[type_.index("<") + 1 : -1]
        made = [_in(v, inner, f"{path}[{i}]") for i, v in enumerate(value)]
        return np.array(made, np.uint64) if type_.startswith("array<") else tuple(made)
    if type_.startswith("struct:"):
        return getattr(messages, type_[7:])(**_fields(type_[7:], value, path))
    if type_.startswith("enum:"):
        cls = getattr(enums, type_[5:])
        if isinstance(value, dict) and isinstance(value.get("unknown"), int) and type_[5:] in tables.OPEN_ENUMS:
            return value["unknown"]
        if not isinstance(value, str) or value not in cls.__members__:
            raise refuse(ErrorCode.UNKNOWN_ENUM_VALUE, path, f"a name of {type_[5:]}", value)
        return cls[value]
    if type_ == "bytes":
        try:
            return bytes.fromhex(value)
        except (TypeError, ValueError):
            raise refuse(ErrorCode.BAD_TYPE, path, "hex", value) from None
    if type_ in ("str", "bool"):
        if not isinstance(value, str if type_ == "str" else bool):
            raise refuse(ErrorCode.BAD_TYPE, path, type_, type(value).__name__)
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and str(int(value)) == value:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    raise refuse(ErrorCode.BAD_TYPE, path, "a decimal string", value)
