"""Python that follows from the registry: enums, classes, the codec's tables, the transition tables."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator

from tools.specgen.registry import HEAD, Facts, moves, version

_INTS = {"u8", "u16", "u32", "u64"}


def annotation(type_: str, facts: Facts) -> str:
    """Python type of a field."""
    if type_.startswith("list<"):
        return f"tuple[{annotation(type_[5:-1], facts)}, ...]"
    if type_.startswith("array<"):
        return "UIntArray"
    if type_.startswith("struct:"):
        return type_[7:]
    if type_.startswith("enum:"):
        name = type_[5:]
        return "int" if name == "ErrorCode" or facts["enum"][name]["open"] else f"enums.{name}"
    return "int" if type_ in _INTS else type_


_ERRORS = '''
class ErrorCode(IntEnum):
    """A reason for a refusal: its code, its class, the recovery that fits, and its meaning, which is the docstring."""

    _value_: int
    error_class: str
    recovery: str

    def __new__(cls, code: int, error_class: str = "", recovery: str = "", meaning: str = "") -> "ErrorCode":
        member = int.__new__(cls, code)
        member._value_, member.error_class, member.recovery, member.__doc__ = code, error_class, recovery, meaning
        return member
'''
_WORD = '''

def word(enum: type[IntEnum], value: int) -> str:
    """The name of a value, for texts; the number of one that is not known."""
    known = enum._value2member_map_.get(value)
    return str(int(value)) if known is None else known.name
'''


def enums_module(facts: Facts) -> str:
    """kvproto/wire/enums.py"""
    pages = "What each value of an enum means is in spec/v1/messages.md, below Enums."
    out = [f'"""Enums and errors of v1. {HEAD}\n\n{pages}\n"""', "", "from enum import IntEnum", "", ""]
    for name, enum in facts["enum"].items():
        out += [f"class {name}(IntEnum):", f'    """{enum["doc"]}"""']
        out += [*(f"    {member} = {value}" for member, value in enum["values"].items()), ""]
    out.append(_ERRORS)
    for name, error in facts["error"].items():
        texts = ", ".join(json.dumps(error[key]) for key in ("class", "recovery", "doc"))
        out.append(f"    {name} = 0x{error['code']:04X}, {texts}")
    return "\n".join(out) + "\n" + _WORD


_MESSAGES_HEAD = """
from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from attrs import cmp_using, field, frozen

from kvproto.wire import enums
from kvproto.wire.row import row

