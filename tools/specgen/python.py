"""Python that follows from the registry: enums, classes, the codec's tables, the transition tables."""

from __future__ import annotations

import json

from tools.specgen.registry import HEAD, Facts, moves

__all__ = [
    "enums_module",
    "limits_module",
    "messages_module",
    "metrics_module",
    "parts_module",
    "tables_module",
    "transitions_module",
]

_INTS = {"u8", "u16", "u32", "u64"}


def annotation(type_: str, facts: Facts) -> str:
    """Python type of a field."""
    if type_.startswith("list<"):
        return f"tuple[{annotation(type_[5:-1], facts)}, ...]"
    if type_.startswith("array<"):
        return "UIntArray"
    if type_.startswith("struct:"):
        return f'"{type_[7:]}"'
    if type_.startswith("enum:"):
        name = type_[5:]
        return "int" if name == "ErrorCode" or facts["enum"][name]["open"] else f"enums.{name}"
    return "int" if type_ in _INTS else type_


def enums_module(facts: Facts) -> str:
    """kvproto/wire/enums.py"""
    out = [f'"""Enums and errors of v1. {HEAD}"""', "", "from enum import IntEnum", ""]
    for name, enum in facts["enum"].items():
        out += ["", f"class {name}(IntEnum):", f'    """{enum["doc"]}"""', ""]
        for member, value in enum["values"].items():
            out += [f"    {member} = {value}", f'    """{enum["docs"][member]}"""']
        out.append("")
    out += ["", "class ErrorCode(IntEnum):", '    """What a refusal says is wrong."""', ""]
    for name, error in facts["error"].items():
        out += [f"    {name} = 0x{error['code']:04X}", f'    """{error["doc"]}"""']
    out += [
        "", "", "def word(enum: type[IntEnum], value: int) -> str:", '    """The name of a value, for texts; the number of one that is not known."""',
        "    known = enum._value2member_map_.get(value)", '    return str(int(value)) if known is None else known.name', "",
    ]  # fmt: skip
    for table, key in (("CLASS", "class"), ("RECOVERY", "recovery"), ("DOC", "doc")):
        out += ["", "" if table == "CLASS" else None, f"ERROR_{table}: dict[ErrorCode, str] = {{"]  # type: ignore[list-item]
        out += [f'    ErrorCode.{name}: "{error[key]}",' for name, error in facts["error"].items()] + ["}"]
    return "\n".join(line for line in out if line is not None) + "\n"


def messages_module(facts: Facts) -> str:
    """kvproto/wire/messages.py"""
    out = [
        f'"""Messages and structs of v1. {HEAD}"""', "", "from typing import Any, ClassVar", "", "import attrs", "import numpy as np",
        "import numpy.typing as npt", "", "from kvproto.wire import enums", "", "UIntArray = npt.NDArray[np.unsignedinteger[Any]]",
        "_same = attrs.cmp_using(eq=np.array_equal)", "",
    ]  # fmt: skip
    for kind in ("struct", "message"):
        for name, body in facts[kind].items():
            out += ["", "@attrs.frozen(kw_only=True)", f"class {name}:", f'    """{body["doc"]}"""', ""]
            if kind == "message":
                out += [f"    TYPE: ClassVar[int] = 0x{body['id']:04X}", ""]
            for field in body["field"]:
                type_ = annotation(field["type"], facts)
                options = []
                if field["presence"] == "optional":
                    type_ = f'"{type_[1:-1]} | None"' if type_.startswith('"') else f"{type_} | None"
                    options.append("default=None")
                if field.get("secret"):
                    options.append("repr=False")
                if field["type"].startswith("array<"):
                    options.append("eq=_same, hash=False")
                default = f" = attrs.field({', '.join(options)})" if options else ""
                unit = "" if field["unit"] == "none" else f" [{field['unit']}]"
                out += [
                    f"    {field['name']}: {type_}{default}",
                    f'    """{field["doc"]}{unit} Since {field["since"]}."""',
                ]
            out.append("")
    out += ["", "Message = (", "    " + "\n    | ".join(facts["message"]), ")"]
    return "\n".join(out) + "\n"


def parts_module(facts: Facts) -> str:
    """kvproto/planning/parts.py"""
    parts = facts["part"]
    out = [
        f'"""Names of parts of v1. {HEAD}"""',
        "",
        f"PARTS = ({json.dumps(list(parts))[1:-1]})",
        '"""Registered names."""',
        "",
        "ALIASES = {",
    ]
    out += [f"    {json.dumps(alias)}: {json.dumps(name)}," for name, row in parts.items() for alias in row["aliases"]]
    out += ["}", '"""Registered names by alias."""', "", "SHARE_OF = {"]
    out += [f"    {json.dumps(name)}: {json.dumps(row['of'])}," for name, row in parts.items() if "of" in row]
    out += ["}", '"""The whole part, by the registered name of a share of it."""', "", "SCALES = {"]
    out += [f"    {json.dumps(name)}: {json.dumps(row['scales'])}," for name, row in parts.items() if "scales" in row]
    return (
        "\n".join([*out, "}", '"""The part that means nothing without its scales, by the name of the scales."""'])
        + "\n"
    )


