"""The reader of the common case: C msgpack makes objects, the tables check them, and packing proves the canonical form.

It accepts a body or leaves it to the strict reader; it reports no error. A canonical encoding is unique, so a body
is canonical exactly if its objects, packed again, are the same bytes. Three things survive packing, and the tables
see to them: the order of field ids, the class of a value (True is equal to 1), and the width of number arrays.

Objects take more memory than the bytes that they come from. So bodies above LARGEST bytes do not come here, and
msgpack refuses maps that are longer than any message or struct, before it hashes a key.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from msgpack import ExtType, packb, unpackb

from kvproto.wire import enums, tables
from kvproto.wire.fields import DTYPES, Fault, check, count_values, ends, ext, handler, integers
from kvproto.wire.tables import CLASSES
from kvproto.wire.writer import MAKERS

LARGEST = 1 << 16
"""The largest body that becomes objects before it is checked, in bytes."""
_LONGEST = max(map(len, tables.FIELDS.values()))
"""The most fields of a message or struct."""
Read = Callable[[Any], Any]


class _Doubt(Exception):
    """The value is refused, or the strict reader has to find out."""


_DOUBTS = (_Doubt, Fault, AttributeError, KeyError, TypeError, ValueError)
"""The errors that objects of an arbitrary body raise here; those of msgpack are ValueErrors."""


def read_canonical(name: str, body: bytes) -> Any:
    """The message or struct of a body of at most LARGEST bytes; None leaves the verdict to the strict reader."""
    try:
        fields = unpackb(body, strict_map_key=False, ext_hook=ext, max_map_len=_LONGEST)
        value = _READERS[name](fields)
        if packb(fields) != body:
            return None
    except _DOUBTS:
        return None
    # a value takes a byte at least, so that short bodies need no count
    if len(body) > tables.MAX_VALUES and hasattr(value, "TYPE") and count_values(fields) > tables.MAX_VALUES:
        return None
    return value


@cache
def _struct(name: str) -> Read:
    cls, ruled = CLASSES[name], name in tables.RULES
    known = {field[0]: (field[1], *integers(field), handler(field, _MAKERS)) for field in tables.FIELDS[name]}

    def read(fields: Any) -> Any:
        last = 0
        values = {}
        for number, packed in fields.items():
            if number.__class__ is not int or number <= last:
                raise _Doubt
            last = number
            field, low, high, read_field = known[number]
            # most fields are integers, which are checked sooner than a function is called
            values[field] = packed if packed.__class__ is int and low <= packed <= high else read_field(packed)
        value = cls(**values)  # which raises TypeError if a required field is missing
        if ruled:
            check(name, value)
        return value

    return read


def _list(item: Read, low: int, high: int, _: str) -> Read:
    def read(packed: Any) -> Any:
        if packed.__class__ is list and low <= len(packed) <= high:
            return tuple(map(item, packed))
        raise _Doubt

    return read


def _numbers(widest: int, low: int, high: int) -> Read:
    # by ext code, the element type and the least value that needs its width
    forms = {
        code: (DTYPES[code], 0 if width == 1 else 1 << 4 * width)
        for width, code in tables.ARRAY_CODES.items()
        if width <= widest
    }

    def read(packed: Any) -> Any:
        if packed.__class__ is ExtType:
            dtype, least = forms[packed[0]]
            values = np.frombuffer(packed[1], dtype)
            if low <= values.size <= high and (not least or ends(values)[1] >= least):
                return values
        raise _Doubt

    return read


def _enum(name: str) -> Read:
    known = {int(member): member for member in getattr(enums, name)}
    is_open = name in tables.OPEN_ENUMS

    def read(packed: Any) -> Any:
        if packed.__class__ is int:
            member = known.get(packed)
            if member is not None:
                return member
            if is_open and 0 <= packed <= 0xFFFF:
                return packed
        raise _Doubt

    return read


_MAKERS: Mapping[str, Callable[..., Read]] = {
    **MAKERS, "list": _list, "struct": _struct, "numbers": _numbers, "enum": _enum,
}  # fmt: skip
"""The makers of the writer for values that stay the same when they are packed, and readers for the others."""
_READERS = {name: _struct(name) for name in tables.FIELDS}
