"""The strict reader, which the tables drive: it alone refuses a body, with a code and a path."""

from collections.abc import Callable, Mapping
from typing import Any

from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.fields import handler
from kvproto.wire.plain import refuse
from kvproto.wire.reader import Fault, Reader
from kvproto.wire.rules import check
from kvproto.wire.tables import CLASSES

Read = Callable[[Reader, int], Any]


def read_whole(name: str, view: memoryview, trace: list[Any] | None = None) -> Any:
    """The message or struct of a canonical map that fills the view; raises WireError."""
    # a struct has no bound but its bytes: each value takes at least one
    values = tables.MAX_VALUES if hasattr(CLASSES[name], "TYPE") else tables.MAX_BODY
    reader = Reader(view, values, trace)
    try:
        value = _READERS[name](reader, 1)
    except Fault as fault:
        raise fault.error() from None
    if reader.at != reader.end:
        raise refuse(ErrorCode.TRAILING_BYTES, "", f"{reader.at} bytes", f"{reader.end} bytes")
    return value


def _struct_reader(name: str) -> Read:
    cls = CLASSES[name]
    fields = {field[0]: (field[1], handler(field, _MAKERS)) for field in tables.FIELDS[name]}
    required = [field[1] for field in tables.FIELDS[name] if field[3]]

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
        values: dict[str, Any] = {}
        count = reader.map_header(depth)
        traced = reader.trace is not None
        if traced:
            reader.mark("map", f"{name}, {count} fields")
        for _ in range(count):
            number = reader.uint()
            if number <= last:
                raise Fault(ErrorCode.FIELD_ORDER, f"above {last}", number, label(number))
            last = number
            field = fields.get(number)
            if traced:
                reader.mark("id", label(number))
            try:
                if field is not None:
                    values[field[0]] = field[1](reader, depth)
                else:
                    unknown(reader, number, depth)
                    reader.mark("skipped", None)
            except Fault as fault:
                fault.steps.append(label(number))
                raise
        for field_name in required:
            if field_name not in values:
                raise Fault(ErrorCode.MISSING_FIELD, "required", "absent", field_name)
        value = cls(**values)
        check(name, value)
        reader.mark("end", None)
        return value

    return read


def _struct(name: str) -> Read:
    return lambda reader, depth: _READERS[name](reader, depth + 1)


def _leaf(read: Callable[[Reader], Any]) -> Read:
    def leaf(reader: Reader, depth: int) -> Any:
        value = read(reader)
        if reader.trace is not None:
            reader.mark("value", value)
        return value

    return leaf


def _enum(name: str) -> Read:
    known = {int(member): member for member in getattr(enums, name)}
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

    return _leaf(read)


def _list(item: Read, low: int, high: int, inner: str) -> Read:
    def read(reader: Reader, depth: int) -> tuple[Any, ...]:
        values: list[Any] = []
        count = reader.array_header(depth + 1)
        if not low <= count <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} elements", f"{count} elements")
        reader.mark("list", f"{count} of {inner.rpartition(':')[2]}")
        try:
            for i in range(count):
                if reader.trace is not None:
                    reader.mark("element", i)
                values.append(item(reader, depth + 1))
        except Fault as fault:
            fault.steps.append(f"[{len(values)}]")
            raise
        reader.mark("end", None)
        return tuple(values)

    return read


_MAKERS: Mapping[str, Callable[..., Read]] = {
    "list": _list,
    "struct": _struct,
    "enum": _enum,
    "numbers": lambda widest, low, high: _leaf(lambda reader: reader.numbers("u", widest, low, high)),
    "uint": lambda low, high: _leaf(lambda reader: reader.uint_in(low, high)),
    "bytes": lambda low, high: _leaf(lambda reader: reader.bytes(low, high)),
    "text": lambda low, high: _leaf(lambda reader: reader.text(low, high)),
    "boolean": lambda: _leaf(lambda reader: reader.boolean()),
}
_READERS: dict[str, Read] = {name: _struct_reader(name) for name in tables.FIELDS}
