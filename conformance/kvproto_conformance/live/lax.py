"""A writer that checks nothing: it makes frames that the strict writer refuses, for peers that misbehave."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec.facts import ENUMS, MAGIC, MESSAGES, STRUCTS, Layout, Type

Json = dict[str, Any]
# First byte and end of the short form, and the first bytes of lengths of 1, 2 and 4 bytes; 0: there is none.
_HEADS = {
    "str": (0xA0, 32, (0xD9, 0xDA, 0xDB)), "bytes": (0, 0, (0xC4, 0xC5, 0xC6)),
    "list": (0x90, 16, (0, 0xDC, 0xDD)), "map": (0x80, 16, (0, 0xDE, 0xDF)),
}  # fmt: skip


def _uint(number: int) -> bytes:
    if number < 0x80:
        return bytes([number])
    width = next(width for width in (1, 2, 4, 8) if number < 256**width)
    return bytes([0xCC + width.bit_length() - 1]) + number.to_bytes(width, "big")


def _head(kind: str, count: int) -> bytes:
    short, end, marks = _HEADS[kind]
    if count < end:
        return bytes([short | count])
    mark, width = next((m, w) for m, w in zip(marks, (1, 2, 4), strict=True) if m and count < 256**w)
    return bytes([mark]) + count.to_bytes(width, "big")


def _array(numbers: list[int]) -> bytes:
    width = next(width for width in (1, 2, 4, 8) if max(numbers, default=0) < 256**width)
    raw = b"".join(number.to_bytes(width, "little") for number in numbers)
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(raw))
    if fixed is not None:
        return bytes([fixed, width.bit_length()]) + raw
    mark, size = next((m, s) for m, s in ((0xC7, 1), (0xC8, 2), (0xC9, 4)) if len(raw) < 256**s)
    return bytes([mark]) + len(raw).to_bytes(size, "big") + bytes([width.bit_length()]) + raw


def _value(stated: Type, value: Any) -> bytes:
    if stated.kind == "struct":
        return _map(STRUCTS[stated.name], value)
    if stated.kind == "enum":
        known = ENUMS[stated.name].values
        return _uint(known[value] if isinstance(value, str) and value in known else int(value))
    if stated.kind == "uint":
        return _uint(int(value))
    if stated.kind == "bool":
        return b"\xc3" if value else b"\xc2"
    if stated.kind == "array":
        return _array([int(number) for number in value])
    if stated.kind == "list":
        return _head("list", len(value)) + b"".join(_value(stated.item, each) for each in value)
    raw = value.encode() if stated.kind == "str" else bytes.fromhex(value)
    return _head(stated.kind, len(raw)) + raw


def _map(layout: Layout, fields: Json) -> bytes:
    rows = [(field.id, _value(field.type, fields[name])) for name, field in layout.names.items() if name in fields]
    return _head("map", len(rows)) + b"".join(_uint(id) + value for id, value in sorted(rows))


def lax_body(name: str, fields: Json) -> bytes:
    """The body of a message with these fields, whatever they say; fields that are None are left out."""
    return _map(MESSAGES[name], {key: value for key, value in fields.items() if value is not None})


def lax_frame(name: str, fields: Json) -> bytes:
    """The same as a frame."""
    return raw_frame(name, lax_body(name, fields))


def raw_frame(name: str, body: bytes, **envelope: int) -> bytes:
    """A frame of any body; `major`, `minor`, `type`, `flags`, `reserved` and `length` are written as given."""
    layout = MESSAGES[name]
    fields = {"major": layout.major, "minor": 0, "type": layout.number, "flags": 0, "reserved": 0, "length": len(body)}
    fields |= envelope
    sizes = (("major", 1), ("minor", 1), ("type", 2), ("flags", 2), ("reserved", 2), ("length", 4))
    return MAGIC + b"".join(fields[key].to_bytes(size, "little") for key, size in sizes) + body
