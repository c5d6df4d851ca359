"""What the generated straight-line code is made of: it reads and writes the canonical form, and doubts everything else.

A canonical encoding is unique, so reading it needs no choices: every id, width and length that is not the expected one
is either wrong or rare. Both end in a Doubt, and the strict tables decide. Nothing here reports an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from operator import le, lt
from typing import Any

import numpy as np


class Doubt(Exception):
    """Not the common case; ask the strict tables."""


DOUBTS = (Doubt, IndexError, ValueError, AttributeError, TypeError, OverflowError, struct.error)
"""What the straight-line code may raise, as it checks neither the end of a buffer nor the type of a field first."""

_U32, _U64 = struct.Struct(">I"), struct.Struct(">Q")
u64 = _U64.unpack_from
new = object.__new__
_DTYPES = tuple(np.dtype(f"<u{width}") for width in (1, 2, 4, 8))
_EMPTY = np.frombuffer(b"", "u1")
_MANY = 64
"""Elements from which numpy is faster than a Python loop."""
BYTE = [bytes((n,)) for n in range(128)] + [bytes((0xCC, n)) for n in range(128, 256)]
"""Canonical integers below 256."""
BYTE_OF = [bytes((n,)) for n in range(256)]
_ARRAY_HEAD = {
    (code, size): bytes((fix, code))
    for code in (1, 2, 3, 4)
    for size, fix in ((1, 0xD4), (2, 0xD5), (4, 0xD6), (8, 0xD7), (16, 0xD8))
}


def setter(cls: type[Any], name: str) -> Callable[[Any, Any], None]:
    """What sets a slot of a fresh instance, at half the cost of __init__, which does nothing else."""
    found: Callable[[Any, Any], None] = getattr(cls, name).__set__
    return found


def read_uint(b: Any, head: int, p: int) -> tuple[int, int]:
    """The integer whose first byte, above 0x7f, is `head`, and where it ends."""
    if head == 0xCC:
        v = b[p]
        if v > 0x7F:
            return v, p + 1
    elif head == 0xCD:
        v = b[p] << 8 | b[p + 1]
        if v > 0xFF:
            return v, p + 2
    elif head == 0xCE:
        (v,) = _U32.unpack_from(b, p)
        if v > 0xFFFF:
            return v, p + 4
    elif head == 0xCF:
        (v,) = _U64.unpack_from(b, p)
        if v > 0xFFFFFFFF:
            return v, p + 8
    raise Doubt


def read_text(b: Any, p: int, low: int, high: int) -> tuple[str, int]:
    """A string of low to high bytes, and where it ends."""
    n = b[p]
    p += 1
    if 0xA0 <= n <= 0xBF:
        n -= 0xA0
    elif n == 0xD9 and b[p] > 31:
        n = b[p]
        p += 1
    elif n == 0xDA and b[p]:
        n = b[p] << 8 | b[p + 1]
        p += 2
    else:
        raise Doubt
    if not low <= n <= high:
        raise Doubt
    return str(b[p : p + n], "utf-8"), p + n


def read_bin(b: Any, p: int, low: int, high: int) -> tuple[bytes, int]:
    """A byte string of low to high bytes, and where it ends."""
    head = b[p]
    if head == 0xC4:
        n = b[p + 1]
        p += 2
    elif head == 0xC5 and b[p + 1]:
        n = b[p + 1] << 8 | b[p + 2]
        p += 3
    elif head == 0xC6:
        (n,) = _U32.unpack_from(b, p + 1)
        p += 5
        if n < 0x10000:
            raise Doubt
    else:
        raise Doubt
    if not low <= n <= high:
        raise Doubt
    return bytes(b[p : p + n]), p + n


def read_count(b: Any, p: int, low: int, high: int) -> tuple[int, int]:
    """Elements of a list, low to high, and where the first begins."""
    n = b[p]
    p += 1
    if 0x90 <= n <= 0x9F:
        n -= 0x90
    elif n == 0xDC:
        n = b[p] << 8 | b[p + 1]
        p += 2
        if n < 16:
            raise Doubt
    else:
        raise Doubt
    if not low <= n <= high:
        raise Doubt
    return n, p


def read_array(b: Any, p: int, widest: int, low: int, high: int) -> tuple[np.ndarray[Any, Any], int]:
    """A number array as a read-only view, and where it ends."""
    head = b[p]
    if 0xD4 <= head <= 0xD8:
        size = 1 << head - 0xD4
        p += 1
    elif head == 0xC7:
        size = b[p + 1]
        p += 2
        if size in (1, 2, 4, 8, 16):
            raise Doubt
    elif head == 0xC8 and b[p + 1]:
        size = b[p + 1] << 8 | b[p + 2]
        p += 3
    elif head == 0xC9:
        (size,) = _U32.unpack_from(b, p + 1)
        p += 5
        if size < 0x10000:
            raise Doubt
    else:
        raise Doubt
    code = b[p]
    p += 1
    if not 1 <= code <= widest:
        raise Doubt
    count = size >> code - 1
    if count << code - 1 != size or not low <= count <= high:
        raise Doubt
    if not size:
        if code != 1:
            raise Doubt
        return _EMPTY, p
    made = np.frombuffer(b, _DTYPES[code - 1], count, p)
    end = p + size
    if code > 1:
        if count > _MANY:
            if int(made.max()) >> (4 << code - 1) == 0:
                raise Doubt
        else:  # is any byte of the upper halves set?
            width = 1 << code - 1
            if not any(bytes(b[p + i : end : width]).strip(b"\0") for i in range(width >> 1, width)):
                raise Doubt
    return made, end


def ascends(keys: Sequence[Any]) -> bool:
    """Whether each key is above the one before."""
    return all(map(lt, keys, keys[1:]))


def rises(keys: Sequence[Any]) -> bool:
    """Whether each key is at least the one before."""
    return all(map(le, keys, keys[1:]))


def array_ascends(values: Any) -> bool:
    """Whether each element of a number array is above the one before."""
    n = len(values)
    if n < 2:
        return True
    return ascends(values.tolist()) if n <= _MANY else bool((values[1:] > values[:-1]).all())


def unique(keys: Iterable[Any]) -> bool:
    """Whether no key occurs twice."""
    found = list(keys)
    return len(set(found)) == len(found)


def write_uint(v: int) -> bytes:
    """An integer from 256 on; the caller has checked its range."""
    if v < 0x10000:
        return b"\xcd" + v.to_bytes(2, "big")
    if v < 0x100000000:
        return b"\xce" + v.to_bytes(4, "big")
    return b"\xcf" + v.to_bytes(8, "big")


def write_text(v: Any, low: int, high: int) -> bytes:
    """A string of low to high bytes."""
    if v.__class__ is not str:
        raise Doubt
    data: bytes = v.encode()
    n = len(data)
    if not low <= n <= high:
        raise Doubt
    if n < 32:
        return bytes((0xA0 | n,)) + data
    return (bytes((0xD9, n)) if n < 256 else b"\xda" + n.to_bytes(2, "big")) + data


def write_bin(v: Any, low: int, high: int, out: list[Any]) -> None:
    """A byte string of low to high bytes."""
    if v.__class__ is not bytes:
        raise Doubt
    n = len(v)
    if not low <= n <= high:
        raise Doubt
    head = (
        bytes((0xC4, n)) if n < 256 else b"\xc5" + n.to_bytes(2, "big") if n < 65536 else b"\xc6" + n.to_bytes(4, "big")
    )
    out += (head, v)


def write_count(n: int, low: int, high: int) -> bytes:
    """Header of a list."""
    if not low <= n <= high:
        raise Doubt
    return bytes((0x90 | n,)) if n < 16 else b"\xdc" + n.to_bytes(2, "big")


def write_array(v: Any, widest: int, low: int, high: int, out: list[Any]) -> None:
    """A number array of low to high elements in its narrowest width."""
    if v.__class__ is not np.ndarray or v.ndim != 1:
        raise Doubt
    count = v.size
    if not low <= count <= high:
        raise Doubt
    if not count:
        out.append(b"\xc7\x00\x01")
        return
    kind = v.dtype.kind
    if kind == "u" and v.dtype.itemsize == 1:
        code = 1
    elif kind == "u" or kind == "i":
        if count <= _MANY:
            found = v.tolist()
            top, least = max(found), min(found)
            if least >= 0 and top < 0x100:
                out += (_ARRAY_HEAD.get((1, count)) or bytes((0xC7, count, 1)), bytes(found))
                return
        else:
            top, least = int(v.max()), 0 if kind == "u" else int(v.min())
        if least < 0:
            raise Doubt
        code = 1 if top < 0x100 else 2 if top < 0x10000 else 3 if top < 0x100000000 else 4
        if code > widest:
            raise Doubt
    else:
        raise Doubt
    size = count << code - 1
    head = _ARRAY_HEAD.get((code, size))
    if head is None:
        head = (
            bytes((0xC7, size, code)) if size < 256
            else b"\xc8" + size.to_bytes(2, "big") + bytes((code,)) if size < 65536
            else b"\xc9" + size.to_bytes(4, "big") + bytes((code,))
        )  # fmt: skip
    dtype = _DTYPES[code - 1]
    if v.dtype != dtype:
        v = v.astype(dtype)
    out += (head, v.tobytes() if size < 4096 or not v.flags.c_contiguous else memoryview(v).cast("B"))
