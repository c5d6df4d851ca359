"""The JSON form: what it looks like, what it takes, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from kvproto.errors import WireError
from kvproto.wire import from_json, to_json
from kvproto.wire.enums import ErrorCode, Role
from kvproto.wire.messages import Content, Grants, Handle, Hello, Limits, Ticket, VersionRange
from tests.errors import raises
from tests.wire.frames import register, transfer

TICKET = {"key": "ab" * 16, "engine": "p0", "replica": "1", "deadline": "60000"}


def test_form() -> None:
    """KVP-JSON-W-KEYS, KVP-JSON-W-INT, KVP-JSON-W-BYTES, KVP-JSON-W-ENUM."""
    assert to_json(Ticket(key=b"\xab" * 16, engine="p0", replica=1, deadline=60000)) == TICKET
    hello = Hello(
        request=1,
        versions=(VersionRange(major=1, min_minor=0, max_minor=0),),
        engine="d",
        incarnation=2**64 - 1,
        rank=0,
        replica=0,
        role=Role.SINK,
        offered=(1, 77),
        needed=(),
        limits=Limits(max_body=1, max_transfers=1),
    )
    data = to_json(hello)
    assert "resume" not in data
    assert data["incarnation"] == "18446744073709551615"
    assert data["role"] == "SINK"
    assert data["offered"] == ["VERIFY", {"unknown": "77"}]
    assert to_json(Content(tokens=np.array([7, 300]), adapter="", salts=(b"\1",)))["tokens"] == ["7", "300"]
    assert from_json(Hello, data) == hello


def test_numbers_are_taken_too() -> None:
    """KVP-JSON-INT: a JSON number below 2^53 is exact, and taken."""
    ticket = from_json(Ticket, TICKET | {"replica": 1, "deadline": 2**53 - 1})
    assert (ticket.replica, ticket.deadline) == (1, 2**53 - 1)


def test_redacted() -> None:
    assert to_json(transfer(), redact=True)["ticket"] == "(secret)"
    region = to_json(register(), redact=True)["regions"][0]
    assert region["base"] == region["handles"][0]["data"] == "(secret)"


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ({"key": "ab"}, ErrorCode.OUT_OF_RANGE, "key"),
        ({"key": "AB" * 16}, ErrorCode.BAD_TYPE, "key"),
        ({"key": "ab " * 16}, ErrorCode.BAD_TYPE, "key"),
        ({"key": None}, ErrorCode.BAD_TYPE, "key"),
        ({"engine": ""}, ErrorCode.OUT_OF_RANGE, "engine"),
        ({"engine": "\ud800"}, ErrorCode.BAD_TEXT, "engine"),
        ({"engine": 5}, ErrorCode.BAD_TYPE, "engine"),
        ({"replica": str(2**32)}, ErrorCode.OUT_OF_RANGE, "replica"),
        ({"replica": "9" * 5000}, ErrorCode.OUT_OF_RANGE, "replica"),
        ({"replica": "01"}, ErrorCode.BAD_TYPE, "replica"),
        ({"replica": "-1"}, ErrorCode.BAD_TYPE, "replica"),
        ({"replica": "1\n"}, ErrorCode.BAD_TYPE, "replica"),
        ({"replica": 1.0}, ErrorCode.BAD_TYPE, "replica"),
        ({"replica": True}, ErrorCode.BAD_TYPE, "replica"),
        ({"deadline": 2**53}, ErrorCode.BAD_TYPE, "deadline"),
        ({"deadline": "0"}, ErrorCode.OUT_OF_RANGE, "deadline"),
        ({"other": 1}, ErrorCode.UNKNOWN_FIELD, "other"),
    ],
)
def test_refusal(change: dict[str, Any], code: ErrorCode, path: str) -> None:
    """KVP-JSON-KEY, KVP-JSON-INT, KVP-JSON-TYPE, KVP-JSON-RANGE."""
    with raises(WireError, code=code, path=path) as caught:
        from_json(Ticket, TICKET | change)
    assert "AB" * 16 not in str(caught.value)


@pytest.mark.parametrize("key", TICKET)
def test_a_key_that_is_absent(key: str) -> None:
    """KVP-JSON-REQUIRED."""
    with raises(WireError, code=ErrorCode.MISSING_FIELD, path=key):
        from_json(Ticket, {k: v for k, v in TICKET.items() if k != key})


def test_rules_hold_in_this_form_too() -> None:
    """KVP-JSON-RULE."""
    grant = {"group": "0", "first": "0", "count": "5", "valid": "4"}
    with raises(WireError, code=ErrorCode.BAD_GRANT, path="valid"):
        from_json(Grants, grant)
    assert from_json(Grants, grant | {"valid": "5"}).count == 5


@pytest.mark.parametrize("data", [None, [], "x", 5, {}])
def test_not_a_ticket(data: Any) -> None:
    with pytest.raises(WireError):
        from_json(Ticket, data)


@pytest.mark.parametrize(
    ("transport", "code"),
    [(value, ErrorCode.UNKNOWN_ENUM_VALUE) for value in ("shm", {"unknown": "1"}, {"unknown": 1})]
    + [(value, ErrorCode.BAD_TYPE) for value in (1, {"unknown": -3}, {"unknown": True}, {})]
    + [({"unknown": 1 << 20}, ErrorCode.OUT_OF_RANGE)],
)  # fmt: skip
def test_enum_refusal(transport: Any, code: ErrorCode) -> None:
    """KVP-JSON-ENUM: an unknown name, a number in place of a name, and an unknown number that has a name."""
    with raises(WireError, code=code, path="transport"):
        from_json(Handle, {"transport": transport, "data": ""})


def test_array_refusal() -> None:
    with raises(WireError, code=ErrorCode.OUT_OF_RANGE, path="tokens[1]"):
        from_json(Content, {"tokens": ["1", str(2**70)], "adapter": "", "salts": []})


@pytest.mark.parametrize(
    ("tokens", "code", "path"),
    [
        ([str(2**32), None], ErrorCode.OUT_OF_RANGE, "tokens[0]"),
        ([None, str(2**32)], ErrorCode.BAD_TYPE, "tokens[0]"),
        (["1", str(2**32), None], ErrorCode.OUT_OF_RANGE, "tokens[1]"),
    ],
)
def test_elements_are_checked_one_after_the_other(tokens: list[Any], code: ErrorCode, path: str) -> None:
    with raises(WireError, code=code, path=path):
        from_json(Content, {"tokens": tokens, "adapter": "", "salts": []})
