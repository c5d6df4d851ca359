"""Differences between two fleets: in the messages that they write and read, and in the values that both state."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvproto_captures.fleet import Fleet
from kvproto_captures.tables import EngineTable, MessageTable, words

__all__ = ["Difference", "compare"]


@attrs.frozen
class Difference:
    """A path at which the two sides differ, and what each has there."""

    path: str
    source: str
    sink: str


def compare(source: Fleet, sink: Fleet) -> list[Difference]:
    """The differences that keep two fleets apart: in messages first, then in words that must be equal."""
    return [*_messages(source, sink), *_words(source, sink)]


def _messages(source: Fleet, sink: Fleet) -> Iterator[Difference]:
    table = source.engine
    if table is not sink.engine:
        yield Difference("engine", source.name, sink.name)
        return
    backends = [_backends(fleet) for fleet in (source, sink)]
    if all(backends) and not backends[0] & backends[1]:
        yield Difference("backend", *(" ".join(sorted(names)) for names in backends))
        return
    writers, readers = (fleet.messages[0].releases for fleet in (source, sink))
    if set(writers) & set(readers):
        return
    order = table.releases.index  # the two releases that are nearest to each other
    nearest = (writers[-1], readers[0]) if order(writers[0]) < order(readers[0]) else (writers[0], readers[-1])
    for message in table.messages:
        if message.name.partition(".")[0] in backends[0] | backends[1] | {"bootstrap"}:
            yield from _rows(table, message, *nearest)


def _backends(fleet: Fleet) -> set[str]:
    return {one.message.name.partition(".")[0] for one in fleet.messages} & {"mooncake", "nixl"}


def _rows(table: EngineTable, message: MessageTable, source: str, sink: str) -> Iterator[Difference]:
    """Positions, or keys of a map, at which two releases have another field or type."""
    sides = []
    for release in (source, sink):
        rows = table.rows(message, release)
        sides.append({row.name if row.at < 0 else row.at: f"{row.name} {row.type}" for row in rows})
    for at in sorted(sides[0].keys() | sides[1].keys(), key=str):
        a, b = (side.get(at, "(absent)") for side in sides)
        if a != b:
            path = f"{message.name}[{at}]" if isinstance(at, int) else f"{message.name}.{at}"
            yield Difference(path, f"{a}, {source}", f"{b}, {sink}")


def _words(source: Fleet, sink: Fleet) -> Iterator[Difference]:
    a, b = source.known(), sink.known()
    for word, row in words()["word"].items():
        if row.get("alike") and word in a and word in b and a[word] != b[word]:
            yield Difference(word, str(a[word]), str(b[word]))
