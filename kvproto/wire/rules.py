"""Cross-field rules: the closed list of predicates that the registry may use, over the fields of one map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.reader import Fault

__all__ = ["check"]

_Break = tuple[str, object, object]
"""Path below the map, what the rule wants, what came."""
_Find = Callable[[Any], _Break | None]


def check(name: str, value: Any) -> None:
    """Raise a Fault at the first rule of the message or struct that its fields break."""
    for error, find in _RULES.get(name, ()):
        broken = find(value)
        if broken is not None:
            path, mine, yours = broken
            raise Fault(error, mine, yours, path)


def _keys(value: Any, field: str, key: str | None) -> tuple[list[Any], str]:
    """What is compared of each element, and the end of its path."""
    elements = getattr(value, field)
    if elements is None:
        return [], ""
    if key is None:
        return (elements.tolist() if isinstance(elements, np.ndarray) else [int(e) for e in elements]), ""
    found = [getattr(e, key) for e in elements]
    return [_comparable(k) for k in found], f".{key}"


def _comparable(key: Any) -> Any:
    """Numbers as they are, and bytes for the rest: text in UTF-8, and ids as hex digits, which people can read."""
    return key.hex().encode() if isinstance(key, bytes) else key.encode() if isinstance(key, str) else key


def _order(wrong: Callable[[Any, Any], bool], mine: str) -> Callable[..., _Find]:
    def bind(field: str, key: str | None = None) -> _Find:
        def find(value: Any) -> _Break | None:
            keys, tail = _keys(value, field, key)
            for i, (a, b) in enumerate(zip(keys, keys[1:], strict=False), 1):
                if wrong(a, b):
                    return f"{field}[{i}]{tail}", f"{mine} {_text(a)}", _text(b)
            return None

        return find

    return bind


def _unique(field: str, key: str) -> _Find:
    def find(value: Any) -> _Break | None:
        seen = set()
        for i, k in enumerate(_keys(value, field, key)[0]):
            if k in seen:
                return f"{field}[{i}].{key}", "each once", _text(k)
            seen.add(k)
        return None

    return find


def _subset(field: str, whole: str) -> _Find:
    def find(value: Any) -> _Break | None:
        allowed = set(getattr(value, whole))
        return next(
            (
                (f"{field}[{i}]", f"one of {whole}", int(k))
                for i, k in enumerate(getattr(value, field))
                if k not in allowed
            ),
            None,
        )

    return find


def _below(strict: bool) -> Callable[[str, str], _Find]:
    def bind(low: str, high: str) -> _Find:
        def find(value: Any) -> _Break | None:
            a, b = getattr(value, low), getattr(value, high)
            if a is None or b is None or a < b or (a == b and not strict):
                return None
            return high, f"{'above' if strict else 'at least'} {a}", b

        return find

    return bind


def _sum_le(first: str, second: str, top: str | int) -> _Find:
    def find(value: Any) -> _Break | None:
        a, b = getattr(value, first), getattr(value, second)
        end = top if isinstance(top, int) else getattr(value, top)
        if a is None or b is None or end is None or int(a) + int(b) <= end:
            return None
        if isinstance(top, int):
            return second, f"{first} + {second} at most {end}", int(a) + int(b)
        return top, f"at least {int(a) + int(b)}", end

    return find


def _same_length(first: str, *others: str) -> _Find:
    def find(value: Any) -> _Break | None:
        size = len(getattr(value, first))
        return next(
            (
                (o, f"{size} elements", f"{len(getattr(value, o))} elements")
                for o in others
                if len(getattr(value, o)) != size
            ),
            None,
        )

    return find


def _presence(both_ways: bool) -> Callable[[str, str, str], _Find]:
    def bind(field: str, enum_field: str, member: str) -> _Find:
        def find(value: Any) -> _Break | None:
            present, kind = getattr(value, field) is not None, getattr(value, enum_field)
            enum = _enum(type(value).__name__, enum_field)
            wanted = kind == enum[member]
            if present == wanted or (wanted and not both_ways) or kind not in set(enum):
                return None
            return (
                field,
                f"{'present' if wanted else 'absent'}, {enum_field} being {int(kind)}",
                "present" if present else "absent",
            )

        return find

    return bind


def _enum(body: str, field: str) -> Any:
    type_ = next(row[2] for row in tables.FIELDS[body] if row[1] == field)
    return getattr(enums, type_[5:])


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


_PREDICATES: dict[str, Callable[..., _Find]] = {
    "ascend": _order(lambda a, b: bool(a >= b), "above"),
    "rise": _order(lambda a, b: bool(a > b), "at least"),
    "unique": _unique,
    "subset": _subset,
    "le": _below(strict=False),
    "lt": _below(strict=True),
    "sum_le": _sum_le,
    "same_length": _same_length,
    "present_iff": _presence(both_ways=True),
    "only_if": _presence(both_ways=False),
}


def _bind(name: str, rules: Iterable[tables.Rule]) -> Iterator[tuple[ErrorCode, _Find]]:
    for predicate, args, error in rules:
        find = _PREDICATES[predicate](*args)
        yield ErrorCode[error], _hushed(find) if set(args) & tables.SECRET.get(name, set()) else find


def _hushed(find: _Find) -> _Find:
    """The same rule, with an error that does not show the secret value."""

    def hushed(value: Any) -> _Break | None:
        broken = find(value)
        return broken and (broken[0], broken[1], "(secret)")

    return hushed


_RULES: dict[str, tuple[tuple[ErrorCode, _Find], ...]] = {
    name: tuple(_bind(name, rules)) for name, rules in tables.RULES.items()
}
