"""The mkdocs hook: the site has the repository's own pages at their own paths, so links work in both.

It adds an anchor for each clause and a link wherever one is named, source files below paragraphs that only link to one, drawings
inside their pages, and the pages that are generated from code and data (clauses, registry, examples, command line, API).
"""

from __future__ import annotations

import argparse
import ast
import html
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from tools.session_figures import session_rows
from tools.specgen.clauses import Clause, clauses
from tools.specgen.drawings import ASSETS, page_style
from tools.specgen.registry import ROOT, load

PAGES = ("*.md", "docs/*.md", "spec/**/*.md", "conformance/*.md", "reference/*.md")
ASSETS = (
    "docs/**/*.svg",
    "spec/assets/*.svg",
    "docs/**/*.css",
    "docs/**/*.js",
    "spec/v1/registry.json",
    "spec/v1/vectors/**/*.json",
    "conformance/testees/c/*.c",
    "conformance/testees/node/*.mjs",
    "conformance/testees/rust/*.rs",
    "conformance/kvproto_conformance/*.json",
)
API = (
    "kvproto",
    "kvproto.events",
    "kvproto.asyncio",
    "kvproto.metrics",
    "kvproto.errors",
    "kvproto.wire",
    "kvproto.planning",
    "kvproto.copying",
    "kvproto.session",
    "kvproto.transport",
    "kvproto.rank",
    "kvproto.source",
    "kvproto.sink",
)
WATCHED = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "spec",
    "conformance",
    "reference",
    "examples",
    "kvproto",
    "benchmarks/results",
)
STANDS_FOR = {
    r"examples": "docs/examples.md",
    r"examples/(\w+)\.py": r"docs/examples.md#\1",
    r"kvproto/source/source\.py": "docs/api.md#kvproto.Source",
    r"kvproto/sink/sink\.py": "docs/api.md#kvproto.Sink",
    r"kvproto/rank/pool\.py": "docs/api.md#kvproto.Pool",
    r"kvproto/events\.py": "docs/api.md#kvproto.events",
    r"spec/v1/registry/\w+\.toml": "docs/registry.md",
}
"""Files of the repository that the site shows on a generated page."""
_BULLET = re.compile(r"^\* `(KVP-[A-Z0-9-]+)` ", re.MULTILINE)
_NAMED = re.compile(r"(?<!\[)`(KVP-[A-Z0-9-]+)`(?!\])")
_ONLY_CODE = re.compile(r"^\[[^\]]*\]\(([^)#\s]+\.py)\)$", re.MULTILINE)
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_NUMBERED = re.compile(r"^\d+\. .*\n(?:(?: {3}.*|\d+\. .*)?\n)*", re.MULTILINE)


def _clauses() -> dict[str, Clause]:
    return clauses(load())


def on_config(config: Any) -> None:
    """`mkdocs serve` rebuilds when any of this changes."""
    config.watch += [str(ROOT / name) for name in WATCHED if (ROOT / name).exists()]


