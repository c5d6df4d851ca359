"""Frames with faults: those of the vectors, changed in their forms and in their bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

from kvproto_conformance.cases import load

Json = dict[str, Any]
HEADER = 16
_HEADS = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE1), 0xFF)


def bases() -> list[bytes]:
    """Frames of all messages, of every shape that the vectors have, refused ones too."""
    asked = (case.asks[0].question for case in load() if case.suite == "codec")
    return sorted(
        {bytes.fromhex(question["frame"]) for question in asked if 0 < len(question.get("frame", "")) <= 1 << 13}
    )


def frame(rng: random.Random, some: list[bytes]) -> Json:
    """A question of op `decode`."""
    made = bytearray(rng.choice(some))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(made) > HEADER and rng.random() < 0.6:
            made[HEADER:] = _other_form(rng, bytes(made[HEADER:]))
        else:
            _damage(rng, made)
    if len(made) >= HEADER and rng.random() < 0.9:
        made[12:16] = (len(made) - HEADER).to_bytes(4, "little")
    if len(made) >= HEADER and rng.random() < 0.03:
        other = rng.choice(some)
        made[: min(8, len(other))] = other[:8]
    return {"op": "decode", "frame": made.hex()}


def _damage(rng: random.Random, made: bytearray) -> None:
    if not made:
        return
    at = rng.randrange(len(made))
    match rng.randrange(5):
        case 0:
            made[at] = rng.choice([*_HEADS, rng.randrange(256)])
        case 1:
            made[at] ^= 1 << rng.randrange(8)
        case 2:
            del made[at : at + rng.randint(1, 5)]
        case 3:
            made[at:at] = rng.randbytes(rng.randint(1, 5))
        case _:
            del made[at + 1 :]


def _other_form(rng: random.Random, body: bytes) -> bytes:
    """The body with one value in place of another, twice, gone, or in a form that is not the shortest."""
    spans = list(_values(body))
    if not spans:
        return body
    begin, end = rng.choice(spans)
    match rng.randrange(5):
        case 0:
            value = _value(rng, rng.randint(0, 3))
        case 1:
            value = body[begin:end] * 2
        case 2:
            value = b""
        case 3:
            other = rng.choice(spans)
            value = body[slice(*other)]
        case _:
            value = _long(rng, body[begin:end])
    return body[:begin] + value + body[end:]


def _long(rng: random.Random, value: bytes) -> bytes:
    """The same value with a longer head, if it has one."""
    first = value[0]
    if first < 0x80:
        return bytes([0xCC + (n := rng.randrange(4)), *first.to_bytes(1 << n, "big")])
    if 0xA0 <= first < 0xC0:
        return bytes([0xD9, first & 31]) + value[1:]
    if 0x80 <= first < 0xA0:
        return bytes([0xDE if first < 0x90 else 0xDC, 0, first & 15]) + value[1:]
    if first in (0xCC, 0xCD, 0xCE, 0xC4, 0xC5, 0xC7, 0xC8):
        size = 1 << (first - (0xCC if first >= 0xCC else 0xC4 if first < 0xC7 else 0xC7))
        return bytes([first + 1]) + value[1 : 1 + size].rjust(2 * size, b"\0") + value[1 + size :]
    return value


def _value(rng: random.Random, depth: int) -> bytes:
    """Any value, now and then in no form that there is."""
    kind = rng.randrange(10)
    if kind == 0:
        return _long(rng, bytes([rng.randrange(128)]))
    if kind == 1:
        wide = rng.randrange(4)
        return bytes([0xCC + wide]) + rng.choice([b"\0", b"\x7f", b"\x80", b"\xff"]) + rng.randbytes((1 << wide) - 1)
    if kind == 2:
        wide = rng.randrange(4)
        return bytes([0xD0 + wide]) + rng.choice([b"\0", b"\x7f", b"\x80", b"\xff"]) * (1 << wide)
    if kind == 3:
        return rng.choice([b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\xca\0\0\0\0", b"\xcb" + bytes(8), b"\xff", b"\xe0"])
    if kind == 4:
        text = rng.choice([b"", b"k", "\u00e9".encode(), b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"n" * 31])
        return bytes([0xA0 + len(text)]) + text
    if kind == 5:
        data = rng.randbytes(rng.choice([0, 1, 8, 16, 32]))
        return bytes([0xC4, len(data)]) + data
    if kind == 6:
        width, count = 1 << rng.randrange(4), rng.choice([0, 1, 2, 3, 5])
        data = b"".join(
            rng.choice([0, 1, 255, rng.randrange(1 << 8 * width)]).to_bytes(width + 1, "little")[:width]
            for _ in range(count)
        )
        fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}
        head = bytes([fixed[len(data)]]) if len(data) in fixed and rng.random() < 0.9 else bytes([0xC7, len(data)])
        return head + bytes([rng.choice([width.bit_length(), width.bit_length() + 4, 0, 9, 255])]) + data
    if kind == 7:
        return struct.pack(
            ">BI", rng.choice([0xDD, 0xDF, 0xC6, 0xDB, 0xC9]), rng.choice([0, 1, 65536, 16777216, 2**32 - 1])
        )
    some = [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))] if depth else []
    if kind == 8:
        return bytes([0x90 + len(some)]) + b"".join(some)
    ids = sorted(rng.sample([*range(1, 12), 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000], len(some)))
    return bytes([0x80 + len(some)]) + b"".join(_id(n) + one for n, one in zip(ids, some, strict=True))


def _id(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    return b"\xcd" + number.to_bytes(2, "big") if number < 65536 else b"\xce" + number.to_bytes(4, "big")


def _values(body: bytes) -> Iterator[tuple[int, int]]:
    """The begin and end of every value, as far as the body has a form."""
    at = 0
    while at < len(body):
        end = _end(body, at, 0)
        if end is None:
            return
        yield at, end
        at = _inside(body, at)


def _head(body: bytes, at: int) -> tuple[int, int, int]:
    """Bytes of the head, bytes behind it, and values behind these."""
    first = body[at]
    if first < 0x80 or first >= 0xE0 or 0xC0 <= first < 0xC4:
        return 1, 0, 0
    if first < 0xA0:
        return 1, 0, (first & 15) * (2 if first < 0x90 else 1)
    if first < 0xC0:
        return 1, first & 31, 0
    if 0xCA <= first < 0xD4:
        return 1, (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)[first - 0xCA], 0
    if 0xD4 <= first < 0xD9:
        return 2, 1 << (first - 0xD4), 0
    size = {
        0xC4: 1,
        0xC5: 2,
        0xC6: 4,
        0xC7: 1,
        0xC8: 2,
        0xC9: 4,
        0xD9: 1,
        0xDA: 2,
        0xDB: 4,
        0xDC: 2,
        0xDD: 4,
        0xDE: 2,
        0xDF: 4,
    }[first]
    count = int.from_bytes(body[at + 1 : at + 1 + size], "big")
    if first >= 0xDC:
        return 1 + size, 0, count * (2 if first >= 0xDE else 1)
    return 1 + size + (0xC7 <= first <= 0xC9), count, 0


def _inside(body: bytes, at: int) -> int:
    """Behind the head of a map or list, or else behind the value."""
    head, data, _ = _head(body, at)
    return at + head + data


def _end(body: bytes, at: int, depth: int) -> int | None:
    if at >= len(body) or depth > 16:
        return None
    head, data, values = _head(body, at)
    end: int | None = at + head + data
    for _ in range(values):
        end = None if end is None else _end(body, end, depth + 1)
        if end is None:
            return None
    return end if end is not None and end <= len(body) else None
