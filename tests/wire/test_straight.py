"""The straight-line code takes all that is canonical and common, and says what the strict tables say."""

import contextlib
import json
from pathlib import Path
from typing import Any

import attrs
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import WireError
from kvproto.wire import codec, decode, encode, from_json, straight, strict, tables, writer
from kvproto.wire.messages import Begin, Chunk, Goodbye, Handle, Ping, Register, Transfer
from kvproto.wire.primitives import DOUBTS
from kvproto_conformance.codec import Refusal, read_frame
from tests.wire.frames import grant, objects, register, transfer


def fast(name: str, data: bytes) -> Any:
    """What the straight-line code takes; None where it doubts."""
    try:
        made, end = straight.DECODE[name](data, 0)
    except DOUBTS:
        return None
    return made if end == len(data) else None


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_good_values_need_no_second_look(name: str, data: st.DataObject) -> None:
    value = data.draw(objects(name))
    parts: list[Any] = []
    straight.ENCODE[type(value)](value, parts)
    body = b"".join(parts)
    assert body == writer.pack(value)
    assert fast(name, body) == strict.read_whole(name, memoryview(body)) == value


@settings(max_examples=40, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_what_it_takes_the_strict_reader_takes(name: str, data: st.DataObject) -> None:
    """Bytes changed, dropped and doubled: the straight-line code accepts no more than the tables, nor another value."""
    body = bytearray(writer.pack(data.draw(objects(name))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        how = data.draw(st.sampled_from(["set", "drop", "double"]))
        if how == "set":
            body[at] = data.draw(st.integers(0, 255))
        elif how == "drop" and len(body) > 1:
            del body[at]
        else:
            body.insert(at, body[at])
    taken = fast(name, bytes(body))
    if taken is not None:
        assert strict.read_whole(name, memoryview(bytes(body))) == taken
        assert writer.pack(taken) == body


@pytest.mark.parametrize("name", tables.FIELDS)
def test_buffers_of_every_kind(name: str) -> None:
    body = writer.pack(SAMPLES[name])
    cls = strict.CLASSES[name]
    for buffer in (body, bytearray(body), memoryview(body), memoryview(bytearray(body + body))[: len(body)]):
        assert codec.decode_struct(cls, buffer) == SAMPLES[name]


def _samples() -> dict[str, Any]:
    folder = Path(__file__).parents[2] / "spec/v1/vectors/codec"
    found: dict[str, Any] = {}
    for path in folder.glob("*.json"):
        for case in json.loads(path.read_text())["cases"]:
            if case["id"] == "full":
                cls = strict.CLASSES[case.get("message") or case["struct"]]
                _gather(from_json(cls, case["fields"]), found)
    return found


def _gather(value: Any, found: dict[str, Any]) -> None:
    name = type(value).__name__
    if name in tables.FIELDS:
        found.setdefault(name, value)
        for row in tables.FIELDS[name]:
            _gather(getattr(value, row[1]), found)
    elif isinstance(value, tuple):
        for item in value:
            _gather(item, found)


SAMPLES = _samples()


def test_doubts_go_to_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without straight-line code everything still works, only slower: it decides nothing."""
    body = writer.pack(SAMPLES["Register"])

    def doubt(*_: Any) -> Any:
        raise straight.Doubt

    monkeypatch.setitem(straight.DECODE, "Register", doubt)
    monkeypatch.setitem(straight.ENCODE, strict.CLASSES["Register"], doubt)
    assert codec.decode_struct(strict.CLASSES["Register"], body) == SAMPLES["Register"]
    assert codec.encode_struct(SAMPLES["Register"]) == body


def test_arrays_of_large_frames_are_views_into_them() -> None:
    frame = bytearray(encode(transfer(grant(np.arange(100_000)))))
    message = decode(frame)
    assert isinstance(message, Transfer)
    items = message.grants[0].items
    assert items is not None
    assert not items.flags.writeable
    assert np.shares_memory(items, np.frombuffer(frame, np.uint8))


def test_body_beyond_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_BODY", 30)
    with pytest.raises(WireError) as caught:
        encode(Goodbye(session=1, reason="x" * 40))
    assert caught.value.code.name == "TOO_LARGE"


def begins(count: int) -> Chunk:
    """8 entries, and 3 for each."""
    made = tuple(Begin(group=n, first=1) for n in range(count))
    return Chunk(session=1, sequence=1, attempt=1, slot=0, offset=0, bytes=1, last=True, begins=made)


def handles(count: int) -> Register:
    """10 entries, 9 for each of 300 regions, and 3 for each of their handles."""
    base = register()
    some = tuple(Handle(transport=1, data=b"") for _ in range(count))
    regions = tuple(attrs.evolve(base.regions[0], id=n, handles=some) for n in range(300))
    return attrs.evolve(base, regions=regions, columns=(), routes=())


@pytest.mark.parametrize(("made", "most"), [(begins, 5458), (handles, 15)])
def test_what_a_body_may_have_in_all(made: Any, most: int) -> None:
    """KVP-BODY-VALUES: at the bound both readers and the writer go along, above it none."""
    assert decode(encode(made(most))) == made(most)
    read_frame(encode(made(most)))
    with pytest.raises(WireError, match="TOO_LARGE"):
        encode(made(most + 1))
    body = msgpack.packb(writer.validate(made(most + 1)), use_bin_type=True)
    bytes_ = encode(made(most))[:12] + len(body).to_bytes(4, "little") + body
    with pytest.raises(WireError, match="TOO_LARGE"):
        decode(bytes_)
    with pytest.raises(Refusal, match="TOO_LARGE"):
        read_frame(bytes_)


def test_values_that_are_skipped_count_too() -> None:
    """KVP-BODY-VALUES: a frame of 16 MiB of them is refused at their first count."""
    ping = encode(Ping(session=1, request=1))[16:]
    for count, good in ((16381, True), (16382, False)):
        skipped = b"\xdc" + count.to_bytes(2, "big") + b"\x01" * count
        body = bytes([ping[0] + 1]) + ping[1:] + b"\xcd\x80\x1b" + skipped  # 3 entries, and the elements
        bytes_ = encode(Ping(session=1, request=1))[:12] + len(body).to_bytes(4, "little") + body
        with contextlib.nullcontext() if good else pytest.raises(WireError, match="TOO_LARGE"):
            decode(bytes_)
        with contextlib.nullcontext() if good else pytest.raises(Refusal, match="TOO_LARGE"):
            read_frame(bytes_)
