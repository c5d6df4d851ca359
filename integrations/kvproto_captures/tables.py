"""The tables of each engine's messages, sglang.toml and vllm.toml, and the words that values state, words.toml."""

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

__all__ = ["EngineTable", "FieldRow", "MessageTable", "engine", "engines", "words"]


@attrs.frozen
class FieldRow:
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

    @property
    def inner(self) -> str:
        """The name of the message that its bytes hold; empty for plain values."""
        return self.type[8:] if self.type.startswith("msgpack:") and self.type != "msgpack:float" else ""


@attrs.frozen(eq=False, slots=False)
class MessageTable:
    """One message in all releases of its engine."""

    name: str
    form: str
    """frames, array, map or log."""
    rows: tuple[FieldRow, ...]
    doc: str = ""
    guard: str = ""
    states: str = ""
    """The owner of its words: "rank", "fleet", or "next" for the rank whose message follows."""
    classes: tuple[str, ...] = attrs.field(default=(), converter=tuple)
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
class EngineTable:
    """One engine: the releases that were examined, oldest first, and its messages."""

    name: str
    releases: tuple[str, ...]
    entries: str
    """Order of a model's buffers: part-major (all layers of one part first) or joint (one for each layer)."""
    messages: tuple[MessageTable, ...]
    always: Mapping[str, Any] = attrs.field(factory=dict)
    """Words with one value in all releases and configurations."""

    def message(self, name: str) -> MessageTable:
        """The message of that name."""
        return next(m for m in self.messages if m.name == name)

    @cache  # noqa: B019 (tables are loaded once)
    def rows(self, message: MessageTable, release: str) -> tuple[FieldRow, ...]:
        """A message's fields in one examined release, by position."""
        place, last = self.releases.index, self.releases[-1]
        spans = [(place(row.since or self.releases[0]), place(row.until or last), row) for row in message.rows]
        rows = [row for first, final, row in spans if first <= place(release) <= final]
        return tuple(sorted(rows, key=lambda row: row.at))

    def around(self, release: str) -> tuple[str, ...]:
        """This release if it was examined, else the two examined ones around it; raises LocalError beyond these."""
        if release in self.releases:
            return (release,)
        below = [r for r in self.releases if _order(r) < _order(release)]
        if not below or len(below) == len(self.releases) or not _order(release):
            wanted, advice = f"{self.name} {self.releases[0]} to {self.releases[-1]}", "add rows to its table"
            raise LocalError(ErrorCode.UNSUPPORTED_VERSION, "release", wanted, release, advice)
        return self.releases[len(below) - 1 : len(below) + 1]


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,9}", release))


@cache
def engines() -> Mapping[str, EngineTable]:
    """Every engine with a table, by name."""
    return {name: _load(name) for name in ("sglang", "vllm")}


def engine(name: str) -> EngineTable:
    """The table of that engine; raises LocalError."""
    if name not in engines():
        raise LocalError(ErrorCode.OUT_OF_RANGE, "engine", " or ".join(engines()), name)
    return engines()[name]


@cache
def words() -> Mapping[str, Any]:
    """The words: what values state, and how a caller says it if they do not."""
    return _toml("words")


def _toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())


def _load(name: str) -> EngineTable:
    data = _toml(name)
    messages = [
        MessageTable(rows=tuple(FieldRow(**row) for row in message.pop("fields")), **message)
        for message in data["message"]
    ]
    return EngineTable(name, tuple(data["releases"]), data["entries"], tuple(messages), data.get("always", {}))
