"""Scripts in benchmarks/ import what is there, also those that only run on GPUs or beside engines that are not installed."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("", "reference", "conformance", "integrations", "benchmarks")]
OURS = {"kvproto", "tests", "tools", *(path.name for folder in FOLDERS[1:4] for path in folder.iterdir())}
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def file_of(module: str) -> Path | None:
    """The file of a module of this repository, by its dotted name; a folder if that has no __init__.py."""
    for folder in FOLDERS:
        path = folder / module.replace(".", "/")
        for candidate in (path.with_suffix(".py"), path / "__init__.py", path):
            if candidate.exists():
                return candidate
    return None


def names_in(path: Path) -> set[str]:
    """Names that a module defines, imports or loads by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Constant(value=str()):
                names.add(node.value)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_imports_are_there(script: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = file_of(node.module)
            if home is None and node.module.partition(".")[0] in OURS:
                missing.append(node.module)
            elif home is not None:
                known = names_in(home)
                lacking = [a.name for a in node.names if a.name not in known and not file_of(f"{node.module}.{a.name}")]
                missing += [f"{node.module}.{name}" for name in lacking]
    assert not missing
