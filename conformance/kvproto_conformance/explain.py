"""Explains the bytes of a frame or bare struct, one line per item, up to the first error."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvproto_conformance.codec import Refusal
from kvproto_conformance.codec.facts import HEADER_BYTES, MAGIC, MESSAGES, STRUCTS, find
from kvproto_conformance.codec.reader import Body, read_envelope, read_map

_ENVELOPE = (("magic", 4), ("major", 1), ("minor", 1), ("type", 2), ("flags", 2), ("reserved", 2), ("body length", 4))
_SHOWN = 16
"""Bytes shown of one value."""


class _Noting(Body):
    """A pass over a body that notes what it takes, and the path for which it takes it."""

    def __init__(self, data: bytes, values: int, notes: list[tuple[int, bytes, str]]) -> None:
        super().__init__(data, values)
        self._notes = notes

    def take(self, count: int, path: str) -> bytes:
        at, piece, notes = self.at, super().take(count, path), self._notes
        if path and notes and notes[-1][2] == path:
            notes[-1] = notes[-1][0], notes[-1][1] + piece, path
        else:
            notes.append((at, piece, path))
        return piece


def explain(data: bytes, struct: str = "") -> list[str]:
    """Lines of offset, bytes, path and value; if there is an error, the last line states it."""
    lines: list[str] = []
    notes: list[tuple[int, bytes, str]] = []
    start, fields = 0, {}
    try:
        if struct:
            layout = find(STRUCTS | MESSAGES, struct)
        else:
            start = HEADER_BYTES
            lines += _envelope(data)
            layout = read_envelope(data)
            lines.append(f"      {layout.name}:")
        fields = read_map(layout, data[start:], partial(_Noting, notes=notes))
        end = ""
    except Refusal as refusal:
        end = f"      {refusal.code} at {refusal.path or 'the whole message'}"
    lines += [line_of(start + at, piece, path, _value(fields, path)) for at, piece, path in notes]
    return [*lines, end] if end else lines


def _envelope(data: bytes) -> list[str]:
    lines, at = [], 0
    for name, size in _ENVELOPE:
        if piece := data[at : at + size]:
            number = int.from_bytes(piece, "little")
            said = {"magic": repr(MAGIC.decode()) if piece == MAGIC else "", "type": f"0x{number:04x}"}
            lines.append(line_of(at, piece, f"@{name}", said.get(name, str(number))))
        at += size
    return lines


def line_of(at: int, piece: bytes, path: str, value: str) -> str:
    """One line: the offset, the bytes, the path, and the value."""
    some = piece[:_SHOWN].hex(" ") + (f" ... {len(piece)} bytes" if len(piece) > _SHOWN else "")
    return f"{at:04x}  {some:<26}  {path or '(map or field id)'}{' = ' if value else ''}{value}"


def _value(fields: Any, path: str) -> str:
    """The value at a path of a JSON form; empty for maps, lists and what was not read."""
    for word in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(fields, list) and word.isdigit() and int(word) < len(fields):
            fields = fields[int(word)]
        elif isinstance(fields, dict):
            fields = fields.get(word)
        else:
            return ""
    text = "" if isinstance(fields, dict | list) or fields is None else str(fields)
    return text if len(text) <= 60 else text[:57] + "..."
