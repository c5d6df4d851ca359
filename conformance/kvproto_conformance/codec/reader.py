"""From bytes to the JSON form, in the order of checks of framing.md."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvproto_conformance.codec import facts
from kvproto_conformance.codec.facts import (
    ENUMS,
    EXT,
    LIMIT_OF,
    LIMITS,
    MESSAGE_TYPES,
    MESSAGES,
    STRUCTS,
    Layout,
    Refusal,
    Type,
    find,
    join,
)
from kvproto_conformance.codec.rules import check_rules

# Kinds of value by first byte; "none" is nil, floats and the byte that msgpack never uses.
KIND = (
    ["uint"] * 0x80 + ["map"] * 16 + ["list"] * 16 + ["str"] * 32
    + ["none"] * 2 + ["bool"] * 2 + ["bytes"] * 3 + ["array"] * 3 + ["none"] * 2 + ["uint"] * 4 + ["signed"] * 4
    + ["array"] * 5 + ["str"] * 3 + ["list"] * 2 + ["map"] * 2 + ["signed"] * 32
)  # fmt: skip
KIND_OF_TYPE = {"enum": "uint", "struct": "map"}
# First byte: bytes of the number that follows it, and the least number that needs this form.
FORM = {
    0xCC: (1, 0x80), 0xCD: (2, 1 << 8), 0xCE: (4, 1 << 16), 0xCF: (8, 1 << 32),
    0xD9: (1, 32), 0xDA: (2, 1 << 8), 0xDB: (4, 1 << 16),
    0xC4: (1, 0), 0xC5: (2, 1 << 8), 0xC6: (4, 1 << 16),
    0xC7: (1, 0), 0xC8: (2, 1 << 8), 0xC9: (4, 1 << 16),
    0xDC: (2, 16), 0xDD: (4, 1 << 16),
    0xDE: (2, 16), 0xDF: (4, 1 << 16),
}  # fmt: skip
SHORT_BITS = {"uint": 0x7F, "map": 0x0F, "list": 0x0F, "str": 0x1F}
FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# First byte of a signed integer: its bytes, and the greatest number that needs this form.
SIGNED = {0xD0: (1, -33), 0xD1: (2, -0x81), 0xD2: (4, -0x8001), 0xD3: (8, -0x80000001)}
UNSIGNED_CODES = {EXT["u8"]: "B", EXT["u16"]: "H", EXT["u32"]: "I", EXT["u64"]: "Q"}
SIGNED_CODES = {EXT["i8"]: "b", EXT["i16"]: "h", EXT["i32"]: "i", EXT["i64"]: "q"}
CODES = UNSIGNED_CODES | SIGNED_CODES
WIDTH = {mark: struct.calcsize("<" + mark) for mark in CODES.values()}
# Greatest number of an element type: the codes that a field of it takes.
CODES_OF_TOP = {
    256 ** WIDTH[widest] - 1: {code: mark for code, mark in UNSIGNED_CODES.items() if WIDTH[mark] <= WIDTH[widest]}
    for widest in UNSIGNED_CODES.values()
}


class Body:
    """One pass over the bytes of a map."""

    def __init__(self, data: bytes, values: int) -> None:
        self.data = data
        self.at = 0
        self.values = values  # how many more entries and elements this body may have

    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int, path: str) -> bytes:
        if count > self.left():
            raise Refusal("TRUNCATED", path)
        self.at += count
        return self.data[self.at - count : self.at]

    def kind(self, path: str) -> str:
        """Return the kind of the value that begins here, without consuming it."""
        if not self.left():
            raise Refusal("TRUNCATED", path)
        return KIND[self.data[self.at]]

    def head(self, path: str) -> int:
        """Take the first byte and the number after it: a value, count or length in its shortest form."""
        first = self.take(1, path)[0]
        if first in FIXED_EXT:
            return FIXED_EXT[first]
        if first not in FORM:
            return first & SHORT_BITS[KIND[first]]
        width, least = FORM[first]
        number = int.from_bytes(self.take(width, path), "big")
        if number < least or (first in (0xC7, 0xC8, 0xC9) and number in FIXED_EXT.values()):
            raise Refusal("NOT_CANONICAL", path)
        return number

    def signed(self, path: str, skipped: bool) -> None:
        """Take a signed integer of a skipped value; none is valid elsewhere."""
        first = self.take(1, path)[0]
        width, greatest = SIGNED.get(first, (0, 0))
        if width and int.from_bytes(self.take(width, path), "big", signed=True) > greatest:
            raise Refusal("NOT_CANONICAL", path)
        if not skipped:
            raise Refusal("BAD_TYPE", path)

    def sized(self, kind: str, path: str) -> int:
        """Take the header of text, bytes, a list or a map, within its limit and the buffer."""
        count = self.head(path)
        if count > LIMITS[LIMIT_OF.get(kind, "max_list")]:
            raise Refusal("TOO_LARGE", path)
        if kind in ("map", "list"):
            self.values -= count
            if self.values < 0:
                raise Refusal("TOO_LARGE", path)
        if count * (2 if kind == "map" else 1) > self.left():
            raise Refusal("TRUNCATED", path)
        return count

    def text(self, path: str) -> str:
        raw = self.take(self.sized("str", path), path)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise Refusal("BAD_TEXT", path) from None

    def array(self, codes: dict[int, str], path: str) -> list[int]:
        size = self.head(path)
        code = self.take(1, path)[0]
        if code not in codes:
            raise Refusal("BAD_TYPE", path)
        width = WIDTH[codes[code]]
        if size % width:
            raise Refusal("BAD_LENGTH", path)
        if size // width > LIMITS["max_array"]:
            raise Refusal("TOO_LARGE", path)
        numbers = list(struct.unpack(f"<{size // width}{codes[code]}", self.take(size, path)))
        if not numbers:
            if code != EXT["u8"]:
                raise Refusal("NOT_CANONICAL", path)
        elif width > 1:
            half = 1 << (width * 4)  # numbers of half the width
            low, high = (-half // 2, half // 2 - 1) if code in SIGNED_CODES else (0, half - 1)
            if low <= min(numbers) and max(numbers) <= high:
                raise Refusal("NOT_CANONICAL", path)
        return numbers

    def enter(self, depth: int, path: str) -> None:
        if depth > LIMITS["max_depth"]:
            raise Refusal("TOO_DEEP", path)

    def field_id(self, path: str) -> int:
        kind = self.kind(path)
        if kind == "signed":
            self.signed(path, skipped=False)
        if kind != "uint":
            raise Refusal("BAD_TYPE", path)
        return self.head(path)

    def skip(self, depth: int, path: str) -> None:
        """Take a value of any kind; every error is at the path of the skipped field."""
        kind = self.kind(path)
        if kind == "uint":
            self.head(path)
        elif kind == "signed":
            self.signed(path, skipped=True)
        elif kind == "bool":
            self.take(1, path)
        elif kind == "str":
            self.text(path)
        elif kind == "bytes":
            self.take(self.sized(kind, path), path)
        elif kind == "array":
            self.array(CODES, path)
        elif kind == "list":
            self.enter(depth, path)
            for _ in range(self.sized(kind, path)):
                self.skip(depth + 1, path)
        elif kind == "map":
            self.enter(depth, path)
            before = 0
            for _ in range(self.sized(kind, path)):
                number = self.field_id(path)
                _check_id(number, before, path)
                self.skip(depth + 1, path)
                before = number
        else:
            raise Refusal("BAD_TYPE", path)

    def map(self, layout: Layout, depth: int, path: str) -> dict[str, Any]:
        """Take a map of known layout, with its rules."""
        self.enter(depth, path)
        if self.kind(path) != "map":
            raise Refusal("BAD_TYPE", path)
        values: dict[str, Any] = {}
        before = 0
        for _ in range(self.sized("map", path)):
            number = self.field_id(path)
            field = layout.fields.get(number)
            place = join(path, field.name if field else f"#{number:04x}")
            _check_id(number, before, place)
            before = number
            if field:
                values[field.name] = self.value(field.type, depth + 1, place)
            elif number < facts.MAY_IGNORE:
                raise Refusal("UNKNOWN_FIELD", place)
            else:
                self.skip(depth + 1, place)
        for field in layout.fields.values():
            if field.required and field.name not in values:
                raise Refusal("MISSING_FIELD", join(path, field.name))
        check_rules(layout, values, path)
        return values

    def value(self, type_: Type, depth: int, path: str) -> Any:
        """Take a value of a known type, within its range; `depth` is that of a map or list here."""
        kind = self.kind(path)
        if kind == "signed" and type_.kind in ("uint", "enum"):
            self.signed(path, skipped=False)
        if kind != KIND_OF_TYPE.get(type_.kind, type_.kind):
            raise Refusal("BAD_TYPE", path)
        if kind == "map":
            return self.map(STRUCTS[type_.name], depth, path)
        if kind == "list":
            self.enter(depth, path)
            count = self.sized(kind, path)
            _check_range(type_, count, path)
            return [self.value(type_.item, depth + 1, f"{path}[{i}]") for i in range(count)]
        if kind == "bool":
            return self.take(1, path) == b"\xc3"
        if kind == "str":
            text = self.text(path)
            _check_range(type_, len(text.encode("utf-8")), path)
            return text
        if kind == "bytes":
            raw = self.take(self.sized(kind, path), path)
            _check_range(type_, len(raw), path)
            return raw
        if kind == "array":
            numbers = self.array(CODES_OF_TOP[type_.item.high], path)
            _check_range(type_, len(numbers), path)
            return numbers
        number = self.head(path)
        _check_range(type_, number, path)
        if type_.kind == "enum" and not ENUMS[type_.name].open and number not in ENUMS[type_.name].names:
            raise Refusal("UNKNOWN_ENUM_VALUE", path)
        return number


def _check_id(number: int, before: int, path: str) -> None:
    if number <= before:
        raise Refusal("FIELD_ORDER", path)
    if number > facts.MAX_ID:
        raise Refusal("OUT_OF_RANGE", path)


def _check_range(type_: Type, number: int, path: str) -> None:
    if not type_.low <= number <= type_.high:
        raise Refusal("OUT_OF_RANGE", path)


def _json(type_: Type, value: Any) -> Any:
    if type_.kind == "struct":
        return _json_map(STRUCTS[type_.name], value)
    if type_.kind in ("list", "array"):
        return [_json(type_.item, element) for element in value]
    if type_.kind == "enum":
        return ENUMS[type_.name].names.get(value, {"unknown": str(value)})
    if type_.kind == "bytes":
        return value.hex()
    return str(value) if type_.kind == "uint" else value


def _json_map(layout: Layout, values: dict[str, Any]) -> dict[str, Any]:
    return {name: _json(layout.names[name].type, value) for name, value in values.items()}


def read_map(layout: Layout, data: bytes, kind: Callable[[bytes, int], Body] = Body) -> dict[str, Any]:
    """Return the values of a whole body; `kind` is the class that reads it, which may also take notes."""
    return _whole(layout, kind(data, LIMITS["max_values"] if layout.name in MESSAGES else LIMITS["max_body"]))


def _whole(layout: Layout, body: Body) -> dict[str, Any]:
    values = body.map(layout, 1, "")
    if body.left():
        raise Refusal("TRAILING_BYTES", "")
    return _json_map(layout, values)


def read_envelope(frame: bytes) -> Layout:
    """Return the layout of the body of one whole frame, or raise Refusal."""
    magic = frame[: len(facts.MAGIC)]
    if magic != facts.MAGIC[: len(magic)]:
        raise Refusal("BAD_MAGIC", "@magic")
    if len(frame) < facts.HEADER_BYTES:
        raise Refusal("TRUNCATED", "@length")
    _, major, _, number, flags, _, length = struct.unpack_from("<4sBBHHHI", frame)
    if major not in (facts.FROZEN_MAJOR, facts.MAJOR):
        raise Refusal("UNSUPPORTED_VERSION", "@major")
    if number not in MESSAGE_TYPES:
        raise Refusal("UNKNOWN_MESSAGE", "@type")
    layout = MESSAGE_TYPES[number]
    if major != layout.major:
        raise Refusal("UNSUPPORTED_VERSION", "@major")
    if flags & 0xFF & ~facts.KNOWN_FLAGS:
        raise Refusal("UNKNOWN_FLAG", "@flags")
    if length > LIMITS["max_body"]:
        raise Refusal("TOO_LARGE", "@length")
    if length != len(frame) - facts.HEADER_BYTES:
        raise Refusal("TRUNCATED" if length > len(frame) - facts.HEADER_BYTES else "TRAILING_BYTES", "@length")
    return layout


def read_frame(frame: bytes) -> tuple[str, dict[str, Any]]:
    """Return the message name and the fields in JSON form of one whole frame, or raise Refusal."""
    layout = read_envelope(frame)
    return layout.name, read_map(layout, frame[facts.HEADER_BYTES :])


def read_struct(name: str, data: bytes) -> dict[str, Any]:
    """Return the fields in JSON form of a bare struct, or raise Refusal."""
    return read_map(find(STRUCTS | MESSAGES, name), data)


def read_stream(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the frames of a stream, each to be read or refused by itself.

    Of a frame beyond the limit only the envelope is yielded; wrong magic ends the stream."""
    buffer, skipped = b"", 0
    for chunk in chunks:
        skipped, chunk = max(0, skipped - len(chunk)), chunk[skipped:]
        buffer += chunk
        while buffer:
            if buffer[:4] != facts.MAGIC[: len(buffer)]:
                yield buffer[:4]
                return
            length = int.from_bytes(buffer[12:16], "little")
            end = facts.HEADER_BYTES + (length if length <= LIMITS["max_body"] else 0)
            if len(buffer) < max(end, facts.HEADER_BYTES):
                break
            yield buffer[:end]
            buffer = buffer[end:]
            if end == facts.HEADER_BYTES and length:
                skipped, buffer = max(0, length - len(buffer)), buffer[length:]
