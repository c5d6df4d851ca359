"""What a later version may add is there today: ids that may be ignored, longer maps, open enums, other minors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvproto import KvprotoError
from kvproto.wire import decode, encode, from_json
from kvproto.wire.messages import Hello, Ping, Pong, Ticket
from tools.made_up import ignored
from tools.specgen.lint import RegistryError, lint
from tools.specgen.registry import Facts, load

Row = dict[str, Any]
FIELD: Row = {
    "name": "x_color", "type": "u32", "unit": "none", "presence": "optional", "since": "1.1", "doc": "A color.",
}  # fmt: skip


@pytest.fixture
def facts() -> Facts:
    made = copy.deepcopy(load())
    made["protocol"]["minor"] = 1
    return made


def add(body: Row, **given: Any) -> None:
    """Put a field, by default one that may be ignored, where its id belongs."""
    body["field"] = sorted([*body["field"], FIELD | {"id": ignored(body)} | given], key=lambda field: int(field["id"]))


@pytest.mark.parametrize("body", ["Hello", "Ping"])
def test_a_later_version_adds_a_field_that_may_be_ignored(facts: Facts, body: str) -> None:
    add(facts["message"][body])
    lint(facts)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda f: add(f["message"]["Ping"], name="color"), "is called x_"),
        (lambda f: add(f["message"]["Ping"], id=3), "is called x_"),
        (lambda f: add(f["message"]["Hello"], id=12, name="color"), "understood by any version"),
        (lambda f: add(f["struct"]["Limits"], id=3, name="color"), "understood by any version"),
        (lambda f: add(f["message"]["Ping"], id=0x8001), "for what is unknown"),
        (lambda f: add(f["struct"]["Content"]), "under a digest"),
        (lambda f: f["enum"]["Role"].update(open=False), "a closed enum, in what any version reads"),
    ],
)  # fmt: skip
def test_what_any_version_reads_grows_by_what_may_be_ignored_alone(
    facts: Facts, edit: Callable[[Facts], object], what: str
) -> None:
    edit(facts)
    with pytest.raises(RegistryError, match=what):
        lint(facts)


def test_a_frame_has_the_minor_of_its_session() -> None:
    """KVP-FRAME-W-MAJOR, KVP-FRAME-MINOR."""
    ping, hello = Ping(session=5, request=6), from_json(Hello, HELLO)
    assert [encode(ping, minor=7)[4:6], encode(hello, minor=7)[4:6]] == [b"\1\7", b"\0\0"]
    assert decode(encode(ping, minor=7)) == ping
    assert encode(ping, minor=7)[6:] == encode(ping)[6:]


def test_a_role_that_is_not_known_is_kept() -> None:
    """KVP-BODY-OPEN: so that any version can be refused in the terms of negotiation."""
    hello = from_json(Hello, HELLO | {"role": {"unknown": "77"}})
    assert decode(encode(hello)) == hello
    assert hello.role == 77


def test_a_ticket_of_a_later_router_is_read() -> None:
    """KVP-JSON-IGNORE, KVP-JSON-KEY."""
    ticket = {"key": "00" * 16, "engine": "p", "replica": "0", "deadline": "1"}
    assert from_json(Ticket, ticket | {"x_color": [{"deep": None}]}) == from_json(Ticket, ticket)
    with pytest.raises(KvprotoError, match="UNKNOWN_FIELD"):
        from_json(Ticket, ticket | {"color": "1"})


def test_what_a_later_version_needs_is_not_said_to_an_older_one() -> None:
    """KVP-VER-SINCE: today's package speaks one minor, and refuses what it cannot know."""
    frame = encode(Pong(session=5, request=6))
    longer = frame[:12] + bytes([len(frame) - 16 + 2, 0, 0, 0]) + b"\x83" + frame[17:] + b"\x03\x01"
    with pytest.raises(KvprotoError, match="UNKNOWN_FIELD"):
        decode(longer)


HELLO = {
    "request": "1", "versions": [{"major": "1", "min_minor": "0", "max_minor": "0"}], "engine": "e", "incarnation": "1", "rank": "0",
    "replica": "0", "role": "SINK", "offered": [], "needed": [], "limits": {"max_body": "1024", "max_transfers": "1"},
}  # fmt: skip
