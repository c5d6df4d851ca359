"""The modules of the crate `kvproto` that follow from the registry: tables, enums, and messages and structs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.specgen.library import enums, span
from tools.specgen.registry import HEAD, ROOT, Facts, of_core

SOURCES = ROOT / "crates/kvproto/src"
_KINDS = {"bool": "Kind::Bool", "str": "Kind::Text", "bytes": "Kind::Bytes"}
_TYPES = {"str": "String", "bytes": "Vec<u8>"}


def crate(facts: Facts) -> dict[Path, str]:
    """The generated modules; drafts' fields are left out, as a codec of the core skips them."""
    core = of_core(facts)
    return {
        SOURCES / "facts.rs": _facts(core),
        SOURCES / "enums.rs": _enums(core),
        SOURCES / "messages.rs": _messages(core),
    }


def _facts(facts: Facts) -> str:
    """Limits, enums, and of each message and struct its fields and rules, as tables."""
    protocol, layouts = facts["protocol"], facts["struct"] | facts["message"]
    lines = [
        f"//! Tables of the registry. {HEAD}\n",
        "use crate::enums::ErrorCode;",
        "use crate::layout::{Enum, Field, Kind, Layout, Predicate, Rule};\n",
        f'pub(crate) const MAGIC: [u8; 4] = *b"{protocol["magic"]}";',
        f"pub(crate) const HEADER: usize = {protocol['header_bytes']};",
        "/// Major version of the specification that this crate speaks.",
        f"pub const MAJOR: u8 = {protocol['major']};",
        "/// Minor version of the specification that this crate speaks.",
        f"pub const MINOR: u8 = {protocol['minor']};",
    ]
    for name, row in facts["limit"].items():
        if row["scope"] in ("body", "plan"):
            lines += [f"/// {row['doc']}", f"pub const {name.upper()}: u64 = {row['value']};"]
    for name, (open_, values) in enums(facts).items():
        rows = ", ".join(f'({value}, "{word}")' for word, value in values.items())
        lines.append(
            f"pub(crate) static E_{_upper(name)}: Enum = Enum {{ open: {json.dumps(open_)}, values: &[{rows}] }};"
        )
    for name, body in layouts.items():
        lines += _layout(facts, name, body)
    for table, kind, doc in (("MESSAGES", "message", "message"), ("STRUCTS", "struct", "struct")):
        named = ", ".join(f"&L_{_upper(name)}" for name in facts[kind])
        lines += [f"/// Every {doc} of the registry.", f"pub static {table}: &[&Layout] = &[{named}];"]
    lines += [
        "/// Registered names of parts: name, whether it is optional, what else it is called.",
        "pub(crate) static PARTS: &[(&str, bool, &[&str])] = &[",
    ]
    for name, row in facts["part"].items():
        aliases = ", ".join(map(json.dumps, row.get("aliases", ())))
        lines.append(f'    ("{name}", {json.dumps(row.get("optional", False))}, &[{aliases}]),')
    return "\n".join([*lines, "];"]) + "\n"


def _layout(facts: Facts, name: str, body: dict[str, Any]) -> list[str]:
    protocol = facts["protocol"]
    major = protocol["frozen_major"] if body.get("frozen") else protocol["major"]
    lines = [
        f"pub(crate) static L_{_upper(name)}: Layout = Layout {{",
        f'    name: "{name}", id: {body.get("id", 0)}, major: {major},',
        "    fields: &[",
    ]
    for field in _fields(body):
        least, most = span(facts, field)
        lines.append(
            f'        Field {{ id: {field["id"]}, name: "{field["name"]}", '
            f"required: {json.dumps(field['presence'] == 'required')}, secret: {json.dumps(field.get('secret', False))}, "
            f"kind: {_kind(field['type'])}, range: {least}..={most} }},"
        )
    rules = [
        f"        Rule {{ error: ErrorCode::{rule['error']}, holds: {_predicate(rule)} }},"
        for rule in body.get("rule", ())
    ]
    return [*lines, "    ],", *(["    rules: &[", *rules, "    ],"] if rules else ["    rules: &[],"]), "};"]


def _fields(body: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(body["field"], key=lambda field: int(field["id"]))


def _upper(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _parsed(type_: str) -> tuple[str, str]:
    """The kind of a type, and what stands in its brackets or after its colon."""
    kind, _, inner = type_.partition("<" if "<" in type_ else ":")
    return kind, inner.removesuffix(">")


def _kind(type_: str) -> str:
    kind, inner = _parsed(type_)
    if kind == "list":
        return f"Kind::List(&{_kind(inner)})"
    if kind == "array":
        return f"Kind::Array({(int(inner[1:]) // 8).bit_length()})"
    if inner:
        return f"Kind::{kind.title()}(&{kind[0].replace('s', 'l').upper()}_{_upper(inner)})"
    return _KINDS.get(kind, "Kind::Uint")


def _predicate(rule: dict[str, Any]) -> str:
    name, args = rule["rule"].title().replace("_", ""), [json.dumps(arg) for arg in rule["args"]]
    if name in ("Ascend", "Rise", "Unique"):
        args = [args[0], f"Some({args[1]})" if len(args) > 1 else "None"]
    elif name == "SameLength":
        args = [f"&[{', '.join(args)}]"]
    elif name == "SumLe" and isinstance(rule["args"][2], int):
        name = "SumAtMost"
    return f"Predicate::{name}({', '.join(args)})"


def _enums(facts: Facts) -> str:
    """A type for each enum."""
    docs = {name: enum["docs"] for name, enum in facts["enum"].items()}
    docs["ErrorCode"] = {name: error["doc"] for name, error in facts["error"].items()}
    heads = {name: enum["doc"] for name, enum in facts["enum"].items()} | {"ErrorCode": "Reason for a refusal."}
    lines = [
        f"//! Enums of the registry. {HEAD}\n",
        "use crate::facts;",
        "use crate::layout::{closed_enum, open_enum};",
    ]
    for name, (open_, values) in enums(facts).items():
        macro = "open_enum" if open_ else "closed_enum"
        lines += ["", f"{macro}! {{", f"    /// {heads[name]}", f"    {name}: facts::E_{_upper(name)} {{"]
        for word, value in values.items():
            lines.append(f"        /// {docs[name][word]}")
            lines.append(f"        {word if open_ else word.title().replace('_', '')} = {value},")
        lines += ["    }", "}"]
    return "\n".join(lines) + "\n"


def _messages(facts: Facts) -> str:
    """A type for each message and struct, and one for any message."""
    lines = [
        f"//! Messages and structs of the registry. {HEAD}\n",
        "use crate::body::{body, messages};",
        "use crate::enums::*;",
        "use crate::facts;",
        "use alloc::string::String;",
        "use alloc::vec::Vec;",
    ]
    for name, body in (facts["struct"] | facts["message"]).items():
        lines += ["", "body! {", f"    /// {body['doc']}", f"    {name}: facts::L_{_upper(name)} {{"]
        for field in _fields(body):
            lines += [f"        /// {field['doc']}", f"        {field['name']}: {_type(field)},"]
        lines += ["    }", "}"]
    return "\n".join([*lines, "", f"messages! {{ {', '.join(facts['message'])} }}"]) + "\n"


def _type(field: dict[str, Any]) -> str:
    made = f"[u8; {field['length']}]" if "length" in field else _rust(field["type"])
    return made if field["presence"] == "required" else f"Option<{made}>"


def _rust(type_: str) -> str:
    kind, inner = _parsed(type_)
    return f"Vec<{_rust(inner)}>" if kind in ("list", "array") else inner or _TYPES.get(kind, kind)
