"""The programs that pages show: they are the files that they claim to be, the snippets run, and links lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

import kvproto
from tests.examples.test_examples import example
from tests.processes import Command

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")


def snippets(page: str) -> str:
    """The Python of a page as one program whose lines are numbered as those of the page."""
    text = (ROOT / page).read_text()
    files = {path.read_text().rstrip() for path in (ROOT / "examples").glob("*.py")}
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if block[1].rstrip() not in files:
            first = text[: block.start(1)].count("\n")
            rows = block[1].splitlines()
            lines[first : first + len(rows)] = rows
    return "\n".join(lines) + "\n"


def _has(kind: str, name: str) -> bool:
    """Whether a class of the door has a method or, from its beginning, an attribute of that name."""
    cls = getattr(kvproto, kind)
    return hasattr(cls, name) or name in cls.__init__.__code__.co_names


def test_calls_that_the_page_of_adapters_names_are_there() -> None:
    """`Class.method` of the door, and files of the two adapters."""
    page = (ROOT / "docs/your-engine.md").read_text()
    calls = set(re.findall(r"`(Source|Sink|Request|Fetch)\.(\w+)", page))
    assert len(calls) > 8
    assert not [call for call in calls if not _has(*call)]
    files = set(re.findall(r"`(kvproto_\w+/\w+\.py)`", page))
    assert len(files) > 8
    assert not [file for file in files if not (ROOT / "integrations" / file).is_file()]


def test_facts_have_the_names_of_the_registry() -> None:
    """An engine whose author copied another name would be refused by one that took the registry's."""
    known = tomllib.loads((ROOT / "spec/v1/registry/facts.toml").read_text())["fact"]
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    stated = [given for page in pages for given in re.findall(r"facts\b.*?=.*?(\{[^}]*\})", page.read_text())]
    names = [name for given in stated for name in re.findall(r'"([^"]+)":', given)]
    assert len(names) >= 8
    assert not [name for name in names if name not in known]


@pytest.mark.parametrize("name", ["source.py", "sink.py", "smallest.py", "torch_paged.py", "adapter.py"])
def test_examples_that_are_copied_state_the_weights(name: str) -> None:
    assert '"weights.target"' in (ROOT / "examples" / name).read_text()


def test_the_programs_of_embed_are_the_files() -> None:
    blocks = [block.rstrip() for block in BLOCK.findall((ROOT / "docs/embed.md").read_text())]
    assert blocks[:2] == [(ROOT / "examples" / name).read_text().rstrip() for name in ("source.py", "sink.py")]


@pytest.mark.parametrize("page", ["docs/embed.md", "docs/your-engine.md", "README.md"])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(snippets(page))
    status, _, said = Command(example, [program]).wait()
    assert (status, said) == (0, "")


@pytest.mark.parametrize(
    "page",
    [
        "docs/embed.md",
        "docs/gpu.md",
        "docs/layouts.md",
        "docs/real.md",
        "docs/your-engine.md",
        "README.md",
        "reference/README.md",
        "spec/v1/terms.md",
    ],
)
def test_links_lead_somewhere_in_the_repository(page: str) -> None:
    here = ROOT / page
    missing = [link for link in LINK.findall(here.read_text()) if not (here.parent / link).exists()]
    assert not missing


def test_tests_that_a_page_names_are_there() -> None:
    page = (ROOT / "tests/README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / "tests" / path).read_text()]
    assert len(named) > 30
    assert not missing
