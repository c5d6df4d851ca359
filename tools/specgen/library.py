"""The facts that libkvproto contains: numbers in its header, and tables that its reader and writer go by."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from tools.specgen.registry import Facts, number

FIRST_STRUCT = 0x10000
"""A message has its type on the wire as its number; structs, which have none there, are counted from here on."""
_KINDS = {"str": "TEXT", "struct": "MAP"}
_PREDICATES = "ascend", "rise", "unique", "subset", "le", "lt", "sum_le", "same_length", "only_if", "present_iff"
_NO_FIELD = -1
_LIMIT_OF = {"str": "max_string", "bytes": "max_bytes", "list": "max_list", "array": "max_array"}


def numbers(facts: Facts) -> str:
    """Constants of kvproto.h: limits, structs, messages, their fields by id, values of enums, codes of errors."""
    major, minor = number(facts)
    lines = [f'#define KVP_SPEC "{major}.{minor}"']
    lines += _enum("", {"MAJOR": major, "MINOR": minor})
    limits = {name: row["value"] for name, row in facts["limit"].items() if row["scope"] in ("body", "plan")}
    lines += ["/* limits */", *_enum("", {name.upper(): value for name, value in limits.items()})]
    layouts = _layouts(facts)
    lines += ["/* structs and messages */"]
    lines += _enum("", {_upper(name): _number(facts, name) for name in layouts})
    lines += ["/* their fields, by id */"]
    for name, body in layouts.items():
        lines += _enum(_upper(name) + "_", {field["name"].upper(): field["id"] for field in _fields(body)})
    declared = enums(facts)
    lines += ["/* enums, and their values */"]
    lines += _enum("ENUM_", {_upper(name): i for i, name in enumerate(declared)})
    for name, (_, values) in declared.items():
        lines += _enum("E_" if name == "ErrorCode" else f"{_upper(name)}_", values)
    names = re.findall(r"\bKVP_\w+(?= = )", "\n".join(lines))
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"kvproto.h would say {twice[0]} twice")
    return "\n".join(lines) + "\n"


def tables(facts: Facts) -> str:
    """Tables of facts.c: enums, of each struct and message its fields and rules, and the names of parts."""
    layouts = _layouts(facts)
    lines = [f"enum {{ {', '.join(f'L_{name}' for name in layouts)} }};"]
    for name, body in layouts.items():
        indices = ", ".join(f"{name}_{field['name']}" for field in _fields(body))
        lines.append(f"enum {{ {indices} }};")
    for name, (_, values) in enums(facts).items():
        rows = ", ".join(f"{{{json.dumps(word)}, {value}}}" for word, value in values.items())
        lines.append(f"static const Value V_{name}[] = {{{rows}}};")
    lines.append("static const Enum ENUMS[] = {")
    lines += [f"    {{{json.dumps(o)}, V_{name}, {len(values)}}}," for name, (o, values) in enums(facts).items()]
    lines.append("};")
    for name, body in layouts.items():
        lines += _rows_of(facts, name, body)
    lines.append("static const Layout LAYOUTS[] = {")
    for name, body in layouts.items():
        rules = body.get("rule", ())
        lines.append(
            f'    {{"{name}", {_number(facts, name)}, {body.get("id", 0)}, {json.dumps(bool(body.get("frozen")))}, '
            f"F_{name}, {len(body['field'])}, {f'R_{name}' if rules else 'NULL'}, {len(rules)}}},"
        )
    return "\n".join([*lines, "};", *_parts(facts)]) + "\n"


def _enum(prefix: str, values: dict[str, int]) -> list[str]:
    return ["enum { " + ", ".join(f"KVP_{prefix}{name} = {value}" for name, value in values.items()) + " };"]


def _layouts(facts: Facts) -> Facts:
    found: Facts = facts["struct"] | facts["message"]
    return found


def _fields(body: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(body["field"], key=lambda field: int(field["id"]))


def _number(facts: Facts, name: str) -> int:
    structs = list(facts["struct"])
    return FIRST_STRUCT + structs.index(name) if name in structs else int(facts["message"][name]["id"])


def _upper(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def _rows_of(facts: Facts, name: str, body: dict[str, Any]) -> list[str]:
    lines = [f"static const Field F_{name}[] = {{"]
    for field in _fields(body):
        required = json.dumps(field["presence"] == "required")
        lines.append(f'    {{{field["id"]}, "{field["name"]}", {required}, {_type(facts, field)}}},')
    lines.append("};")
    if rules := body.get("rule"):
        lines.append(f"static const Rule R_{name}[] = {{")
        lines += [f"    {_rule(facts, body, rule)}," for rule in rules]
        lines.append("};")
    return lines


def _type(facts: Facts, field: dict[str, Any]) -> str:
    kind, _, inner = field["type"].partition("<" if "<" in field["type"] else ":")
    least, most = span(facts, field)
    ref, of = "0", "NULL"
    if kind in ("list", "array"):
        of = f"&(const Type){_type(facts, {'type': inner[:-1]})}"
    elif kind == "enum":
        ref = str(list(enums(facts)).index(inner))
    elif inner:
        ref = f"L_{inner}"
    elif kind[0] == "u":
        kind, ref = "uint", str(int(kind[1:]) // 8)
    return f"{{{_KINDS.get(kind, kind.upper())}, {ref}, {least}u, {most}u, {of}}}"


def _rule(facts: Facts, body: dict[str, Any], rule: dict[str, Any]) -> str:
    """A predicate, the places of its fields, a number (a bound, or a value of an enum), and the error."""
    predicate, args = rule["rule"], rule["args"]
    if predicate not in _PREDICATES:
        raise ValueError(f"libkvproto has no predicate {predicate}")
    names = [field["name"] for field in _fields(body)]
    types = {field["name"]: field["type"] for field in body["field"]}
    bound, inner = 0, _NO_FIELD
    if predicate in ("only_if", "present_iff"):
        bound, args = enums(facts)[types[args[1]].partition(":")[2]][1][args[2]], args[:2]
    elif predicate in ("ascend", "rise", "unique") and len(args) > 1:
        of = _layouts(facts)[re.fullmatch(r"list<struct:(\w+)>", types[args[0]])[1]]  # type: ignore[index]
        inner, args = [field["name"] for field in _fields(of)].index(args[1]), args[:1]
    elif predicate == "sum_le" and isinstance(args[2], int):
        bound, args = args[2], args[:2]
    places = [names.index(arg) for arg in args]
    shown = ", ".join(map(str, places))
    return f"{{{predicate.upper()}, {len(places)}, {{{shown}}}, {inner}, {bound}u, KVP_E_{rule['error']}}}"


def _parts(facts: Facts) -> list[str]:
    lines = ["static const Registered PARTS[] = {"]
    for name, row in facts["part"].items():
        aliases = ", ".join([*map(json.dumps, row.get("aliases", ())), "NULL"])
        optional = json.dumps(row.get("optional", False))
        lines.append(f'    {{"{name}", {optional}, (const char *const[]){{{aliases}}}}},')
    return [*lines, "};"]


def enums(facts: Facts) -> dict[str, tuple[bool, dict[str, int]]]:
    """By enum, whether it is open, and its values by name; ErrorCode too."""
    declared = {name: (bool(enum["open"]), enum["values"]) for name, enum in facts["enum"].items()}
    return declared | {"ErrorCode": (True, {name: error["code"] for name, error in facts["error"].items()})}


def span(facts: Facts, field: dict[str, Any]) -> tuple[int, int]:
    """Least and greatest value, or length."""
    kind = field["type"].partition("<" if "<" in field["type"] else ":")[0]
    if kind in _LIMIT_OF:
        top = facts["limit"][_LIMIT_OF[kind]]["value"]
    else:
        top = {"enum": 0xFFFF, "struct": 0, "bool": 0}.get(kind) if kind[0] != "u" else (1 << int(kind[1:])) - 1
    length = field.get("length")
    return length or field.get("min", 0), length or field.get("max", top)
