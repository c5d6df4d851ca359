"""Rows of a directory: each states where one rank of a source listens."""

from __future__ import annotations

import json
from typing import Any

import attrs

from kvproto import KvprotoError, Seed
from kvproto.errors import bad, check_type, check_whole
from kvproto.prompt import check_name

__all__ = ["Replica", "Row", "read_row", "write_row"]

Replica = tuple[str, int]
"""A source replica: the engine's name and the number of the replica."""
_OPTIONAL = ("key", "digest", "load")
_WHOLE = ("replica", "rank", "replicas", "incarnation", "load")
_MOST, _MOST_RUNS = 2**32 - 1, 2**64 - 1
_LONGEST = 4096
"""The most bytes of a row."""


@attrs.frozen(kw_only=True)
class Row:
    """One rank of a source as a directory knows it.

    Fields:
        engine: Its name, as tickets say it.
        address: The address that sinks dial.
        key: Its public key; None if the address needs none.
        replicas: Replicas with this name, from 0 on; for routers that compute the replica of a request.
        incarnation: Of this run; 0 if the directory does not know it.
        digest: SHA-256 of its Description in hexadecimal: sources with the same one are interchangeable.
        load: Requests that are not over when the row was written.
        state: "ready", or the reason that it should be sent no requests.
    """

    engine: str
    replica: int = 0
    rank: int = 0
    address: str
    key: str | None = None
    replicas: int = 1
    incarnation: int = 0
    digest: str | None = None
    load: int | None = None
    state: str = "ready"

    @property
    def place(self) -> tuple[str, int, int]:
        """Engine, replica and rank, of which there is one row."""
        return self.engine, self.replica, self.rank

    @property
    def seed(self) -> Seed:
        """The address and key that `Sink.connect` takes."""
        return Seed(self.address, self.key)


def write_row(row: Row) -> str:
    """The JSON form of a row."""
    return json.dumps({name: value for name, value in attrs.asdict(row).items() if value is not None})


def read_row(where: str, text: bytes) -> Row:
    """The row in JSON; unknown fields are left out. Raises LocalError(OUT_OF_RANGE) with `where`, naming the field."""
    try:
        given = json.loads(text[: _LONGEST + 1])
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise bad(where, f"a JSON object of at most {_LONGEST} bytes", repr(text[:40]), "remove it")
    fields: dict[str, Any] = {}
    for field in attrs.fields(Row):
        name, path, value = field.name, f"{where}.{field.name}", given.get(field.name)
        if value is None and (name in _OPTIONAL or field.default is not attrs.NOTHING):
            continue
        if name in _WHOLE:
            fields[name] = check_whole(path, value, 0, _MOST_RUNS if name == "incarnation" else _MOST)
        else:
            check_type(path, value, str, "text")
            fields[name] = value
    check_name(f"{where}.engine", fields["engine"])
    return Row(**fields)


def by_replica(rows: list[Row]) -> dict[Replica, Row]:
    """The row of the lowest rank of each replica, from which a sink learns of the others."""
    return {(row.engine, row.replica): row for row in sorted(rows, key=lambda row: -row.rank)}


def read_rows(found: dict[str, bytes], prefix: str) -> tuple[list[Row], dict[str, KvprotoError]]:
    """The rows by their keys in a directory, and the errors of those that are wrong or belong to another key."""
    rows, wrong = [], dict[str, KvprotoError]()
    for name, text in found.items():
        try:
            row = read_row(name, text)
            if (mine := name_of(prefix, *row.place)) != name:
                raise bad(
                    name, f"the row of {mine}", f"{row.engine} replica {row.replica} rank {row.rank}", "remove it"
                )
        except KvprotoError as error:
            wrong[name] = error
        else:
            rows.append(row)
    return rows, wrong


def name_of(prefix: str, engine: str, replica: int, rank: int) -> str:
    """The key of a row in a directory."""
    return f"{prefix}{engine}/{replica}/{rank}"