def tables_module(facts: Facts) -> str:
    """kvproto/wire/tables.py"""
    p, limits, grease = facts["protocol"], facts["limit"], facts["grease"]
    open_enums = ["ErrorCode", *(n for n, e in facts["enum"].items() if e["open"])]
    out = [
        f'"""Tables that the strict codec walks. {HEAD}"""', "", f'MAGIC = b"{p["magic"]}"', f"MAJOR = {p['major']}", f"MINOR = {p['minor']}",
        f"HEADER_BYTES = {p['header_bytes']}", f"FROZEN_MAJOR = {p['frozen_major']}", f"KNOWN_FLAGS = {p['known_flags']}",
        *(f"{name.upper()} = {row['value']}" for name, row in limits.items() if row["scope"] == "body"),
        *(f"GREASE_{key.upper()} = range({g['first']}, {g['last'] + 1}, {g['step']})" for key, g in grease.items() if key != "major"),
        f"GREASE_MAJOR = {grease['major']}", f"MAY_IGNORE = 0x{1 << facts['field_ids']['may_ignore_bit']:04X}", "",
        "ARRAY_CODES = {" + ", ".join(f"{1 << i}: {facts['ext'][f'u{8 << i}']}" for i in range(4)) + "}", '"""Width in bytes of unsigned numbers to ext code."""', "",
        "ARRAY_KINDS = {" + ", ".join(f'{code}: ("{name[0]}", {int(name[1:]) // 8})' for name, code in facts["ext"].items()) + "}", '"""Ext code to kind and width in bytes."""', "",
        f"OPEN_ENUMS = {{{json.dumps(open_enums)[1:-1]}}}", "",
        "Field = tuple[int, str, str, bool, int | None, int | None, int | None]",
        '"""id, name, type, required, min, max (of a list or array: elements; of text and bytes: length), exact length"""',
        "Rule = tuple[str, tuple[str | int, ...], str]", '"""predicate, its arguments, the error"""', "",
        "FROZEN = {" + ", ".join(f'"{n}"' for n, m in facts["message"].items() if m["frozen"]) + "}", "",
        "FIELDS: dict[str, tuple[Field, ...]] = {",
    ]  # fmt: skip
    bodies = (facts["struct"] | facts["message"]).items()
    for name, body in bodies:
        out.append(f'    "{name}": (')
        for f in body["field"]:
            row = (
                f["id"],
                f["name"],
                f["type"],
                f["presence"] == "required",
                f.get("min"),
                f.get("max"),
                f.get("length"),
            )
            out.append("        " + repr(row).replace("'", '"') + ",")
        out.append("    ),")
    out += ["}", "", "RULES: dict[str, tuple[Rule, ...]] = {"]
    for name, body in bodies:
        if body.get("rule"):
            out.append(f'    "{name}": (')
            for r in body["rule"]:
                out.append("        " + repr((r["rule"], tuple(r["args"]), r["error"])).replace("'", '"') + ",")
            out.append("    ),")
    units = {n: {f["name"]: f["unit"] for f in b["field"] if f["unit"] != "none"} for n, b in bodies}
    secret = {n: {f["name"] for f in b["field"] if f.get("secret")} for n, b in bodies}
    out += ["}", "", "DELIVERY: dict[str, str] = {"]
    out += [f'    "{name}": "{message["delivery"]}",' for name, message in facts["message"].items()]
    out += ["}", "", "UNITS: dict[str, dict[str, str]] = {"]
    out += [f"    {json.dumps(n)}: {json.dumps(row)}," for n, row in units.items() if row]
    out += ["}", "", "SECRET: dict[str, set[str]] = {"]
    out += [f"    {json.dumps(n)}: {{{json.dumps(sorted(row))[1:-1]}}}," for n, row in secret.items() if row]
    return "\n".join([*out, "}"]) + "\n"


_LIMITS = {
    "session": "Times and numbers that a session keeps; an engine may set others before it opens a Source or Sink.\n\n",
    "net": "Times and numbers of connections. ",
    "plan": "Limits of planning. ",
}
"""What the module of each scope holds."""


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
    """kvproto/session/transitions.py: every row, and the features that it needs."""
    out = [
        f'"""States and moves of a session and its transfers. {HEAD}"""',
        "",
        "from enum import Enum",
        "",
        "from kvproto.wire.enums import Feature",
        "",
    ]
    for name, machine in facts["machine"].items():
        out += ["", f"class {name.title()}State(Enum):", f'    """{machine["doc"]}"""', ""]
        out += ["    __hash__ = object.__hash__  # rows are looked up by it for every message", ""]
        for state in machine["state"]:
            out += [f'    {state["name"].upper()} = "{state["name"]}"', f'    """{state["doc"]}"""']
        out.append("")
    for name in facts["machine"]:
        cls = f"{name.title()}State"
        rows = moves(facts, name)
        out += ["", f"{name.upper()}: dict[tuple[{cls}, str], {cls}] = {{"]
        out += [
            f'    ({cls}.{before.upper()}, "{message}"): {cls}.{after.upper()},' for before, message, after, _ in rows
        ]
        out += ["}", "", f"{name.upper()}_FEATURES: dict[tuple[{cls}, str], frozenset[Feature]] = {{"]
        out += [
            f'    ({cls}.{before.upper()}, "{message}"): frozenset({{{", ".join(f"Feature.{f}" for f in features)}}}),'
            for before, message, _, features in rows
            if features
        ]
        out += ["}", '"""Rows that are there only in sessions with one of these features."""']
    return "\n".join(out) + "\n"
