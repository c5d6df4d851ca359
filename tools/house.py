"""`python -m tools.house`: rules for names, sizes, docstrings and layers that no linter checks.

Each problem is a line: file, line, what is wrong, and what to do about it. The exit status is 1 if there is one.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvproto", "reference", "conformance", "integrations", "tools")
"""Folders whose functions are measured."""
KEPT = ("conformance/versions",)
"""Folders that stay as they were."""
READ = (*PACKAGES, "benchmarks")
"""Folders whose docstrings are read."""
SAME_NAME: dict[str, str] = {}
"""Class names that two files of kvproto/ may define, and why."""
SMALL = {"kvproto/metrics.py": "is imported by engines, which need no probes"}
"""Modules of kvproto/ that stay small beside their only user, and why."""

_LAYERS = "docs/architecture.md"
"""The page with the table of layers."""
_FUNCTION_LINES = 70
_MODULE_LINES = 60
_REGISTRY_CLASSES = ("kvproto/wire/enums.py", "kvproto/wire/messages.py")
"""Generated from the registry: their names are the specification's."""
_CLAUSE = re.compile(r"(That|Those|What|Whatever|When|Where|Which|Who|Whoever|Whose|Why|How)\b")
"""Beginnings of docstrings that are a clause where CONTRIBUTING.md asks for a noun or a verb."""
_SKIP = re.compile(r"#\s*fmt:\s*skip")
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.Tuple)


@frozen
class Problem:
    path: str
    line: int
    text: str
    """The problem, and what to do about it."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@frozen(eq=False)
class _Module:
    path: str
    """Relative to the root of the repository."""
    text: str
    statements: list[ast.stmt]
    """All of them, at every depth."""

    @property
    def name(self) -> str:
        """The dotted name by which others import it; only of modules in kvproto/."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    def imports(self) -> Iterator[str]:
        """Names of modules that it imports, and names in them, which can be modules too."""
        for node in self.statements:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(root: Path, folders: Iterable[str]) -> Iterator[_Module]:
    for package in folders:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(KEPT):
                text = path.read_text()
                yield _Module(name, text, list(_statements(ast.parse(text, name))))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements below a node; expressions, most of a syntax tree, are not searched."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, block, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from _statements(inner)


def _same_names(product: list[_Module]) -> Iterator[Problem]:
    """Class names that several files define; leading underscores do not make them different."""
    classes: dict[str, dict[str, int]] = defaultdict(dict)
    for module in product:
        if module.path not in _REGISTRY_CLASSES:
            for node in module.statements:
                if isinstance(node, ast.ClassDef):
                    classes[node.name.lstrip("_")].setdefault(module.path, node.lineno)
    for name, homes in classes.items():
        if len(homes) > 1 and name not in SAME_NAME:
            (path, line), *others = homes.items()
            where = ", ".join(f"{other}:{at}" for other, at in others)
            yield Problem(path, line, f"class {name} is also defined in {where}: rename all but one")


def _long_functions(modules: list[_Module]) -> Iterator[Problem]:
    for module in modules:
        for node in module.statements:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > _FUNCTION_LINES:
                    text = f"{node.name} has {lines} lines: divide it, at most {_FUNCTION_LINES} are allowed"
                    yield Problem(module.path, node.lineno, text)


def _small_modules(modules: list[_Module], product: list[_Module]) -> Iterator[Problem]:
    """Short modules with a single user, a neighbour in the same folder."""
    users: dict[str, set[_Module]] = defaultdict(set)
    for module in modules:
        for name in module.imports():
            users[name].add(module)
    for module in product:
        lines = module.text.count("\n")
        if lines >= _MODULE_LINES or module.path.endswith("__init__.py") or module.path in SMALL:
            continue
        neighbours = [user for user in users[module.name] if user is not module]
        if len(neighbours) == 1 and neighbours[0].folder == module.folder:
            yield Problem(module.path, 1, f"{lines} lines that only {neighbours[0].path} uses: join the two")