UIntArray = npt.NDArray[np.unsignedinteger[Any]]
_same = cmp_using(eq=np.array_equal)
"""
_BASES = {
    "_OfSession": ("", ("session",), "A message of a session."),
    "_Asked": ("_OfSession", ("session", "request"), "A request of a session, or the reply to one."),
    "_OfTransfer": ("_OfSession", ("session", "sequence"), "A notice of a transfer."),
    "_AskedOfTransfer": ("_Asked", ("session", "request", "sequence"), "A request of a transfer, or its reply."),
}
"""Bases of messages, which state the fields of many: the base of each, all of its fields, and what it stands for."""


def messages_module(facts: Facts) -> str:
    """kvproto/wire/messages.py"""
    pages = "Their fields are explained in spec/v1/messages.md and messages-extensions.md."
    out = [f'"""Messages and structs of v1. {HEAD}\n\n{pages}\n"""', _MESSAGES_HEAD]
    for name, body in facts["struct"].items():
        out += _class(name, "", body["doc"], [], [_attribute(field, facts) for field in body["field"]])
    shared = {field["name"]: _attribute(field, facts) for field in facts["message"]["Transfer"]["field"]}
    for base, (above, names, doc) in _BASES.items():
        inherited = _BASES[above][1] if above else ()
        out += _class(base, above, doc, [], [shared[name] for name in names if name not in inherited])
    for name, body in facts["message"].items():
        lines = [_attribute(field, facts) for field in body["field"]]
        known = {base: [shared[field] for field in names] for base, (_, names, _) in _BASES.items()}
        base = max((b for b in known if lines[: len(known[b])] == known[b]), key=lambda b: len(known[b]), default="")
        stated = [f"    TYPE: ClassVar[int] = 0x{body['id']:04X}"]
        out += _class(name, base, body["doc"], stated, lines[len(known.get(base, ())) :])
    union = textwrap.wrap(" | ".join(facts["message"]), 112)
    return "\n".join([*out, "", "Message = (", textwrap.indent("\n".join(union), "    "), ")"]) + "\n"


def _class(name: str, base: str, doc: str, stated: Iterable[str], fields: Iterable[str]) -> Iterator[str]:
    """The lines of a struct, a message, or a base of messages."""
    yield from ("@frozen(kw_only=True)", f"class {name}({base}):" if base else f"class {name}:", f'    """{doc}"""')
    yield from (*stated, *fields, "")


def _attribute(field: Facts, facts: Facts) -> str:
    """The line of a class that states a field."""
    type_ = annotation(field["type"], facts)
    bounds = {key: field[key] for key in ("min", "max", "length") if key in field}
    unit = {} if field["unit"] == "none" else {"unit": field["unit"]}
    named = "".join(f", {key}={json.dumps(value)}" for key, value in (bounds | unit).items())
    options = []
    if field["presence"] == "optional":
        type_ += " | None"
        options.append("default=None")
    if field.get("secret"):
        options.append("repr=False")
    if field["type"].startswith("array<"):
        options.append("eq=_same, hash=False")
    options.append(f'metadata=row({field["id"]}, "{field["type"]}"{named})')
    return f"    {field['name']}: {type_} = field({', '.join(options)})"


def parts_module(facts: Facts) -> str:
    """kvproto/planning/parts.py"""
    parts = facts["part"]
    out = [
        f'"""Names of parts of v1. {HEAD}"""',
        "",
        "from kvproto.wire.enums import DType",
        "",
        f"PARTS = ({json.dumps(list(parts))[1:-1]})",
        '"""Registered names."""',
        "",
        "ALIASES = {",
    ]
    aliases = [(json.dumps(row["aliases"]), json.dumps(name)) for name, row in parts.items() if row["aliases"]]
    out += [f"    **dict.fromkeys({names}, {name})," for names, name in aliases]
    shares = {name: row["of"] for name, row in parts.items() if "of" in row}
    optional = [name for name, row in parts.items() if row.get("optional")]
    out += ["}", '"""Registered names by alias."""', "", f"SHARE_OF = {json.dumps(shares)}"]
    out += ['"""The whole part, by the registered name of a share of it."""', "", "SCALES = {"]
    out += [f"    {json.dumps(name)}: {json.dumps(row['scales'])}," for name, row in parts.items() if "scales" in row]
    out += ["}", '"""The part that means nothing without its scales, by the name of the scales."""', ""]
    out += [
        f"OPTIONAL = ({json.dumps(optional)[1:-1]})",
        '"""Parts that a sink takes or leaves, whatever else it takes of a layer."""',
        "",
        "CONVERSIONS = {",
    ]
    rows = facts["conversion"].items()
    out += [f'    "{name}": (DType.{c["wide"]}, DType.{c["narrow"]}, {c["scales"] == "part"}),' for name, c in rows]
    out += [
        "}",
        '"""By name: the dtypes of the wide and the narrow form, and whether a part has the scales of the narrow one."""',
    ]
    return "\n".join(out) + "\n"


_TABLES_HEAD = """
from typing import Any

import attrs

