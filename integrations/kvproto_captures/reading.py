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
from kvproto_captures.captures import Raw
from kvproto_captures.tables import Engine, Message, Row, engine, engines
from kvproto_captures.values import from_frame, from_msgpack, from_value

__all__ = ["Reading", "read", "resolve"]


@attrs.frozen
class Reading:
    """A message as some releases of one engine write it."""

    engine: Engine
    message: Message
    releases: tuple[str, ...]
    values: Mapping[str, Any]
    """By field; a message within a frame is a nested map."""
    path: str

    @property
    def whose(self) -> str:
        """Whose words it has: "rank", "next" for the rank whose message follows, or "fleet"; empty for none."""
        return next((message.states for message, *_ in _inner(self) if message.states), "")

    def stated(self) -> Iterator[tuple[str, Any, str]]:
        """(word, value, path) of what its values state, including those of inner messages."""
        for message, values, path in _inner(self):
            for row in self.engine.rows(message, self.releases[-1]):
                if row.word and values.get(row.name) is not None:
                    yield row.word, values[row.name], f"{path}.{row.name}"


def _inner(reading: Reading) -> Iterator[tuple[Message, Mapping[str, Any], str]]:
    """A message and those within its frames, each with its values and path."""
    left = [(reading.message, reading.values, reading.path)]
    for message, values, path in left:
        yield message, values, path
        for row in reading.engine.rows(message, reading.releases[-1]):
            if row.type.startswith("msgpack:") and isinstance(values.get(row.name), dict):
                left.append((reading.engine.message(row.type[8:]), values[row.name], f"{path}.{row.name}"))


def read(raw: Raw, name: str | None = None, release: str | None = None) -> list[Reading]:
    """The readings of one message by the tables, one for each way in which its values differ.

    `name` and `release` are the engine's, if known; otherwise those that the capture notes. Raises WireError with the
    field at which the likeliest table fails, or LocalError for an engine or release without a table.
    """
    if not release and name in (None, raw.engine):
        release = raw.release
    name = name or raw.engine
    tried = [engine(name)] if name else list(engines().values())
    found: list[Reading] = []
    failed: list[tuple[int, WireError]] = []
    for of in tried:
        allowed = of.around(release) if release and name else of.releases
        for message in of.messages:
            if message.form not in raw.forms or (raw.kind and raw.kind not in (*message.classes, message.marker)):
                continue
            if message.form == "frames" and list(raw.value[: len(message.head)]) != message.head:
                continue
            for releases in _alike(of, message, allowed):
                done: list[str] = []
                try:
                    values = _values(of, message, releases[0], raw.value, raw.path, done)
                except WireError as error:
                    failed.append((len(done), error))
                else:
                    found.append(Reading(of, message, releases, values, raw.path))
    if found:
        return _merged(found)
    most = max((n for n, _ in failed), default=0)
    if not most:
        known = ", ".join(e.name for e in tried)
        raise refuse(ErrorCode.UNKNOWN_MESSAGE, raw.path, f"a message of {known}", raw.seen())
    errors = [error for n, error in failed if n == most]
    if len(errors) > 1 and errors[0].path == f"{raw.path}.frames":
        counts = sorted({int(error.mine.split()[0]) for error in errors if error.path == errors[0].path})
        wanted = f"{', '.join(map(str, counts))} frames in the releases with a table"
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, errors[0].path, wanted, errors[0].yours, "is it cut, or newer?")
    raise errors[-1]


def resolve(messages: Sequence[Sequence[Reading]]) -> list[Reading]:
    """One Reading of each message, by releases that write them all; raises WireError(FIELD_CONFLICT).

    The capture is of one engine and one release, or of several that write these messages alike.
    """
    common: set[tuple[str, str]] = set()
    for i, ways in enumerate(messages):
        these = {(way.engine.name, r) for way in ways for r in way.releases}
        if i and not common & these:
            so_far = f"a message of {_named(common)}, as those before"
            raise refuse(ErrorCode.FIELD_CONFLICT, ways[0].path, so_far, _named(these), "one file for each fleet")
        common = common & these if i else these
    chosen = []
    for ways in messages:
        left = [
            attrs.evolve(way, releases=tuple(r for r in way.releases if (way.engine.name, r) in common)) for way in ways
        ]
        left = [way for way in left if way.releases]
        if len(left) > 1:
            a, b = left[:2]
            field = next((f"{k}" for k in a.values if a.values[k] != b.values.get(k)), "")
            kinds = " or ".join(f"{way.message.name} of {way.releases[0]}" for way in left)
            raise refuse(
                ErrorCode.FIELD_CONFLICT, f"{a.path}.{field}", "one way to read it", kinds, "state the release"
            )
        chosen.append(left[0])
    return chosen


