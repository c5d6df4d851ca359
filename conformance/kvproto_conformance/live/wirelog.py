"""Messages of both sides of a scenario, as lines for people, without what the registry calls secret."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from kvproto_conformance.data import REGISTRY
from kvproto_conformance.report import short

if TYPE_CHECKING:
    from kvproto_conformance.live.running import Result

_WIDTH = 160
"""The number of characters of a message's fields that are shown."""
_HIDDEN = "..."


@cache
def _fields() -> dict[str, dict[str, tuple[bool, str]]]:
    """By message or struct, its fields: whether each is secret, and the struct that it holds, if any."""
    facts = json.loads(REGISTRY.read_text(encoding="utf-8"))
    return {
        name: {
            field["name"]: (bool(field.get("secret")), field["type"].partition("struct:")[2].rstrip(">"))
            for field in body["field"]
        }
        for kind in ("message", "struct")
        for name, body in facts[kind].items()
    }


def blanked(name: str, value: Any) -> Any:
    """The fields of a message or struct that are not secret."""
    if isinstance(value, list):
        return [blanked(name, each) for each in value]
    if not isinstance(value, dict):
        return value
    known = _fields().get(name, {})
    found = {}
    for key, held in value.items():
        secret, struct = known.get(key, (False, ""))
        found[key] = _HIDDEN if secret else blanked(struct, held) if struct else held
    return found


def lines(said: Result) -> Iterator[str]:
    """One line per message, by connection."""
    for number, connection in enumerate(said.log, 1):
        yield f"connection {number}"
        for at, sender, message, fields in connection:
            yield f"  {at:8.3f} s  {sender:<6}  {message}  {short(blanked(message, fields), _WIDTH)}"
