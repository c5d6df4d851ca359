"""Bytes to the JSON form, by the order of checks of spec/v1/framing.md."""

from __future__ import annotations

from typing import Any

from kvproto_conformance.codec.facts import (
    LIMIT,
    MESSAGES,
    Field,
    enum_of,
    fields_of,
    is_open,
    join,
    major_of,
    range_of,
)
from kvproto_conformance.codec.refusal import Refusal
from kvproto_conformance.codec.rules import check_rules

__all__ = ["read_frame", "read_struct"]

_WIDTH = {1: 1, 2: 2, 3: 4, 4: 8}
"""Ext code to bytes of an element; 4 more: signed."""
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_SIGNED = {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def read_frame(frame: bytes) -> tuple[str, dict[str, Any]]:
    """Name and fields of a message; raises Refusal, and nothing else."""
    magic = b"KVPW"
    if frame[:4] != magic[: len(frame[:4])]:
        raise Refusal("BAD_MAGIC", "@magic")
    if len(frame) < 16:
        raise Refusal("TRUNCATED", "@length")
    major, type_, flags = frame[4], int.from_bytes(frame[6:8], "little"), int.from_bytes(frame[8:10], "little")
    length = int.from_bytes(frame[12:16], "little")
    if major > 1:
        raise Refusal("UNSUPPORTED_VERSION", "@major")
    if type_ not in MESSAGES:
        raise Refusal("UNKNOWN_MESSAGE", "@type")
    name = MESSAGES[type_]
    if major != major_of(name):
        raise Refusal("UNSUPPORTED_VERSION", "@major")
    if flags & 0xFF:
        raise Refusal("UNKNOWN_FLAG", "@flags")
    if length > LIMIT["max_body"]:
        raise Refusal("TOO_LARGE", "@length")
    if length > len(frame) - 16:
        raise Refusal("TRUNCATED", "@length")
    if length < len(frame) - 16:
        raise Refusal("TRAILING_BYTES", "@length")
    return name, read_struct(name, frame[16:])


def read_struct(name: str, data: bytes) -> dict[str, Any]:
    """Fields of a bare map that fills the bytes; raises Refusal, and nothing else."""
    if len(data) > LIMIT["max_body"]:
        raise Refusal("TOO_LARGE", "")
    body = _Body(data)
    fields = body.struct(name, "", 1)
    if body.at < len(data):
        raise Refusal("TRAILING_BYTES", "")
    return fields


class _Body:
    """One pass over the bytes of a body."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    # bytes and numbers

    def take(self, size: int, path: str) -> bytes:
        if size > len(self.data) - self.at:
            raise Refusal("TRUNCATED", path)
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, width: int, path: str, signed: bool = False) -> int:
        return int.from_bytes(self.take(width, path), "big", signed=signed)

    def integer(self, head: int, path: str) -> int:
        """An integer of either sign, in its shortest form; `head` is taken already."""
        if head <= 0x7F:
            return head
        if head >= 0xE0:
            return head - 256
        if head in _UNSIGNED:
            width = _UNSIGNED[head]
            value = self.number(width, path)
            shortest = 1 if value < 128 else next(w + 1 for w in (1, 2, 4, 8) if value < 256**w)
        else:
            width = _SIGNED[head]
            value = self.number(width, path, signed=True)
            if value >= 0:
                raise Refusal("NOT_CANONICAL", path)
            shortest = 1 if value >= -32 else next(w + 1 for w in (1, 2, 4, 8) if value >= -(256**w) // 2)
        if shortest != width + 1:
            raise Refusal("NOT_CANONICAL", path)
        return value

    def unsigned(self, path: str) -> int:
        head = self.take(1, path)[0]
        if not (head <= 0x7F or head >= 0xE0 or head in _UNSIGNED or head in _SIGNED):
            raise Refusal("BAD_TYPE", path)
        value = self.integer(head, path)
        if value < 0:
            raise Refusal("BAD_TYPE", path)
        return value

    def sized(self, head: int, heads: tuple[int, ...], least: tuple[int, ...], path: str) -> int:
        """The length of a value whose head announces 1, 2 or 4 bytes of it, and needs at least so much."""
        i = heads.index(head)
        width = 1 << i if len(heads) == 3 else 2 << i
        size = self.number(width, path)
        if size < least[i]:
            raise Refusal("NOT_CANONICAL", path)
        return size

    def count(self, kind: str, path: str, depth: int) -> int:
        """Entries of a map, or elements of a list: depth, kind, form, limit, room."""
        if depth > LIMIT["max_depth"]:
            raise Refusal("TOO_DEEP", path)
        head = self.take(1, path)[0]
        fixed, heads, each = (0x80, (0xDE, 0xDF), 2) if kind == "map" else (0x90, (0xDC, 0xDD), 1)
        if fixed <= head < fixed + 16:
            number = head - fixed
        elif head in heads:
            number = self.sized(head, heads, (16, 65536), path)
        else:
            raise Refusal("BAD_TYPE", path)
        if number > LIMIT["max_list"]:
            raise Refusal("TOO_LARGE", path)
        if number * each > len(self.data) - self.at:
            raise Refusal("TRUNCATED", path)
        return number

    # values of fields

    def struct(self, name: str, path: str, depth: int) -> dict[str, Any]:
        known = {f["id"]: f for f in fields_of(name)}
        found: dict[str, Any] = {}
        before = 0
        for _ in range(self.count("map", path, depth)):
            id_ = self.unsigned(path)
            field = known.get(id_)
            here = join(path, field["name"] if field else f"#{id_:04x}")
            if id_ <= before:
                raise Refusal("FIELD_ORDER", here)
            if id_ > 0xFFFF:
                raise Refusal("OUT_OF_RANGE", here)
            before = id_
            if field is not None:
                found[field["name"]] = self.value(field, here, depth)
            elif id_ < 0x8000:
                raise Refusal("UNKNOWN_FIELD", here)
            else:
                self.skip(here, depth + 1)
        for field in fields_of(name):
            if field["presence"] == "required" and field["name"] not in found:
                raise Refusal("MISSING_FIELD", join(path, field["name"]))
        check_rules(name, found, path)
        return found

    def value(self, field: Field, path: str, depth: int) -> Any:
        type_ = field["type"]
        if type_.startswith("struct:"):
            return self.struct(type_[7:], path, depth + 1)
        low, high = range_of(field)
        if type_.startswith("list<"):
            number = self.count("list", path, depth + 1)
            if not low <= number <= high:
                raise Refusal("OUT_OF_RANGE", path)
            return [self.value({"type": type_[5:-1]}, join(path, i), depth + 1) for i in range(number)]
        if type_.startswith("enum:"):
            return self.enum(type_[5:], path)
        if type_ in ("str", "bytes"):
            return self.text(low, high, path) if type_ == "str" else self.bytes(low, high, path).hex()
        if type_.startswith("array<"):
            return self.array(int(type_[7:-1]) // 8, False, low, high, path)
        if type_ == "bool":
            head = self.take(1, path)[0]
            if head not in (0xC2, 0xC3):
                raise Refusal("BAD_TYPE", path)
            return head == 0xC3
        number = self.unsigned(path)
        if not low <= number <= high:
            raise Refusal("OUT_OF_RANGE", path)
        return str(number)

    def enum(self, enum: str, path: str) -> Any:
        number = self.unsigned(path)
        for name, value in enum_of(enum).items():
            if value == number:
                return name
        if number > 0xFFFF:
            raise Refusal("OUT_OF_RANGE", path)
        if not is_open(enum):
            raise Refusal("UNKNOWN_ENUM_VALUE", path)
        return {"unknown": str(number)}

    def text(self, low: int, high: int, path: str) -> str:
        head = self.take(1, path)[0]
        if 0xA0 <= head <= 0xBF:
            size = head - 0xA0
        elif head in (0xD9, 0xDA, 0xDB):
            size = self.sized(head, (0xD9, 0xDA, 0xDB), (32, 256, 65536), path)
        else:
            raise Refusal("BAD_TYPE", path)
        if size > LIMIT["max_string"]:
            raise Refusal("TOO_LARGE", path)
        data = self.take(size, path)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise Refusal("BAD_TEXT", path) from None
        if not low <= size <= high:
            raise Refusal("OUT_OF_RANGE", path)
        return text

    def bytes(self, low: int, high: int, path: str) -> bytes:
        head = self.take(1, path)[0]
        if head not in (0xC4, 0xC5, 0xC6):
            raise Refusal("BAD_TYPE", path)
        size = self.sized(head, (0xC4, 0xC5, 0xC6), (0, 256, 65536), path)
        if size > LIMIT["max_bytes"]:
            raise Refusal("TOO_LARGE", path)
        data = self.take(size, path)
        if not low <= size <= high:
            raise Refusal("OUT_OF_RANGE", path)
        return data

    def array(self, widest: int, any_sign: bool, low: int, high: int, path: str) -> list[str]:
        head = self.take(1, path)[0]
        if head in _FIXEXT:
            size = _FIXEXT[head]
        elif head in (0xC7, 0xC8, 0xC9):
            size = self.sized(head, (0xC7, 0xC8, 0xC9), (0, 256, 65536), path)
            if size in _FIXEXT.values():
                raise Refusal("NOT_CANONICAL", path)
        else:
            raise Refusal("BAD_TYPE", path)
        code = self.take(1, path)[0]
        signed = 5 <= code <= 8
        width = _WIDTH.get(code - 4 if signed else code, 99)
        if width > widest or (signed and not any_sign):
            raise Refusal("BAD_TYPE", path)
        if size % width:
            raise Refusal("BAD_LENGTH", path)
        if size // width > LIMIT["max_array"]:
            raise Refusal("TOO_LARGE", path)
        data = self.take(size, path)
        numbers = [int.from_bytes(data[i : i + width], "little", signed=signed) for i in range(0, size, width)]
        if width > 1 and _fits(numbers, width // 2, signed):
            raise Refusal("NOT_CANONICAL", path)
        if not low <= len(numbers) <= high:
            raise Refusal("OUT_OF_RANGE", path)
        return [str(n) for n in numbers]

    # values that are skipped

    def skip(self, path: str, depth: int) -> None:
        if self.at >= len(self.data):
            raise Refusal("TRUNCATED", path)
        head = self.data[self.at]
        if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
            before = 0
            for _ in range(self.count("map", path, depth)):
                id_ = self.unsigned(path)
                if id_ <= before:
                    raise Refusal("FIELD_ORDER", path)
                if id_ > 0xFFFF:
                    raise Refusal("OUT_OF_RANGE", path)
                before = id_
                self.skip(path, depth + 1)
        elif 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
            for _ in range(self.count("list", path, depth)):
                self.skip(path, depth + 1)
        elif 0xA0 <= head <= 0xBF or head in (0xD9, 0xDA, 0xDB):
            self.text(0, LIMIT["max_string"], path)
        elif head in (0xC4, 0xC5, 0xC6):
            self.bytes(0, LIMIT["max_bytes"], path)
        elif head in (0xC2, 0xC3):
            self.at += 1
        elif head in _FIXEXT or head in (0xC7, 0xC8, 0xC9):
            self.array(8, True, 0, LIMIT["max_array"], path)
        elif head <= 0x7F or head >= 0xE0 or head in _UNSIGNED or head in _SIGNED:
            self.at += 1
            self.integer(head, path)
        else:
            raise Refusal("BAD_TYPE", path)


def _fits(numbers: list[int], width: int, signed: bool) -> bool:
    """Whether all numbers fit into elements of that width."""
    top = 256**width
    return all(-top // 2 <= n < top // 2 for n in numbers) if signed else all(n < top for n in numbers)
