"""The folder of the suite's data: in the repository, or in the installed package."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class MixedVersions(ImportError):
    """The suite and the kvproto beside it, which its testee in Python runs on, are of two versions."""


def _version() -> str:
    """The version of this distribution, and of kvproto; raises MixedVersions unless they are one."""
    beside = version("kvproto")
    try:
        own = version("kvproto-conformance")
    except PackageNotFoundError:  # on the path of a checkout alone
        return beside
    if own != beside:
        advice = f"pip install kvproto-conformance=={own} kvproto=={own}"
        raise MixedVersions(f"kvproto-conformance {own} needs kvproto {own}, and {beside} is installed: {advice}")
    return own


VERSION = _version()
"""The suite's version, which is that of kvproto."""

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]


def _found(path: str, name: str) -> Path:
    """A path in the repository, or its counterpart in the wheel."""
    here = _REPOSITORY / path
    return here if here.exists() else _HERE / name


SPEC = _found("spec/v1", "spec")
"""The folder of the specification's pages, schemas, vectors and registry."""
VECTORS = SPEC / "vectors"
REGISTRY = Path(os.environ.get("KVPROTO_REGISTRY") or SPEC / "registry.json")
"""The registry that the suite speaks: with the environment's KVPROTO_REGISTRY, that of a version that is kept."""
CLAUSES = SPEC / "clauses.json"
KEPT = _found("conformance/versions", "kept")
TEMPLATES = _found("conformance/testees", "testees")
LIBRARY = _found("libkvproto", "libkvproto")


@cache
def _clauses() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(CLAUSES.read_text(encoding="utf-8"))
    return found


def sentence(clause: str) -> dict[str, str]:
    """The `text`, `page` and `keyword` of a clause of the specification; the text of an unknown clause is empty."""
    return _clauses().get(clause, {"text": "", "page": "", "keyword": "MUST"})


def spec() -> str:
    """The version of the specification, such as 1.0-rc1."""
    return str(json.loads(REGISTRY.read_text(encoding="utf-8"))["version"])


def digest(folder: Path = VECTORS) -> str:
    """SHA-256 of all vectors; two reports with the same digest asked the same questions."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
