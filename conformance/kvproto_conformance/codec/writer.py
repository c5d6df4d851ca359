"""From the JSON form to canonical bytes, in the order of checks of json.md."""

import re
import struct
from typing import Any

from kvproto_conformance.codec import facts
from kvproto_conformance.codec.facts import (
    ENUMS,
    EXT,
    LIMIT_OF,
    LIMITS,
    MESSAGES,
    STRUCTS,
    Layout,
    Refusal,
    Type,
    find,
    join,
)
from kvproto_conformance.codec.rules import check_rules

DIGITS = re.compile(r"0|[1-9][0-9]*", re.ASCII)
HEX = re.compile(r"(?:[0-9a-f]{2})*", re.ASCII)
JSON_NUMBERS = 1 << 53
PYTHON = {"bool": (bool,), "str": (str,), "bytes": (str,), "list": (list,), "array": (list,)}
WIDTHS = ((EXT["u8"], "B"), (EXT["u16"], "H"), (EXT["u32"], "I"), (EXT["u64"], "Q"))
FIXED_EXT = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
# Kind: first byte and end of the short form, then the first byte of each longer form with its width.
HEADS: dict[str, tuple[int, int, tuple[tuple[int, int], ...]]] = {
    "uint": (0x00, 0x80, ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))),
    "str": (0xA0, 32, ((0xD9, 1), (0xDA, 2), (0xDB, 4))),
    "bytes": (0, 0, ((0xC4, 1), (0xC5, 2), (0xC6, 4))),
    "list": (0x90, 16, ((0xDC, 2), (0xDD, 4))),
    "map": (0x80, 16, ((0xDE, 2), (0xDF, 4))),
    "array": (0, 0, ((0xC7, 1), (0xC8, 2), (0xC9, 4))),
}


def _integer(value: Any, path: str) -> int:
    if type(value) is int and 0 <= value < JSON_NUMBERS:
        return value
    if type(value) is not str or not DIGITS.fullmatch(value):
        raise Refusal("BAD_TYPE", path)
    digits = value.lstrip("0")
    if len(digits) > 20:  # beyond 64 bits, and perhaps beyond what int() takes
        raise Refusal("OUT_OF_RANGE", path)
    return int(digits or "0")


def _check_range(type_: Type, number: int, path: str) -> None:
    if type_.kind in LIMIT_OF and number > LIMITS[LIMIT_OF[type_.kind]]:
        raise Refusal("TOO_LARGE", path)
    if not type_.low <= number <= type_.high:
        raise Refusal("OUT_OF_RANGE", path)


def _take_enum(type_: Type, value: Any, path: str) -> int:
    enum = ENUMS[type_.name]
    if type(value) is str:
        if value not in enum.values:
            raise Refusal("UNKNOWN_ENUM_VALUE", path)
        return enum.values[value]
    if type(value) is not dict or list(value) != ["unknown"]:
        raise Refusal("BAD_TYPE", path)
    number = _integer(value["unknown"], path)
    _check_range(type_, number, path)
    if not enum.open or number in enum.names:
        raise Refusal("UNKNOWN_ENUM_VALUE", path)
    return number


