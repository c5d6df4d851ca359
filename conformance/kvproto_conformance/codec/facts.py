"""The facts of registry.json, loaded once, in the shape that the reader and the writer need."""

import json
from dataclasses import dataclass
from typing import Any

from kvproto_conformance.data import REGISTRY


class Refusal(Exception):
    """The specification refuses these bytes or this JSON; `code` and `path` are those of the first failure."""

    def __init__(self, code: str, path: str) -> None:
        super().__init__(f"{code} at {path or 'the whole message'}")
        self.code = code
        self.path = path


@dataclass(frozen=True)
class Type:
    """A field type; kind is uint, bool, str, bytes, enum, struct, list or array."""

    kind: str
    low: int = 0
    high: int = 0
    name: str = ""
    element: "Type | None" = None

    @property
    def item(self) -> "Type":
        """The element type of a list or array."""
        assert self.element is not None
        return self.element


@dataclass(frozen=True)
class Field:
    """A field; its type holds its range."""

    id: int
    name: str
    type: Type
    required: bool


@dataclass(frozen=True)
class Rule:
    """A predicate over the fields of one map, and the error for breaking it."""

    predicate: str
    args: tuple[Any, ...]
    error: str


@dataclass(frozen=True)
class Layout:
    """The fields and rules of a message or struct; only messages have a number and a major version."""

    name: str
    number: int
    major: int
    fields: dict[int, Field]
    names: dict[str, Field]
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Enum:
    """The names and values of an enum."""

    open: bool
    names: dict[int, str]
    values: dict[str, int]


_facts: dict[str, Any] = json.loads(REGISTRY.read_text(encoding="utf-8"))
_protocol: dict[str, Any] = _facts["protocol"]
MAGIC: bytes = _protocol["magic"].encode("ascii")
MAJOR: int = _protocol["major"]
MINOR: int = _protocol["minor"]
FROZEN_MAJOR: int = _protocol["frozen_major"]
HEADER_BYTES: int = _protocol["header_bytes"]
KNOWN_FLAGS: int = _protocol["known_flags"]
MAY_IGNORE: int = 1 << _facts["field_ids"]["may_ignore_bit"]
MAX_ID = 0xFFFF
MAX_ENUM = 0xFFFF
EXT: dict[str, int] = _facts["ext"]
GREASE_FEATURES = range(_facts["grease"]["features"]["first"], _facts["grease"]["features"]["last"] + 1,
                        _facts["grease"]["features"]["step"])  # fmt: skip
"""Numbers of features that are never given a meaning."""
LIMITS: dict[str, int] = {name: limit["value"] for name, limit in _facts["limit"].items()}
LIMIT_OF = {"str": "max_string", "bytes": "max_bytes", "list": "max_list", "array": "max_array"}


def parse_type(text: str, low: int | None = None, high: int | None = None) -> Type:
    """Turn a type of the registry and an optional range into a Type."""
    kind, _, rest = text.partition("<" if "<" in text else ":")
    name, element = "", None
    if text[0] == "u":
        kind, top = "uint", (1 << int(text[1:])) - 1
    elif kind in ("list", "array"):
        element, top = parse_type(rest[:-1]), LIMITS[LIMIT_OF[kind]]
    elif kind == "enum":
        name, top = rest, MAX_ENUM
    elif kind == "struct":
        name, top = rest, 0
    else:
        top = LIMITS[LIMIT_OF[kind]] if kind in LIMIT_OF else 0
    return Type(kind, low or 0, top if high is None else high, name, element)


def _field(raw: dict[str, Any]) -> Field:
    low, high = raw.get("length", raw.get("min")), raw.get("length", raw.get("max"))
    return Field(raw["id"], raw["name"], parse_type(raw["type"], low, high), raw["presence"] == "required")


def _layout(name: str, raw: dict[str, Any]) -> Layout:
    fields = sorted((_field(field) for field in raw["field"]), key=lambda field: field.id)
    rules = tuple(Rule(rule["rule"], tuple(rule["args"]), rule["error"]) for rule in raw.get("rule", []))
    major = FROZEN_MAJOR if raw.get("frozen") else MAJOR
    by_id, by_name = {field.id: field for field in fields}, {field.name: field for field in fields}
    return Layout(name, raw.get("id", 0), major, by_id, by_name, rules)


def _enum(is_open: bool, values: dict[str, int]) -> Enum:
    return Enum(is_open, {value: name for name, value in values.items()}, values)


MESSAGES: dict[str, Layout] = {name: _layout(name, raw) for name, raw in _facts["message"].items()}
MESSAGE_TYPES: dict[int, Layout] = {layout.number: layout for layout in MESSAGES.values()}
STRUCTS: dict[str, Layout] = {name: _layout(name, raw) for name, raw in _facts["struct"].items()}
ENUMS: dict[str, Enum] = {name: _enum(raw["open"], raw["values"]) for name, raw in _facts["enum"].items()}
ENUMS["ErrorCode"] = _enum(True, {name: raw["code"] for name, raw in _facts["error"].items()})


def find(layouts: dict[str, Layout], name: str) -> Layout:
    """Return the layout of a message or struct, or refuse a name that is not known."""
    if not isinstance(name, str) or name not in layouts:
        raise Refusal("UNKNOWN_MESSAGE", "@type")
    return layouts[name]


def join(path: str, name: str) -> str:
    """Return the path of a field of the map at a path."""
    return f"{path}.{name}" if path else name


PART_NAMES: dict[str, list[str]] = {name: raw["aliases"] for name, raw in _facts["part"].items()}
"""Registered names of parts, each with its aliases."""


SCALED_BY: dict[str, str] = {name: raw["scales"] for name, raw in _facts["part"].items() if "scales" in raw}
"""The part that is scaled, by the registered name of its scales."""

CONVERSIONS: dict[str, dict[str, str]] = _facts["conversion"]
"""By name: the dtypes of its wide and its narrow form, and where the scales of the narrow one are."""

OPTIONAL = {name for name, raw in _facts["part"].items() if raw.get("optional")}
"""Registered names of parts that a sink takes or leaves, whatever else it takes of a layer."""
