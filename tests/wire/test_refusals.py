"""Bytes that are wrong and that are no vector: each by its code and path, and nothing but WireError for any bytes."""

import contextlib

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import WireError
from kvproto.wire import decode, decode_struct, encode, messages, tables
from kvproto.wire.enums import ErrorCode
from tests.errors import raises
from tests.wire.frames import DONE_ACK, GOLDEN, GOODBYE, MESSAGES, extended, frame, objects, register

SECOND = "0206 0301"
CASES = {
    "half an envelope": (GOLDEN[:9], ErrorCode.TRUNCATED, "@length"),
    "magic of a short frame": (b"KX", ErrorCode.BAD_MAGIC, "@magic"),
    "major": (GOLDEN[:4] + b"\x02" + GOLDEN[5:], ErrorCode.UNSUPPORTED_VERSION, "@major"),
    "frozen message as major 1": (frame(GOODBYE, "80"), ErrorCode.UNSUPPORTED_VERSION, "@major"),
    "other message as major 0": (frame(DONE_ACK, "80", 0), ErrorCode.UNSUPPORTED_VERSION, "@major"),
    "text as a field id": (frame(DONE_ACK, "84 a161 0105 0206 0301"), ErrorCode.BAD_TYPE, ""),
    "field 0": (frame(DONE_ACK, "84 0005 0105 " + SECOND), ErrorCode.FIELD_ORDER, "#0000"),
    "non-minimal u16": (frame(DONE_ACK, "83 01cd00ff " + SECOND), ErrorCode.NOT_CANONICAL, "session"),
    "non-minimal u32": (frame(DONE_ACK, "83 01ce0000ffff " + SECOND), ErrorCode.NOT_CANONICAL, "session"),
    "non-minimal u64": (frame(DONE_ACK, "83 01cf00000000ffffffff " + SECOND), ErrorCode.NOT_CANONICAL, "session"),
    "signed form": (frame(DONE_ACK, "83 01d005 " + SECOND), ErrorCode.NOT_CANONICAL, "session"),
    "non-minimal text": (frame(GOODBYE, "82 0105 03d90161", 0), ErrorCode.NOT_CANONICAL, "reason"),
    "float": (frame(DONE_ACK, "83 01ca00000000 " + SECOND), ErrorCode.BAD_TYPE, "session"),
    "negative in a byte": (frame(DONE_ACK, "83 01d080 " + SECOND), ErrorCode.BAD_TYPE, "session"),
    "unused first byte": (frame(DONE_ACK, "83 01c1 " + SECOND), ErrorCode.BAD_TYPE, "session"),
    "text for bytes": (frame(0x0201, "84 0101 0201 0301 04a0"), ErrorCode.BAD_TYPE, "ticket"),
    "15 bytes for 16": (frame(0x0201, "84 0101 0201 0301 04c40f" + "00" * 15), ErrorCode.OUT_OF_RANGE, "ticket"),
    "range before missing": (frame(DONE_ACK, "81 0300"), ErrorCode.OUT_OF_RANGE, "sequence"),
    "closed enum": (frame(0x0202, "84 0105 " + SECOND + "0409"), ErrorCode.UNKNOWN_ENUM_VALUE, "state"),
    "open enum beyond 16 bits": (frame(0x0003, "82 0201 03ce00010000", 0), ErrorCode.OUT_OF_RANGE, "code"),
    "must understand, small": (frame(DONE_ACK, "84 0105 " + SECOND + "0407"), ErrorCode.UNKNOWN_FIELD, "#0004"),
    "more entries than bytes": (frame(DONE_ACK, "de0100 0105"), ErrorCode.TRUNCATED, ""),
    "more entries than bytes, before what they are": (frame(DONE_ACK, "84 01c0"), ErrorCode.TRUNCATED, ""),
    "more elements than bytes": (extended("92c0"), ErrorCode.TRUNCATED, "#8001"),
    "huge text": (frame(GOODBYE, "82 0105 03dbffffffff", 0), ErrorCode.TOO_LARGE, "reason"),
    "text beyond the limit": (frame(GOODBYE, "82 0105 03da1001", 0), ErrorCode.TOO_LARGE, "reason"),
    "text cut short": (frame(GOODBYE, "82 0105 03a261", 0), ErrorCode.TRUNCATED, "reason"),
    "surrogate": (frame(GOODBYE, "82 0105 03a3eda080", 0), ErrorCode.BAD_TEXT, "reason"),
    "bomb": (extended("91" * 50), ErrorCode.TOO_DEEP, "#8001"),
    "one too deep": (extended("91" * 7 + "90"), ErrorCode.TOO_DEEP, "#8001"),
    "map too deep": (extended("8101" * 7 + "80"), ErrorCode.TOO_DEEP, "#8001"),
    "ignored map with a wide id": (extended("81ce0001000001"), ErrorCode.OUT_OF_RANGE, "#8001"),
    "ignored part of an element": (extended("c70302010203"), ErrorCode.BAD_LENGTH, "#8001"),
    "ignored float in a list": (extended("91cb" + "00" * 8), ErrorCode.BAD_TYPE, "#8001"),
    "ignored timestamp": (extended("d6ff00000000"), ErrorCode.BAD_TYPE, "#8001"),
    "ignored ext of no code": (extended("d40900"), ErrorCode.BAD_TYPE, "#8001"),
    "ignored wide array": (extended("d502ff00"), ErrorCode.NOT_CANONICAL, "#8001"),
    "ignored wide signed array": (extended("d60680ff7f00"), ErrorCode.NOT_CANONICAL, "#8001"),
    "ignored integer": (extended("cc7f"), ErrorCode.NOT_CANONICAL, "#8001"),
    "ignored negative": (extended("d0e0"), ErrorCode.NOT_CANONICAL, "#8001"),
    "ignored list": (extended("dc000101"), ErrorCode.NOT_CANONICAL, "#8001"),
    "ignored map out of order": (extended("8202010101"), ErrorCode.FIELD_ORDER, "#8001"),
    "ignored map with text keys": (extended("81a16101"), ErrorCode.BAD_TYPE, "#8001"),
    "ignored text": (extended("a1ff"), ErrorCode.BAD_TEXT, "#8001"),
    "ignored bytes of no end": (extended("c6ffffffff"), ErrorCode.TOO_LARGE, "#8001"),
    "ignored value absent": (extended(""), ErrorCode.TRUNCATED, "#8001"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusal(case: str) -> None:
    data, code, path = CASES[case]
    with raises(WireError, code=code, path=path):
        decode(data)


ARRAYS = {
    "u16 for u8": (2, b"\1\0", ErrorCode.NOT_CANONICAL),
    "u32 for u16": (3, b"\0\1\0\0", ErrorCode.NOT_CANONICAL),
    "empty u16": (2, b"", ErrorCode.NOT_CANONICAL),
    "wider than the field": (4, bytes(7) + b"\1", ErrorCode.BAD_TYPE),
    "signed": (5, b"\1", ErrorCode.BAD_TYPE),
    "no such ext": (9, b"\1", ErrorCode.BAD_TYPE),
    "part of an element": (2, b"\0\1\0", ErrorCode.BAD_LENGTH),
    "more than the limit": (1, bytes(tables.MAX_ARRAY + 1), ErrorCode.TOO_LARGE),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_array_refusal(case: str) -> None:
    code, data, error = ARRAYS[case]
    body = msgpack.packb({1: 0, 2: 0, 3: 1, 4: 1, 5: msgpack.ExtType(code, data)})
    with raises(WireError, code=error, path="items"):
        decode_struct(messages.Grants, body)


@pytest.mark.parametrize("ext", ["c7010105", "c80001 0105", "c7020200 01"])
def test_ext_that_has_a_shorter_form(ext: str) -> None:
    with raises(WireError, code=ErrorCode.NOT_CANONICAL, path="items"):
        decode_struct(messages.Grants, bytes.fromhex("85 0100 0200 0301 0401 05" + ext))


def test_paths_of_nested_fields() -> None:
    good = encode(register(77))
    at = good.rindex(b"\x03\x4d")
    with raises(WireError, code=ErrorCode.OUT_OF_RANGE, path="regions[2].length"):
        decode(good[: at + 1] + b"\x00" + good[at + 2 :])


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60), st.sampled_from([getattr(messages, n).TYPE for n in MESSAGES]))
def test_random_bytes_let_only_wire_errors_out(body: bytes, type_: int) -> None:
    for data in (body, frame(type_, body, 0), frame(type_, body, 1), extended(body.hex())):
        with contextlib.suppress(WireError):
            decode(data)
    for name in tables.FIELDS:
        with contextlib.suppress(WireError):
            decode_struct(getattr(messages, name), body)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_mutations_let_only_wire_errors_out(data: st.DataObject) -> None:
    good = bytearray(encode(data.draw(objects(data.draw(st.sampled_from(MESSAGES))))))
    for _ in range(data.draw(st.integers(1, 3))):
        # half of them near the start, where lengths and types are
        top = data.draw(st.sampled_from([min(40, len(good)), len(good)]))
        good[data.draw(st.integers(0, top - 1))] = data.draw(st.integers(0, 255))
    try:
        again = decode(bytes(good))
    except WireError:
        return
    # whatever is accepted without an ignored field is canonical
    if len(encode(again)) == len(good):
        assert encode(again)[16:] == good[16:]
