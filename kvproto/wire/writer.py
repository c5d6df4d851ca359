"""The writer of bodies: turns attrs objects into what msgpack packs, and refuses everything that the readers would."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from msgpack import ExtType, packb

from kvproto.errors import LocalError
from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.fields import DTYPES, Fault, check, count_values, ends, ext, handler, integers
from kvproto.wire.plain import refuse
from kvproto.wire.tables import CLASSES

Write = Callable[[Any], Any]
# tuples, as a union of types would be made again at each check
_INTEGERS = (int, np.integer)
_BOOLEANS = (bool, np.bool_)
_BYTES = (bytes, bytearray, memoryview)
_SEQUENCES = (tuple, list)
_ARRAYS = (np.ndarray, tuple, list)


def pack(value: Any, grease: int | None = None) -> bytes:
    """The canonical map of a message or struct, with an additional field if there is `grease`; raises WireError."""
    fields = validate(value)
    if grease is not None:
        fields[grease] = value.TYPE
    body: bytes = packb(fields)
    # a value takes a byte at least, so that short bodies need no count
    if len(body) > tables.MAX_VALUES and hasattr(value, "TYPE") and (count := count_values(fields)) > tables.MAX_VALUES:
        raise refuse(ErrorCode.TOO_LARGE, "", f"{tables.MAX_VALUES} entries and elements", count)
    if len(body) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(body))
    return body


def validate(value: Any) -> dict[int, Any]:
    """The map by field id; raises WireError with the path of the first field that is wrong."""
    write = _WRITERS.get(type(value))
    if write is None:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", type(value).__name__)
    try:
        fields: dict[int, Any] = write(value)
    except Fault as fault:
        raise fault.error() from None
    return fields


def check_field(name: str, field: str, value: Any, path: str) -> None:
    """Raise WireError, at the path, unless the field may have this value."""
    try:
        _FIELD_WRITERS[name][field](value)
    except Fault as fault:
        raise fault.error(path) from None


def check_rules(value: Any, path: str) -> None:
    """Raise WireError, below the path, at the first rule that the fields break."""
    try:
        check(type(value).__name__, value)
    except Fault as fault:
        raise fault.error(path) from None


@cache
def _struct(name: str) -> Write:
    cls, ruled = CLASSES[name], name in tables.RULES
    writers = _FIELD_WRITERS[name] = {row[1]: handler(row, MAKERS) for row in tables.FIELDS[name]}
    rows = [(*row[:2], row[3], *integers(row), writers[row[1]]) for row in tables.FIELDS[name]]

    def write(value: Any) -> dict[int, Any]:
        if type(value) is not cls:
            raise _wrong(name, value)
        fields = {}
        for number, field, required, low, high, write_field in rows:
            item = getattr(value, field)
            # most fields are integers, which are checked sooner than a function is called
            if item.__class__ is int and low <= item <= high:
                fields[number] = item
            elif item is not None:
                try:
                    fields[number] = write_field(item)
                except Fault as fault:
                    fault.steps.append(field)
                    raise
            elif required:
                raise Fault(ErrorCode.MISSING_FIELD, "required", "absent", field)
        if ruled:
            check(name, value)
        return fields

    return write


def _uint(low: int, high: int) -> Write:
    def write(value: Any) -> int:
        if value.__class__ is not int and (not isinstance(value, _INTEGERS) or isinstance(value, bool)):
            raise _wrong("an integer", value)
        if not low <= value <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high}", value)
        return int(value)

    return write


def _enum(name: str) -> Write:
    write_number = _uint(0, 0xFFFF)
    known = None if name in tables.OPEN_ENUMS else {int(member) for member in getattr(enums, name)}

    def write(value: Any) -> int:
        number: int = write_number(value)
        if known is not None and number not in known:
            raise Fault(ErrorCode.UNKNOWN_ENUM_VALUE, f"a value of {name}", number)
        return number

    return write


def _bytes(low: int, high: int) -> Write:
    def write(value: Any) -> bytes:
        if not isinstance(value, _BYTES):
            raise _wrong("bytes", value)
        data = bytes(value)
        if not low <= len(data) <= high:
            if len(data) > tables.MAX_BYTES:
                raise Fault(ErrorCode.TOO_LARGE, tables.MAX_BYTES, len(data))
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{len(data)} bytes")
        return data

    return write


def _text(low: int, high: int) -> Write:
    def write(value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong("a string", value)
        try:
            size = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError:
            raise Fault(ErrorCode.BAD_TEXT, "UTF-8", "a lone surrogate") from None
        if not low <= size <= high:
            if size > tables.MAX_STRING:
                raise Fault(ErrorCode.TOO_LARGE, tables.MAX_STRING, size)
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{size} bytes")
        return value

    return write


def _boolean() -> Write:
    def write(value: Any) -> bool:
        if not isinstance(value, _BOOLEANS):
            raise _wrong("a boolean", value)
        return bool(value)

    return write


def _list(item: Write, low: int, high: int, _: str) -> Write:
    def write(value: Any) -> list[Any]:
        if not isinstance(value, _SEQUENCES):
            raise _wrong("a tuple", value)
        if len(value) > tables.MAX_LIST:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_LIST, len(value))
        if not low <= len(value) <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} elements", f"{len(value)} elements")
        elements: list[Any] = []
        try:
            for element in value:
                elements.append(item(element))
        except Fault as fault:
            fault.steps.append(f"[{len(elements)}]")
            raise
        return elements

    return write


def _numbers(widest: int, low: int, high: int) -> Write:
    def write(value: Any) -> ExtType:
        if not isinstance(value, _ARRAYS):
            raise _wrong("a number array", value)
        if len(value) > tables.MAX_ARRAY:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_ARRAY, len(value))
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "ui"):
            raise Fault(ErrorCode.BAD_TYPE, "a vector of integers", f"{array.dtype} {array.shape}")
        least, most = ends(array) if array.size else (0, 0)
        if least < 0 or most >= 1 << 8 * widest:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"0..{(1 << 8 * widest) - 1}", least if least < 0 else most)
        if not low <= array.size <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} elements", f"{array.size} elements")
        width = 1 if most < 0x100 else 2 if most < 0x10000 else 4 if most < 0x100000000 else 8
        code = tables.ARRAY_CODES[width]
        return ext(code, array.astype(DTYPES[code], copy=False).tobytes())

    return write


def _wrong(wanted: str, value: object) -> Fault:
    return Fault(ErrorCode.BAD_TYPE, wanted, type(value).__name__)


MAKERS: Mapping[str, Callable[..., Write]] = {
    "list": _list, "struct": _struct, "numbers": _numbers, "uint": _uint, "enum": _enum, "bytes": _bytes, "text": _text,
    "boolean": _boolean,
}  # fmt: skip
_FIELD_WRITERS: dict[str, dict[str, Write]] = {}
_WRITERS = {CLASSES[name]: _struct(name) for name in tables.FIELDS}
