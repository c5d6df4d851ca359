"""The interpreter: reads a message of a capture by the tables, into named values and the releases that write it so.

If several releases read a message and their values differ, all are kept until the rest of the capture, or the caller,
says which release it is (`resolve`); nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import attrs

from kvproto.errors import WireError
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import refuse
from kvproto_captures.capture import RawMessage
from kvproto_captures.tables import EngineTable, FieldRow, MessageTable, engine, engines
from kvproto_captures.values import from_frame, from_msgpack, from_value

__all__ = ["Interpretation", "read", "resolve"]


@attrs.frozen
class Interpretation:
    """A message as some releases of one engine write it."""

    engine: EngineTable
    message: MessageTable
    releases: tuple[str, ...]
    values: Mapping[str, Any]
    """By field; a message within a frame is a nested map."""
    path: str

    @property
    def whose(self) -> str:
        """The owner of its words: "rank", "next" for the rank whose message follows, or "fleet"; empty for none."""
        return next((message.states for message, *_ in self._nested() if message.states), "")

    def stated(self) -> Iterator[tuple[str, Any, str]]:
        """(word, value, path) of what its values state, including those of inner messages."""
        for message, values, path in self._nested():
            for row in self.engine.rows(message, self.releases[-1]):
                if row.word and values.get(row.name) is not None:
                    yield row.word, values[row.name], f"{path}.{row.name}"

    def _nested(self) -> Iterator[tuple[MessageTable, Mapping[str, Any], str]]:
        """The message and those within its frames, each with its values and path."""
        nested = [(self.message, self.values, self.path)]
        for message, values, path in nested:
            yield message, values, path
            for row in self.engine.rows(message, self.releases[-1]):
                if row.inner and isinstance(values.get(row.name), dict):
                    nested.append((self.engine.message(row.inner), values[row.name], f"{path}.{row.name}"))


def read(raw: RawMessage, name: str | None = None, release: str | None = None) -> list[Interpretation]:
    """The interpretations of one message by the tables, one for each way in which its values differ.

    `name` and `release` are the engine's, if known; otherwise those that the capture notes. Raises WireError with the
    field at which the likeliest table fails, or LocalError for an engine or release without a table.
    """
    if not release and name in (None, raw.engine):
        release = raw.release
    name = name or raw.engine
    tables = [engine(name)] if name else list(engines().values())
    ways: list[Interpretation] = []
    failures: list[tuple[int, WireError]] = []
    for table in tables:
        allowed = table.around(release) if release and name else table.releases
        for message in filter(raw.may_be, table.messages):
            for releases in _alike(table, message, allowed):
                parser = _Parser(table, releases[0])
                try:
                    values = parser.fields(message, raw.value, raw.path)
                except WireError as error:
                    failures.append((len(parser.recognised), error))
                else:
                    ways.append(Interpretation(table, message, releases, values, raw.path))
    if not ways:
        raise _likeliest(raw, tables, failures)
    return _merged(ways)


def _likeliest(raw: RawMessage, tables: Iterable[EngineTable], failures: Sequence[tuple[int, WireError]]) -> WireError:
    """The error of the tables that recognised most of a message, or that nothing of it is known."""
    most = max((recognised for recognised, _ in failures), default=0)
    if not most:
        known = ", ".join(table.name for table in tables)
        return refuse(ErrorCode.UNKNOWN_MESSAGE, raw.path, f"a message of {known}", raw.summary())
    errors = [error for recognised, error in failures if recognised == most]
    if len(errors) > 1 and errors[0].path == f"{raw.path}.frames":
        counts = sorted({int(error.mine.split()[0]) for error in errors if error.path == errors[0].path})
        wanted = f"{', '.join(map(str, counts))} frames in the releases with a table"
        return refuse(ErrorCode.UNSUPPORTED_VERSION, errors[0].path, wanted, errors[0].yours, "is it cut, or newer?")
    return errors[-1]


def resolve(messages: Sequence[Sequence[Interpretation]]) -> list[Interpretation]:
    """One interpretation of each message, by releases that write them all; raises WireError(FIELD_CONFLICT).

    The capture is of one engine and one release, or of several that write these messages alike.
    """
    common: set[tuple[str, str]] = set()
    for i, ways in enumerate(messages):
        writers = {(way.engine.name, release) for way in ways for release in way.releases}
        if i and not common & writers:
            wanted = f"a message of {_span(common)}, as those before"
            raise refuse(ErrorCode.FIELD_CONFLICT, ways[0].path, wanted, _span(writers), "one file for each fleet")
        common = common & writers if i else writers
    return [_only(ways, common) for ways in messages]


def _only(ways: Iterable[Interpretation], common: set[tuple[str, str]]) -> Interpretation:
    """The one interpretation by these (engine, release) pairs; raises WireError(FIELD_CONFLICT) for several."""
    narrowed = [
        attrs.evolve(way, releases=tuple(r for r in way.releases if (way.engine.name, r) in common)) for way in ways
    ]
    possible = [way for way in narrowed if way.releases]
    if len(possible) > 1:
        a, b = possible[:2]
        field = next((name for name in a.values if a.values[name] != b.values.get(name)), "")
        kinds = " or ".join(f"{way.message.name} of {way.releases[0]}" for way in possible)
        raise refuse(ErrorCode.FIELD_CONFLICT, f"{a.path}.{field}", "one way to read it", kinds, "state the release")
    return possible[0]


def _span(pairs: Iterable[tuple[str, str]]) -> str:
    ordered = sorted(pairs, key=lambda pair: (pair[0], engine(pair[0]).releases.index(pair[1])))
    return f"{ordered[0][0]} {ordered[0][1]}" + (f" to {ordered[-1][1]}" if len(ordered) > 1 else "")


@cache
def _alike(table: EngineTable, message: MessageTable, allowed: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Releases in which the message has the same rows, inner messages included."""
    groups: dict[Any, list[str]] = {}
    for release in allowed:
        if rows := _all_rows(table, message, release):
            groups.setdefault(rows, []).append(release)
    return [tuple(group) for group in groups.values()]


