"""The JSON form to canonical bytes, by spec/v1/json.md and the writer's clauses of framing.md."""

from __future__ import annotations

import re
from typing import Any

from kvproto_conformance.codec.facts import (
    BODIES,
    LIMIT,
    MESSAGES,
    Field,
    enum_of,
    fields_of,
    is_open,
    join,
    major_of,
    minor_of,
    range_of,
)
from kvproto_conformance.codec.refusal import Refusal
from kvproto_conformance.codec.rules import check_rules

__all__ = ["write_frame", "write_struct"]


def write_frame(message: str, fields: Any) -> bytes:
    """The frame of a message."""
    number = next((id_ for id_, name in MESSAGES.items() if name == message), None)
    if number is None:
        raise Refusal("UNKNOWN_MESSAGE", "@type")
    body = write_struct(message, fields)
    head = bytes((major_of(message), minor_of(message))) + number.to_bytes(2, "little") + bytes(4)
    return b"KVPW" + head + len(body).to_bytes(4, "little") + body


def write_struct(name: str, fields: Any) -> bytes:
    """The bare map of a message or struct."""
    body = _struct(name, fields, "")
    if len(body) > LIMIT["max_body"]:
        raise Refusal("TOO_LARGE", "")
    return body


def _struct(name: str, fields: Any, path: str) -> bytes:
    if not isinstance(fields, dict):
        raise Refusal("BAD_TYPE", path)
    known = {f["name"]: f for f in fields_of(name)}
    for key in fields:
        if key not in known:
            raise Refusal("UNKNOWN_FIELD", join(path, str(key)))
    made = b""
    count = 0
    for field in BODIES[name]["field"]:
        here = join(path, field["name"])
        if field["name"] in fields:
            made += _integer(field["id"]) + _value(field, fields[field["name"]], here)
            count += 1
        elif field["presence"] == "required":
            raise Refusal("MISSING_FIELD", here)
    check_rules(name, fields, path)
    return _head(count, 0x80, 16, (None, 0xDE, 0xDF)) + made


def _value(field: Field, value: Any, path: str) -> bytes:
    type_ = field["type"]
    low, high = range_of(field)
    if type_.startswith("struct:"):
        return _struct(type_[7:], value, path)
    if type_.startswith("enum:"):
        return _integer(_enum(type_[5:], value, path))
    if type_ == "bool":
        if not isinstance(value, bool):
            raise Refusal("BAD_TYPE", path)
        return b"\xc3" if value else b"\xc2"
    if type_ == "str":
        if not isinstance(value, str):
            raise Refusal("BAD_TYPE", path)
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise Refusal("BAD_TEXT", path) from None
        _within(len(data), low, high, LIMIT["max_string"], path)
        return _head(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data
    if type_ == "bytes":
        if not isinstance(value, str) or re.fullmatch("([0-9a-f][0-9a-f])*", value) is None:
            raise Refusal("BAD_TYPE", path)
        data = bytes.fromhex(value)
        _within(len(data), low, high, LIMIT["max_bytes"], path)
        return _head(len(data), 0, 0, (0xC4, 0xC5, 0xC6)) + data
    if type_.startswith(("list<", "array<")):
        if not isinstance(value, list):
            raise Refusal("BAD_TYPE", path)
        inner = {"type": type_[type_.index("<") + 1 : -1]}
        if type_.startswith("array<"):
            return _array(
                [_number(v, 2 ** int(inner["type"][1:]) - 1, join(path, i)) for i, v in enumerate(value)],
                low,
                high,
                path,
            )
        parts = [_value(inner, v, join(path, i)) for i, v in enumerate(value)]
        _within(len(parts), low, high, LIMIT["max_list"], path)
        return _head(len(parts), 0x90, 16, (None, 0xDC, 0xDD)) + b"".join(parts)
    number = _number(value, 2**64 - 1, path)
    if not low <= number <= high:
        raise Refusal("OUT_OF_RANGE", path)
    return _integer(number)


def _number(value: Any, top: int, path: str) -> int:
    """A string of decimal digits without leading zeros, or a JSON number below 2^53."""
    if isinstance(value, str) and re.fullmatch("0|[1-9][0-9]*", value, re.ASCII):
        if len(value) > 20 or int(value) > top:
            raise Refusal("OUT_OF_RANGE", path)
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    raise Refusal("BAD_TYPE", path)


def _enum(enum: str, value: Any, path: str) -> int:
    names = enum_of(enum)
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, dict) and set(value) == {"unknown"}:
        number = _number(value["unknown"], 2**64 - 1, path)
        if is_open(enum) and number not in names.values():
            if number > 0xFFFF:
                raise Refusal("OUT_OF_RANGE", path)
            return number
    raise Refusal("UNKNOWN_ENUM_VALUE", path)


def _array(numbers: list[int], low: int, high: int, path: str) -> bytes:
    _within(len(numbers), low, high, LIMIT["max_array"], path)
    code, width = next((c, w) for c, w in ((1, 1), (2, 2), (3, 4), (4, 8)) if max(numbers, default=0) < 256**w)
    data = b"".join(n.to_bytes(width, "little") for n in numbers)
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(data))
    head = bytes((fixed,)) if fixed else _head(len(data), 0, 0, (0xC7, 0xC8, 0xC9))
    return head + bytes((code,)) + data


def _within(size: int, low: int, high: int, limit: int, path: str) -> None:
    if size > limit:
        raise Refusal("TOO_LARGE", path)
    if not low <= size <= high:
        raise Refusal("OUT_OF_RANGE", path)


def _integer(number: int) -> bytes:
    if number < 128:
        return bytes((number,))
    head, width = next((h, w) for h, w in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)) if number < 256**w)
    return bytes((head,)) + number.to_bytes(width, "big")


def _head(size: int, fixed: int, below: int, heads: tuple[int | None, ...]) -> bytes:
    """Header of a value: the fixed form, or the shortest of 1, 2, 4 bytes of length that there is."""
    if size < below:
        return bytes((fixed + size,))
    head, width = next((h, w) for h, w in zip(heads, (1, 2, 4), strict=True) if h is not None and size < 256**w)
    return bytes((head,)) + size.to_bytes(width, "big")
