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
    """One frame: either a message with its fields in JSON form, or an error with its path."""

    id: str
    clause: str
    frame: str
    """Hex."""
    expected: dict[str, Any]
    """The testee's answer, exactly."""
    note: str


def load(folder: Path = VECTORS) -> list[Case]:
    """All cases of a folder, by file, then in file order."""
    found = []
    for path in sorted(folder.glob("*.json")):
        suite = json.loads(path.read_text())
        for row in suite["cases"]:
            expected = {k: row[k] for k in ("message", "fields", "error", "path") if k in row}
            found.append(Case(f"{suite['suite']}/{row['id']}", row["clause"], row["bytes"], expected, row["note"]))
    return found