def on_files(files: Files, config: Any) -> Files:
    """The repository's pages and assets at their own paths, and the generated pages."""
    found = [f for f in files if f.src_dir != config.docs_dir]  # from the theme and plugins
    for pattern in (*PAGES, *ASSETS):
        for path in sorted(ROOT.glob(pattern)):
            found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    found += [File.generated(config, f"docs/{name}.md", content=make()) for name, make in MADE.items()]
    found.append(File.generated(config, "docs/assets/drawings.css", content=page_style("figure.drawing")))
    return Files(found)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Clauses become anchors, mentions of them links; files that are not pages are shown or named."""
    here = page.file.src_uri
    known = _clauses()
    own = {name for name, clause in known.items() if here == f"spec/v1/{clause.page}"}

    def to(name: str) -> str:
        target = f"spec/v1/{known[name].page}"
        return f"#{name}" if target == here else f"{_relative(target, here)}#{name}"

    text = _NUMBERED.sub(lambda m: _nested(m[0]), markdown)
    text = _ONLY_CODE.sub(lambda m: m[0] + "\n\n" + _code(here, m[1]), text)
    text = _DRAWING.sub(lambda m: _drawing(here, m[1], m[2]), text)
    anchor = '* <span id="{0}" class="clause">[`{0}`](#{0})</span> '
    text = _BULLET.sub(lambda m: anchor.format(m[1]) if m[1] in own else m[0], text)
    text = _NAMED.sub(lambda m: f"[`{m[1]}`]({to(m[1])})" if m[1] in known else m[0], text)
    return _LINK.sub(lambda m: _link(here, m, files), text)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark long code within a sentence or a cell: site.css lets only that wrap."""
    return re.sub(r"<code>([^<]{25,})</code>", r'<code class="long">\1</code>', html)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Hide the list of pages where a tab has only one."""
    alone = page.parent is None or len(page.parent.children) == 1
    page.meta["hide"] = ["navigation"] if alone else []
    return context


def _nested(items: str) -> str:
    """A numbered list as Python-Markdown nests it: four spaces, and a blank line between items of several paragraphs."""
    wider = re.sub("^ {3}", " " * 4, items, flags=re.MULTILINE)
    return re.sub(r"(?<!\n)\n(?=\d+\. )", "\n\n", wider) if "\n\n    " in wider else wider


def _relative(target: str, here: str) -> str:
    return os.path.relpath(target, Path(here).parent.as_posix())


def _target(here: str, link: str) -> str:
    return os.path.normpath((Path(here).parent / link).as_posix())


def _link(here: str, match: re.Match[str], files: Files) -> str:
    """The link, to the page that stands for its target if there is one; otherwise its text and the path within the repository."""
    target = _target(here, match[2])
    if files.get_file_from_path(target) is not None or not (ROOT / target).exists():
        return match[0]
    text = match[1]
    for pattern, page in STANDS_FOR.items():
        if not page.startswith(here) and (found := re.fullmatch(pattern, target)):
            return f"[{text}]({found.expand(_relative(page, here))})"
    return text if text.strip("`") == target else f"{text} (`{target}`)"


def _code(here: str, link: str) -> str:
    path = ROOT / _target(here, link)
    return f"```python\n{path.read_text().rstrip()}\n```" if path.exists() else ""


def _drawing(here: str, title: str, link: str) -> str:
    """Put a drawing into the page, so that it has the page's colours; a terminal keeps its own."""
    path = ROOT / _target(here, link)
    if path.parent not in (ROOT / "docs/assets", ASSETS) or not path.exists():
        return f"![{title}]({link})"
    if 'class="rich-terminal"' in (text := path.read_text()):
        return f"![{title}]({link}){{ .terminal }}"
    drawing = re.sub(r"<(style|title|desc)>.*?</\1>|<!--.*?-->", "", text, flags=re.DOTALL)
    drawing = re.sub(r"\s*\n\s*", " ", drawing.strip())
    return f'<figure class="drawing" role="img" aria-label="{html.escape(title)}">{drawing}</figure>'


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
            "| name | " + " | ".join(columns).replace("doc", "") + " |",
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
    rows = [
        "# Python",
        "",
        "An engine needs only `kvproto`: `from kvproto import Source, Sink, Prompt, Options, Pool`. The packages below it are for tools, and for anything",
        "else that you build from the same parts.",
        "",
    ]
    for name in API:
        path = ROOT / name.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").exists():
            rows += [f"::: {name}", ""]
    return "\n".join(rows)


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
    "registry": _registry, "examples": _examples, "handovers": _handovers, "cli": _cli, "api": _api, "host": _host,
}  # fmt: skip


_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)")


def on_post_build(config: Any) -> None:
    """Raise if a page loads something from another host: the site also works from disk, without a network."""
    for path in Path(config["site_dir"]).rglob("*.html"):
        if loads := _ELSEWHERE.search(path.read_text()):
            raise PluginError(f"{path.relative_to(config['site_dir'])} loads {loads[1]}")
