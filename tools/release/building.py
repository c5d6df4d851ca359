"""Sdists, and wheels out of them, with the same bytes wherever and whenever they are built."""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "kvproto", "libkvproto", "crates", "reference", "conformance", "integrations", "spec/v1", "distributions",
    "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore",
)  # fmt: skip
"""All that distributions are made of."""


def projects(root: Path = ROOT) -> list[Path]:
    """The folders of the distributions, the core first."""
    return [root, *sorted(path.parent for path in root.glob("distributions/*/pyproject.toml"))]


def build(out: Path, root: Path = ROOT, only: Sequence[str] = ()) -> list[Path]:
    """Build each distribution of a checkout, or only those named, into a folder; the files, sdist before wheel."""
    out.mkdir(parents=True, exist_ok=True)
    chosen = (project for project in projects(root) if not only or project.name in only)
    return [path for project in chosen for path in _built(project, out.resolve())]


def wheels(out: Path, without: str) -> list[Path]:
    """Build the wheels of all distributions but one straight from the checkout, which is quicker."""
    out.mkdir(parents=True, exist_ok=True)
    return [_wheel(project, out.resolve()) for project in projects() if project.name != without]


def differing(files: list[Path]) -> list[str]:
    """The names of those files that have other bytes when a copy of the checkout builds them elsewhere.

    The copy has other times and permissions.
    """
    with tempfile.TemporaryDirectory(prefix="kvproto-again-") as folder:
        again = build(Path(folder) / "built", copied(Path(folder) / "elsewhere"))
        if [path.name for path in again] != [path.name for path in files]:
            return [path.name for path in again]
        return [one.name for one, other in zip(files, again, strict=True) if one.read_bytes() != other.read_bytes()]


def copied(target: Path) -> Path:
    """Copy all that distributions are made of into a folder, which is returned."""
    for name in SOURCES:
        _copy(ROOT / name, target / name)
    return target


def _built(project: Path, out: Path) -> Iterator[Path]:
    with chdir(project):
        sdist = out / build_sdist(str(out))
    yield sdist
    with tempfile.TemporaryDirectory(prefix="kvproto-sdist-") as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        yield _wheel(Path(folder) / sdist.name.removesuffix(".tar.gz"), out)


def _wheel(source: Path, out: Path) -> Path:
    with chdir(source):
        return out / build_wheel(str(out))


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder, of which nobody but its owner may read the copy, as under another umask."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy(source, target)
        return
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target, symlinks=True, copy_function=shutil.copy, ignore=ignored)
    for path in target.rglob("*"):
        if not path.is_symlink():
            os.chmod(path, path.stat().st_mode & 0o700)
