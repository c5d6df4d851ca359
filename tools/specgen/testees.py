"""The facts that libkvproto and testees in other languages contain: a block of each file, made from the registry."""

from __future__ import annotations

import json
from pathlib import Path

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


_MADE = {
    TESTEES / "node/codec.mjs": _node,
    ROOT / "libkvproto/include/kvproto.h": numbers,
    ROOT / "libkvproto/src/facts.c": tables,
}
