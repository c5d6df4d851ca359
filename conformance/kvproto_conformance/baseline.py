"""Known failures, each with an issue and a date by which it must be fixed."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.fresh import PREFIX
from kvproto_conformance.report import short
from kvproto_conformance.run import Result, Status

_RED = (Status.FAIL, Status.ERROR, Status.UNEARNED)


class BadBaseline(Exception):
    """A baseline file cannot be used at all."""


@attrs.frozen
class Known:
    """One entry."""

    id: str
    issue: str
    until: date
    expect: str = ""
    """The beginning of the first wrong answer; a failure that begins otherwise is a new one."""


def read(path: Path) -> list[Known]:
    """Read the `[[known]]` entries of a TOML file; raises BadBaseline."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadBaseline(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadBaseline(f"{path}: {error}") from None
    if strange := sorted(found.keys() - {"known"}):
        raise BadBaseline(f"{path}: it has {strange[0]}, and should have [[known]] and nothing else")
    rows = found.get("known", [])
    if not isinstance(rows, list):
        raise BadBaseline(f"{path}: known is a list of tables, [[known]]")
    return [_entry(path, n, row) for n, row in enumerate(rows)]


def _entry(path: Path, n: int, row: Any) -> Known:
    at = f"{path}, entry {n + 1}"
    if not isinstance(row, dict) or row.keys() - {"id", "issue", "until", "expect"}:
        raise BadBaseline(f"{at}: it has id, issue, until, and perhaps expect, and nothing else")
    if not all(isinstance(row.get(key, ""), str) for key in ("id", "issue", "until", "expect")):
        raise BadBaseline(f"{at}: all of it is strings")
    if not row.get("id") or not row.get("issue"):
        raise BadBaseline(f"{at}: it needs an id and an issue")
    try:
        until = date.fromisoformat(row.get("until", ""))
    except ValueError:
        raise BadBaseline(f'{at}: until is a day, as "2027-01-31"') from None
    return Known(row["id"], row["issue"], until, row.get("expect", ""))


def apply(entries: list[Known], results: list[Result], ids: set[str], today: date) -> tuple[list[Result], list[str]]:
    """Mark the known failures among the results; also return what is wrong with the entries."""
    by_id = {result.case.id: result for result in results}
    complaints, known = [], set()
    for entry in entries:
        result = by_id.get(entry.id)
        if entry.id not in ids:
            complaints.append(f"{entry.id}: there is no such case")
        elif entry.id in known:
            complaints.append(f"{entry.id}: it stands here twice")
        elif entry.until < today:
            complaints.append(f"{entry.id}: it was to be mended by {entry.until} ({entry.issue})")
        elif result is not None and result.status not in _RED:
            complaints.append(f"{entry.id}: it passes; take it out")
        elif result is not None and not _answer(result).startswith(entry.expect):
            complaints.append(f"{entry.id}: it fails in another way: {_answer(result)}, not {entry.expect}")
        else:
            known.add(entry.id)
    return [attrs.evolve(r, status=Status.KNOWN) if r.case.id in known else r for r in results], complaints


def _answer(result: Result) -> str:
    return short(result.wrong[0].got, 200) if result.wrong else ""


def made(report: dict[str, Any], issue: str, until: date) -> str:
    """Make a baseline of everything that failed in a report, but for what its seed alone has made."""
    rows = [row for row in report["results"] if row["status"] in _RED and not row["id"].startswith(PREFIX)]
    return "".join(
        f'[[known]]\nid = "{row["id"]}"\nissue = {_quoted(issue)}\nuntil = "{until}"\n'
        + (f"expect = {_quoted(short(row['wrong'][0]['got'], 200)[:60])}\n\n" if row.get("wrong") else "\n")
        for row in rows
    )


def _quoted(text: str) -> str:
    """A TOML string, literal if possible."""
    if "'" not in text and text.isprintable():
        return f"'{text}'"
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'