from kvproto.wire import messages
from kvproto.wire.row import Field as Field
from kvproto.wire.row import rows
"""
_TABLES_OF_CLASSES = """\
CLASSES: dict[str, type[Any]] = {
    name: cls for name, cls in vars(messages).items() if attrs.has(cls) and not name.startswith("_")
}
FIELDS = {name: rows(cls) for name, cls in CLASSES.items()}
UNITS = {name: {field.name: field.metadata["unit"] for field in attrs.fields(cls)} for name, cls in CLASSES.items()}
SECRET = {name: {field.name for field in attrs.fields(cls) if not field.repr} for name, cls in CLASSES.items()}
"""


def tables_module(facts: Facts) -> str:
    """kvproto/wire/tables.py"""
    protocol, grease = facts["protocol"], facts["grease"]
    bodies = (facts["struct"] | facts["message"]).items()
    open_enums = ["ErrorCode", *(name for name, enum in facts["enum"].items() if enum["open"])]
    ranges = {key: row for key, row in grease.items() if key != "major"}
    codes = {1 << i: facts["ext"][f"u{8 << i}"] for i in range(4)}
    kinds = {code: (name[0], int(name[1:]) // 8) for name, code in facts["ext"].items()}
    frozen = [name for name, message in facts["message"].items() if message["frozen"]]
    delivered = {
        kind: tuple(name for name, message in facts["message"].items() if message["delivery"] == kind)
        for kind in facts["delivery"]
    }
    out = [
        f'"""Tables that the codec is made of. {HEAD}"""',
        _TABLES_HEAD,
        f'SPEC = "{version(facts)}"',
        f"MAGIC = {_source(protocol['magic'].encode())}",
        f"MAJOR = {protocol['major']}",
        f"MINOR = {protocol['minor']}",
        f"HEADER_BYTES = {protocol['header_bytes']}",
        f"FROZEN_MAJOR = {protocol['frozen_major']}",
        f"KNOWN_FLAGS = {protocol['known_flags']}",
        *(f"{name.upper()} = {row['value']}" for name, row in facts["limit"].items() if row["scope"] == "body"),
        *(f"GREASE_{k.upper()} = range({r['first']}, {r['last'] + 1}, {r['step']})" for k, r in ranges.items()),
        f"GREASE_MAJOR = {grease['major']}",
        f"MAY_IGNORE = 0x{1 << facts['field_ids']['may_ignore_bit']:04X}",
        "",
        f"ARRAY_CODES = {_source(codes)}",
        '"""Width in bytes of unsigned numbers to ext code."""',
        "",
        f"ARRAY_KINDS = {_source(kinds)}",
        '"""Ext code to kind and width in bytes."""',
        "",
        f"OPEN_ENUMS = {{{_source(open_enums)[1:-1]}}}",
        f"FROZEN = {{{_source(frozen)[1:-1]}}}",
        "",
        "DELIVERY = {",
        *(f"    **dict.fromkeys({_source(names)}, {_source(kind)})," for kind, names in delivered.items()),
        "}",
        '"""Message to the class of its delivery."""',
        "",
        _TABLES_OF_CLASSES,
        "Rule = tuple[str, tuple[str | int, ...], str]",
        '"""predicate, its arguments, the error"""',
        "",
        *_table(
            "RULES: dict[str, tuple[Rule, ...]]", {name: _rules(body) for name, body in bodies if body.get("rule")}
        ),
    ]
    return "\n".join(out) + "\n"


def _source(value: object) -> str:
    """A plain value as Python, with double quotes."""
    return repr(value).replace("'", '"')


def _rules(body: Facts) -> tuple[tuple[object, ...], ...]:
    return tuple((rule["rule"], tuple(rule["args"]), rule["error"]) for rule in body["rule"])


def _table(head: str, rows: dict[str, tuple[tuple[object, ...], ...]]) -> Iterator[str]:
    """A dict of rows by name, a line a row; rows that fit into a line stand beside their name."""
    yield f"{head} = {{"
    for name, entries in rows.items():
        line = f'    "{name}": {_source(entries)},'
        if len(line) <= 120:
            yield line
        else:
            yield f'    "{name}": ('
            yield from (f"        {_source(entry)}," for entry in entries)
            yield "    ),"
    yield from ("}", "")


_LIMITS = {
    "session": "Times and numbers that a session keeps; an engine may set others before it opens a Source or Sink.\n\n",
    "net": "Times and numbers of connections. ",
    "plan": "Limits of planning. ",
}
"""The subject of the module of each scope."""


def limits_module(facts: Facts, scope: str) -> str:
    """limits.py of kvproto/session, kvproto/planning and kvproto/net: times in seconds."""
    out = [f'"""{_LIMITS[scope]}{HEAD}"""', ""]
    for name, row in facts["limit"].items():
        if row["scope"] == scope:
            value = row["value"] / 1000 if row["unit"] == "ms" else row["value"]
            unit = " In seconds." if row["unit"] == "ms" else ""
            out += [f"{name.upper()} = {value!r}", f'"""{row["doc"]}{unit}"""']
    return "\n".join(out) + "\n"


def metrics_module(facts: Facts) -> str:
    """kvproto/observability/names.py"""
    out = [
        f'"""Metrics of v1. {HEAD}"""',
        "",
        'BASE = ("engine", "replica", "rank", "role")',
        '"""Labels of every metric."""',
        "",
        "METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {",
    ]
    for name, row in facts["metric"].items():
        doc = row["doc"] if row["unit"] == "none" else f"{row['doc']} [{row['unit']}]"
        labels = "".join(f"{json.dumps(label)}, " for label in row["labels"]).rstrip()
        out.append(f"    {json.dumps(name)}: ({json.dumps(row['type'])}, ({labels}), {json.dumps(doc)}),")
    out += ["}", '"""By name: the type, the labels in addition to those of every metric, and the meaning."""', ""]
    out += [f"BUCKETS = ({json.dumps(facts['metric_buckets']['second'])[1:-1]})"]
    return "\n".join([*out, '"""Upper ends of the buckets of histograms, in seconds."""']) + "\n"


def transitions_module(facts: Facts) -> str:
    """kvproto/session/transitions.py, rows of: states before, the message, the state after if it is another, and the
    features of which one must be chosen."""
    out = [
        f'"""States and moves of a session and its transfers, as spec/v1/session.md states them. {HEAD}"""',
        "",
        "from enum import Enum",
        "",
    ]
    for name, machine in facts["machine"].items():
        out += ["", f"class {name.title()}State(Enum):", f'    """{machine["doc"]}"""']
        out += ["    __hash__ = object.__hash__  # rows are looked up by it for every message"]
        out += [*(f'    {state["name"].upper()} = "{state["name"]}"' for state in machine["state"]), ""]
    for name in facts["machine"]:
        befores: dict[tuple[str, str, str], list[str]] = {}
        for before, message, after, features in moves(facts, name):
            key = message, "" if after == before else after, " ".join(features)
            befores.setdefault(key, []).append(before)
        out += ["", f"{name.upper()}_MOVES = ("]
        out += [*(f"    {_source((' '.join(states), *key))}," for key, states in befores.items()), ")"]
    return "\n".join(out) + "\n"
