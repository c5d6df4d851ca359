"""Where the suite's data lie: in the repository, or in the installed package."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path

__all__ = ["CLAUSES", "KEPT", "REGISTRY", "TEMPLATES", "VECTORS", "VERSION", "digest", "sentence"]

VERSION = version("kvproto")
"""Of the suite, which is part of the distribution."""

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]


def _found(path: str, name: str) -> Path:
    """A path of the repository; where there is none, what the wheel has of it."""
    here = _REPOSITORY / path
    return here if here.exists() else _HERE / name


VECTORS = _found("spec/v1/vectors", "vectors")
REGISTRY = _found("spec/v1/registry.json", "registry.json")
CLAUSES = _found("spec/v1/clauses.json", "clauses.json")
KEPT = _found("conformance/versions", "kept")
TEMPLATES = _found("conformance/testees", "testees")


@cache
def _clauses() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(CLAUSES.read_text(encoding="utf-8"))
    return found


def sentence(clause: str) -> dict[str, str]:
    """What the specification says: `text`, `page` and `keyword` of a clause; no text where it is not known."""
    return _clauses().get(clause, {"text": "", "page": "", "keyword": "MUST"})


def digest(folder: Path = VECTORS) -> str:
    """SHA-256 of all vectors, by which two reports say that they asked the same."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
