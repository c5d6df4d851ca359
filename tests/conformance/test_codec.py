"""The suite's own codec says of every vector what the vector says, and of any bytes what kvproto says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import WireError
from kvproto.wire import decode_struct, encode_struct, from_json, messages, tables, to_json
from kvproto_conformance.codec import Refusal, read_frame, read_struct, write_frame, write_struct
from tests.wire.frames import objects

FILES = sorted((Path(__file__).parents[2] / "spec/v1/vectors/codec").glob("*.json"))


def judged(case: dict[str, Any]) -> dict[str, Any]:
    data = bytes.fromhex(case["bytes"])
    try:
        if "struct" in case:
            return {"struct": case["struct"], "fields": read_struct(case["struct"], data)}
        message, fields = read_frame(data)
        return {"message": message, "fields": fields}
    except Refusal as refusal:
        return {"error": refusal.code, "path": refusal.path}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_second_opinion_on_every_vector(path: Path) -> None:
    for case in json.loads(path.read_text())["cases"]:
        found = judged(case)
        assert found == {
            k: case[k] for k in ("error", "path", "message", "struct", "fields") if k in case and k in found
        }, case["id"]
        if "fields" in case and case.get("canonical", True):
            made = (
                write_struct(case["struct"], case["fields"])
                if "struct" in case
                else write_frame(case["message"], case["fields"])
            )
            assert made.hex() == case["bytes"], case["id"]


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_two_readers_agree_on_any_bytes(name: str, data: st.DataObject) -> None:
    cls = getattr(messages, name)
    body = bytearray(encode_struct(data.draw(objects(name))))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        body = body or bytearray(1)
    ours: tuple[Any, ...]
    try:
        ours = ("ok", to_json(decode_struct(cls, bytes(body))))
    except WireError as error:
        ours = ("no", error.code.name, error.path)
    theirs: tuple[Any, ...]
    try:
        theirs = ("ok", read_struct(name, bytes(body)))
    except Refusal as refusal:
        theirs = ("no", refusal.code, refusal.path)
    assert ours == theirs


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_two_writers_agree(name: str, data: st.DataObject) -> None:
    value = data.draw(objects(name))
    assert write_struct(name, to_json(value)) == encode_struct(value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["00ff", "7", "007", "READY", "-1", "4294967296", "18446744073709551616", 2**53]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["unknown", "a", "group"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", ["Ticket", "Transfer", "Geometry", "Hello", "Credit", "Done"])
def test_two_readers_of_json_agree(name: str, data: st.DataObject) -> None:
    """Fields replaced by something else, or taken away, or added; inside lists too. The first fault is the error."""
    fields = to_json(data.draw(objects(name)))
    for _ in range(data.draw(st.integers(1, 2))):
        at = fields
        key: Any = data.draw(st.sampled_from([*at, "nothing"]))
        while isinstance(at.get(key), list) and at[key] and isinstance(at[key][0], dict) and data.draw(st.booleans()):
            at = at[key][0]
            key = data.draw(st.sampled_from([*at, "nothing"]))
        if isinstance(at.get(key), list) and data.draw(st.booleans()):
            at[key] = [*at[key], data.draw(JSON)]
        elif data.draw(st.booleans()):
            at[key] = data.draw(JSON)
        else:
            at.pop(key, None)
    ours: Any
    try:
        ours = encode_struct(from_json(getattr(messages, name), fields))
    except WireError as error:
        ours = error.code.name, error.path
    theirs: Any
    try:
        theirs = write_struct(name, fields)
    except Refusal as refusal:
        theirs = refusal.code, refusal.path
    assert ours == theirs
