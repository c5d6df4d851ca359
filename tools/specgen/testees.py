"""The facts that testees in other languages contain: a block of each file, made from the registry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tools.specgen.registry import ROOT, Facts, number, of_core

TESTEES = ROOT / "conformance/testees"
_BEGIN, _END = "begin facts. Generated", "end facts"
_LIMIT_OF = {"str": "max_string", "bytes": "max_bytes", "list": "max_list", "array": "max_array"}


def testees(facts: Facts) -> dict[Path, str]:
    """Testees with their facts renewed."""
    return {path: _renewed(path.read_text(), make(of_core(facts))) for path, make in _MADE.items()}


def _renewed(text: str, facts: str) -> str:
    """The text with the lines of the block replaced, and its first and last line kept."""
    lines = text.splitlines(keepends=True)
    begin, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in (_BEGIN, _END))
    return "".join([*lines[: begin + 1], facts, *lines[end:]])


def _enums(facts: Facts) -> dict[str, tuple[bool, dict[str, int]]]:
    declared = {name: (bool(enum["open"]), enum["values"]) for name, enum in facts["enum"].items()}
    return declared | {"ErrorCode": (True, {name: error["code"] for name, error in facts["error"].items()})}


def _range(facts: Facts, field: dict[str, Any]) -> tuple[int, int]:
    """Least and greatest value, or length."""
    kind = field["type"].partition("<" if "<" in field["type"] else ":")[0]
    if kind in _LIMIT_OF:
        top = facts["limit"][_LIMIT_OF[kind]]["value"]
    else:
        top = {"enum": 0xFFFF, "struct": 0, "bool": 0}.get(kind) if kind[0] != "u" else (1 << int(kind[1:])) - 1
    length = field.get("length")
    return length or field.get("min", 0), length or field.get("max", top)


def _node(facts: Facts) -> str:
    """A table in JavaScript: limits, enums, and of each message and struct its fields and rules."""
    limits = {name: row["value"] for name, row in facts["limit"].items() if row["scope"] == "body"}
    protocol = facts["protocol"]
    lines = [f"const MAJOR = {protocol['major']}, MINOR = {protocol['minor']};"]
    lines += ["const LIMITS = " + json.dumps(limits) + ";", "const ENUMS = {"]
    lines += [
        f"  {name}: [{json.dumps(open_)}, {json.dumps(values)}]," for name, (open_, values) in _enums(facts).items()
    ]
    lines += [
        "};",
        "// name: [type, whether its major is frozen, fields, rules]; a field: [id, name, type, required, least, greatest]",
        "const LAYOUTS = {",
    ]
    for name, body in (facts["struct"] | facts["message"]).items():
        fields = sorted(body["field"], key=lambda field: int(field["id"]))
        rows = [
            [f["id"], f["name"], f["type"], f["presence"] == "required", *map(str, _range(facts, f))] for f in fields
        ]
        rules = [[rule["rule"], rule["args"], rule["error"]] for rule in body.get("rule", ())]
        lines.append(f"  {name}: {json.dumps([body.get('id', 0), bool(body.get('frozen')), rows, rules])},")
    return "\n".join([*lines, "};"]) + "\n"


def _c(facts: Facts) -> str:
    """Tables in C: limits, enums, and of each message and struct its fields and rules."""
    limits = {name: row["value"] for name, row in facts["limit"].items() if row["scope"] == "body"}
    enums, layouts = _enums(facts), facts["struct"] | facts["message"]
    major, minor = number(facts)
    lines = [f'#define SPEC "{major}.{minor}"', f"enum {{ MAJOR = {major}, MINOR = {minor} }};"]
    lines += ["enum { " + ", ".join(f"{name.upper()} = {value}" for name, value in limits.items()) + " };"]
    lines += [
        f"enum {{ {', '.join(f'E_{name}' for name in enums)} }};",
        f"enum {{ {', '.join(f'L_{name}' for name in layouts)} }};",
    ]
    for name, (_, values) in enums.items():
        lines.append(
            f"static const Value V_{name}[] = {{{', '.join(f'{{{json.dumps(word)}, {n}}}' for word, n in values.items())}}};"
        )
    lines.append("static const Enum ENUMS[] = {")
    lines += [
        f"    {{{'true' if open_ else 'false'}, V_{name}, {len(values)}}}," for name, (open_, values) in enums.items()
    ]
    lines.append("};")
    for name, body in layouts.items():
        lines.append(f"static const Field F_{name}[] = {{")
        for field in sorted(body["field"], key=lambda field: int(field["id"])):
            required = "true" if field["presence"] == "required" else "false"
            lines.append(f'    {{{field["id"]}, "{field["name"]}", {required}, {_c_type(facts, field)}}},')
        lines.append("};")
        if rules := body.get("rule"):
            lines.append(f"static const Rule R_{name}[] = {{")
            for rule in rules:
                args = [" ".join(rule["args"])] if rule["rule"] == "same_length" else map(str, rule["args"])
                lines.append(f'    {{"{rule["rule"]}", {{{", ".join(map(json.dumps, args))}}}, "{rule["error"]}"}},')
            lines.append("};")
    lines.append("static const Layout LAYOUTS[] = {")
    for name, body in layouts.items():
        frozen, rules = "true" if body.get("frozen") else "false", len(body.get("rule", ()))
        table = f"R_{name}" if rules else "NULL"
        lines.append(
            f'    {{"{name}", {body.get("id", 0)}, {frozen}, F_{name}, {len(body["field"])}, {table}, {rules}}},'
        )
    return "\n".join([*lines, "};"]) + "\n"


def _c_type(facts: Facts, field: dict[str, Any]) -> str:
    kind, _, inner = field["type"].partition("<" if "<" in field["type"] else ":")
    least, most = _range(facts, field)
    ref, of = "0", "NULL"
    if kind in ("list", "array"):
        of = f"&(const Type){_c_type(facts, {'type': inner[:-1]})}"
    elif inner:
        ref = f"{'E' if kind == 'enum' else 'L'}_{inner}"
    elif kind[0] == "u":
        kind, ref = "uint", str(int(kind[1:]) // 8)
    return f"{{{kind.upper()}, {ref}, {least}u, {most}u, {of}}}"


def _c_parts(facts: Facts) -> str:
    """Tables in C: limits of plans, and of each name of a part what it is called elsewhere and whether it is optional."""
    limits = [f"{name.upper()} = {row['value']}" for name, row in facts["limit"].items() if row["scope"] == "plan"]
    lines = [
        f"enum {{ {', '.join(limits)} }};",
        "typedef struct { const char *name; bool optional; const char *const *aliases; } Registered;",
        "static const Registered PARTS[] = {",
    ]
    for name, row in facts["part"].items():
        aliases = ", ".join([*map(json.dumps, row.get("aliases", ())), "NULL"])
        optional = json.dumps(row.get("optional", False))
        lines.append(f'    {{"{name}", {optional}, (const char *const[]){{{aliases}}}}},')
    return "\n".join([*lines, "};"]) + "\n"


def _rust_parts(facts: Facts) -> str:
    """The same in Rust."""
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
    for name, (open_, values) in _enums(facts).items():
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
            least, most = _range(facts, field)
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
    TESTEES / "c/codec.c": _c,
    TESTEES / "c/description.c": _c_parts,
}
