"""Cases are data: what is asked of a testee, and what it has to answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

__all__ = ["LEVELS", "Ask", "Case", "load"]

Json = dict[str, Any]
_REPOSITORY = Path(__file__).resolve().parents[2] / "spec/v1/vectors"
VECTORS = _REPOSITORY if _REPOSITORY.is_dir() else Path(__file__).parent / "vectors"

LEVELS = ("codec", "negotiation", "deal", "merge", "plan", "lowering", "verify", "late", "stream", "inline")
"""Bytes and fields; version and features of a session; which rank stores which token, and where; attention over shares
made one; who sends what to whom; which bytes go where; checksums of them; windows that begin late; in which
order bytes are packed; Data under credit."""


@attrs.frozen
class Ask:
    """One question and its answer."""

    question: dict[str, Any]
    expected: dict[str, Any]
    """The testee's answer, exactly."""
    tolerance: float = 0.0
    """By how much a number of the answer may differ, times the greater of 1 and its size."""
    more: bool = False
    """Whether the answer may have keys that are not in `expected`."""


@attrs.frozen
class Case:
    """One thing that a testee has to know, by one question or two."""

    id: str
    clause: str
    level: str
    asks: tuple[Ask, ...]
    note: str


def load(folder: Path = VECTORS) -> list[Case]:
    """All cases of a folder, by level, then by file, then in file order."""
    found = []
    for pattern, cases_of in _FILES.items():
        for path in sorted(folder.glob(pattern)):
            suite = json.loads(path.read_text())
            for row in suite["cases"]:
                for level, ask in cases_of(suite, row):
                    name = level if level in _CLAUSES else suite["suite"]
                    clause = _CLAUSES.get(level, row["clause"])
                    found.append(Case(f"{name}/{row['id']}", clause, level, ask, row["note"]))
    return found


Asked = Iterator[tuple[str, tuple[Ask, ...]]]
"""Level and questions of each case that a row of a file makes."""


def _codec(suite: Json, row: Json) -> Asked:
    yield "codec", _read_and_written(row)


def _negotiated(suite: Json, row: Json) -> Asked:
    question = {"op": "negotiate", "sink": row["sink"], "source": row["source"]}
    answer: Json = {key: row[key] for key in ("version", "features") if key in row}
    yield "negotiation", (Ask(question, answer or _refused(row)),)


def _dealt(suite: Json, row: Json) -> Asked:
    yield row["level"], (Ask(row["question"], row["expected"], float(row.get("tolerance", 0))),)


def _planned(suite: Json, row: Json) -> Asked:
    """A Description may have a name, under which the file has it; what is expected then leaves out the routes."""
    named = suite.get("geometries", {})
    source, sink = (named[row[side]] if named else row[side] for side in ("source", "sink"))
    question = {"op": "plan", "source": source, "sink": sink, "features": row["features"]}
    yield "plan", (Ask(question, row.get("expected") or _refused(row), more=bool(named)),)


def _lowered(suite: Json, row: Json) -> Asked:
    sides = {side: row[side] for side in ("source", "sink")}
    yield "lowering", (Ask({"op": "lower", **sides}, {"copies": row["expected"]}),)
    yield "verify", (Ask({"op": "checksums", **sides}, {"checksums": row["sums"]}),)
    yield "stream", (Ask({"op": "stream", **sides}, {"stream": row["stream"]}),)


def _late(suite: Json, row: Json) -> Asked:
    question = {"op": "late", **{key: row[key] for key in ("group", "cp_rank", "since", "grant")}}
    answer: Json = {key: row[key] for key in ("begins", "window") if key in row}
    yield "late", (Ask(question, answer or _refused(row)),)


def _inline(suite: Json, row: Json) -> Asked:
    question = {"op": "inline", **{key: row[key] for key in ("length", "total", "data")}}
    yield "inline", (Ask(question, row["expected"]),)


_CLAUSES = {"verify": "KVP-VERIFY-SOURCE", "stream": "KVP-STG-ORDER"}
"""Of levels that share the rows of another."""
_FILES: dict[str, Callable[[Json, Json], Asked]] = {
    "codec/*.json": _codec, "negotiation.json": _negotiated, "dcp.json": _dealt, "plan/*.json": _planned,
    "lowering.json": _lowered, "late.json": _late, "inline.json": _inline,
}  # fmt: skip


def _refused(row: Json) -> Json:
    return {"error": row["error"], "path": row["path"]}


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
