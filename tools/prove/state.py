"""Results of earlier runs over the same sources: an interrupted run goes on, and parts of one make a whole.

A folder has a file for each run, of JSON lines: first what the sources were, then a row for each mutant. Files of
another machine count as well; those of other sources do not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from kvproto_conformance.live.scenario import SCENARIOS
from tools.prove.rows import Row
from tools.specgen.registry import ROOT

HINTS = Path(__file__).with_name("hints.json")
"""The test or scenario that noticed a mutant last time. It is asked first; if it notices nothing, all others are."""

_WHAT = ("kvproto", "conformance", "spec/v1/registry", "spec/v1/vectors", "tests", "tools/prove", "tools/specgen")
_KINDS = {".py", ".toml", ".json"}


def sources() -> str:
    """Digest of everything that the answers depend on."""
    found = hashlib.sha256()
    for folder in _WHAT:
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in _KINDS and path.is_file()):
            if path == HINTS:  # they change no answer
                continue
            found.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def read_hints() -> dict[str, str]:
    """Mutant to the test that noticed it the last time."""
    found: dict[str, str] = json.loads(HINTS.read_text(encoding="utf-8")) if HINTS.exists() else {}
    return found


class State:
    """Rows of earlier runs, and a file for those of this one."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Read all files of these sources; a last line that was cut off is none."""
        self._folder, self._digest, self._path = folder, digest, folder / f"{digest}-{os.getpid()}.jsonl"
        self._known: dict[tuple[str, str], Row] = {}
        for path in sorted(folder.glob("*.jsonl")):
            head, *rows = path.read_text(encoding="utf-8").splitlines() or [""]
            if _object(head).get("sources") == digest:
                for said in filter(None, map(_object, rows)):
                    row = Row(**said)
                    self._known[row.kind, row.name] = row

    def known(self, kind: str, name: str) -> Row | None:
        """The row of a mutant that was asked before."""
        return self._known.get((kind, name))

    def keep(self, row: Row) -> None:
        """Note a row for later runs, at once."""
        self._folder.mkdir(parents=True, exist_ok=True)
        begun = self._path.exists()
        with self._path.open("a", encoding="utf-8") as file:
            if not begun:
                file.write(json.dumps({"sources": self._digest}) + "\n")
            file.write(json.dumps(attrs.asdict(row)) + "\n")

    def forget(self) -> None:
        """Ask everything anew."""
        self._known.clear()

    @staticmethod
    def killers(rows: Iterable[Row]) -> dict[str, str]:
        """Of the mutants that tests or scenarios have noticed, which it was; bugs name theirs."""
        slow = [row for row in rows if row.kind != "bug" and ("::" in row.noticed or row.noticed in SCENARIOS)]
        return {row.name: row.noticed for row in sorted(slow, key=lambda row: row.name)}


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
