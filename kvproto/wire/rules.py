"""Cross-field rules: the closed list of predicates that the registry may use, over the fields of one map."""

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np

from kvproto.wire import enums, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.fields import FEW, Fault

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
