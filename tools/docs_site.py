"""The mkdocs hook: the site has the repository's own pages at their own paths, so links work in both.

It adds an anchor for each clause and a link wherever one is named, source files below paragraphs that only link to
one, drawings inside their pages, the pages that tools/site_pages.py makes from code and data, and for programs all of
it as Markdown, with llms.txt (tools/site_texts.py).
"""

from __future__ import annotations

import html
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import kvproto
from tools import site_texts
from tools.site_pages import MADE
from tools.site_tables import filterable, laid_out
from tools.specgen import drawings
from tools.specgen.clauses import Clause, clauses
from tools.specgen.registry import ROOT, load

PAGES = ("*.md", "docs/**/*.md", "spec/**/*.md", "conformance/*.md", "reference/*.md")
ASSETS = (
    "docs/**/*.svg",
    "spec/assets/*.svg",
    "docs/**/*.css",
    "docs/**/*.js",
    "spec/v1/*.json",
    "spec/v1/vectors/**/*.json",
    "conformance/testees/c/*.c",
    "conformance/testees/node/*.mjs",
    "conformance/testees/perl/*.pl",
    "conformance/testees/rust/*.rs",
    "crates/kvproto/examples/*.rs",
    "conformance/kvproto_conformance/*.json",
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
    r"README\.md": "index.md",
    r"docs/index\.md": "index.md",
    r"examples": "docs/examples.md",
    r"examples/(\w+)\.py": r"docs/examples.md#\1",
    r"kvproto/source/source\.py": "docs/api.md#kvproto.Source",
    r"kvproto/sink/sink\.py": "docs/api.md#kvproto.Sink",
    r"kvproto/rank/pool\.py": "docs/api.md#kvproto.Pool",
    r"kvproto/events\.py": "docs/api.md#kvproto.events",
    r"spec/v1/registry/\w+\.toml": "docs/registry.md",
}
"""Files of the repository that the site shows on a generated page."""
_FILTERED = "spec/v1/clauses.md"
_CORE, _MESSAGES = "Core", "spec/v1/messages.md"
"""The section of the specification's core, and the page of the messages that it uses."""
_BULLET = re.compile(r"^\* `(KVP-[A-Z0-9-]+)` ", re.MULTILINE)
_NAMED = re.compile(r"(?<!\[)`(KVP-[A-Z0-9-]+)`(?!\])")
_ONLY_CODE = re.compile(r"^\[[^\]]*\]\(([^)#\s]+\.py)\)$", re.MULTILINE)
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+\.svg)\)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_TO_FILE = re.compile(r"\]\(([^)#\s:]+)")
_ALERT = re.compile(r"^> \[!([A-Z]+)\]\n((?:>.*\n?)+)", re.MULTILINE)
_ALERTS = {"CAUTION": "danger", "IMPORTANT": "info"}
"""Kinds of alerts that Material calls otherwise."""
_NUMBERED = re.compile(r"^\d+\. .*\n(?:(?: {3}.*|\d+\. .*)?\n)*", re.MULTILINE)


def _clauses() -> dict[str, Clause]:
    return clauses(load())


