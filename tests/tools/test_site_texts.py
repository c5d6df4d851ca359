"""The site for programs that read: llms.txt, and the core of the specification as one file."""

import re

from tools import site_texts
from tools.site_texts import Text
from tools.specgen.clauses import clauses
from tools.specgen.registry import SPEC, load

PAGES = [
    Text("index.md", (), "Home", "# kvproto\n\nSee it *first*: `make demo` runs. Then more.\n"),
    Text(
        "docs/a.md",
        ("Use it", "How to"),
        "A",
        "# A\n\n```\ncode\n\nmore code\n```\n\n| a | b |\n|---|---|\n\nOne has [`lay_out`](b.md). Two.\n",
    ),
    Text("docs/b.md", ("Use it", "How to"), "B", "# B and more\n\n* nothing else\n"),
]


def test_llms_lists_every_page_by_section_with_its_first_sentence() -> None:
    text = site_texts.llms("kvproto 1.0", "The contract", PAGES)
    assert text.startswith(
        "# kvproto 1.0\n\n> The contract\n\n## For programs\n\n- [kvproto-core.md](kvproto-core.md): "
    )
    assert "\n## kvproto 1.0\n\n- [Home](index.md): See it first: `make demo` runs.\n" in text
    assert text.endswith("\n## Use it: How to\n\n- [A](docs/a.md): One has `lay_out`.\n- [B](docs/b.md)\n")


def test_links_of_the_core_lead_within_it_or_to_the_site() -> None:
    one = Text("spec/v1/one.md", (), "", "# One page\n\n[two](two.md) [t](two.md#there) [out](../versions.md#why)\n")
    two = Text("spec/v1/two.md", (), "", "# Two\n\n[back](one.md)\n")
    text = site_texts.core("1.0", [one, two])
    assert "## One page\n\n[two](#two) [t](#there) [out](spec/versions.md#why)\n" in text
    assert "## Two\n\n[back](#one-page)\n" in text


def test_the_core_has_each_clause_of_its_pages_once() -> None:
    pages = ("framing.md", "model.md", "transfers.md")
    texts = [Text(f"spec/v1/{name}", ("Specification", "Core"), name, (SPEC / name).read_text()) for name in pages]
    found = re.findall(r"^\* `(KVP-[A-Z0-9-]+)` ", site_texts.core("1.0", texts), re.MULTILINE)
    assert sorted(found) == sorted(name for name, clause in clauses(load()).items() if clause.page in pages)
