"""The programs that pages show: they are the files that they claim to be, the snippets run, and links lead somewhere."""

import re
import tomllib
from pathlib import Path

import attrs
import pytest

import kvproto
from kvproto.wire.enums import ErrorCode
from tests.examples.test_examples import example
from tests.processes import Command
from tools.site_pages import MADE
from tools.specgen.registry import load

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\))([^)#\s:]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
ID = re.compile(r'id="([^"]+)"')


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
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py"), ROOT / "README.md"]
    stated = [given for page in pages for given in re.findall(r"facts\b.*?=.*?(\{[^}]*\})", page.read_text())]
    names = [name for given in stated for name in re.findall(r'"([^"]+)":', given)]
    assert len(names) >= 8
    assert not [name for name in names if name not in known]


@pytest.mark.parametrize("name", ["source.py", "sink.py", "smallest.py", "torch_paged.py", "adapter.py"])
def test_examples_that_are_copied_state_the_weights(name: str) -> None:
    assert '"weights.target"' in (ROOT / "examples" / name).read_text()


def test_the_programs_of_the_tutorial_are_the_files() -> None:
    blocks = [block.rstrip() for block in BLOCK.findall((ROOT / "docs/tutorial.md").read_text())]
    assert blocks == [(ROOT / "examples" / name).read_text().rstrip() for name in ("source.py", "sink.py")]


HOW_TO = sorted(f"docs/how-to/{path.name}" for path in (ROOT / "docs/how-to").glob("*.md"))
SAYS = {"docs/how-to/changed-pages.md": "item 1 of the pool"}
"""What a page's program is meant to print on stderr."""


ALONE = [*HOW_TO, "docs/quickstart.md", "docs/your-engine.md", "README.md"]
"""Pages whose Python is a program."""


@pytest.mark.parametrize("page", ALONE)
def test_snippets_run(page: str, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(snippets(page))
    status, _, said = Command(example, [program]).wait()
    assert status == 0, said
    assert SAYS[page] in said if page in SAYS else said == ""


def test_every_page_of_how_to_has_a_program_and_a_link_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert len(HOW_TO) >= 15
    assert not [page for page in HOW_TO if page.removeprefix("docs/") not in index]
    assert not [page for page in HOW_TO if not BLOCK.search((ROOT / page).read_text())]


def test_the_reference_has_every_option() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    table = text[text.index("| field | default | of |") :].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert sorted(named) == sorted(field.name for field in attrs.fields(kvproto.Options))


def test_transports_have_the_status_of_their_features() -> None:
    status = {name: row["status"] for name, row in load()["feature"].items()}
    rows = re.findall(
        r"^\| `\w+` \| (\w+) \| [^|]* \| [^|]* \| (\w+) \|", (ROOT / "docs/reference.md").read_text(), re.M
    )
    assert len(rows) == 2
    assert [said for said, _ in rows] == [status[feature] for _, feature in rows]


def test_troubleshooting_has_an_entry_for_each_code() -> None:
    """`kvproto errors CODE` prints the link."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    entries = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \| \S.* \| \S.* \|$', page, re.MULTILINE)
    assert not [entry for entry in entries if entry[0] != entry[1]]
    assert sorted(name for name, _ in entries) == sorted(code.name for code in ErrorCode)


PAGES = sorted(
    str(path.relative_to(ROOT))
    for kind in ("*.md", "docs/**/*.md", "spec/**/*.md", "conformance/*.md", "reference/*.md")
    for path in ROOT.glob(kind)
)


@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in (ROOT / page).read_text()])
def test_python_of_every_page_is_run(page: str) -> None:
    """Here, or by another test, which reads the page. Blocks marked `py` need a GPU."""
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert page in ALONE or any(f'"{page}"' in test for test in tests)


@pytest.mark.parametrize("page", PAGES)
def test_every_column_but_the_first_has_a_head(page: str) -> None:
    """The first column of a table may name its rows."""
    heads = re.findall(r"^\|(.*)\|\n\|[-:| ]+\|$", FENCE.sub("", (ROOT / page).read_text()), re.MULTILINE)
    assert not [head for head in heads if not all(cell.strip() for cell in head.split("|")[1:])]


def anchors(page: Path) -> set[str]:
    """What a link to a page may name: its headings, as GitHub and the site call them, and ids."""
    text = FENCE.sub("", page.read_text())
    heads = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads} | set(ID.findall(text))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_in_the_repository(page: str) -> None:
    """To a file, and in pages to a heading; pages that are made for the site are not in the repository."""
    here = ROOT / page
    made = {(ROOT / "docs" / f"{name}.md").resolve() for name in MADE}
    links = [
        (to, anchor, (here.parent / to).resolve() if to else here)
        for to, anchor in LINK.findall(FENCE.sub("", here.read_text()))
    ]
    links = [link for link in links if link[2] not in made]
    assert not [to for to, _, path in links if not path.exists()]
    assert not [(to, anchor) for to, anchor, path in links if anchor and anchor not in anchors(path)]


def test_tests_that_a_page_names_are_there() -> None:
    page = (ROOT / "tests/README.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / "tests" / path).read_text()]
    assert len(named) > 30
    assert not missing
