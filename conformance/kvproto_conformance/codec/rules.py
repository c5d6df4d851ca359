"""The predicates over several fields of one map, on decoded values: integers, text, bytes, lists and dicts."""

from typing import Any

from kvproto_conformance.codec.facts import ENUMS, Layout, Refusal, join


def _key(value: Any) -> Any:
    return value.encode("utf-8") if isinstance(value, str) else value


def _column(values: dict[str, Any], args: tuple[Any, ...]) -> list[Any]:
    """The elements of a list or array, or the named field of each."""
    elements = values.get(args[0], [])
    return [_key(element[args[1]] if len(args) > 1 else element) for element in elements]


def _at(args: tuple[Any, ...], i: int) -> str:
    """Path of an element, or of its named field."""
    return f"{args[0]}[{i}].{args[1]}" if len(args) > 1 else f"{args[0]}[{i}]"


def _ascend(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    column = _column(values, args)
    return next((_at(args, i) for i in range(1, len(column)) if column[i] <= column[i - 1]), None)


def _rise(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    column = _column(values, args)
    return next((_at(args, i) for i in range(1, len(column)) if column[i] < column[i - 1]), None)


def _unique(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    seen = set()
    for i, element in enumerate(_column(values, args)):
        if element in seen:
            return _at(args, i)
        seen.add(element)
    return None


def _subset(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    if args[0] not in values or args[1] not in values:
        return None
    part, whole = _column(values, args[:1]), set(_column(values, args[1:]))
    return next((f"{args[0]}[{i}]" for i in range(len(part)) if part[i] not in whole), None)


def _le(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    present = args[0] in values and args[1] in values
    return args[1] if present and _key(values[args[0]]) > _key(values[args[1]]) else None


def _lt(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    present = args[0] in values and args[1] in values
    return args[1] if present and _key(values[args[0]]) >= _key(values[args[1]]) else None


def _sum_le(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    named = [arg for arg in args if isinstance(arg, str)]
    if any(name not in values for name in named):
        return None
    bound = values[args[2]] if isinstance(args[2], str) else args[2]
    return named[-1] if values[args[0]] + values[args[1]] > bound else None


def _same_length(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    present = [name for name in args if name in values]
    return next((name for name in present if len(values[name]) != len(values[present[0]])), None)


def _has(layout: Layout, values: dict[str, Any], field: str, name: str) -> bool | None:
    """Whether an enum field has the value of this name; None if its value is unknown, which decides nothing."""
    enum = ENUMS[layout.names[field].type.name]
    if field in values and values[field] not in enum.names:
        return None
    return field in values and bool(values[field] == enum.values[name])


def _present_iff(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    wanted = _has(layout, values, args[1], args[2])
    return args[0] if wanted is not None and (args[0] in values) != wanted else None


def _only_if(layout: Layout, values: dict[str, Any], args: tuple[Any, ...]) -> str | None:
    return args[0] if args[0] in values and _has(layout, values, args[1], args[2]) is False else None


PREDICATES = {
    "ascend": _ascend, "rise": _rise, "unique": _unique, "subset": _subset, "le": _le, "lt": _lt, "sum_le": _sum_le,
    "same_length": _same_length, "present_iff": _present_iff, "only_if": _only_if,
}  # fmt: skip


def check_rules(layout: Layout, values: dict[str, Any], path: str) -> None:
    """Refuse the map at a path by the first rule that it breaks."""
    for rule in layout.rules:
        place = PREDICATES[rule.predicate](layout, values, rule.args)
        if place is not None:
            raise Refusal(rule.error, join(path, place))
