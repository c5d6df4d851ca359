"""Cases are data: what is asked of a testee, and what it has to answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

__all__ = ["LEVELS", "Ask", "Case", "load"]

_REPOSITORY = Path(__file__).resolve().parents[2] / "spec/v1/vectors"
VECTORS = _REPOSITORY if _REPOSITORY.is_dir() else Path(__file__).parent / "vectors"

LEVELS = ("codec", "deal", "merge")
"""Bytes and fields; which rank stores which token, and where; attention over shares made one."""


@attrs.frozen
class Ask:
    """One question and its answer."""

    question: dict[str, Any]
    expected: dict[str, Any]
    """The testee's answer, exactly."""
    tolerance: float = 0.0
    """By how much a number of the answer may differ, times the greater of 1 and its size."""


@attrs.frozen
class Case:
    """One thing that a testee has to know, by one question or two."""

    id: str
    clause: str
    level: str
    asks: tuple[Ask, ...]
    note: str


def load(folder: Path = VECTORS) -> list[Case]:
    """All cases of a folder, by file, then in file order."""
    found = []
    for path in (*sorted((folder / "codec").glob("*.json")), *sorted(folder.glob("dcp.json"))):
        suite = json.loads(path.read_text())
        for row in suite["cases"]:
            asks = (_asked(row),) if "question" in row else _read_and_written(row)
            level = row.get("level", "codec")
            found.append(Case(f"{suite['suite']}/{row['id']}", row["clause"], level, asks, row["note"]))
    return found


def _asked(row: dict[str, Any]) -> Ask:
    return Ask(row["question"], row["expected"], float(row.get("tolerance", 0)))


def _read_and_written(row: dict[str, Any]) -> tuple[Ask, ...]:
    """A frame or a bare struct: what a reader accepts, a writer writes again byte by byte, unless it may be ignored."""
    expected: dict[str, Any] = {k: row[k] for k in ("message", "fields", "error", "path") if k in row}
    if (struct := row.get("struct")) is not None:
        read = Ask({"op": "decode_struct", "struct": struct, "bytes": row["bytes"]}, expected)
        written = Ask({"op": "encode_struct", "struct": struct, "fields": row.get("fields")}, {"bytes": row["bytes"]})
    else:
        read = Ask({"op": "decode", "frame": row["bytes"]}, expected)
        written = Ask({"op": "encode", **expected}, {"frame": row["bytes"]})
    return (read, written) if "fields" in row and row.get("canonical", True) else (read,)