def _clauses(modules: list[_Module]) -> Iterator[Problem]:
    """Docstrings, of variables too, that begin with a clause such as "What a peer sent"."""
    for module in modules:
        for node in module.statements:
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if begin := _CLAUSE.match(text.lstrip()):
                    problem = f'a docstring begins with "{begin[0]}": begin with a noun or a verb'
                    yield Problem(module.path, node.lineno, problem)


def _skips(product: list[_Module]) -> Iterator[Problem]:
    """`# fmt: skip` at statements other than tables: displays, calls with one display, and unions."""
    for module in product:
        lines = {n for n, text in enumerate(module.text.split("\n"), 1) if _SKIP.search(text)}
        if not lines:
            continue
        for line in sorted(lines):
            around = [node for node in module.statements if node.lineno <= line <= _header_end(node)]
            if not (around and _is_table(max(around, key=lambda node: node.lineno))):
                yield Problem(module.path, line, "`# fmt: skip` belongs at tables: remove it and run `make format`")


def _header_end(statement: ast.stmt) -> int:
    """The last line of a simple statement, or of a compound one before its body."""
    body: list[ast.stmt] = getattr(statement, "body", [])
    if body:
        return max(statement.lineno, body[0].lineno - 1)
    return statement.end_lineno or statement.lineno


def _is_table(statement: ast.stmt) -> bool:
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
        value = value.args[0]
    return isinstance(value, (*_DISPLAYS, ast.BinOp))


def _layers(root: Path) -> Iterator[Problem]:
    """Differences between the table of layers, lowest first, and import-linter's contract, highest first."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    levels = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    level_of = {name.strip(): n for n, level in enumerate(reversed(levels)) for name in level.split("|")}
    named: set[str] = set()
    reached = -1
    rows = list(_table(root / _LAYERS, "| layer | folder |"))
    for number, cells in rows:
        row = list(_product_names(cells[1], level_of))
        for name in row:
            if name not in level_of:
                text = f"{name} is in the table of layers and not in pyproject's contract: add it to one, or remove it"
                yield Problem(_LAYERS, number, text)
            elif level_of[name] < reached:
                text = f"{name} is lower in pyproject's contract than a row above: move it up"
                yield Problem(_LAYERS, number, text)
        known = [level_of[name] for name in row if name in level_of]
        reached = max([reached, *known])
        named |= set(row)
    for name in level_of:
        if name not in named:
            text = f"layer {name} of pyproject's contract is in no row of the table: add it"
            yield Problem(_LAYERS, rows[0][0] if rows else 1, text)


def _table(path: Path, head: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of the table that begins with this head: the line's number, and its cells."""
    inside = False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        inside = line.startswith(head) or (inside and line.startswith("|"))
        if inside and not line.startswith((head, "|--", "| -")):
            yield number, [cell.strip() for cell in line.strip("|").split("|")]


def _product_names(cell: str, layers: dict[str, int]) -> Iterator[str]:
    """Layers that a cell such as "`kvproto/net`, `transport`" names."""
    for name in re.findall(r"`([^`]*)`", cell):
        bare = name.removeprefix("kvproto/").removesuffix(".py").rstrip("/")
        if name.startswith("kvproto/") or bare in layers:
            yield bare


def problems(root: Path) -> list[Problem]:
    """Every problem of the tree at `root`, by file and line."""
    read = list(_modules(root, READ))
    modules = [module for module in read if module.path.startswith(PACKAGES)]
    product = [module for module in modules if module.path.startswith("kvproto/")]
    return sorted(
        [
            *_same_names(product),
            *_long_functions(modules),
            *_small_modules(modules, product),
            *_clauses(read),
            *_skips(product),
            *_layers(root),
        ],
        key=lambda problem: (problem.path, problem.line),
    )


def main() -> int:
    """Print every problem of this repository; the exit status is 1 if there is one."""
    gc.disable()  # syntax trees have no cycles, and looking for some takes three quarters of the time
    broken = problems(ROOT)
    for problem in broken:
        print(problem)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