def _named(pairs: Iterable[tuple[str, str]]) -> str:
    kept = sorted(pairs, key=lambda pair: (pair[0], engine(pair[0]).releases.index(pair[1])))
    return f"{kept[0][0]} {kept[0][1]}" + (f" to {kept[-1][1]}" if len(kept) > 1 else "")


@cache
def _alike(of: Engine, message: Message, allowed: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Releases in which the message has the same rows, inner messages included."""
    groups: dict[Any, list[str]] = {}
    for release in allowed:
        if _shape(of, message, release):
            groups.setdefault(_shape(of, message, release), []).append(release)
    return [tuple(group) for group in groups.values()]


def _shape(of: Engine, message: Message, release: str) -> tuple[Any, ...]:
    rows = of.rows(message, release)
    inner = [row.type[8:] for row in rows if row.type.startswith("msgpack:") and row.type != "msgpack:float"]
    return (*rows, *(_shape(of, of.message(name), release) for name in inner))


def _merged(found: Sequence[Reading]) -> list[Reading]:
    kept: list[Reading] = []
    for way in found:
        same = next((k for k in kept if k.message is way.message and k.values == way.values), None)
        if same is not None:
            kept[kept.index(same)] = attrs.evolve(same, releases=same.releases + way.releases)
        else:
            kept.append(way)
    return kept


def _values(of: Engine, message: Message, release: str, value: Any, path: str, done: list[str]) -> dict[str, Any]:
    """Values by field; `done` collects what was recognised, for a good error if nothing fits."""
    rows = of.rows(message, release)
    if message.form == "frames":
        done += [message.guard] * bool(message.guard)
        return _positional(of, message, release, rows, value[bool(message.guard) :], path, done)
    if message.form == "array":
        if not isinstance(value, list):
            raise refuse(ErrorCode.BAD_TYPE, path, "an array", type(value).__name__)
        return _positional(of, message, release, rows, value, path, done)
    if message.form == "log":
        done += [message.marker, *(row.name for row in rows if row.name in value)]
        if len(done) == 1:
            wanted = f"one of the fields {', '.join(row.name for row in rows)}"
            raise refuse(ErrorCode.MISSING_FIELD, f"{path}.{rows[0].name}", wanted, "none of them")
        return {r.name: from_frame(r.type, value[r.name].encode(), f"{path}.{r.name}") for r in rows if r.name in value}
    return _keyed(of, message, release, rows, value, path, done)


def _positional(
    of: Engine, message: Message, release: str, rows: Sequence[Row], given: Sequence[Any], path: str, done: list[str]
) -> dict[str, Any]:
    one = _frame if message.form == "frames" else _element
    if given and rows:
        one(of, release, rows[0], given[0], f"{path}.{rows[0].name}", [])
        done.append(rows[0].name)
    if not len(rows) - sum(row.optional for row in rows) <= len(given) <= len(rows):
        what = "frames" if message.form == "frames" else "elements"
        raise refuse(ErrorCode.OUT_OF_RANGE, f"{path}.{what}", f"{len(rows)} in {release}", len(given))
    values = {}
    for row, item in zip(rows, given, strict=False):
        values[row.name] = one(of, release, row, item, f"{path}.{row.name}", done)
        done.append(row.name)
    return values


def _frame(of: Engine, release: str, row: Row, item: bytes, path: str, done: list[str]) -> Any:
    if row.type.startswith("msgpack:"):
        return _packed(of, release, row, item, path, done)
    return from_frame(row.type, item, path)


def _element(of: Engine, release: str, row: Row, item: Any, path: str, done: list[str]) -> Any:
    if row.type.startswith("msgpack:"):
        return _packed(of, release, row, from_value("bytes", item, path), path, done)
    return from_value(row.type, item, path)


def _packed(of: Engine, release: str, row: Row, data: bytes, path: str, done: list[str]) -> Any:
    value = from_msgpack(data, path)
    if row.type == "msgpack:float":
        return from_value("float", value, path)
    return _values(of, of.message(row.type[8:]), release, value, path, done)


def _keyed(
    of: Engine, message: Message, release: str, rows: Sequence[Row], given: Any, path: str, done: list[str]
) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise refuse(ErrorCode.BAD_TYPE, path, "a map", type(given).__name__)
    known = {row.name: row for row in rows}
    done += [name for name in known if name in given]
    for name in given:
        if name not in known:
            raise refuse(ErrorCode.UNKNOWN_FIELD, f"{path}.{name}", f"a field of {message.name} in {release}", name)
    values = {}
    for name, row in known.items():
        if name in given:
            values[name] = _element(of, release, row, given[name], f"{path}.{name}", done)
        elif not row.optional:
            raise refuse(ErrorCode.MISSING_FIELD, f"{path}.{name}", f"a field of {message.name} in {release}", "absent")
    return values
