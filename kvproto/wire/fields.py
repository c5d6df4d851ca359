"""Tools of the readers and the writer: the handler of a field by the registry's tables, and refusals."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from msgpack import ExtType

from kvproto.errors import WireError
from kvproto.wire import tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import refuse

Handler = TypeVar("Handler")
DTYPES = {code: np.dtype(f"<{kind}{width}") for code, (kind, width) in tables.ARRAY_KINDS.items()}
"""Ext code to the element type of a number array."""
BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
"""Type of an integer to its bits."""
FEW = 64
"""Elements up to which Python compares sooner than numpy."""


class Fault(Exception):
    """A refusal on its way up; containers add their steps to its path, so that valid input does not pay for paths."""

    def __init__(self, code: ErrorCode, mine: object, yours: object, *steps: str) -> None:
        super().__init__(code)
        self.code, self.mine, self.yours, self.steps = code, mine, yours, list(steps)

    def error(self, path: str = "") -> WireError:
        """The WireError with the whole path, which goes on from `path`."""
        for step in reversed(self.steps):
            path += step if not path or step.startswith("[") else f".{step}"
        return refuse(self.code, path, self.mine, self.yours)


def handler(field: tables.Field, makers: Mapping[str, Callable[..., Handler]]) -> Handler:
    """Make the handler of a field: call the maker of its type with the bounds of the field.

    `makers` holds, by name: uint(low, high), boolean(), enum(name), text and bytes(low, high) in bytes, struct(name),
    numbers(bytes of the widest element, low, high) and list(handler of an element, low, high, type of an element).
    """
    _, _, type_, _, low, high, length = field
    least = low or 0
    if type_.startswith("list<"):
        inner = type_[5:-1]
        item = handler((0, "", inner, True, None, None, None), makers)
        return makers["list"](item, least, tables.MAX_LIST if high is None else high, inner)
    if type_.startswith("array<"):
        return makers["numbers"](BITS[type_[6:-1]] // 8, least, tables.MAX_ARRAY if high is None else high)
    if type_.startswith(("struct:", "enum:")):
        kind, _, name = type_.partition(":")
        return makers[kind](name)
    if type_ in BITS:
        return makers["uint"](*integers(field))
    if type_ == "bytes":
        return makers["bytes"](*((least, high or tables.MAX_BYTES) if length is None else (length, length)))
    if type_ == "str":
        return makers["text"](least, tables.MAX_STRING if high is None else high)
    return makers["boolean"]()


def integers(field: tables.Field) -> tuple[int, int]:
    """The least and the largest integer of a field; (1, 0), between which there is none, if it is of another type."""
    _, _, type_, _, low, high, _ = field
    if type_ not in BITS:
        return 1, 0
    return low or 0, (1 << BITS[type_]) - 1 if high is None else high


def count_values(value: Any) -> int:
    """Entries of maps and elements of lists in the objects of msgpack, at any depth (KVP-BODY-VALUES)."""
    if isinstance(value, dict | list):
        return len(value) + sum(map(count_values, value.values() if isinstance(value, dict) else value))
    return 0


def ends(values: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The least and the largest element of a number array that is not empty; 0 may stand for the least unsigned one."""
    if values.size <= FEW:
        numbers = values.tolist()
        return min(numbers), max(numbers)
    return (0 if values.dtype.kind == "u" else int(values.min())), int(values.max())


def ext(code: int, data: bytes) -> ExtType:
    """An ExtType of a code and bytes that are known to be right, which its constructor would check again."""
    return tuple.__new__(ExtType, (code, data))
