"""Bytes to typed messages and back: canonical msgpack maps in a 16-byte envelope.

The reader is strict and has one order of checks: envelope; then one pass over the body in byte order, limits before
allocation; then missing fields by id. The first failure is the error. Only WireError escapes `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import numpy as np

from kvproto.wire import enums, messages, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import Reader, refuse

__all__ = ["decode", "decode_struct", "encode", "encode_struct"]

T = TypeVar("T")
_ENVELOPE = struct.Struct("<4sBBHHHI")
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_WIDTHS = {code: width for width, code in tables.ARRAY_CODES.items()}
_MESSAGES: dict[int, type[Any]] = {
    getattr(messages, name).TYPE: getattr(messages, name)
    for name in tables.FIELDS
    if hasattr(getattr(messages, name), "TYPE")
}

Read = Callable[[Reader, str, int], Any]
Write = Callable[[Any, str], Any]


def encode(message: messages.Message) -> bytes:
    """Canonical frame; raises WireError where a field breaks its range."""
    body = encode_struct(message)
    if len(body) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "@length", tables.MAX_BODY, len(body))
    frozen = type(message).__name__ in tables.FROZEN
    major, minor = (tables.FROZEN_MAJOR, 0) if frozen else (tables.MAJOR, tables.MINOR)
    return _ENVELOPE.pack(tables.MAGIC, major, minor, message.TYPE, 0, 0, len(body)) + body


def encode_struct(value: Any) -> bytes:
    """Canonical map alone, as in nested bins and digests."""
    made: bytes = msgpack.packb(_WRITERS[type(value).__name__](value, ""), use_bin_type=True)
    return made


def decode(frame: bytes | bytearray | memoryview) -> messages.Message:
    """The message of one frame."""
    view = memoryview(frame).cast("B").toreadonly()
    if len(view) < tables.HEADER_BYTES:
        known = bytes(view[:4])
        if not tables.MAGIC.startswith(known):
            raise refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), known.hex())
        raise refuse(ErrorCode.TRUNCATED, "@length", f"{tables.HEADER_BYTES} bytes", f"{len(view)} bytes")
    magic, major, _, number, flags, _, length = _ENVELOPE.unpack_from(view)
    if magic != tables.MAGIC:
        raise refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), magic.hex())
    if major not in (tables.FROZEN_MAJOR, tables.MAJOR):
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", tables.MAJOR, major)
    if flags & 0xFF & ~tables.KNOWN_FLAGS:
        raise refuse(ErrorCode.UNKNOWN_FLAG, "@flags", f"{tables.KNOWN_FLAGS:#06x}", f"{flags:#06x}")
    cls = _MESSAGES.get(number)
    if cls is None:
        raise refuse(ErrorCode.UNKNOWN_MESSAGE, "@type", "a type of v1", f"{number:#06x}")
    if (major == tables.FROZEN_MAJOR) != (cls.__name__ in tables.FROZEN):
        raise refuse(
            ErrorCode.UNSUPPORTED_VERSION,
            "@major",
            tables.FROZEN_MAJOR if cls.__name__ in tables.FROZEN else tables.MAJOR,
            major,
        )
    if length > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "@length", tables.MAX_BODY, length)
    if length > len(view) - tables.HEADER_BYTES:
        raise refuse(ErrorCode.TRUNCATED, "@length", f"{length} bytes", f"{len(view) - tables.HEADER_BYTES} bytes")
    if length < len(view) - tables.HEADER_BYTES:
        raise refuse(ErrorCode.TRAILING_BYTES, "@length", f"{length} bytes", f"{len(view) - tables.HEADER_BYTES} bytes")
    made: messages.Message = _whole(cls, view[tables.HEADER_BYTES :])
    return made


def decode_struct(cls: type[T], buffer: bytes | bytearray | memoryview) -> T:
    """A bare canonical map."""
    view = memoryview(buffer).cast("B").toreadonly()
    if len(view) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(view))
    made: T = _whole(cls, view)
    return made


def _whole(cls: type[Any], view: memoryview) -> Any:
    reader = Reader(view)
    made = _READERS[cls.__name__](reader, "", 1)
    if reader.at != len(view):
        raise refuse(ErrorCode.TRAILING_BYTES, "", f"{reader.at} bytes", f"{len(view)} bytes")
    return made


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _struct_reader(name: str) -> Read:
    cls = getattr(messages, name)
    fields = {f[0]: (f[1], _reader(f), f[0]) for f in tables.FIELDS[name]}
    required = [(f[0], f[1]) for f in tables.FIELDS[name] if f[3]]

    def read(reader: Reader, path: str, depth: int) -> Any:
        count = reader.map_header(path, depth)
        last = 0
        found: dict[str, Any] = {}
        for _ in range(count):
            number = reader.uint(path)
            if number <= last:
                raise refuse(ErrorCode.FIELD_ORDER, _join(path, _label(number)), f"above {last}", number)
            last = number
            field = fields.get(number)
            if field is not None:
                found[field[0]] = field[1](reader, _join(path, field[0]), depth)
            elif number > 0xFFFF:
                raise refuse(ErrorCode.OUT_OF_RANGE, _join(path, _label(number)), "at most 0xffff", number)
            elif number & 0x8000:
                reader.skip(_join(path, _label(number)), depth + 1)
            else:
                raise refuse(ErrorCode.UNKNOWN_FIELD, _join(path, _label(number)), "a known field", f"{number:#06x}")
        for _, field_name in required:
            if field_name not in found:
                raise refuse(ErrorCode.MISSING_FIELD, _join(path, field_name), "required", "absent")
        return cls(**found)

    def _label(number: int) -> str:
        return fields[number][0] if number in fields else f"#{number:04x}"

    return read


def _reader(field: tables.Field) -> Read:
    _, _, type_, _, low, high, length = field
    if type_.startswith("list<"):
        return _list_reader(_reader((0, "", type_[5:-1], True, None, None, None)))
    if type_.startswith("struct:"):
        name = type_[7:]
        return lambda reader, path, depth: _READERS[name](reader, path, depth + 1)
    if type_.startswith("array<"):
        return _array_reader(_BITS[type_[6:-1]] // 8)
    if type_.startswith("enum:"):
        return _enum_reader(type_[5:])
    if type_ in _BITS:
        return _int_reader(low or 0, high if high is not None else (1 << _BITS[type_]) - 1)
    if type_ == "bytes":
        return lambda reader, path, depth: reader.bytes(path, length)
    if type_ == "str":
        return lambda reader, path, depth: reader.text(path, low or 0, high if high is not None else tables.MAX_STRING)
    return lambda reader, path, depth: reader.boolean(path)


def _int_reader(low: int, high: int) -> Read:
    def read(reader: Reader, path: str, depth: int) -> int:
        value = reader.uint(path)
        if not low <= value <= high:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"{low}..{high}", value)
        return value

    return read


def _enum_reader(name: str) -> Read:
    cls = getattr(enums, name)
    known = {int(v): v for v in cls}
    is_open = name in tables.OPEN_ENUMS

    def read(reader: Reader, path: str, depth: int) -> Any:
        value = reader.uint(path)
        if value in known:
            return known[value]
        if not is_open:
            raise refuse(ErrorCode.UNKNOWN_ENUM_VALUE, path, f"a value of {name}", value)
        if value > 0xFFFF:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, "at most 0xffff", value)
        return value

    return read


def _list_reader(item: Read) -> Read:
    def read(reader: Reader, path: str, depth: int) -> tuple[Any, ...]:
        count = reader.array_header(path, depth + 1)
        return tuple(item(reader, f"{path}[{i}]", depth + 1) for i in range(count))

    return read


def _array_reader(widest: int) -> Read:
    def read(reader: Reader, path: str, depth: int) -> Any:
        code, data = reader.ext(path)
        width = _WIDTHS.get(code)
        if width is None or width > widest:
            raise refuse(ErrorCode.BAD_TYPE, path, f"numbers of at most {widest} bytes", f"ext {code}")
        if len(data) % width:
            raise refuse(ErrorCode.TRUNCATED, path, f"whole numbers of {width} bytes", f"{len(data)} bytes")
        if len(data) // width > tables.MAX_ARRAY:
            raise refuse(ErrorCode.TOO_LARGE, path, tables.MAX_ARRAY, len(data) // width)
        values = np.frombuffer(data, f"<u{width}")
        if width > 1 and (not values.size or int(values.max()) < 1 << 4 * width):
            raise refuse(ErrorCode.NOT_CANONICAL, path, "the narrowest width", f"{width} bytes")
        return values

    return read


def _struct_writer(name: str) -> Write:
    fields = [(f[0], f[1], _writer(f), f[3]) for f in tables.FIELDS[name]]

    def write(value: Any, path: str) -> dict[int, Any]:
        found = {}
        for number, field, writer, required in fields:
            item = getattr(value, field)
            if item is not None:
                found[number] = writer(item, _join(path, field))
            elif required:
                raise refuse(ErrorCode.MISSING_FIELD, _join(path, field), "required", "absent")
        return found

    return write


def _writer(field: tables.Field) -> Write:
    _, _, type_, _, low, high, length = field
    if type_.startswith("list<"):
        item = _writer((0, "", type_[5:-1], True, None, None, None))
        return lambda value, path: [
            item(v, f"{path}[{i}]") for i, v in enumerate(_bounded(value, path, tables.MAX_LIST))
        ]
    if type_.startswith("struct:"):
        name = type_[7:]
        return lambda value, path: _WRITERS[name](value, path)
    if type_.startswith("array<"):
        return _array_writer(_BITS[type_[6:-1]] // 8)
    if type_ in _BITS or type_.startswith("enum:"):
        top = high if high is not None else (1 << _BITS.get(type_, 16)) - 1

        def write_int(value: Any, path: str) -> int:
            if not isinstance(value, int | np.integer) or not (low or 0) <= value <= top:
                raise refuse(ErrorCode.OUT_OF_RANGE, path, f"{low or 0}..{top}", value)
            return int(value)

        return write_int
    if type_ == "bytes":

        def write_bytes(value: Any, path: str) -> bytes:
            made = bytes(_bounded(value, path, tables.MAX_BYTES))
            if length is not None and len(made) != length:
                raise refuse(ErrorCode.OUT_OF_RANGE, path, f"{length} bytes", f"{len(made)} bytes")
            return made

        return write_bytes
    if type_ == "str":

        def write_str(value: str, path: str) -> str:
            size = len(value.encode())
            if not (low or 0) <= size <= (high if high is not None else tables.MAX_STRING):
                raise refuse(
                    ErrorCode.OUT_OF_RANGE, path, f"{low or 0}..{high or tables.MAX_STRING} bytes", f"{size} bytes"
                )
            return value

        return write_str
    return lambda value, path: bool(value)


def _bounded(value: Any, path: str, limit: int) -> Any:
    if len(value) > limit:
        raise refuse(ErrorCode.TOO_LARGE, path, limit, len(value))
    return value


def _array_writer(widest: int) -> Write:
    def write(value: Any, path: str) -> msgpack.ExtType:
        array = np.asarray(_bounded(value, path, tables.MAX_ARRAY))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "ui"):
            raise refuse(ErrorCode.BAD_TYPE, path, "a vector of integers", f"{array.dtype} {array.shape}")
        top = int(array.max()) if array.size else 0
        if (array.size and int(array.min()) < 0) or top >= 1 << 8 * widest:
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"0..{(1 << 8 * widest) - 1}", top)
        width = next(w for w in (1, 2, 4, 8) if top < 1 << 8 * w)
        return msgpack.ExtType(tables.ARRAY_CODES[width], array.astype(f"<u{width}").tobytes())

    return write


_READERS: dict[str, Read] = {}
_WRITERS: dict[str, Write] = {}
for _name in tables.FIELDS:
    _READERS[_name] = _struct_reader(_name)
    _WRITERS[_name] = _struct_writer(_name)
