"""Cases are data: bytes, and what a reader must make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Case", "load"]

_REPOSITORY = Path(__file__).resolve().parents[2] / "spec/v1/vectors"
VECTORS = _REPOSITORY if _REPOSITORY.is_dir() else Path(__file__).parent / "vectors"


@attrs.frozen
class Case:
    """One frame or bare struct: either its fields in JSON form, or an error with its path."""

    id: str
    clause: str
    frame: str
    """Hex."""
    struct: str | None
    """Name of a bare struct; None for a frame."""
    expected: dict[str, Any]
    """The testee's answer, exactly."""
    note: str
    canonical: bool = True
    """Whether a writer of the fields makes these very bytes."""


def load(folder: Path = VECTORS) -> list[Case]:
    """All cases of a folder, by file, then in file order."""
    found = []
    for path in sorted((folder / "codec").glob("*.json")):
        suite = json.loads(path.read_text())
        for row in suite["cases"]:
            expected = {k: row[k] for k in ("message", "fields", "error", "path") if k in row}
            id_ = f"{suite['suite']}/{row['id']}"
            canonical = row.get("canonical", True)
            found.append(Case(id_, row["clause"], row["bytes"], row.get("struct"), expected, row["note"], canonical))
    return found
