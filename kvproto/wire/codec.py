"""Bytes to typed messages and back: canonical msgpack maps in a 16-byte envelope.

The reader is strict and has one order of checks: envelope; then one pass over the body in byte order, limits before
allocation; then missing fields by id. The first failure is the error. Only WireError escapes `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

from kvproto.errors import LocalError
from kvproto.wire import enums, messages, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import Fault, Reader, refuse
from kvproto.wire.writer import pack

__all__ = ["decode", "decode_struct", "encode", "encode_struct"]

T = TypeVar("T")
Read = Callable[[Reader, int], Any]
_ENVELOPE = struct.Struct("<4sBBHHHI")
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_CLASSES: dict[str, type[Any]] = {name: getattr(messages, name) for name in tables.FIELDS}
_MESSAGES: dict[int, type[Any]] = {cls.TYPE: cls for cls in _CLASSES.values() if hasattr(cls, "TYPE")}
_TYPES = frozenset(_MESSAGES.values())
_MAJORS = {
    number: tables.FROZEN_MAJOR if cls.__name__ in tables.FROZEN else tables.MAJOR for number, cls in _MESSAGES.items()
}


def encode(message: messages.Message) -> bytes:
    """Canonical frame; raises WireError where a field breaks its range."""
    if type(message) not in _TYPES:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message", type(message).__name__)
    body = pack(message)
    frozen = _MAJORS[message.TYPE] == tables.FROZEN_MAJOR
    major, minor = (tables.FROZEN_MAJOR, 0) if frozen else (tables.MAJOR, tables.MINOR)
    return _ENVELOPE.pack(tables.MAGIC, major, minor, message.TYPE, 0, 0, len(body)) + body


def encode_struct(value: Any) -> bytes:
    """Canonical map alone, as in nested bins and digests."""
    return pack(value)


def decode(frame: bytes | bytearray | memoryview) -> messages.Message:
    """The message of one frame."""
    view = _view(frame)
    size = len(view) - tables.HEADER_BYTES
    start = bytes(view[:4])
    if not tables.MAGIC.startswith(start):
        raise refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), start.hex())
    if size < 0:
        raise refuse(ErrorCode.TRUNCATED, "@length", f"{tables.HEADER_BYTES} bytes", f"{len(view)} bytes")
    _, major, _, number, flags, _, length = _ENVELOPE.unpack_from(view)
    if major not in (tables.FROZEN_MAJOR, tables.MAJOR):
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", tables.MAJOR, major)
    cls = _MESSAGES.get(number)
    if cls is None:
        raise refuse(ErrorCode.UNKNOWN_MESSAGE, "@type", "a type of v1", f"{number:#06x}")
    if major != _MAJORS[number]:
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", f"{_MAJORS[number]} for {cls.__name__}", major)
    if flags & 0xFF & ~tables.KNOWN_FLAGS:
        raise refuse(ErrorCode.UNKNOWN_FLAG, "@flags", f"{tables.KNOWN_FLAGS:#06x}", f"{flags:#06x}")
    if length > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "@length", tables.MAX_BODY, length)
    if length != size:
        code = ErrorCode.TRUNCATED if length > size else ErrorCode.TRAILING_BYTES
        raise refuse(code, "@length", f"{length} bytes", f"{size} bytes")
    made: messages.Message = _whole(cls, view[tables.HEADER_BYTES :])
    return made


def decode_struct(cls: type[T], buffer: bytes | bytearray | memoryview) -> T:
    """A bare canonical map."""
    if cls.__name__ not in _READERS:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", cls.__name__)
    view = _view(buffer)
    if len(view) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(view))
    made: T = _whole(cls, view)
    return made


def _view(buffer: bytes | bytearray | memoryview) -> memoryview:
    view = memoryview(buffer)
    return (view if view.c_contiguous else memoryview(view.tobytes())).cast("B").toreadonly()


def _whole(cls: type[Any], view: memoryview) -> Any:
    reader = Reader(view)
    try:
        made = _READERS[cls.__name__](reader, 1)
    except Fault as fault:
        raise fault.error() from None
    if reader.at != reader.end:
        raise refuse(ErrorCode.TRAILING_BYTES, "", f"{reader.at} bytes", f"{reader.end} bytes")
    return made


def _struct_reader(name: str) -> Read:
    cls = _CLASSES[name]
    fields = {f[0]: (f[1], _reader(f)) for f in tables.FIELDS[name]}
    required = [f[1] for f in tables.FIELDS[name] if f[3]]

    def label(number: int) -> str:
        return fields[number][0] if number in fields else f"#{number:04x}"

    def unknown(reader: Reader, number: int, depth: int) -> None:
        if number > 0xFFFF:
            raise Fault(ErrorCode.OUT_OF_RANGE, "at most 0xffff", number)
        if not number & 0x8000:
            raise Fault(ErrorCode.UNKNOWN_FIELD, "a known field", f"{number:#06x}")
        reader.skip(depth + 1)

    def read(reader: Reader, depth: int) -> Any:
        last = 0
        found: dict[str, Any] = {}
        for _ in range(reader.map_header(depth)):
            number = reader.uint()
            if number <= last:
                raise Fault(ErrorCode.FIELD_ORDER, f"above {last}", number, label(number))
            last = number
            field = fields.get(number)
            try:
                if field is not None:
                    found[field[0]] = field[1](reader, depth)
                else:
                    unknown(reader, number, depth)
            except Fault as fault:
                fault.steps.append(label(number))
                raise
        for field_name in required:
            if field_name not in found:
                raise Fault(ErrorCode.MISSING_FIELD, "required", "absent", field_name)
        return cls(**found)

    return read


def _reader(field: tables.Field) -> Read:
    _, _, type_, _, low, high, length = field
    if type_.startswith("list<"):
        return _list_reader(_reader((0, "", type_[5:-1], True, None, None, None)))
    if type_.startswith("struct:"):
        name = type_[7:]
        return lambda reader, depth: _READERS[name](reader, depth + 1)
    if type_.startswith("array<"):
        widest = _BITS[type_[6:-1]] // 8
        return lambda reader, depth: reader.numbers("u", widest)
    if type_.startswith("enum:"):
        return _enum_reader(type_[5:])
    if type_ in _BITS:
        return _int_reader(low or 0, high if high is not None else (1 << _BITS[type_]) - 1)
    if type_ == "bytes":
        return lambda reader, depth: reader.bytes(length)
    if type_ == "str":
        shortest, longest = low or 0, high if high is not None else tables.MAX_STRING
        return lambda reader, depth: reader.text(shortest, longest)
    return lambda reader, depth: reader.boolean()


def _int_reader(low: int, high: int) -> Read:
    def read(reader: Reader, depth: int) -> int:
        value = reader.uint()
        if not low <= value <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high}", value)
        return value

    return read


def _enum_reader(name: str) -> Read:
    known = {int(v): v for v in getattr(enums, name)}
    is_open = name in tables.OPEN_ENUMS

    def read(reader: Reader, depth: int) -> Any:
        value = reader.uint()
        if value in known:
            return known[value]
        if not is_open:
            raise Fault(ErrorCode.UNKNOWN_ENUM_VALUE, f"a value of {name}", value)
        if value > 0xFFFF:
            raise Fault(ErrorCode.OUT_OF_RANGE, "at most 0xffff", value)
        return value

    return read


def _list_reader(item: Read) -> Read:
    def read(reader: Reader, depth: int) -> tuple[Any, ...]:
        made: list[Any] = []
        count = reader.array_header(depth + 1)
        try:
            for _ in range(count):
                made.append(item(reader, depth + 1))
        except Fault as fault:
            fault.steps.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return read


_READERS: dict[str, Read] = {name: _struct_reader(name) for name in tables.FIELDS}
