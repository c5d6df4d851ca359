"""The JSON form of messages and structs: names as keys, integers as decimal strings, bytes as hex, enums by name."""

import re
from typing import Any, TypeVar

import numpy as np

from kvproto.errors import LocalError, WireError
from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.fields import BITS
from kvproto.wire.plain import refuse
from kvproto.wire.writer import check_field, check_rules

T = TypeVar("T")
REDACTED = "(secret)"
_DECIMAL = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def to_json(value: Any, redact: bool = False) -> dict[str, Any]:
    """A message or struct as JSON data, secret fields as "(secret)" if `redact`; raises LocalError(BAD_TYPE)."""
    cls = type(value).__name__
    if cls not in tables.FIELDS:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", cls)
    hidden = tables.SECRET[cls] if redact else set()
    data: dict[str, Any] = {}
    for _, name, type_, *_ in tables.FIELDS[cls]:
        item = getattr(value, name)
        if item is not None:
            data[name] = REDACTED if name in hidden else _out(item, type_, redact)
    return data


def _out(value: Any, type_: str, redact: bool) -> Any:
    if type_.startswith("list<"):
        return [_out(v, type_[5:-1], redact) for v in value]
    if type_.startswith("struct:"):
        return to_json(value, redact)
    if type_.startswith("array<"):
        return [str(int(v)) for v in value]
    if type_.startswith("enum:"):
        try:
            return getattr(enums, type_[5:])(value).name
        except ValueError:
            return {"unknown": str(int(value))}
    if type_ == "bytes":
        return bytes(value).hex()
    return value if type_ in ("str", "bool") else str(int(value))


def from_json(cls: type[T], data: Any) -> T:
    """The message or struct of JSON data; raises WireError with a path, or LocalError for another `cls`."""
    if cls.__name__ not in tables.FIELDS:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", cls.__name__)
    value: T = _object(cls, data, "")
    return value


def _object(cls: type[Any], data: Any, path: str) -> Any:
    name = cls.__name__
    if not isinstance(data, dict):
        raise refuse(ErrorCode.BAD_TYPE, path, "an object", type(data).__name__)
    values = {}
    rows = {row[1]: row for row in tables.FIELDS[name]}
    for key in data:
        if key not in rows and not str(key).startswith("x_"):
            raise refuse(ErrorCode.UNKNOWN_FIELD, _join(path, str(key)), "a known field", key)
    for field, row in rows.items():
        at = _join(path, field)
        if field in data:
            try:
                values[field] = _in(data[field], row[2], at)
                check_field(name, field, values[field], at)
            except WireError as error:
                if field in tables.SECRET[name]:
                    raise refuse(error.code, error.path, error.mine, REDACTED) from None
                raise
        elif row[3]:
            raise refuse(ErrorCode.MISSING_FIELD, at, "required", "absent")
    whole = cls(**values)
    check_rules(whole, path)
    return whole


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _in(value: Any, type_: str, path: str) -> Any:
    if type_.startswith(("list<", "array<")):
        if not isinstance(value, list):
            raise refuse(ErrorCode.BAD_TYPE, path, "a list", type(value).__name__)
        inner = type_[type_.index("<") + 1 : -1]
        elements = [_element(v, inner, f"{path}[{i}]") for i, v in enumerate(value)]
        return np.array(elements, np.uint64) if type_.startswith("array<") else tuple(elements)
    if type_.startswith("struct:"):
        return _object(tables.CLASSES[type_[7:]], value, path)
    if type_.startswith("enum:"):
        return _enum(value, type_[5:], path)
    if type_ == "bytes":
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            raise refuse(ErrorCode.BAD_TYPE, path, "lower-case hex", type(value).__name__)
        return bytes.fromhex(value)
    if type_ in ("str", "bool"):
        if not isinstance(value, str if type_ == "str" else bool):
            raise refuse(ErrorCode.BAD_TYPE, path, type_, type(value).__name__)
        return value
    return _integer(value, path)


def _element(value: Any, type_: str, path: str) -> Any:
    element = _in(value, type_, path)
    if type_ in BITS and element >> BITS[type_]:
        raise refuse(ErrorCode.OUT_OF_RANGE, path, f"0..{(1 << BITS[type_]) - 1}", element)
    return element


def _enum(value: Any, name: str, path: str) -> int:
    cls = getattr(enums, name)
    if isinstance(value, dict) and value.keys() == {"unknown"}:
        number = _integer(value["unknown"], path)
        if number > 0xFFFF:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, "at most 0xffff", number)
        if name in tables.OPEN_ENUMS and number not in set(cls):
            return number
    elif not isinstance(value, str):
        raise refuse(ErrorCode.BAD_TYPE, path, f"a name of {name}", type(value).__name__)
    elif value in cls.__members__:
        member: int = cls[value]
        return member
    raise refuse(ErrorCode.UNKNOWN_ENUM_VALUE, path, f"a name of {name}", repr(value)[:80])


def _integer(value: Any, path: str) -> int:
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        # the length is checked first: converting very many digits is slow, and Python itself refuses it
        if len(value) > 20 or int(value) >= 1 << 64:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"0..{(1 << 64) - 1}", value[:24])
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    raise refuse(ErrorCode.BAD_TYPE, path, "a decimal string", repr(value)[:80])
