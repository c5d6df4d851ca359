"""The strict reader of canonical msgpack, which the tables drive: it alone refuses a body, with a code and a path.

It holds each length against the limits and the buffer before anything is made.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.fields import DTYPES, Fault, check, ends, handler
from kvproto.wire.plain import refuse
from kvproto.wire.tables import CLASSES

_UINT = {0xCC: (1, 0x80), 0xCD: (2, 0x100), 0xCE: (4, 0x10000), 0xCF: (8, 0x100000000)}
"""By first byte: the bytes of a number, and the least value that needs them."""
_INT = {0xD0: (1, -0x20), 0xD1: (2, -0x80), 0xD2: (4, -0x8000), 0xD3: (8, -0x80000000)}
"""By first byte: the bytes of a negative number, and the value that all numbers that need them are below."""
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT = {0xC7: (1, 0), 0xC8: (2, 0x100), 0xC9: (4, 0x10000)}
_BIN = {0xC4: (1, 0), 0xC5: (2, 0x100), 0xC6: (4, 0x10000)}
_STR = {0xD9: (1, 32), 0xDA: (2, 0x100), 0xDB: (4, 0x10000)}
_ARRAY = {0xDC: (2, 16), 0xDD: (4, 0x10000)}
_MAP = {0xDE: (2, 16), 0xDF: (4, 0x10000)}


class Reader:
    """A cursor over one body."""

    __slots__ = ("at", "end", "left", "trace", "view")

    def __init__(self, view: memoryview, values: int, trace: list[tuple[int, str, object]] | None = None) -> None:
        """`values` is the number of entries and elements that all maps and lists may have together."""
        self.view, self.at, self.end, self.left, self.trace = view, 0, len(view), values, trace

    def mark(self, kind: str, note: object) -> None:
        """Note in the trace, if there is one, what the bytes up to here were; readers of many values check first."""
        if self.trace is not None:
            self.trace.append((self.at, kind, note))

    def _byte(self) -> int:
        at = self.at
        if at >= self.end:
            raise Fault(ErrorCode.TRUNCATED, "a value", "the end")
        self.at = at + 1
        return self.view[at]

    def _take(self, size: int) -> memoryview:
        at = self.at
        if size > self.end - at:
            raise Fault(ErrorCode.TRUNCATED, f"{size} bytes", f"{self.end - at} bytes")
        self.at = at + size
        return self.view[at : at + size]

    def _number(self, form: tuple[int, int], signed: bool = False) -> int:
        value = int.from_bytes(self._take(form[0]), "big", signed=signed)
        if value >= form[1] if signed else value < form[1]:
            raise Fault(ErrorCode.NOT_CANONICAL, "the shortest form", f"a number of {form[0]} bytes")
        return value

    def uint(self) -> int:
        """An integer from 0 on."""
        at = self.at
        if at < self.end and self.view[at] < 0x80:
            self.at = at + 1
            return self.view[at]
        head = self._byte()
        form = _UINT.get(head)
        if form is not None:
            return self._number(form)
        if head in _INT:
            self._number(_INT[head], signed=True)
        raise _wrong(head, "an unsigned integer")

    def uint_in(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        value = self.uint()
        if not low <= value <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high}", value)
        return value

    def boolean(self) -> bool:
        """True or false."""
        head = self._byte()
        if head not in (0xC2, 0xC3):
            raise _wrong(head, "a boolean")
        return head == 0xC3

    def _length(self, head: int, forms: dict[int, tuple[int, int]], kind: str, limit: int) -> int:
        form = forms.get(head)
        if form is None:
            raise _wrong(head, kind)
        size = self._number(form)
        if size > limit:
            raise Fault(ErrorCode.TOO_LARGE, limit, size)
        return size

    def map_header(self, depth: int) -> int:
        """Entries of a map; each takes two bytes at least."""
        if depth > tables.MAX_DEPTH:
            raise Fault(ErrorCode.TOO_DEEP, tables.MAX_DEPTH, depth)
        head = self._byte()
        count = head - 0x80 if 0x80 <= head <= 0x8F else self._length(head, _MAP, "a map", tables.MAX_LIST)
        return self._room(count, 2)

    def array_header(self, depth: int) -> int:
        """Elements of a list; each takes one byte at least."""
        if depth > tables.MAX_DEPTH:
            raise Fault(ErrorCode.TOO_DEEP, tables.MAX_DEPTH, depth)
        head = self._byte()
        count = head - 0x90 if 0x90 <= head <= 0x9F else self._length(head, _ARRAY, "a list", tables.MAX_LIST)
        return self._room(count, 1)

    def _room(self, count: int, least: int) -> int:
        self.left -= count
        if self.left < 0:
            raise Fault(ErrorCode.TOO_LARGE, f"{tables.MAX_VALUES} in the body", f"{-self.left} more")
        if count * least > self.end - self.at:
            raise Fault(ErrorCode.TRUNCATED, f"{count * least} bytes", f"{self.end - self.at} bytes")
        return count

    def bytes(self, low: int, high: int) -> bytes:
        """A byte string of low to high bytes."""
        size = self._length(self._byte(), _BIN, "a byte string", tables.MAX_BYTES)
        data = self._take(size)
        if not low <= size <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{size} bytes")
        return bytes(data)

    def text(self, low: int, high: int) -> str:
        """A UTF-8 string of low to high bytes."""
        head = self._byte()
        size = head - 0xA0 if 0xA0 <= head <= 0xBF else self._length(head, _STR, "a string", tables.MAX_STRING)
        data = self._take(size)
        try:
            decoded = str(data, "utf-8")
        except UnicodeDecodeError:
            raise Fault(ErrorCode.BAD_TEXT, "UTF-8", "other bytes") from None
        if not low <= size <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"{low}..{high} bytes", f"{size} bytes")
        return decoded

    def numbers(self, kinds: str, widest: int, low: int = 0, high: int = tables.MAX_ARRAY) -> np.ndarray[Any, Any]:
        """A number array of low to high elements, as a view; `kinds` are those of "u" and "i" that may occur."""
        head = self._byte()
        size = _FIXEXT.get(head)
        if size is None:
            size = self._length(head, _EXT, "a number array", 1 << 32)  # the limit is in elements, below
            if size in (1, 2, 4, 8, 16):
                raise Fault(ErrorCode.NOT_CANONICAL, "the shortest form", f"{size} bytes of ext")
        code = self._byte()
        kind, width = tables.ARRAY_KINDS.get(code, ("", 0))
        if not kind or kind not in kinds or width > widest:
            raise Fault(ErrorCode.BAD_TYPE, f"numbers of at most {widest} bytes", f"ext {code}")
        if size % width:
            raise Fault(ErrorCode.BAD_LENGTH, f"whole numbers of {width} bytes", f"{size} bytes")
        if size > width * tables.MAX_ARRAY:
            raise Fault(ErrorCode.TOO_LARGE, tables.MAX_ARRAY, size // width)
        values = np.frombuffer(self._take(size), DTYPES[code])
        if (code > 1 and not size) or (width > 1 and _narrower(values, kind, width)):
            raise Fault(ErrorCode.NOT_CANONICAL, "the narrowest width", f"{width} bytes")
        if not low <= values.size <= high:
            raise Fault(ErrorCode.OUT_OF_RANGE, f"at least {low} elements", f"{values.size} elements")
        return values

    def skip(self, depth: int) -> None:
        """Skip a value that may be ignored, which must be canonical nevertheless."""
        if self.at >= self.end:
            raise Fault(ErrorCode.TRUNCATED, "a value", "the end")
        head = self.view[self.at]
        if head < 0x80 or head in _UINT:
            self.uint()
        elif head >= 0xE0:
            self.at += 1
        elif head in _INT:
            self.at += 1
            self._number(_INT[head], signed=True)
        elif head <= 0x8F or head in _MAP:
            last = 0
            for _ in range(self.map_header(depth)):
                last = self._key(last)
                self.skip(depth + 1)
        elif head <= 0x9F or head in _ARRAY:
            for _ in range(self.array_header(depth)):
                self.skip(depth + 1)
        elif head <= 0xBF or head in _STR:
            self.text(0, tables.MAX_STRING)
        elif head in _BIN:
            self._take(self._length(self._byte(), _BIN, "a byte string", tables.MAX_BYTES))
        elif head in (0xC2, 0xC3):
            self.at += 1
        elif head in _FIXEXT or head in _EXT:
            self.numbers("ui", 8)
        else:
            raise _wrong(head, "a value of the canonical form")

    def _key(self, last: int) -> int:
        key = self.uint()
        if key <= last:
            raise Fault(ErrorCode.FIELD_ORDER, f"above {last}", key)
        if key > 0xFFFF:
            raise Fault(ErrorCode.OUT_OF_RANGE, "at most 0xffff", key)
        return key


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


def _narrower(values: np.ndarray[Any, Any], kind: str, width: int) -> bool:
    """Tell if half the width holds all elements."""
    half = 1 << 4 * width - (kind == "i")
    least, most = ends(values)
    return most < half and (kind == "u" or least >= -half)


def _wrong(head: int, wanted: str) -> Fault:
    return Fault(ErrorCode.BAD_TYPE, wanted, f"first byte {head:#04x}")
