"""What is written comes back, is canonical, and is what the spec's example says."""

import contextlib
import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import LocalError, WireError
from kvproto.wire import decode, decode_struct, encode, encode_struct, enums, from_json, messages, tables, to_json
from kvproto.wire.enums import ErrorCode
from tests.errors import raises
from tests.wire.frames import GOLDEN, MESSAGES, extended, grant, objects, register, transfer

CODEC = Path(__file__).parents[2] / "spec/v1/vectors/codec"


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", tables.FIELDS)
def test_round_trip(name: str, data: st.DataObject) -> None:
    cls = getattr(messages, name)
    value = data.draw(objects(name))
    body = encode_struct(value)
    assert decode_struct(cls, body) == value
    assert encode_struct(decode_struct(cls, body)) == body
    assert encode_struct(from_json(cls, to_json(value))) == body
    if name in MESSAGES:
        frame = encode(value)
        assert frame[16:] == body
        assert frame[4] == (0 if name in tables.FROZEN else 1)
        assert decode(frame) == value
        assert encode(decode(memoryview(bytearray(frame)))) == frame


@pytest.mark.parametrize("name", MESSAGES)
def test_envelope(name: str) -> None:
    """KVP-FRAME-W-MAJOR, KVP-FRAME-W-ZERO: of every message, byte by byte."""
    case = json.loads(next(CODEC.glob(f"*-{name}.json")).read_text())["cases"][0]
    message = from_json(getattr(messages, name), case["fields"])
    head = encode(message)[:16]
    assert head[:4] == b"KVPW"
    assert head[4:6] == (b"\0\0" if name in ("Hello", "Welcome", "Refused", "Error", "Goodbye") else b"\1\0")
    assert head[8:12] == bytes(4)


@pytest.mark.parametrize(
    ("number", "form"),
    [(0, "00"), (127, "7f"), (128, "cc80"), (255, "ccff"), (256, "cd0100"), (1 << 31, "ce80000000"), (1 << 63, "cf8000000000000000")],
)  # fmt: skip
def test_integers_take_unsigned_forms(number: int, form: str) -> None:
    """KVP-BODY-W-FORM: never d0 to d3, which could hold most of these too."""
    assert encode_struct(messages.Checksum(group=0, value=number)) == bytes.fromhex("82 0100 02" + form)


def test_an_absent_value_has_no_field() -> None:
    """KVP-BODY-W-FORM: two fields, and no nil for the optional third."""
    one = messages.Part(name="k", dtype=enums.DType.U8, lanes=1, lane_bytes=1)
    assert encode_struct(one)[0] == 0x84
    assert b"\xc0" not in encode_struct(one)


def test_golden_frame() -> None:
    message = messages.DoneAck(session=5, request=6, sequence=1)
    assert encode(message) == GOLDEN
    assert decode(GOLDEN) == message


@pytest.mark.parametrize(
    ("items", "ext"),
    [
        ([], "c70001"),
        ([255], "d401ff"),
        ([256], "d5020001"),
        ([1, 2, 3], "c70301010203"),
        ([65535, 0], "d602ffff0000"),
        ([65536], "d60300000100"),
        ([2**32 - 1, 1], "d703ffffffff01000000"),
    ],
)
def test_arrays_take_the_narrowest_width(items: list[int], ext: str) -> None:
    for given_type in (np.uint32, np.uint64, np.int64):
        body = encode_struct(grant(np.array(items, given_type)))
        assert body.endswith(bytes.fromhex("05" + ext))
    again = decode_struct(messages.Grants, body).items
    assert again.tolist() == items
    assert not again.flags.writeable
    assert again.base is not None


def test_offsets_may_be_64_bits_wide() -> None:
    one = np.array([1])
    columns = messages.Columns(
        group=0,
        items=1,
        region=one,
        offset=np.array([2**64 - 1], np.uint64),
        item_stride=one,
        row_stride=one,
        lane_stride=one,
    )
    assert decode_struct(messages.Columns, encode_struct(columns)).offset.tolist() == [2**64 - 1]


def test_types_are_those_of_the_annotations() -> None:
    again = decode(encode(register()))
    assert isinstance(again, messages.Register)
    assert type(again.plan) is bytes
    assert again.access is enums.Access.WRITE
    assert again.regions[0].device is None
    unknown = decode_struct(messages.Handle, bytes.fromhex("82 01 63 02 c400"))
    assert unknown.transport == 99


@pytest.mark.parametrize(
    "value",
    ["91c3", "c400", "a0", "ff", "e0", "d0df", "d1ff7f", "d2ffff7fff", "d3ffffffff7fffffff", "8101ccff", "c70001", "d405ff",
     "d60600ff7f00", "90", "80", "97" + "01" * 7, "d9" + "20" + "61" * 32],
)  # fmt: skip
def test_field_that_may_be_ignored(value: str) -> None:
    assert decode(extended(value)) == decode(GOLDEN)


def test_an_unknown_field_is_not_sent_on() -> None:
    """KVP-BODY-IGNORE: what was read and not understood is not written again."""
    assert encode(decode(extended("a161"))) == GOLDEN


