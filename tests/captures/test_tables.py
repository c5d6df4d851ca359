"""Each row of the tables against captures: what a release's own encoder wrote, and what its own parser reads there."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvproto.errors import KvprotoError
from kvproto_captures.interpreter import Interpretation, read
from kvproto_captures.tables import EngineTable, MessageTable, engines

from .shelf import ENGINES, Kept, full_name, kept

RELEASES = [(engine, release) for engine, releases in ENGINES.items() for release in releases]
_OTHER_NAMES = {"dst_attn_tp_size": "dst_tp_size", "agent_metadata": "agent_metadata"}
_BY_POSITION = {"is_dummy", "staging_slot_layer_ids"}  # some releases' parsers give these no name


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_a_message_reads_as_its_own_package_reads_it(engine: str, release: str) -> None:
    for item in kept(engine, release):
        parsed = item.record.get("parsed") or item.record.get("json")
        if not parsed:
            continue
        values = _inner(item.reading)
        compared = 0
        for name, value in values.items():
            theirs = _theirs(parsed, name)
            if theirs is not _ABSENT:
                ours = value.hex() if isinstance(value, bytes) else value
                assert ours == theirs or (not ours and not theirs), (full_name(item.record), name)
                compared += 1
        assert compared >= len(values) - len(_BY_POSITION)


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_every_row_of_a_release_is_in_a_capture(engine: str, release: str) -> None:
    table = engines()[engine]
    seen = {(of.name, name) for item in kept(engine, release) for of, name in _fields(table, item.reading, release)}
    rows = {(m.name, row.name) for m in table.messages if m.form != "log" for row in table.rows(m, release)}
    assert rows - seen == set()


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_a_release_beyond_a_change_does_not_read_it_alike(engine: str, release: str) -> None:
    table = engines()[engine]
    for item in kept(engine, release):
        of = item.reading.message
        if item.record["variant"] not in ("hybrid", "regions", "pull") or of.name == "nixl.request":
            continue
        for other in table.releases:
            if _rows(table, of, other) != _rows(table, of, release):
                assert _elsewhere(item, engine, other) != item.reading.values, (of.name, other)


def test_the_captures_are_of_every_examined_release() -> None:
    for name, engine in engines().items():
        assert sorted(engine.releases) == ENGINES[name]


def test_since_and_until_are_examined_releases_in_order() -> None:
    for engine in engines().values():
        place = engine.releases.index
        for message in engine.messages:
            for row in message.rows:
                assert place(row.since or engine.releases[0]) <= place(row.until or engine.releases[-1])
            for release in engine.releases:
                rows = engine.rows(message, release)
                assert len({row.name for row in rows}) == len(rows)
                if message.form in ("frames", "array"):
                    assert [row.at for row in rows] == list(range(len(rows)))


_ABSENT: Any = object()


def _theirs(parsed: dict[str, Any], name: str) -> Any:
    """The value under the package's name for it."""
    for key in (name, _OTHER_NAMES.get(name, name)):
        if key in parsed:
            return parsed[key]
    staging = parsed.get("staging")
    short = name.removeprefix("staging_")
    if "staging" in parsed and name.startswith("staging_"):
        return staging[short] if staging and short in staging else _ABSENT if staging else None
    return _ABSENT


def _inner(reading: Interpretation) -> dict[str, Any]:
    """Values of the innermost map: what vLLM's metadata holds."""
    values: Any = reading.values
    for name in ("payload", "agent_metadata_bytes", "metadata"):
        values = values.get(name, values)
    return dict(values)


def _fields(table: EngineTable, reading: Interpretation, release: str) -> Iterator[tuple[MessageTable, str]]:
    def walk(of: MessageTable, values: Any) -> Iterator[tuple[MessageTable, str]]:
        for row in table.rows(of, release):
            if row.name in values or row.optional:
                yield of, row.name
            if row.type.startswith("msgpack:nixl") and row.name in values:
                yield from walk(table.message(row.type[8:]), values[row.name])

    return walk(reading.message, reading.values)


def _rows(table: EngineTable, of: MessageTable, release: str) -> Any:
    inner = [table.message(row.type[8:]) for row in table.rows(of, release) if row.type.startswith("msgpack:nixl")]
    return [row for row in table.rows(of, release) if not row.optional], [_rows(table, m, release) for m in inner]


def _elsewhere(item: Kept, engine: str, release: str) -> Any:
    """What another release's table makes of it; None where it refuses."""
    try:
        return next(
            (way.values for way in read(item.blind, engine, release) if way.message is item.reading.message), None
        )
    except KvprotoError:
        return None
