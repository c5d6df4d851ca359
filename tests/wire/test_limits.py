"""Limits of a body: values in all, depth, and the memory that bytes of unknown origin take."""

import contextlib
import tracemalloc
from collections.abc import Callable

import attrs
import msgpack
import numpy as np
import pytest

from kvproto.errors import WireError
from kvproto.wire import decode, encode, tables, writer
from kvproto.wire.canonical import LARGEST, read_canonical
from kvproto.wire.messages import Begin, Chunk, Goodbye, Handle, Message, Ping, Register, Transfer
from kvproto_conformance.codec import Refusal, read_frame
from tests.wire.frames import grant, register, transfer

PING = encode(Ping(session=1, request=1))


def with_body(frame: bytes, body: bytes) -> bytes:
    return frame[:12] + len(body).to_bytes(4, "little") + body


def with_ignored(value: bytes) -> bytes:
    """A Ping with the value in a field that may be ignored."""
    return with_body(PING, bytes([PING[16] + 1]) + PING[17:] + b"\xcd\x80\x1b" + value)


def peak(read: Callable[[], object]) -> int:
    """The most bytes that Python holds for a refusal beyond those held before."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def begins(count: int) -> Chunk:
    """7 entries, and 3 for each."""
    starts = tuple(Begin(group=n, first=1) for n in range(count))
    return Chunk(session=1, sequence=1, slot=0, offset=0, bytes=1, last=True, begins=starts)


def handles(count: int) -> Register:
    """10 entries, 9 for each of 300 regions, and 3 for each of their handles."""
    base = register()
    of_each = tuple(Handle(transport=1, data=b"") for _ in range(count))
    regions = tuple(attrs.evolve(base.regions[0], id=n, handles=of_each) for n in range(300))
    return attrs.evolve(base, regions=regions, columns=(), routes=())


@pytest.mark.parametrize(("message_of", "most"), [(begins, 5459), (handles, 15)])
def test_values_of_a_body(message_of: Callable[[int], Message], most: int) -> None:
    """KVP-BODY-VALUES: at the bound all readers and the writer go along, above it none."""
    good = encode(message_of(most))
    assert decode(good) == message_of(most)
    read_frame(good)
    with pytest.raises(WireError, match="TOO_LARGE"):
        encode(message_of(most + 1))
    body = msgpack.packb(writer.validate(message_of(most + 1)))
    with pytest.raises(WireError, match="TOO_LARGE"):
        decode(with_body(good, body))
    with pytest.raises(Refusal, match="TOO_LARGE"):
        read_frame(with_body(good, body))


def test_the_canonical_reader_counts_values() -> None:
    """KVP-BODY-VALUES: its bodies are large enough for more values than a message may have."""
    assert read_canonical("Chunk", encode(begins(5459))[16:]) == begins(5459)
    assert len(body := msgpack.packb(writer.validate(begins(5460)))) <= LARGEST
    assert read_canonical("Chunk", body) is None


@pytest.mark.parametrize(("count", "good"), [(16381, True), (16382, False)])
def test_skipped_values_count_too(count: int, good: bool) -> None:
    """KVP-BODY-VALUES: a frame of 16 MiB of them is refused at their first count."""
    data = with_ignored(b"\xdc" + count.to_bytes(2, "big") + b"\x01" * count)  # 3 entries, and the elements
    with contextlib.nullcontext() if good else pytest.raises(WireError, match="TOO_LARGE"):
        decode(data)
    with contextlib.nullcontext() if good else pytest.raises(Refusal, match="TOO_LARGE"):
        read_frame(data)


@pytest.mark.parametrize("size", [50, 600, 1200, 65_500, 1 << 18])
@pytest.mark.parametrize("start", ["91", "8101"])
def test_bombs(start: str, size: int) -> None:
    """KVP-BODY-LIMIT: however deep lists and maps lie within each other, the refusal is the same."""
    bomb = bytes.fromhex(start)
    with pytest.raises(WireError) as caught:
        decode(with_ignored(bomb * (size // len(bomb))))
    assert (caught.value.code.name, caught.value.path) == ("TOO_DEEP", "#801b")


@pytest.mark.parametrize("value", ["90", "80", "a0", "cb" + "00" * 8])
def test_large_bodies_become_no_objects(value: str) -> None:
    """A list of a million elements takes a hundred bytes for each byte of the body, if anything makes it."""
    data = with_ignored(b"\xdd" + (1 << 20).to_bytes(4, "big") + bytes.fromhex(value) * (1 << 20))
    assert peak(lambda: decode(data)) < 1 << 16


def test_long_maps_become_no_objects() -> None:
    """Of field ids in order, of which no message has so many."""
    entries = b"".join(msgpack.packb(n) + b"\xc0" for n in range(1, 16_001))
    body = b"\xde" + (16_000).to_bytes(2, "big") + entries
    assert peak(lambda: decode(with_body(PING, body))) < 4 * len(body)


def test_memory_of_bodies_that_become_objects() -> None:
    count = 65_500
    data = with_ignored(b"\xdc" + count.to_bytes(2, "big") + b"\x80" * count)
    assert peak(lambda: decode(data)) < 100 * count


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
