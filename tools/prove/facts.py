"""Mutants of the registry: each has one fact that is otherwise, under a name that says which."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tools.prove.changing import Changes, module_of
from tools.specgen import python
from tools.specgen.lint import RegistryError, lint
from tools.specgen.registry import Facts, load

Row = dict[str, Any]
Edit = Callable[[Facts], object]
_FILES: dict[str, Callable[[Facts], str]] = {
    "kvproto/wire/enums.py": python.enums_module,
    "kvproto/wire/messages.py": python.messages_module,
    "kvproto/wire/tables.py": python.tables_module,
    "kvproto/planning/parts.py": python.parts_module,
    "kvproto/planning/limits.py": lambda facts: python.limits_module(facts, "plan"),
    "kvproto/session/limits.py": lambda facts: python.limits_module(facts, "session"),
    "kvproto/net/limits.py": lambda facts: python.limits_module(facts, "net"),
    "kvproto/observability/names.py": python.metrics_module,
    "kvproto/session/transitions.py": python.transitions_module,
}
_FACTS = load()
_PLAIN = {file: make(_FACTS) for file, make in _FILES.items()}
_OTHER_TYPE = {
    "u8": "u16", "u16": "u32", "u32": "u64", "u64": "u32", "bool": "u8", "str": "bytes", "bytes": "str",
    "array<u32>": "array<u64>", "array<u64>": "array<u32>",
}  # fmt: skip
_OTHER_RULE = {
    "ascend": "rise", "rise": "ascend", "le": "lt", "lt": "le", "present_iff": "only_if", "only_if": "present_iff",
}  # fmt: skip
_OTHER_WORD = {"1.0": "1.1", "stable": "draft", "draft": "stable", "sink": "source"}


def changes_of(edit: Edit) -> Changes:
    """Modules of kvproto that a mutant makes otherwise, and their text."""
    facts = copy.deepcopy(_FACTS)
    edit(facts)
    made = {file: make(facts) for file, make in _FILES.items()}
    differ = {file: text for file, text in made.items() if text != _PLAIN[file]}
    return {module_of(file): text for file, text in differ.items() if _code(text) != _code(_PLAIN[file])}


def refused(edit: Edit) -> str:
    """The error by which the registry's own check refuses a mutant; empty if it takes it."""
    facts = copy.deepcopy(_FACTS)
    edit(facts)
    try:
        lint(facts)
    except (RegistryError, LookupError) as error:
        return f"tools.specgen: {error}"
    return ""


def homes(name: str) -> frozenset[str]:
    """Messages and structs that the fact of a mutant is part of: that which its name says, and all that have it."""
    found, more = set[str](), {name.split(".")[1]}
    while more:
        found |= more
        more = {home for each in more for home in _HOMES.get(each, ())} - found
    return frozenset(found)


def _homes() -> dict[str, set[str]]:
    """Struct to what has a field of it."""
    found: dict[str, set[str]] = {}
    for kind in ("struct", "message"):
        for name, body in _FACTS[kind].items():
            for field in body["field"]:
                for word in re.findall(r"(?:struct|enum):(\w+)", field["type"]):
                    found.setdefault(word, set()).add(name)
    return found


_HOMES = _homes()


def _code(text: str) -> str:
    """The text without the lines that are documentation alone."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith('"""'))


def mutants() -> Iterator[tuple[str, Edit]]:
    """Every fact of the registry made otherwise, one at a time."""
    for kind in ("struct", "message"):
        for name, body in _FACTS[kind].items():
            for what, change in _body(body):
                yield f"{kind}.{name}.{what}", _at(change, kind, name)
    for name, message in _FACTS["message"].items():
        for what, change in _message(message):
            yield f"message.{name}.{what}", _at(change, "message", name)
    for name, enum in _FACTS["enum"].items():
        for what, change in _enum(enum):
            yield f"enum.{name}.{what}", _at(change, "enum", name)
    for kind in ("error", "limit", "fact", "part", "group", "metric", "feature"):
        for name, row in _FACTS[kind].items():
            for key, value in row.items():
                if key not in ("doc", "clauses") and (kind, key) != ("feature", "value"):  # which the enum Feature has
                    yield from _value(f"{kind}.{name}.{key}", value, kind, name, key)
    for kind in ("protocol", "field_ids", "ext"):
        for key, value in _FACTS[kind].items():
            yield from _value(f"{kind}.{key}", value, kind, key)
    for key, value in _FACTS["grease"].items():
        if isinstance(value, dict):
            for end, number in value.items():
                yield from _value(f"grease.{key}.{end}", number, "grease", key, end)
        else:
            yield from _value(f"grease.{key}", value, "grease", key)
    for name, machine in _FACTS["machine"].items():
        for i, move in enumerate(machine["move"]):
            at = f"machine.{name}.{move['from']}.{move['message']}"
            yield f"{at} removed", _at(_removed(i), "machine", name, "move")
            if move["to"] != "same":
                yield f"{at} stays", _at(_set("to", "same"), "machine", name, "move", i)


def _at(change: Callable[[Any], object], *path: str | int) -> Edit:
    def edit(facts: Facts) -> None:
        found: Any = facts
        for step in path:
            found = found[step]
        change(found)

    return edit


