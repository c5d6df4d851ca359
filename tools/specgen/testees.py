"""The facts that libkvproto and testees in other languages contain: a block of each file, made from the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.specgen.library import enums, numbers, span, tables
from tools.specgen.registry import ROOT, Facts, of_core

TESTEES = ROOT / "conformance/testees"
_BEGIN, _END = "begin facts. Generated", "end facts"


def testees(facts: Facts) -> dict[Path, str]:
    """Testees with their facts renewed."""
    return {path: _renewed(path.read_text(), make(of_core(facts))) for path, make in _MADE.items()}


def _renewed(text: str, facts: str) -> str:
    """The text with the lines of the block replaced, and its first and last line kept."""
    lines = text.splitlines(keepends=True)
    begin, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in (_BEGIN, _END))
    return "".join([*lines[: begin + 1], facts, *lines[end:]])


def _node(facts: Facts) -> str:
    """A table in JavaScript: limits, enums, and of each message and struct its fields and rules."""
    limits = {name: row["value"] for name, row in facts["limit"].items() if row["scope"] == "body"}
    protocol = facts["protocol"]
    lines = [f"const MAJOR = {protocol['major']}, MINOR = {protocol['minor']};"]
    lines += ["const LIMITS = " + json.dumps(limits) + ";", "const ENUMS = {"]
    lines += [
        f"  {name}: [{json.dumps(open_)}, {json.dumps(values)}]," for name, (open_, values) in enums(facts).items()
    ]
    lines += [
        "};",
        "// name: [type, whether its major is frozen, fields, rules]; a field: [id, name, type, required, least, greatest]",
        "const LAYOUTS = {",
    ]
    for name, body in (facts["struct"] | facts["message"]).items():
        fields = sorted(body["field"], key=lambda field: int(field["id"]))
        rows = [[f["id"], f["name"], f["type"], f["presence"] == "required", *map(str, span(facts, f))] for f in fields]
        rules = [[rule["rule"], rule["args"], rule["error"]] for rule in body.get("rule", ())]
        lines.append(f"  {name}: {json.dumps([body.get('id', 0), bool(body.get('frozen')), rows, rules])},")
    return "\n".join([*lines, "};"]) + "\n"


def _rust_parts(facts: Facts) -> str:
    """In Rust, limits of plans, and of each name of a part what it is called elsewhere and whether it is optional."""
    limits = {name: row["value"] for name, row in facts["limit"].items() if row["scope"] == "plan"}
    lines = [f"pub const {name.upper()}: u64 = {value};" for name, value in limits.items()]
    lines.append("/// Name, whether it is optional, what else it is called.")
    lines.append("pub static REGISTERED: &[(&str, bool, &[&str])] = &[")
    for name, row in facts["part"].items():
        aliases = ", ".join(map(json.dumps, row.get("aliases", ())))
        lines.append(f'    ("{name}", {json.dumps(row.get("optional", False))}, &[{aliases}]),')
    return "".join(f"    {line}\n" for line in [*lines, "];"])


_RUST_KINDS = {"bool": "Kind::Bool", "str": "Kind::Text", "bytes": "Kind::Bytes"}


def _rust(facts: Facts) -> str:
    """Tables in Rust: limits, enums, and of each message and struct its fields and rules."""
    protocol, layouts = facts["protocol"], facts["struct"] | facts["message"]
    lines = [
        f'pub(super) const MAGIC: [u8; 4] = *b"{protocol["magic"]}";',
        f"pub(super) const HEADER: usize = {protocol['header_bytes']};",
        f"pub(super) const MAJOR: u8 = {protocol['major']};",
        f"pub(super) const MINOR: u8 = {protocol['minor']};",
    ]
    lines += [
        f"pub(super) const {name.upper()}: u64 = {row['value']};"
        for name, row in facts["limit"].items()
        if row["scope"] == "body"
    ]
    for name, (open_, values) in enums(facts).items():
        rows = ", ".join(f'({value}, "{word}")' for word, value in values.items())
        lines.append(f"static E_{_upper(name)}: Enum = Enum {{ open: {json.dumps(open_)}, values: &[{rows}] }};")
    for name, body in layouts.items():
        major = protocol["frozen_major"] if body.get("frozen") else protocol["major"]
        lines += [
            f"static L_{_upper(name)}: Layout = Layout {{",
            f'    name: "{name}", id: {body.get("id", 0)}, major: {major},',
            "    fields: &[",
        ]
        for field in sorted(body["field"], key=lambda field: int(field["id"])):
            least, most = span(facts, field)
            lines.append(
                f'        Field {{ id: {field["id"]}, name: "{field["name"]}", '
                f"required: {json.dumps(field['presence'] == 'required')}, kind: {_rust_kind(field['type'])}, "
                f"range: {least}..={most} }},"
            )
        rules = [
            f'        Rule {{ error: "{rule["error"]}", holds: {_rust_predicate(rule)} }},'
            for rule in body.get("rule", ())
        ]
        lines += ["    ],", *(["    rules: &[", *rules, "    ],"] if rules else ["    rules: &[],"]), "};"]
    for table, kind in (("MESSAGES", "message"), ("STRUCTS", "struct")):
        named = ", ".join(f"&L_{_upper(name)}" for name in facts[kind])
        lines.append(f"pub static {table}: &[&Layout] = &[{named}];")
    return "".join(f"    {line}\n" for line in lines)


def _upper(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _rust_kind(type_: str) -> str:
    kind, _, inner = type_.partition("<" if "<" in type_ else ":")
    if kind == "list":
        return f"Kind::List(&{_rust_kind(inner[:-1])})"
    if kind == "array":
        return f"Kind::Array({(int(inner[1:-1]) // 8).bit_length()})"
    if inner:
        return f"Kind::{kind.title()}(&{kind[0].replace('s', 'l').upper()}_{_upper(inner)})"
    return _RUST_KINDS.get(kind, "Kind::Uint")


def _rust_predicate(rule: dict[str, Any]) -> str:
    name, args = rule["rule"].title().replace("_", ""), [json.dumps(arg) for arg in rule["args"]]
    if name in ("Ascend", "Rise", "Unique"):
        args = [args[0], f"Some({args[1]})" if len(args) > 1 else "None"]
    elif name == "SameLength":
        args = [f"&[{', '.join(args)}]"]
    elif name == "SumLe" and isinstance(rule["args"][2], int):
        name = "SumAtMost"
    return f"Predicate::{name}({', '.join(args)})"


_MADE = {
    TESTEES / "node/codec.mjs": _node,
    TESTEES / "rust/codec.rs": _rust,
    TESTEES / "rust/description.rs": _rust_parts,
    ROOT / "libkvproto/include/kvproto.h": numbers,
    ROOT / "libkvproto/src/facts.c": tables,
}
