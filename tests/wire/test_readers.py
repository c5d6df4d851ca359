"""The two readers agree: what the canonical reader accepts, the strict one accepts, as the same value."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import WireError
from kvproto.wire import codec, decode, decode_struct, encode_struct, from_json, tables
from kvproto.wire.canonical import LARGEST, read_canonical
from kvproto.wire.strict import read_whole
from kvproto.wire.tables import CLASSES
from kvproto.wire.writer import pack
from tests.fuzz.target import exact
from tests.wire.frames import DONE_ACK, GOLDEN, frame, grant, objects, transfer

FILES = sorted((Path(__file__).parents[2] / "spec/v1/vectors/codec").glob("*.json"))


def verdict(read: Any, *args: Any) -> Any:
    try:
        return exact(read(*args))
    except WireError as error:
        return error.code, error.path, error.mine, error.yours


def agree(name: str, body: bytes) -> bool:
    """Assert that both readers say the same of a body; whether the canonical one accepts it."""
    strict = verdict(read_whole, name, memoryview(body))
    assert verdict(decode_struct, CLASSES[name], body) == strict
    value = read_canonical(name, body)
    if value is not None:
        assert exact(value) == strict
        assert pack(value) == body
    return value is not None


def bodies() -> Iterator[tuple[str, bytes, bool]]:
    """Of each vector with a whole body: the message or struct, the body, and whether it is good and canonical."""
    for path in FILES:
        for case in json.loads(path.read_text())["cases"]:
            data = bytes.fromhex(case["bytes"])
            good = "error" not in case and case.get("canonical", True)
            if "struct" in case:
                yield case["struct"], data, good
            elif len(data) >= tables.HEADER_BYTES and int.from_bytes(data[6:8], "little") in MESSAGES:
                yield MESSAGES[int.from_bytes(data[6:8], "little")], data[tables.HEADER_BYTES :], good


MESSAGES = {cls.TYPE: name for name, cls in CLASSES.items() if hasattr(cls, "TYPE")}
BODIES = list(bodies())


def mutated(body: bytes, dice: random.Random) -> bytes:
    """The body with up to three bytes changed, dropped, doubled or inserted, often by first bytes of msgpack."""
    changed = bytearray(body)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(changed) + 1)
        match dice.choice(("set", "set", "drop", "double", "insert")):
            case "set":
                changed[at : at + 1] = bytes((dice.choice((dice.randrange(256), dice.randrange(0xC0, 0xE0))),))
            case "drop":
                del changed[at : at + 1]
            case "double":
                changed[at:at] = changed[at : at + dice.randint(1, 2)]
            case "insert":
                changed[at:at] = dice.randbytes(dice.randint(1, 9))
    return bytes(changed)


def test_vectors() -> None:
    assert len(BODIES) > 2500
    for name, body, good in BODIES:
        accepted = agree(name, body)
        assert accepted or not good or len(body) > LARGEST


@pytest.mark.parametrize("seed", range(4))
def test_mutated_vectors(seed: int) -> None:
    dice = random.Random(seed)
    accepted = 0
    for name, body, _ in BODIES:
        if len(body) <= 2000:
            accepted += agree(name, mutated(body, dice))
    assert accepted > 50


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_good_values_need_no_strict_reader(name: str, data: st.DataObject) -> None:
    assert agree(name, pack(data.draw(objects(name))))


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_mutated_values(name: str, data: st.DataObject) -> None:
    body = pack(data.draw(objects(name)))
    agree(name, mutated(body, data.draw(st.randoms(use_true_random=False))))


PACKED_AGAIN = {
    # of objects that are equal to good ones, or that pack to the same bytes again
    "true as field 1": "83 c305 0206 0301",
    "a float as field 1": "83 cb3ff000000000000005 0206 0301",
    "true as a number": "83 0105 0206 03c3",
    "a float as a number": "83 0105 0206 03cb3ff0000000000000",
    "fields that descend": "83 0206 0105 0301",
    "a field twice": "83 0105 0105 0301",
    "nil": "83 0105 0206 03c0",
    "an instant": "83 0105 0206 03d6ff00000001",
    "an instant as a field": "83 d6ff0000000105 0206 0301",
    "a list as a field": "83 900501 0206 0301",
    "a list as the map": "94 01 02 03 04",
    "an array as the map": "d40101",
    "a negative number": "83 01ff 0206 0301",
}


@pytest.mark.parametrize("body", PACKED_AGAIN.values(), ids=PACKED_AGAIN)
def test_objects_that_pack_to_the_same_bytes(body: str) -> None:
    assert not agree("DoneAck", bytes.fromhex(body))
    with pytest.raises(WireError):
        decode(frame(DONE_ACK, body))


@pytest.mark.parametrize(
    ("code", "data"),
    [(2, b"\1\0"), (3, b"\0\1\0\0"), (4, b"\0\0\0\0\1\0\0\0"), (2, b""), (2, b"\0\1\0"), (5, b"\1"), (-1, bytes(4))],
)
def test_number_arrays_that_pack_to_the_same_bytes(code: int, data: bytes) -> None:
    body = msgpack.packb({1: 0, 2: 0, 3: 1, 4: 1, 5: msgpack.ExtType(code, data) if code > 0 else msgpack.Timestamp(0)})
    assert not agree("Grants", body)


def test_the_strict_reader_alone_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "read_canonical", lambda name, body: None)
    for name, sample in SAMPLES.items():
        assert exact(decode_struct(CLASSES[name], encode_struct(sample))) == exact(read_canonical(name, pack(sample)))
    assert decode(GOLDEN) is not None


@pytest.mark.parametrize("name", tables.FIELDS)
def test_buffers_of_every_kind(name: str) -> None:
    body = pack(SAMPLES[name])
    for buffer in (body, bytearray(body), memoryview(body), memoryview(bytearray(body + body))[: len(body)]):
        assert decode_struct(CLASSES[name], buffer) == SAMPLES[name]


@pytest.mark.parametrize("count", [8, 100_000])
def test_buffers_that_do_not_lie_in_one_piece(count: int) -> None:
    message = transfer(grant(np.arange(count)))
    apart = memoryview(bytes(byte for byte in codec.encode(message) for _ in range(2)))[::2]
    assert decode(apart) == message


def _samples() -> dict[str, Any]:
    """A value of each message and struct, from the full vectors."""
    samples: dict[str, Any] = {}

    def gather(value: Any) -> None:
        name = type(value).__name__
        if name in tables.FIELDS:
            samples.setdefault(name, value)
            for row in tables.FIELDS[name]:
                gather(getattr(value, row[1]))
        elif isinstance(value, tuple):
            for element in value:
                gather(element)

    for path in FILES:
        for case in json.loads(path.read_text())["cases"]:
            if case["id"] == "full":
                gather(from_json(CLASSES[case.get("message") or case["struct"]], case["fields"]))
    return samples


SAMPLES = _samples()
