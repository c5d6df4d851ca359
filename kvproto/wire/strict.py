"""The strict, table-driven reader of bodies, which decides what is refused, with which code and path.

The straight-line code of `straight.py` accepts nothing that this refuses; whatever it does not accept comes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproto.wire import enums, messages, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import Fault, Reader, refuse
from kvproto.wire.rules import check

__all__ = ["CLASSES", "read_whole"]

CLASSES: dict[str, type[Any]] = {name: getattr(messages, name) for name in tables.FIELDS}
Read = Callable[[Reader, int], Any]
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}


def read_whole(name: str, view: memoryview, trace: list[Any] | None = None) -> Any:
    """The message or struct of a canonical map that fills the view; raises WireError."""
    values = tables.MAX_VALUES if hasattr(CLASSES[name], "TYPE") else tables.MAX_BODY  # each takes at least a byte
    reader = Reader(view, values, trace)
    try:
        made = _READERS[name](reader, 1)
    except Fault as fault:
        raise fault.error() from None
    if reader.at != reader.end:
        raise refuse(ErrorCode.TRAILING_BYTES, "", f"{reader.at} bytes", f"{reader.end} bytes")
    return made


def _struct_reader(name: str) -> Read:
    cls = CLASSES[name]
    fields = {f[0]: (f[1], _reader(f)) for f in tables.FIELDS[name]}
    required = [f[1] for f in tables.FIELDS[name] if f[3]]

    def label(number: int) -> str:
        return fields[number][0] if number in fields else f"#{number:04x}"

    def unknown(reader: Reader, number: int, depth: int) -> None:
        if number > 0xFFFF:
            raise Fault(ErrorCode.OUT_OF_RANGE, "at most 0xffff", number)
        if not number & tables.MAY_IGNORE:
            raise Fault(ErrorCode.UNKNOWN_FIELD, "a known field", f"{number:#06x}")
        reader.skip(depth + 1)

    def read(reader: Reader, depth: int) -> Any:
        last = 0
        found: dict[str, Any] = {}
        count = reader.map_header(depth)
        told = reader.trace is not None
        if told:
            reader.mark("map", f"{name}, {count} fields")
        for _ in range(count):
            number = reader.uint()
            if number <= last:
                raise Fault(ErrorCode.FIELD_ORDER, f"above {last}", number, label(number))
            last = number
            field = fields.get(number)
            if told:
                reader.mark("id", label(number))
            try:
                if field is not None:
                    found[field[0]] = field[1](reader, depth)
                else:
                    unknown(reader, number, depth)
                    reader.mark("skipped", None)
            except Fault as fault:
                fault.steps.append(label(number))
                raise
        for field_name in required:
            if field_name not in found:
                raise Fault(ErrorCode.MISSING_FIELD, "required", "absent", field_name)
        made = cls(**found)
        check(name, made)
        reader.mark("end", None)
        return made

    return read


def _reader(field: tables.Field) -> Read:
    _, _, type_, _, low, high, length = field
    if type_.startswith("list<"):
        inner = type_[5:-1]
        return _list_reader(_reader((0, "", inner, True, None, None, None)), low, high, inner)
    if type_.startswith("struct:"):
        name = type_[7:]
        return lambda reader, depth: _READERS[name](reader, depth + 1)
    if type_.startswith("array<"):
        widest = _BITS[type_[6:-1]] // 8
        return _leaf(lambda reader: reader.numbers("u", widest, low, high))
    if type_.startswith("enum:"):
        return _leaf(_enum_reader(type_[5:]))
    if type_ in _BITS:
        least, most = low or 0, high if high is not None else (1 << _BITS[type_]) - 1
        return _leaf(lambda reader: reader.uint_in(least, most))
    if type_ == "bytes":
        shortest, longest = (low or 0, high or tables.MAX_BYTES) if length is None else (length, length)
        return _leaf(lambda reader: reader.bytes(shortest, longest))
    if type_ == "str":
        shortest, longest = low or 0, high if high is not None else tables.MAX_STRING
        return _leaf(lambda reader: reader.text(shortest, longest))
    return _leaf(lambda reader: reader.boolean())


def _leaf(read: Callable[[Reader], Any]) -> Read:
    def leaf(reader: Reader, depth: int) -> Any:
        value = read(reader)
        if reader.trace is not None:
            reader.mark("value", value)
        return value

    return leaf


def _enum_reader(name: str) -> Callable[[Reader], Any]:
    known = {int(v): v for v in getattr(enums, name)}
    is_open = name in tables.OPEN_ENUMS

    def read(reader: Reader) -> Any:
        value = reader.uint()
        if value in known:
            return known[value]
        if value > 0xFFFF:
            raise Fault(ErrorCode.OUT_OF_RANGE, "at most 0xffff", value)
        if not is_open:
            raise Fault(ErrorCode.UNKNOWN_ENUM_VALUE, f"a value of {name}", value)
        return value

    return read


def _list_reader(item: Read, low: int | None, high: int | None, inner: str) -> Read:
    least, most = low or 0, high if high is not None else tables.MAX_LIST

    def read(reader: Reader, depth: int) -> tuple[Any, ...]:
        made: list[Any] = []
        count = reader.array_header(depth + 1)
        if not least <= count <= most:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{least}..{most} elements", f"{count} elements")
        reader.mark("list", f"{count} of {inner.rpartition(':')[2]}")
        try:
            for i in range(count):
                if reader.trace is not None:
                    reader.mark("element", i)
                made.append(item(reader, depth + 1))
        except Fault as fault:
            fault.steps.append(f"[{len(made)}]")
            raise
        reader.mark("end", None)
        return tuple(made)

    return read


_READERS: dict[str, Read] = {name: _struct_reader(name) for name in tables.FIELDS}