def test_grease_is_a_field_that_may_be_ignored() -> None:
    """KVP-GREASE-SEND."""
    frame = encode(decode(GOLDEN), grease=tables.GREASE_FIELD_IDS[0])
    assert frame[16:] == b"\x84" + GOLDEN[17:] + bytes.fromhex("cd801b cd0206")
    assert decode(frame) == decode(GOLDEN)


def test_flags_of_the_high_byte_and_reserved_and_minor_are_ignored() -> None:
    assert decode(GOLDEN[:5] + b"\x07" + GOLDEN[6:8] + b"\x00\xff\xff\xff" + GOLDEN[12:]) == decode(GOLDEN)


@pytest.mark.parametrize(
    ("value", "code", "path"),
    [
        (messages.DoneAck(session=1, request=1, sequence=0), ErrorCode.OUT_OF_RANGE, "sequence"),
        (messages.DoneAck(session=True, request=1, sequence=1), ErrorCode.BAD_TYPE, "session"),
        (messages.DoneAck(session=None, request=1, sequence=1), ErrorCode.MISSING_FIELD, "session"),  # type: ignore[arg-type]
        (messages.Accepted(session=1, request=1, sequence=1, state=9), ErrorCode.UNKNOWN_ENUM_VALUE, "state"),  # type: ignore[arg-type]
        (messages.Goodbye(session=1, reason="\ud800"), ErrorCode.BAD_TEXT, "reason"),
        (messages.Goodbye(session=1, reason="x" * 4097), ErrorCode.TOO_LARGE, "reason"),
        (messages.Goodbye(session=1, reason=b"x"), ErrorCode.BAD_TYPE, "reason"),  # type: ignore[arg-type]
        (transfer(grant(np.array([1])), grant(np.array([-1]))), ErrorCode.OUT_OF_RANGE, "grants[1].items"),
        *((transfer(grant(np.arange(n) - 1)), ErrorCode.OUT_OF_RANGE, "grants[0].items") for n in (2, 1000)),
        (transfer(grant(np.array([1.5]))), ErrorCode.BAD_TYPE, "grants[0].items"),
        (transfer(grant(np.array([2**32]))), ErrorCode.OUT_OF_RANGE, "grants[0].items"),
        (transfer(grant(np.array([[1]]))), ErrorCode.BAD_TYPE, "grants[0].items"),
        (transfer(grant(5)), ErrorCode.BAD_TYPE, "grants[0].items"),
        (transfer("x"), ErrorCode.BAD_TYPE, "grants[0]"),  # type: ignore[arg-type]
        (register(0), ErrorCode.OUT_OF_RANGE, "regions[2].length"),
        (attrs.evolve(register(), columns=5), ErrorCode.BAD_TYPE, "columns"),
        (transfer(grant(np.array([1])), grant(np.array([1]))), ErrorCode.NOT_ASCENDING, "grants[1].group"),
        (transfer(messages.Grants(group=0, first=8, count=2, valid=9)), ErrorCode.BAD_GRANT, "grants[0].valid"),
    ],
)  # fmt: skip
def test_writer_refuses_what_the_reader_would(value: messages.Message, code: ErrorCode, path: str) -> None:
    """KVP-BODY-W-FORM."""
    with raises(WireError, code=code, path=path):
        encode(value)


@pytest.mark.parametrize(("number", "good"), [(0, True), (0xFFFF, True), (0x10000, False), (-1, False)])
def test_open_enums_have_16_bits(number: int, good: bool) -> None:
    """KVP-BODY-ENUM."""
    handle = messages.Handle(transport=number, data=b"")
    with contextlib.nullcontext() if good else pytest.raises(WireError, match="OUT_OF_RANGE"):
        assert decode_struct(messages.Handle, encode_struct(handle)) == handle


def test_misuse_is_a_local_error() -> None:
    with pytest.raises(LocalError):
        encode(messages.Version(major=1, minor=0))  # type: ignore[arg-type]
    with pytest.raises(LocalError):
        encode_struct("x")
    with pytest.raises(LocalError):
        decode_struct(int, b"\x80")


def test_secrets_are_in_no_repr() -> None:
    """KVP-SECRET-LOG."""
    shown = repr(transfer()) + repr(register())
    assert "ticket" not in shown
    assert str(1 << 46) not in shown
    assert r"\xcd\xef" not in shown


@pytest.mark.parametrize("head", [0xC1, 0xC6, 0xDD])
def test_a_long_array_under_another_head_is_none(head: int) -> None:
    """KVP-BODY-TYPE: whatever lies behind it looks as if it were."""
    frame = bytearray(encode(transfer(grant(np.arange(0x18000, dtype=np.uint32)))))
    at = frame.index(0xC9)
    assert decode(bytes(frame)) == transfer(grant(np.arange(0x18000, dtype=np.uint32)))
    frame[at] = head
    with raises(WireError, code=ErrorCode.BAD_TYPE):
        decode(bytes(frame))