def on_config(config: Any) -> None:
    """Set the versions and the licence in header and footer, and what `mkdocs serve` watches."""
    config.watch += [str(ROOT / name) for name in WATCHED if (ROOT / name).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    spec = json.loads((ROOT / "spec/v1/vectors/negotiation.json").read_text())["version"]
    config.site_name = f"kvproto {spec}"
    config.copyright = f"kvproto {kvproto.__version__}, specification {spec}. {project['license']}."
    if source := project.get("urls", {}).get("Repository"):
        config.copyright += f' <a href="{html.escape(source)}">Repository</a>'


def on_files(files: Files, config: Any) -> Files:
    """The repository's pages and assets at their own paths, and the generated pages."""
    found = [f for f in files if f.src_dir != config.docs_dir]  # from the theme and plugins
    for pattern in (*PAGES, *ASSETS):
        for path in sorted(set(ROOT.glob(pattern)) - {ROOT / "README.md", ROOT / "docs/index.md"}):
            found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    found += [File.generated(config, f"docs/{name}.md", content=make()) for name, make in MADE.items()]
    found.append(File.generated(config, "index.md", content=_home()))
    found.append(File.generated(config, "docs/assets/drawings.css", content=drawings.page_style("figure.drawing")))
    return Files(found)


def on_nav(nav: Any, config: Any, files: Files) -> None:
    """Keep the pages in their order, for `on_post_build`."""
    _PAGES[:] = nav.pages


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Clauses become anchors, mentions of them links; files that are not pages are shown or named."""
    here = page.file.src_uri
    known = _clauses()
    own = {name for name, clause in known.items() if here == f"spec/v1/{clause.page}"}

    def to(name: str) -> str:
        target = f"spec/v1/{known[name].page}"
        return f"#{name}" if target == here else f"{_relative(target, here)}#{name}"

    text = _NUMBERED.sub(lambda m: _nested(m[0]), markdown)
    text = _ALERT.sub(lambda m: _alert(m[1], m[2]), text)
    text = _ONLY_CODE.sub(lambda m: m[0] + "\n\n" + _code(here, m[1]), text)
    text = _DRAWING.sub(lambda m: _drawing(here, m[1], m[2]), text)
    anchor = '* <span id="{0}" class="clause">[`{0}`](#{0})</span> '
    text = _BULLET.sub(lambda m: anchor.format(m[1]) if m[1] in own else m[0], text)
    text = _NAMED.sub(lambda m: f"[`{m[1]}`]({to(m[1])})" if m[1] in known else m[0], text)
    return _LINK.sub(lambda m: _link(here, m, files), text)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark what site.css lays out: long code within a sentence or a cell, which alone may wrap; tables; reasons."""
    text = re.sub(r"<code>([^<]{25,})</code>", r'<code class="long">\1</code>', laid_out(html))
    text = text.replace("<p><em>Why:</em>", '<p class="why"><em>Why:</em>')
    return filterable(text, _clauses(), load()) if page.file.src_uri == _FILTERED else text


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """Hide the list of pages where a tab has only one."""
    alone = page.parent is None or len(page.parent.children) == 1
    page.meta["hide"] = ["navigation"] if alone else []
    return context


def _home() -> str:
    """docs/index.md as the site's first page, which lies a folder higher."""
    text = (ROOT / "docs/index.md").read_text()
    return _TO_FILE.sub(lambda m: f"]({os.path.normpath('docs/' + m[1])}", text)


def _nested(items: str) -> str:
    """A numbered list as Python-Markdown nests it: four spaces, and a blank line between long items."""
    wider = re.sub("^ {3}", " " * 4, items, flags=re.MULTILINE)
    return re.sub(r"(?<!\n)\n(?=\d+\. )", "\n\n", wider) if "\n\n    " in wider else wider


def _alert(kind: str, lines: str) -> str:
    """An alert as GitHub writes it, as an admonition."""
    kind = _ALERTS.get(kind, kind.lower())
    return f"!!! {kind}\n\n" + re.sub(r"^> ?(.*)$", r"    \1", lines, flags=re.MULTILINE)


def _relative(target: str, here: str) -> str:
    return os.path.relpath(target, Path(here).parent.as_posix())


def _target(here: str, link: str) -> str:
    return os.path.normpath((Path(here).parent / link).as_posix())


def _link(here: str, match: re.Match[str], files: Files) -> str:
    """The link, to the page that stands for its target if there is one; otherwise its text and its path."""
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
    if path.parent not in (ROOT / "docs/assets", drawings.ASSETS) or not path.exists():
        return f"![{title}]({link})"
    if 'class="rich-terminal"' in (text := path.read_text()):
        return f"![{title}]({link}){{ .terminal }}"
    drawing = re.sub(r"<(style|title|desc)>.*?</\1>|<!--.*?-->", "", text, flags=re.DOTALL)
    drawing = re.sub(r"\s*\n\s*", " ", drawing.strip())
    drawing = re.sub(r'(<svg[^>]*) width="(\d+)"', lambda m: f'{m[1]} style="width: {int(m[2]) / 17:.1f}rem"', drawing)
    return f'<figure class="drawing" role="img" aria-label="{html.escape(title)}">{drawing}</figure>'


_PAGES: list[Any] = []
"""The pages of the navigation, in its order."""
_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?:[^\" >]+)")


def on_post_build(config: Any) -> None:
    """Write what programs read; raise if a page loads something from another host: the site also works from disk."""
    site = Path(config["site_dir"])
    texts = [_text(page) for page in _PAGES]
    for text in texts:
        (site / text.path).write_text(text.markdown)
    (site / site_texts.LLMS).write_text(site_texts.llms(config.site_name, config.site_description, texts))
    core = [text for text in texts if text.sections[-1:] == (_CORE,) or text.path == _MESSAGES]
    (site / site_texts.CORE).write_text(site_texts.core(config.site_name.partition(" ")[2], core))
    for path in site.rglob("*.html"):
        if loads := _ELSEWHERE.search(path.read_text()):
            raise PluginError(f"{path.relative_to(config['site_dir'])} loads {loads[1]}")


def _text(page: Any) -> site_texts.Text:
    """A page as it is in the repository, before this hook changes it."""
    sections = tuple(ancestor.title for ancestor in reversed(page.ancestors))
    return site_texts.Text(page.file.src_uri, sections, page.title, page.file.content_string)