def _all_rows(table: EngineTable, message: MessageTable, release: str) -> tuple[Any, ...]:
    rows = table.rows(message, release)
    return (*rows, *(_all_rows(table, table.message(row.inner), release) for row in rows if row.inner))


def _merged(ways: Iterable[Interpretation]) -> list[Interpretation]:
    """The same with one interpretation of equal values, by the releases of all of these."""
    merged: list[Interpretation] = []
    for way in ways:
        for i, other in enumerate(merged):
            if other.message is way.message and other.values == way.values:
                merged[i] = attrs.evolve(other, releases=other.releases + way.releases)
                break
        else:
            merged.append(way)
    return merged


@attrs.define
class _Parser:
    """Reads a message and those within it as one release writes them; raises WireError."""

    table: EngineTable
    release: str
    recognised: list[str] = attrs.field(factory=list)
    """Guards, names and markers that matched, by which the likeliest of several errors is chosen."""

    def fields(self, message: MessageTable, value: Any, path: str) -> dict[str, Any]:
        """Values by field."""
        rows = self.table.rows(message, self.release)
        if message.form == "frames":
            self.recognised += [message.guard] * bool(message.guard)
            return self._positional(rows, value[bool(message.guard) :], path, "frames")
        if message.form == "array":
            if not isinstance(value, list):
                raise refuse(ErrorCode.BAD_TYPE, path, "an array", type(value).__name__)
            return self._positional(rows, value, path, "elements")
        if message.form == "log":
            return self._logged(message, rows, value, path)
        return self._keyed(message, rows, value, path)

    def _positional(self, rows: Sequence[FieldRow], items: Sequence[Any], path: str, what: str) -> dict[str, Any]:
        framed = what == "frames"
        if items and rows:  # so that a message with a right first field is refused by its number of fields
            _Parser(self.table, self.release)._value(rows[0], items[0], f"{path}.{rows[0].name}", framed)
            self.recognised.append(rows[0].name)
        if not len(rows) - sum(row.optional for row in rows) <= len(items) <= len(rows):
            raise refuse(ErrorCode.OUT_OF_RANGE, f"{path}.{what}", f"{len(rows)} in {self.release}", len(items))
        values = {}
        for row, item in zip(rows, items, strict=False):
            values[row.name] = self._value(row, item, f"{path}.{row.name}", framed)
            self.recognised.append(row.name)
        return values

    def _logged(self, message: MessageTable, rows: Sequence[FieldRow], value: Any, path: str) -> dict[str, Any]:
        present = [row for row in rows if row.name in value]
        self.recognised += [message.marker, *(row.name for row in present)]
        if not present:
            wanted = f"one of the fields {', '.join(row.name for row in rows)}"
            raise refuse(ErrorCode.MISSING_FIELD, f"{path}.{rows[0].name}", wanted, "none of them")
        return {row.name: from_frame(row.type, value[row.name].encode(), f"{path}.{row.name}") for row in present}

    def _keyed(self, message: MessageTable, rows: Sequence[FieldRow], value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(ErrorCode.BAD_TYPE, path, "a map", type(value).__name__)
        wanted, known = f"a field of {message.name} in {self.release}", {row.name for row in rows}
        self.recognised += [row.name for row in rows if row.name in value]
        for name in value:
            if name not in known:
                raise refuse(ErrorCode.UNKNOWN_FIELD, f"{path}.{name}", wanted, name)
        values = {}
        for row in rows:
            if row.name in value:
                values[row.name] = self._value(row, value[row.name], f"{path}.{row.name}", False)
            elif not row.optional:
                raise refuse(ErrorCode.MISSING_FIELD, f"{path}.{row.name}", wanted, "absent")
        return values

    def _value(self, row: FieldRow, item: Any, path: str, framed: bool) -> Any:
        """The value of one field, from a frame or from a plain value."""
        if not row.type.startswith("msgpack:"):
            return from_frame(row.type, item, path) if framed else from_value(row.type, item, path)
        unpacked = from_msgpack(item if framed else from_value("bytes", item, path), path)
        if not row.inner:
            return from_value("float", unpacked, path)
        return self.fields(self.table.message(row.inner), unpacked, path)
