"""Fields and rules: the handler of a field by the registry's tables, refusals, and rules across the fields of a map."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import numpy as np
from msgpack import ExtType

from kvproto.errors import WireError
from kvproto.wire import enums, tables
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


_Break = tuple[str, object, object]
"""Path below the map, the value that the rule wants, the value that came."""
_Rule = Callable[[Any], _Break | None]


def check(name: str, value: Any) -> None:
    """Raise a Fault at the first rule of the message or struct that its fields break."""
    for error, rule in _RULES.get(name, ()):
        broken = rule(value)
        if broken is not None:
            path, mine, yours = broken
            raise Fault(error, mine, yours, path)


def _order(right: Callable[[Any, Any], Any], mine: str) -> Callable[..., _Rule]:
    def bind(field: str, key: str | None = None) -> _Rule:
        tail = "" if key is None else f".{key}"

        def rule(value: Any) -> _Break | None:
            elements = getattr(value, field)
            if elements is None or len(elements) < 2:
                return None
            if isinstance(elements, np.ndarray):
                if len(elements) > FEW and right(elements[:-1], elements[1:]).all():
                    return None
                elements = elements.tolist()
            # text in the order of code points, which is that of its UTF-8
            keys = elements if key is None else [getattr(element, key) for element in elements]
            if all(map(right, keys, keys[1:])):
                return None
            i = next(i for i in range(1, len(keys)) if not right(keys[i - 1], keys[i]))
            return f"{field}[{i}]{tail}", f"{mine} {_text(keys[i - 1])}", _text(keys[i])

        return rule

    return bind


def _unique(field: str, key: str) -> _Rule:
    def rule(value: Any) -> _Break | None:
        seen = set()
        for i, element in enumerate(getattr(value, field)):
            k = getattr(element, key)
            if k in seen:
                return f"{field}[{i}].{key}", "each once", _text(k)
            seen.add(k)
        return None

    return rule


def _subset(field: str, whole: str) -> _Rule:
    def rule(value: Any) -> _Break | None:
        allowed = set(getattr(value, whole))
        for i, element in enumerate(getattr(value, field)):
            if element not in allowed:
                return f"{field}[{i}]", f"one of {whole}", int(element)
        return None

    return rule


def _below(strict: bool) -> Callable[[str, str], _Rule]:
    def bind(low: str, high: str) -> _Rule:
        def rule(value: Any) -> _Break | None:
            a, b = getattr(value, low), getattr(value, high)
            if a is None or b is None or a < b or (a == b and not strict):
                return None
            return high, f"{'above' if strict else 'at least'} {a}", b

        return rule

    return bind


def _sum_le(first: str, second: str, limit: str | int) -> _Rule:
    def rule(value: Any) -> _Break | None:
        a, b = getattr(value, first), getattr(value, second)
        end = limit if isinstance(limit, int) else getattr(value, limit)
        if a is None or b is None or end is None or int(a) + int(b) <= end:
            return None
        if isinstance(limit, int):
            return second, f"{first} + {second} at most {end}", int(a) + int(b)
        return limit, f"at least {int(a) + int(b)}", end

    return rule


def _same_length(first: str, *others: str) -> _Rule:
    def rule(value: Any) -> _Break | None:
        size = len(getattr(value, first))
        for other in others:
            length = len(getattr(value, other))
            if length != size:
                return other, f"{size} elements", f"{length} elements"
        return None

    return rule


def _presence(both_ways: bool) -> Callable[[str, str, str], _Rule]:
    def bind(field: str, enum_field: str, member: str) -> _Rule:
        def rule(value: Any) -> _Break | None:
            present, kind = getattr(value, field) is not None, getattr(value, enum_field)
            known = _members(type(value).__name__, enum_field)
            wanted = kind == known[member]
            if present == wanted or (wanted and not both_ways) or kind not in known.values():
                return None
            mine = f"{'present' if wanted else 'absent'}, {enum_field} being {int(kind)}"
            return field, mine, "present" if present else "absent"

        return rule

    return bind


@cache
def _members(body: str, field: str) -> dict[str, int]:
    """Values by name of the enum of a field."""
    type_ = next(row[2] for row in tables.FIELDS[body] if row[1] == field)
    return {member.name: member.value for member in getattr(enums, type_[5:])}


def _text(key: Any) -> str:
    """A key for people: ids as hex digits."""
    return key.hex() if isinstance(key, bytes) else str(key)


_PREDICATES: dict[str, Callable[..., _Rule]] = {
    "ascend": _order(operator.lt, "above"),
    "rise": _order(operator.le, "at least"),
    "unique": _unique,
    "subset": _subset,
    "le": _below(strict=False),
    "lt": _below(strict=True),
    "sum_le": _sum_le,
    "same_length": _same_length,
    "present_iff": _presence(both_ways=True),
    "only_if": _presence(both_ways=False),
}


def _bind(name: str, rules: Iterable[tables.Rule]) -> Iterator[tuple[ErrorCode, _Rule]]:
    for predicate, args, error in rules:
        rule = _PREDICATES[predicate](*args)
        yield ErrorCode[error], _hushed(rule) if tables.SECRET[name].intersection(args) else rule


def _hushed(rule: _Rule) -> _Rule:
    """The same rule, with an error that does not show the secret value."""

    def hushed(value: Any) -> _Break | None:
        broken = rule(value)
        return broken and (broken[0], broken[1], "(secret)")

    return hushed


_RULES: dict[str, tuple[tuple[ErrorCode, _Rule], ...]] = {
    name: tuple(_bind(name, rules)) for name, rules in tables.RULES.items()
}
