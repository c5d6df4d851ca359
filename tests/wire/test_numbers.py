"""The most of each kind that fits, and one more, of both halves of the codec: too long for vectors."""

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from kvproto.errors import WireError
from kvproto.wire import decode, decode_struct, encode, encode_struct, strict, writer
from kvproto.wire.messages import Content, Data, Goodbye, HandOff

BODIES: dict[str, tuple[int, type[Any], Callable[[int], Any], Callable[[int], dict[int, Any]]]] = {
    # the most, the struct, a value of so much, and its map
    "array": (
        1 << 22, Content,
        lambda n: Content(tokens=np.zeros(n, np.uint8), adapter="", salts=()),
        lambda n: {1: msgpack.ExtType(1, bytes(n)), 2: "", 3: []},
    ),
    "list": (
        1 << 16, Content,
        lambda n: Content(tokens=np.zeros(0, np.uint8), adapter="", salts=(b"",) * n),
        lambda n: {1: msgpack.ExtType(1, b""), 2: "", 3: [b""] * n},
    ),
    "bytes": (
        1 << 23, HandOff,
        lambda n: HandOff(group=1, data=bytes(n)),
        lambda n: {1: 1, 2: bytes(n)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_the_most_that_fits(kind: str) -> None:
    """KVP-BODY-LIMIT."""
    most, cls, value, body = BODIES[kind]
    raw = msgpack.packb(body(most))
    assert encode_struct(value(most)) == writer.pack(value(most)) == raw
    assert decode_struct(cls, raw) == strict.read_whole(cls.__name__, memoryview(raw)) == value(most)


def test_bytes_of_one_data() -> None:
    """KVP-BODY-RANGE."""
    ids: dict[str, Any] = {"session": 1, "sequence": 1, "offset": 0, "last": True}
    most = Data(**ids, data=bytes(1 << 18))
    frame = encode(most)
    assert decode(frame) == most
    body = bytearray(frame[16:])
    at = body.index(b"\xc6\x00\x04\x00\x00")
    body[at : at + 5] = b"\xc6\x00\x04\x00\x01\x00"
    for refused in (lambda: encode(Data(**ids, data=bytes((1 << 18) + 1))), lambda: decode(raw(frame, bytes(body)))):
        with pytest.raises(WireError, match="OUT_OF_RANGE"):
            refused()


def raw(frame: bytes, body: bytes) -> bytes:
    """A frame with another body."""
    return frame[:12] + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("kind", BODIES)
def test_one_more(kind: str) -> None:
    """KVP-BODY-LIMIT."""
    most, cls, value, body = BODIES[kind]
    with pytest.raises(WireError, match="TOO_LARGE"):
        encode_struct(value(most + 1))
    with pytest.raises(WireError, match="TOO_LARGE"):
        decode_struct(cls, msgpack.packb(body(most + 1)))


@pytest.mark.parametrize("more", [0, 1])
def test_the_largest_body(more: int) -> None:
    """KVP-FRAME-W-LENGTH: 16 MiB of a message whose unknown fields are left out, and one byte more."""
    frame, most = encode(Goodbye(session=1, reason="")), 1 << 24
    fields = msgpack.unpackb(frame[16:], strict_map_key=False) | {60000: bytes(1 << 23), 60002: b""}
    rest = most - len(msgpack.packb(fields | {60002: bytes(1 << 22)})) + (1 << 22) + more
    largest = raw(frame, msgpack.packb(fields | {60002: bytes(rest)}))
    assert len(largest) == 16 + most + more
    if not more:
        assert decode(largest) == Goodbye(session=1, reason="")
    else:
        with pytest.raises(WireError, match="TOO_LARGE at @length"):
            decode(largest)