def _set(key: str, value: Any) -> Callable[[Row], None]:
    return lambda row: row.update({key: value})


def _removed(i: Any) -> Callable[[Any], None]:
    def change(rows: Any) -> None:
        del rows[i]

    return change


def _value(name: str, value: Any, *path: str) -> Iterator[tuple[str, Edit]]:
    """A value somewhere: one more and one less, the other of two, the list without each of its elements."""
    *above, key = path
    match value:
        case bool():
            others: list[Any] = [not value]
        case int():
            others = [value + 1, value - 1]
        case str():
            others = [value[:-1] + chr(ord(value[-1]) ^ 1)]
        case list():
            others = [value[:i] + value[i + 1 :] for i in range(len(value))]
        case _:
            others = []
    for other in others:
        yield f"{name} = {other}", _at(_set(key, other), *above)


def _body(body: Row) -> Iterator[tuple[str, Callable[[Row], object]]]:
    for i, field in enumerate(body["field"]):
        name = field["name"]
        for what, change in _field(field):
            yield f"{name}.{what}", partial(_nth, "field", i, change)
        yield f"{name}.id", partial(_moved, i)
        yield f"{name} removed", partial(_without, i)
        if i:
            yield f"{name}.order", partial(_swapped, i)
    for i, rule in enumerate(body.get("rule", [])):
        at = f"rule {rule['id']}"
        yield f"{at} removed", partial(_no_rule, i)
        other = "REPEATED" if rule["error"] != "REPEATED" else "NOT_ASCENDING"
        yield f"{at}.error", partial(_nth, "rule", i, _set("error", other))
        if rule["rule"] in _OTHER_RULE:
            yield f"{at}.predicate", partial(_nth, "rule", i, _set("rule", _OTHER_RULE[rule["rule"]]))
        if i:
            yield f"{at}.order", partial(_earlier, i)


def _nth(rows: str, i: int, change: Callable[[Row], object], body: Row) -> None:
    change(body[rows][i])


def _no_rule(i: int, body: Row) -> None:
    del body["rule"][i]


def _earlier(i: int, body: Row) -> None:
    """The rule is checked before the one that it comes after."""
    body["rule"].insert(i - 1, body["rule"].pop(i))


def _field(field: Row) -> Iterator[tuple[str, Callable[[Row], object]]]:
    type_ = field["type"]
    yield "presence", _set("presence", "required" if field["presence"] == "optional" else "optional")
    other = _OTHER_TYPE.get(type_)
    if type_.startswith("enum:"):
        other = "u16"
    elif type_.startswith("struct:"):
        other = f"list<{type_}>"
    elif type_.startswith("list<"):
        other = "array<u32>"
    if other is not None:
        yield f"type = {other}", _set("type", other)
    for key in ("min", "max", "length"):
        for by in (-1, 1) if key in field else ():
            yield f"{key}{by:+}", _set(key, field[key] + by)
    yield "since", _set("since", "1.1")
    yield "unit", _set("unit", "byte" if field["unit"] != "byte" else "none")
    yield "secret", lambda row: row.update(secret=not row.get("secret", False))


def _moved(i: int, body: Row) -> None:
    """The field takes the number after the last."""
    field = body["field"].pop(i)
    body["field"].append({**field, "id": max([field["id"], *(f["id"] for f in body["field"])]) + 1})


def _without(i: int, body: Row) -> None:
    """The field is gone, and the rules over it."""
    name = body["field"].pop(i)["name"]
    body["rule"] = [rule for rule in body.get("rule", []) if name not in rule["args"]]


def _swapped(i: int, body: Row) -> None:
    """The field and the one before exchange their numbers."""
    first, second = body["field"][i - 1], body["field"][i]
    first["id"], second["id"] = second["id"], first["id"]
    body["field"][i - 1 : i + 1] = second, first


def _message(message: Row) -> Iterator[tuple[str, Callable[[Row], object]]]:
    yield "id", _set("id", message["id"] + 0x40)
    yield "frozen", _set("frozen", not message["frozen"])
    for key in ("since", "status", "sender"):
        yield key, _set(key, _OTHER_WORD.get(message[key], "sink"))
    yield "delivery", _set("delivery", "request" if message["delivery"] == "notice" else "notice")
    for feature in message.get("feature", ()):
        yield f"feature {feature} removed", _set("feature", [f for f in message["feature"] if f != feature])
    if "feature" not in message:
        yield "feature VERIFY needed", _set("feature", ["VERIFY"])
    for reply in message["reply"]:
        yield f"reply {reply} removed", _set("reply", [r for r in message["reply"] if r != reply])


def _enum(enum: Row) -> Iterator[tuple[str, Callable[[Row], object]]]:
    yield "open", _set("open", not enum["open"])
    top = max(enum["values"].values()) + 1
    for value in enum["values"]:
        yield f"{value} = {top}", partial(_valued, value, top)
        yield f"{value} removed", partial(_unvalued, value)
    yield "one more", partial(_valued, "ANOTHER", top)


def _valued(name: str, value: int, enum: Row) -> None:
    enum["values"][name] = value
    enum["docs"].setdefault(name, "Another.")


def _unvalued(name: str, enum: Row) -> None:
    del enum["values"][name], enum["docs"][name]
