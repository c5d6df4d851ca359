"""The tables of each engine's messages: sglang.toml and vllm.toml, checked as they are loaded."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode

__all__ = ["Engine", "Message", "Row", "engine", "engines", "words"]


@attrs.frozen
class Row:
    """One field in a span of releases."""

    name: str
    type: str
    at: int = -1
    """Index of the frame or element after the guard; -1 for a key of a map."""
    since: str = ""
    """First examined release that has it; the first of all by default."""
    until: str = ""
    """Last examined release that has it; the last of all by default."""
    word: str = ""
    """The word of words.toml that it states."""
    optional: bool = False
    """Whether it may be absent, as a key or as one of the last frames."""


@attrs.frozen(eq=False, slots=False)
class Message:
    """One message in all releases of its engine."""

    name: str
    form: str
    """frames, array, map or log."""
    rows: tuple[Row, ...]
    doc: str = ""
    guard: str = ""
    states: str = ""
    """Whose words it has: "rank", "fleet", or "next" for the rank whose message follows."""
    classes: tuple[str, ...] = ()
    """Names of its class in pickles."""
    marker: str = ""
    """For a log: text that identifies its line."""

    @cached_property
    def head(self) -> list[bytes]:
        """Frames that it begins with in all releases: the guard, and a first field that is constant."""
        first = {row.type for row in self.rows if row.at == 0}
        constant = [t[1:].encode() for t in first if len(first) == 1 and t.startswith("=")]
        return [self.guard.encode()] * bool(self.guard) + constant


@attrs.frozen(eq=False)
class Engine:
    """One engine: the releases that were examined, oldest first, and its messages."""

    name: str
    releases: tuple[str, ...]
    entries: str
    """Order of a model's buffers: part-major (all layers of one part first) or joint (one for each layer)."""
    messages: tuple[Message, ...]
    always: Mapping[str, Any] = attrs.field(factory=dict)
    """Words with one value in all releases and configurations."""

    def message(self, name: str) -> Message:
        """The message of that name."""
        return next(m for m in self.messages if m.name == name)

    @cache  # noqa: B019 (engines are made once)
    def rows(self, message: Message, release: str) -> tuple[Row, ...]:
        """A message's fields in one examined release, by position."""
        place = self.releases.index
        last = len(self.releases) - 1
        found = [
            row
            for row in message.rows
            if (place(row.since) if row.since else 0) <= place(release) <= (place(row.until) if row.until else last)
        ]
        return tuple(sorted(found, key=lambda row: row.at))

    def around(self, release: str) -> tuple[str, ...]:
        """This release if it was examined, else the two examined ones around it; raises LocalError beyond these."""
        if release in self.releases:
            return (release,)
        below = [r for r in self.releases if _order(r) < _order(release)]
        if not below or len(below) == len(self.releases) or not _order(release):
            span = f"{self.releases[0]} to {self.releases[-1]}"
            raise LocalError(
                ErrorCode.UNSUPPORTED_VERSION, "release", f"{self.name} {span}", release, "add rows to its table"
            )
        return self.releases[len(below) - 1 : len(below) + 1]


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,9}", release))


@cache
def engines() -> Mapping[str, Engine]:
    """Every engine with a table, by name."""
    made = [_load(name) for name in ("sglang", "vllm")]
    return {e.name: e for e in made}


def engine(name: str) -> Engine:
    """The engine of that name; raises LocalError."""
    if name not in engines():
        raise LocalError(ErrorCode.OUT_OF_RANGE, "engine", " or ".join(engines()), name)
    return engines()[name]


@cache
def words() -> Mapping[str, Any]:
    """words.toml: what values state, and how a caller says it if they do not."""
    return _toml("words")


def _toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())


def _load(name: str) -> Engine:
    data = _toml(name)
    messages = []
    for message in data["message"]:
        fields = tuple(Row(**row) for row in message.pop("fields"))
        classes = tuple(message.pop("classes", ()))
        messages.append(Message(rows=fields, classes=classes, **message))
    return Engine(data["engine"], tuple(data["releases"]), data["entries"], tuple(messages), data.get("always", {}))