def _take(type_: Type, value: Any, path: str) -> Any:
    """The value of a JSON value of a known type, within its range."""
    kind = type_.kind
    if kind == "struct":
        return _take_map(STRUCTS[type_.name], value, path)
    if kind == "enum":
        return _take_enum(type_, value, path)
    if kind == "uint":
        number = _integer(value, path)
        _check_range(type_, number, path)
        return number
    if type(value) not in PYTHON[kind]:
        raise Refusal("BAD_TYPE", path)
    if kind in ("list", "array"):
        taken = [_take(type_.item, element, f"{path}[{i}]") for i, element in enumerate(value)]
        _check_range(type_, len(value), path)
        return taken
    if kind == "str":
        try:
            size = len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise Refusal("BAD_TEXT", path) from None
        _check_range(type_, size, path)
    if kind == "bytes":
        if not HEX.fullmatch(value):
            raise Refusal("BAD_TYPE", path)
        _check_range(type_, len(value) // 2, path)
        return bytes.fromhex(value)
    return value


def _take_map(layout: Layout, fields: Any, path: str) -> dict[str, Any]:
    """The values of a JSON object of a known layout, with its rules."""
    if type(fields) is not dict:
        raise Refusal("BAD_TYPE", path)
    for key in fields:
        if key not in layout.names and not key.startswith("x_"):
            raise Refusal("UNKNOWN_FIELD", join(path, str(key)))
    values: dict[str, Any] = {}
    for field in layout.fields.values():
        if field.name in fields:
            values[field.name] = _take(field.type, fields[field.name], join(path, field.name))
        elif field.required:
            raise Refusal("MISSING_FIELD", join(path, field.name))
    check_rules(layout, values, path)
    return values


def _head(kind: str, number: int) -> bytes:
    short, end, forms = HEADS[kind]
    if number < end:
        return bytes([short | number])
    first, width = next((first, width) for first, width in forms if number < 256**width)
    return bytes([first]) + number.to_bytes(width, "big")


def _put_array(numbers: list[int]) -> bytes:
    code, mark = next(pair for pair in WIDTHS if max(numbers, default=0) < 256 ** struct.calcsize("<" + pair[1]))
    raw = struct.pack(f"<{len(numbers)}{mark}", *numbers)
    head = bytes([FIXED_EXT[len(raw)]]) if len(raw) in FIXED_EXT else _head("array", len(raw))
    return head + bytes([code]) + raw


def _put(type_: Type, value: Any) -> bytes:
    kind = type_.kind
    if kind == "struct":
        return _put_map(STRUCTS[type_.name], value)
    if kind in ("uint", "enum"):
        return _head("uint", value)
    if kind == "bool":
        return b"\xc3" if value else b"\xc2"
    if kind == "array":
        return _put_array(value)
    if kind == "list":
        return _head(kind, len(value)) + b"".join(_put(type_.item, element) for element in value)
    raw = value.encode("utf-8") if kind == "str" else value
    return _head(kind, len(raw)) + bytes(raw)


def _put_map(layout: Layout, values: dict[str, Any]) -> bytes:
    parts = [_head("map", len(values))]
    for field in layout.fields.values():
        if field.name in values:
            parts += [_head("uint", field.id), _put(field.type, values[field.name])]
    return b"".join(parts)


def _count(layout: Layout, values: dict[str, Any]) -> int:
    """Entries of maps and elements of lists."""
    there = (field for field in layout.fields.values() if field.name in values)
    return len(values) + sum(_count_below(field.type, values[field.name]) for field in there)


def _count_below(type_: Type, value: Any) -> int:
    if type_.kind == "struct":
        return _count(STRUCTS[type_.name], value)
    if type_.kind == "list":
        return len(value) + sum(_count_below(type_.item, element) for element in value)
    return 0


def _whole(layout: Layout, values: dict[str, Any]) -> bytes:
    made = _put_map(layout, values)
    if len(made) > LIMITS["max_body"]:
        raise Refusal("TOO_LARGE", "")
    return made


def write_frame(message: str, fields: dict[str, Any], minor: int = 0) -> bytes:
    """Return the canonical frame of a message from its fields in JSON form, or raise Refusal.

    `minor` is that of the session; every implementation of a major version speaks its minor version 0.
    """
    layout = find(MESSAGES, message)
    values = _take_map(layout, fields, "")
    if _count(layout, values) > LIMITS["max_values"]:
        raise Refusal("TOO_LARGE", "")
    body = _whole(layout, values)
    minor = 0 if layout.major == facts.FROZEN_MAJOR else minor
    return struct.pack("<4sBBHHHI", facts.MAGIC, layout.major, minor, layout.number, 0, 0, len(body)) + body


def write_struct(name: str, fields: dict[str, Any]) -> bytes:
    """Return the canonical bytes of a bare struct from its fields in JSON form, or raise Refusal."""
    layout = find(STRUCTS | MESSAGES, name)
    return _whole(layout, _take_map(layout, fields, ""))
