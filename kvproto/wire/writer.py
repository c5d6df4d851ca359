"""Turns attrs objects into what msgpack packs, and refuses everything that the reader would refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from kvproto.errors import LocalError
from kvproto.wire import enums, messages, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import Fault, refuse
from kvproto.wire.rules import check

__all__ = ["check_field", "check_rules", "pack", "validate"]

Write = Callable[[Any], Any]
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}


def pack(value: Any, grease: int | None = None) -> bytes:
    """The canonical map of a message or struct, with an additional field if there is `grease`; raises WireError."""
    fields = validate(value)
    if grease is not None:
        fields[grease] = value.TYPE
    if hasattr(value, "TYPE") and (count := _values(fields)) > tables.MAX_VALUES:
        raise refuse(ErrorCode.TOO_LARGE, "", f"{tables.MAX_VALUES} entries and elements", count)
    made: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(made) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(made))
    return made


def _values(made: Any) -> int:
    """Entries of maps and elements of lists, at any depth."""
    if isinstance(made, dict | list):
        return len(made) + sum(map(_values, made.values() if isinstance(made, dict) else made))
    return 0


def validate(value: Any) -> dict[int, Any]:
    """The map by field id; raises WireError with the path of what is wrong."""
    write = _WRITERS.get(type(value))
    if write is None:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", type(value).__name__)
    try:
        made: dict[int, Any] = write(value)
    except Fault as fault:
        raise fault.error() from None
    return made


def check_field(name: str, field: str, value: Any, path: str) -> None:
    """Raise WireError, at the path, unless the field may have this value."""
    try:
        _FIELD_WRITERS[name, field](value)
    except Fault as fault:
        raise fault.error(path) from None


def check_rules(value: Any, path: str) -> None:
    """Raise WireError, below the path, at the first rule that the fields break."""
    try:
        check(type(value).__name__, value)
    except Fault as fault:
        raise fault.error(path) from None


def _struct_writer(cls: type[Any]) -> Write:
    fields = [(f[0], f[1], _writer(f), f[3]) for f in tables.FIELDS[cls.__name__]]

    def write(value: Any) -> dict[int, Any]:
        if type(value) is not cls:
            raise _wrong(cls.__name__, value)
        found = {}
        for number, name, writer, required in fields:
            item = getattr(value, name)
            if item is not None:
                try:
                    found[number] = writer(item)
                except Fault as fault:
                    fault.steps.append(name)
                    raise
            elif required:
                raise Fault(ErrorCode.MISSING_FIELD, "required", "absent", name)
        check(cls.__name__, value)
        return found

    return write


def _writer(field: tables.Field) -> Write:
    _, _, type_, _, low, high, length = field
    if type_.startswith("list<"):
        inner = _writer((0, "", type_[5:-1], True, None, None, None))
        return _list_writer(inner, low or 0, high if high is not None else tables.MAX_LIST)
    if type_.startswith("struct:"):
        cls = getattr(messages, type_[7:])
        return lambda value: _WRITERS[cls](value)
    if type_.startswith("array<"):
        return _array_writer(_BITS[type_[6:-1]] // 8, low or 0, high if high is not None else tables.MAX_ARRAY)
    if type_.startswith("enum:"):
        return _enum_writer(type_[5:])
    if type_ in _BITS:
        return _int_writer(low or 0, high if high is not None else (1 << _BITS[type_]) - 1)
    if type_ == "bytes":
        return _bytes_writer(*((length, length) if length is not None else (low or 0, high or tables.MAX_BYTES)))
    if type_ == "str":
        return _text_writer(low or 0, high if high is not None else tables.MAX_STRING)
    return _write_bool


def _int_writer(low: int, high: int) -> Write:
    def write(value: Any) -> int:
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise _wrong("an integer", value)
        if not low <= value <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high}", value)
        return int(value)

    return write


def _enum_writer(name: str) -> Write:
    number = _int_writer(0, 0xFFFF)
    known = None if name in tables.OPEN_ENUMS else {int(v) for v in getattr(enums, name)}

    def write(value: Any) -> int:
        made: int = number(value)
        if known is not None and made not in known:
            raise Fault(ErrorCode.UNKNOWN_ENUM_VALUE, f"a value of {name}", made)
        return made

    return write


def _bytes_writer(low: int, high: int) -> Write:
    def write(value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _wrong("bytes", value)
        made = bytes(value)
        if len(made) > tables.MAX_BYTES:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_BYTES, len(made))
        if not low <= len(made) <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{len(made)} bytes")
        return made

    return write


def _text_writer(low: int, high: int) -> Write:
    def write(value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong("a string", value)
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise Fault(ErrorCode.BAD_TEXT, "UTF-8", "a lone surrogate") from None
        if size > tables.MAX_STRING:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_STRING, size)
        if not low <= size <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{size} bytes")
        return value

    return write


def _write_bool(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _wrong("a boolean", value)
    return bool(value)


def _list_writer(item: Write, low: int, high: int) -> Write:
    def write(value: Any) -> list[Any]:
        if not isinstance(value, tuple | list):
            raise _wrong("a tuple", value)
        if len(value) > tables.MAX_LIST:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_LIST, len(value))
        if not low <= len(value) <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} elements", f"{len(value)} elements")
        made: list[Any] = []
        try:
            for part in value:
                made.append(item(part))
        except Fault as fault:
            fault.steps.append(f"[{len(made)}]")
            raise
        return made

    return write


def _array_writer(widest: int, least: int, most: int) -> Write:
    def write(value: Any) -> msgpack.ExtType:
        if not isinstance(value, np.ndarray | tuple | list):
            raise _wrong("a number array", value)
        if len(value) > tables.MAX_ARRAY:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_ARRAY, len(value))
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "ui"):
            raise Fault(ErrorCode.BAD_TYPE, "a vector of integers", f"{array.dtype} {array.shape}")
        low, top = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or top >= 1 << 8 * widest:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"0..{(1 << 8 * widest) - 1}", low if low < 0 else top)
        if not least <= array.size <= most:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{least}..{most} elements", f"{array.size} elements")
        width = next(w for w in (1, 2, 4, 8) if top < 1 << 8 * w)
        return msgpack.ExtType(tables.ARRAY_CODES[width], array.astype(f"<u{width}", copy=False).tobytes())

    return write


def _wrong(wanted: str, value: object) -> Fault:
    return Fault(ErrorCode.BAD_TYPE, wanted, type(value).__name__)


_FIELD_WRITERS = {(name, row[1]): _writer(row) for name, rows in tables.FIELDS.items() for row in rows}
_WRITERS: dict[type[Any], Write] = {}
for _name in tables.FIELDS:
    _cls = getattr(messages, _name)
    _WRITERS[_cls] = _struct_writer(_cls)
