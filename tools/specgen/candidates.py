"""Candidates of the specification: `[[candidate]]` in protocol.toml, the oldest first. What is stable in the last is frozen."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime

from tools.specgen.lint import RegistryError
from tools.specgen.registry import REGISTRY, ROOT, Facts, number

_FILE = REGISTRY / "protocol.toml"
_NAME = re.compile(r"rc[1-9][0-9]*|final")


def stated(facts: Facts, name: str, why: str) -> None:
    """Write a candidate to the registry: a new one, or the last one again until its tag `spec-VERSION` publishes it."""
    ours = ".".join(map(str, number(facts)))
    version = ours if name == "final" else f"{ours}-{name}"
    rows: list[dict[str, str]] = facts["candidate"]
    held = [row["version"] for row in rows]
    if version in held[:-1] or (ours in held and version != ours) or _published(version):
        raise RegistryError(f"{version} is published, or a later one is open: it does not change")
    again = rows[-1:] if rows and rows[-1]["version"] == version else []
    why = " ".join(why.split()) or "".join(row["why"] for row in again)
    if not _NAME.fullmatch(name) or not why:
        raise RegistryError("a candidate is rc1, rc2 ... or final, and has a reason")
    rows = rows[: len(rows) - len(again)]
    row = {"version": version, "day": datetime.now(UTC).date().isoformat(), "why": why}
    head = _FILE.read_text().partition("[[candidate]]")[0]
    _FILE.write_text(head + "\n".join(map(_block, [*rows, row])))


def _block(row: dict[str, str]) -> str:
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in row.items())
    return "".join(["[[candidate]]\n", *lines])


def _published(version: str) -> bool:
    """Whether the repository has a tag of this version."""
    asked = ["git", "-C", str(ROOT), "tag", "--list", f"spec-{version}"]
    return bool(subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip())
