"""The site for programs that read: llms.txt, each page as Markdown, and the core specification as one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath

from attrs import frozen

LLMS, CORE = "llms.txt", "kvproto-core.md"
_LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_SENTENCE = re.compile(r"(?<=[a-z0-9`)*][.?!])\s")
_PLAIN = re.compile(r"\[([^\]]*)\]\([^)]*\)|\*+")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_NOTE = 240
"""The most characters of a note."""
_BESIDE = {
    CORE: "The core of the specification as one file: all pages that an engine needs, and the tables of its messages",
    "spec/v1/registry.json": "All facts: messages, fields, ranges, rules, enums, errors, limits",
    "spec/v1/description.schema.json": "JSON Schema of a Description",
    "spec/v1/ticket.schema.json": "JSON Schema of a ticket",
}
"""Files for programs, which are no pages."""


@frozen
class Text:
    """A page: its place in the site, the names of the sections that it is in, its title, and its Markdown."""

    path: str
    sections: tuple[str, ...]
    title: str
    markdown: str


def llms(name: str, summary: str, texts: Iterable[Text]) -> str:
    """The text of llms.txt: all pages by section, each with its first sentence (llmstxt.org)."""
    lines = [f"# {name}", "", f"> {summary}", "", "## For programs", ""]
    lines += [f"- [{path}]({path}): {note}" for path, note in _BESIDE.items()]
    section = None
    for text in texts:
        if text.sections != section:
            section = text.sections
            lines += ["", f"## {': '.join(section) or name}", ""]
        note = _first_sentence(text.markdown)
        lines.append(f"- [{text.title}]({text.path})" + (f": {note}" if note else ""))
    return "\n".join(lines) + "\n"


def core(version: str, texts: Sequence[Text]) -> str:
    """One Markdown file of these pages; links lead within it, or to the pages of the site."""
    anchors = {text.path: f"#{_slug(text.markdown)}" for text in texts}
    parts = [f"# kvproto {version}: the core\n\nOne file of {len(texts)} pages of the specification, in their order."]
    for text in texts:
        body = re.sub(r"^(#+ )", r"#\1", text.markdown.strip(), flags=re.MULTILINE)
        parts.append(_LINK.sub(partial(_moved, text.path, anchors), body))
    return "\n\n".join(parts) + "\n"


def _moved(here: str, anchors: Mapping[str, str], link: re.Match[str]) -> str:
    """The end of a link of the page `here`, as the file at the top of the site has it."""
    target = os.path.normpath(str(PurePosixPath(here).parent / link[1]))
    anchor = link[2] or ""
    return f"]({anchor or anchors[target] if target in anchors else target + anchor})"


def _slug(markdown: str) -> str:
    """The anchor of a page's first heading."""
    heading = markdown.lstrip().partition("\n")[0].lstrip("# ").lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def _first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph, without markup; nothing if a page begins otherwise."""
    text = _FENCED.sub("", markdown)
    blocks = [block for block in text.split("\n\n") if block.strip() and not re.match(r"\s*[#<!|>`*\-]", block)]
    if not blocks:
        return ""
    text = _PLAIN.sub(lambda m: m[1] or "", " ".join(blocks[0].split()))
    sentence = _SENTENCE.split(text, maxsplit=1)[0]
    return sentence if len(sentence) <= _NOTE else sentence[: _NOTE - 3].rpartition(" ")[0] + "..."
