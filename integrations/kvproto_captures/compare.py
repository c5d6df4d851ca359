"""Whether two fleets write and read the same messages and state the same values, field by field."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvproto_captures.fleet import Fleet
from kvproto_captures.tables import Engine, Message, words

__all__ = ["Difference", "compare"]


@attrs.frozen
class Difference:
    """A path at which the two sides differ, and what each has there."""

    path: str
    source: str
    sink: str


def compare(source: Fleet, sink: Fleet) -> list[Difference]:
    """What keeps two fleets from understanding each other: messages first, then words that must be equal."""
    return [*_messages(source, sink), *_words(source, sink)]


def _messages(source: Fleet, sink: Fleet) -> Iterator[Difference]:
    engines = [fleet.readings[0].engine for fleet in (source, sink)]
    if engines[0] is not engines[1]:
        yield Difference("engine", source.name, sink.name)
        return
    backends = [_backends(fleet) for fleet in (source, sink)]
    if backends[0] and backends[1] and not backends[0] & backends[1]:
        yield Difference("backend", *(" ".join(sorted(b)) for b in backends))
        return
    order = engines[0].releases.index
    releases = [fleet.readings[0].releases for fleet in (source, sink)]
    if set(releases[0]) & set(releases[1]):
        return
    older = releases[0] if order(releases[0][0]) < order(releases[1][0]) else releases[1]
    near = [r[-1] if r is older else r[0] for r in releases]
    for message in engines[0].messages:
        if message.name.partition(".")[0] in backends[0] | backends[1] | {"bootstrap"}:
            yield from _rows(engines[0], message, near[0], near[1])


def _backends(fleet: Fleet) -> set[str]:
    return {r.message.name.partition(".")[0] for r in fleet.readings} & {"mooncake", "nixl"}


def _rows(engine: Engine, message: Message, source: str, sink: str) -> Iterator[Difference]:
    """Positions, or keys of a map, at which two releases have another field or type."""
    sides = []
    for release in (source, sink):
        rows = engine.rows(message, release)
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
