"""The files of vectors: where they are, and their text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvproto_conformance.data import spec

MADE = Path(__file__).resolve().parents[2] / "spec/v1/vectors"
"""The folder that the scripts which make vectors write to."""


def text(suite: str, rows: Iterable[dict[str, Any]], **named: dict[str, Any]) -> str:
    """The text of a file of vectors: tables of what cases name, then the cases, each entry on its own line."""
    tables = "".join(f', "{name}": {{\n{_lines(map(_entry, table.items()))}\n}}' for name, table in named.items())
    return f'{{"suite": "{suite}", "version": "{spec()}"{tables}, "cases": [\n{_lines(map(_json, rows))}\n]}}\n'


def _lines(lines: Iterable[str]) -> str:
    return ",\n".join("  " + line for line in lines)


def _entry(entry: tuple[str, Any]) -> str:
    return f"{_json(entry[0])}: {_json(entry[1])}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
