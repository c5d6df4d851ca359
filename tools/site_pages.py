"""Pages of the site that are generated from code and data: registry, examples, hand-overs, command line, API, figures of a host."""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import kvproto
from tools.session_figures import session_rows
from tools.specgen.registry import ROOT, load

_FIRST = ("Source", "Sink", "Pool", "Cache", "lay_out", "Options", "Request", "Fetch", "Withdrawal", "Ticket", "Prompt")
"""Public names in the order in which an engine's author meets them; others follow."""
_BESIDE = ("kvproto.events", "kvproto.asyncio", "kvproto.metrics", "kvproto.errors")
_BELOW = (
    "kvproto.wire",
    "kvproto.planning",
    "kvproto.copying",
    "kvproto.session",
    "kvproto.transport",
    "kvproto.rank",
    "kvproto.source",
    "kvproto.sink",
)
"""Packages that an engine does not need."""


def _registry() -> str:
    facts = load()
    rows = [
        "# Registry",
        "",
        "Every fact has one home, `spec/v1/registry/*.toml`; programs read [registry.json](../spec/v1/registry.json). Messages, structs and enums",
        "have [their own page](../spec/v1/messages.md), and [session](../spec/v1/session.md) has the states.",
    ]
    tables = {
        "Features": ("feature", ("value", "status", "doc")),
        "Limits": ("limit", ("value", "unit", "doc")),
        "Names of facts": ("fact", ("rule", "doc")),
        "Errors": ("error", ("code", "class", "recovery", "doc")),
    }
    for title, (key, columns) in tables.items():
        if key not in facts:
            continue
        rows += [
            "",
            f"## {title}",
            "",
            "| name | " + " | ".join(columns).replace("doc", "meaning") + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for name, row in facts[key].items():
            cells = (f"`0x{row[c]:04X}`" if c == "code" else str(row.get(c, "")) for c in columns)
            rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _examples() -> str:
    rows = ["# Examples", "", "These files are in `examples/`, and `make test` runs each of them."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        if path.name.startswith("_"):
            continue
        title, _, more = _docstring(path).partition("\n")
        rows += [
            "",
            f"## {path.stem}",
            "",
            title,
            "",
            more.strip(),
            "",
            f"[examples/{path.name}](../examples/{path.name})",
        ]
    return "\n".join(rows)


def _handovers() -> str:
    """From the table in examples/handover_table.py, which examples/handovers.py runs."""
    rows = [
        "# Hand-overs that other engines refuse",
        "",
        "kvproto plans from what each rank owns, so it needs no rule for any pair of parallel layouts. Today's serving engines refuse each of",
        "these hand-overs. One command runs it: it opens a Source or a Sink for every rank, and compares every byte.",
        "All of them also run between [the reference engines](../reference/README.md#hand-overs-that-engines-refuse).",
    ]
    folder = ROOT / "examples"
    if not (folder / "handover_table.py").exists():
        return "\n".join(rows)
    sys.path.insert(0, str(folder))
    try:
        table = importlib.import_module("handover_table").HANDOVERS
    finally:
        sys.path.remove(str(folder))
    for row in table:
        rows += ["", f"## {row.name}", "", f"{row.what}.", "", f"*Why engines refuse it.* {row.refused}", ""]
        rows += ["```", f"python examples/handovers.py {row.name}", "```"]
    return "\n".join(rows)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _parsers(sub)


def _cli() -> str:
    os.environ["COLUMNS"] = "100"
    from kvproto.cli.main import parser

    rows = ["# Command line", ""]
    for one in _parsers(parser()):
        rows += [f"## {one.prog}", "", "```text", one.format_help().rstrip(), "```", ""]
    return "\n".join(rows)


def _api() -> str:
    """Names that an engine uses, in the order in which it meets them; errors come last."""
    errors = {name for name in kvproto.__all__ if name.endswith("Error")}
    others = [name for name in kvproto.__all__ if name not in _FIRST and name not in errors and name[0] != "_"]
    rows = [
        "# Python",
        "",
        "An engine needs only `kvproto`: `from kvproto import Source, Sink, Prompt, Options, Pool`.",
        "[The packages below it](internals.md) are for tools, and for anything else that you build from the same parts.",
        "",
    ]
    for name in (*_FIRST, *others):
        rows += [f"::: kvproto.{name}", "    options: {show_root_full_path: false}", ""]
    return "\n".join([*rows, *_packages(_BESIDE)])


def _internals() -> str:
    rows = [
        "# Packages below",
        "",
        "For tools, and for anything else that is built from parts of kvproto. An engine needs none of them.",
        "",
    ]
    return "\n".join([*rows, *_packages(_BELOW)])


def _packages(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        path = ROOT / name.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").exists():
            yield from (f"::: {name}", "")


def _results(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def _host() -> str:
    """Tables and bars of what was measured on a host: medians from benchmarks/results."""
    codec, planned, moved = _results("codec"), _results("plan"), _results("transfer_host")
    rows = [
        "# On the host",
        "",
        "Medians from `benchmarks/results`; each section names the script that measures it.",
    ]
    said = "Microseconds per message, next to msgspec, the fastest typed msgpack for Python, which checks less."
    rows += ["", "## Codec", "", f"{said} `python benchmarks/codec.py`", ""]
    rows += _figures(
        {shape: {k: median(v) for k, v in row["samples_us"].items()} for shape, row in codec["shapes"].items()}, "us"
    )
    rows += ["", "## Planning", "", "Milliseconds for a whole plan. `python benchmarks/plan.py`", ""]
    rows += _figures({name: {"plan": median(some)} for name, some in planned["planning_ms"].items()}, "ms")
    rows += ["", "## Transport nixl between processes", ""]
    rows += [
        "GB/s of scattered runs, by their length in bytes; the ceiling is one copy of memory. `python benchmarks/transfer_host.py`",
        "",
    ]
    kinds = ("ceiling", "direct", "packed")
    rows += _figures(
        {f"{int(run):,}": {k: median(row[k]) for k in kinds} for run, row in moved["runs"].items()}, "GB/s"
    )
    rows += session_rows(_results("session"))
    return "\n".join(rows)


def _figures(table: dict[str, dict[str, float]], unit: str) -> list[str]:
    """A table, and the same as bars; rows may lack columns."""
    columns = list(dict.fromkeys(name for row in table.values() for name in row))
    lines = [f"| {unit} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {n} | " + " | ".join(_short(r[c]) if c in r else "" for c in columns) + " |" for n, r in table.items()
    ]
    return [*lines, "", _bars(table, columns, unit), ""] if len(columns) <= 3 else [*lines, ""]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(table: dict[str, dict[str, float]], columns: list[str], unit: str) -> str:
    """Horizontal bars, as a drawing in the page's colours."""
    most = max(max(row.values()) for row in table.values())
    out, y = [], 20
    for i, name in enumerate(columns if len(columns) > 1 else []):
        out.append(
            f'<rect x="{300 + 130 * i}" y="2" width="10" height="10" class="bar{i}"/><text x="{315 + 130 * i}" y="11">{html.escape(name)}</text>'
        )
    for name, row in table.items():
        out.append(f'<text x="290" y="{y + 7 * len(row) + 3}" text-anchor="end">{html.escape(name)}</text>')
        for column in (c for c in columns if c in row):
            width = max(400 * row[column] / most, 1)
            out.append(f'<rect x="300" y="{y}" width="{width:.1f}" height="12" class="bar{columns.index(column)}"/>')
            out.append(f'<text x="{305 + width:.1f}" y="{y + 10}">{_short(row[column])} {unit}</text>')
            y += 14
        y += 8
    return f'<figure class="drawing"><svg viewBox="0 0 760 {y}" xmlns="http://www.w3.org/2000/svg">{"".join(out)}</svg></figure>'


MADE: dict[str, Callable[[], str]] = {
    "registry": _registry, "examples": _examples, "handovers": _handovers, "cli": _cli, "api": _api,
    "internals": _internals, "host": _host,
}  # fmt: skip
