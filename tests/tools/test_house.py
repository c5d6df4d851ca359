"""The rules of tools/house.py, on trees of a few lines that keep or break one of them."""

from pathlib import Path

import pytest

from tools import house

PROJECT = """
[[tool.importlinter.contracts]]
type = "independence"
[[tool.importlinter.contracts]]
type = "layers"
layers = ["cli", "sink | source", "wire", "errors"]
"""
LAYERS = """
| layer | folder | knows |
|---|---|---|
| spec | `spec/v1` | facts |
| wire | `kvproto/errors.py`, `wire` | bytes |
| towers | `kvproto/source`, `kvproto/sink` | ranks |
| tools | `kvproto/cli` | people |

| layer | of another table |
| x | `kvproto/nobody` |
"""


@pytest.fixture
def tree(tmp_path: Path):
    """Writes files by name beside a page of layers and a pyproject that agree, and returns the problems of the whole."""

    def check(**files: str) -> list[str]:
        for name, text in {"docs__architecture": LAYERS, "pyproject": PROJECT, **files}.items():
            ending = {"docs__architecture": ".md", "pyproject": ".toml"}.get(name, ".py")
            path = tmp_path / (name.replace("__", "/") + ending)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return [str(problem) for problem in house.problems(tmp_path)]

    return check


def test_a_tree_that_keeps_the_rules(tree):
    assert tree(kvproto__a="class A: ...\n", kvproto__b="class B: ...\n") == []


def test_a_class_name_in_two_files(tree):
    (problem,) = tree(kvproto__a="\nclass Part: ...\n", kvproto__b="class B:\n    class _Part: ...\n")
    assert problem == "kvproto/a.py:2: class Part is also defined in kvproto/b.py:2: rename all but one"


def test_class_names_of_the_registry_and_of_other_packages_are_free(tree):
    part = "class Part: ...\n"
    assert tree(kvproto__a=part, kvproto__wire__messages=part, reference__b=part) == []


def test_a_class_name_with_a_reason(tree, monkeypatch):
    monkeypatch.setitem(house.SAME_NAME, "Part", "the specification's word, and shown to users")
    assert tree(kvproto__a="class Part: ...\n", kvproto__b="class Part: ...\n") == []


@pytest.mark.parametrize("package", house.PACKAGES)
@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n", "def f(\n    a,\n):\n"])
def test_a_function_of_71_lines(tree, package, head):
    body = "    pass\n" * (70 - head.count("\n"))
    assert tree(**{f"{package}__a": head + body}) == []
    (problem,) = tree(**{f"{package}__a": "class A:\n    x = 0\n" + head + body + "    pass\n"})
    assert problem == f"{package}/a.py:3: f has 71 lines: divide it, at most 70 are allowed"


def test_what_is_kept_as_it_was_is_not_measured(tree):
    assert tree(**{"conformance__versions__a": "def f():\n" + "    pass\n" * 70}) == []


@pytest.mark.parametrize(
    "line", ["from kvproto.net import small", "from kvproto.net.small import x", "import kvproto.net.small"]
)
def test_a_small_module_with_one_user_in_its_folder(tree, line):
    (problem,) = tree(kvproto__net__small="x = 0\n" * 59, kvproto__net__user=f"def f():\n    {line}\n")
    assert problem == "kvproto/net/small.py:1: 59 lines that only kvproto/net/user.py uses: join the two"


def test_modules_that_are_large_or_used_elsewhere_stay(tree):
    use = "from kvproto.net import small\n"
    small = "x = 0\n"
    assert tree(kvproto__net__small=small * 60, kvproto__net__user=use) == []
    assert tree(kvproto__net__small=small, kvproto__net__user=use, kvproto__net__b=use) == []
    assert tree(kvproto__net__b=small, kvproto__net__user=small, integrations__c=use) == []


def test_a_package_and_a_small_module_with_a_reason_stay(tree, monkeypatch):
    monkeypatch.setitem(house.SMALL, "kvproto/net/small.py", "documented for authors of transports")
    files = {"kvproto__net__small": "x = 0\n", "kvproto__net____init__": "from kvproto.net import small\n"}
    assert tree(**files, kvproto__net__user="import kvproto.net\n") == []


@pytest.mark.parametrize("package", house.READ)
@pytest.mark.parametrize("word", ["What", "Those", "That", "Whatever", "Which", "Where", "When", "Who", "Why", "How"])
def test_a_docstring_that_begins_with_a_clause(tree, package, word):
    problem = f'begins with "{word}": begin with a noun or a verb'
    begins = f'"""{word} a peer sends."""\n'
    texts = begins, f"def f():\n    {begins}", f"class A:\n    x = 0\n    {begins}", f'x = 0\n"""\n{word} it is."""\n'
    for text in texts:
        assert [line.partition("docstring ")[2] for line in tree(**{f"{package}__a": text})] == [problem]


@pytest.mark.parametrize(
    "text", ['"""The words of a peer, which are What."""', '"""Whether it waits."""', 'x = "What"']
)
def test_docstrings_that_begin_with_a_noun_and_other_strings(tree, text):
    assert tree(kvproto__a=text + "\n") == []


SKIP = "  # fmt: skip\n"


@pytest.mark.parametrize("code", [
    f"def f(a, b,\n  c) -> int:{SKIP}    return a\n", f"x = max(1,\n  2){SKIP}", f"raise ValueError(\n  1){SKIP}",
    f"x = [a for a in\n  'b']{SKIP}", f"if max(\n  1, 2):{SKIP}    pass\n",
])  # fmt: skip
def test_layout_by_hand(tree, code):
    (problem,) = tree(kvproto__a=code)
    assert "`# fmt: skip` belongs at tables" in problem


@pytest.mark.parametrize("code", [
    f"x = {{\n  1: 2}}{SKIP}", f"x: list[int] = [\n  1,{SKIP}  2]{SKIP}", f"x = frozenset((\n  1,)){SKIP}",
    f"x = int\\\n | str{SKIP}", f"def f():\n    return (\n  1, 2){SKIP}",
])  # fmt: skip
def test_tables_are_laid_out_by_hand(tree, code):
    assert tree(kvproto__a=code) == []


@pytest.mark.parametrize(("row", "other", "problem"), [
    ("`kvproto/source`, `kvproto/sink`", "`kvproto/source`", "docs/architecture.md:4: layer sink of pyproject's contract is in no row of the table: add it"),
    ("`kvproto/cli`", "`kvproto/cli`, `kvproto/net`", "docs/architecture.md:7: net is in the table of layers and not in pyproject's contract: add it to one, or remove it"),
    ("`kvproto/errors.py`, `wire`", "`kvproto/wire`", "docs/architecture.md:4: layer errors of pyproject's contract is in no row of the table: add it"),
    ("`spec/v1`", "`kvproto/sink`", "docs/architecture.md:5: wire is lower in pyproject's contract than a row above: move it up"),
])  # fmt: skip
def test_the_table_of_layers_and_the_contract(tree, row, other, problem):
    assert problem in tree(docs__architecture=LAYERS.replace(row, other))
