"""Bytes to typed messages and back: canonical msgpack maps in a 16-byte envelope (spec/v1/framing.md).

Generated straight-line code handles the common case, and can only accept. Whatever it does not accept goes through the
strict tables, which accept it, or refuse it with a code and a path. `decode` raises nothing but WireError.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

from kvproto.errors import LocalError
from kvproto.wire import messages, straight, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.primitives import DOUBTS, Doubt
from kvproto.wire.reader import refuse
from kvproto.wire.strict import CLASSES, read_whole
from kvproto.wire.writer import pack

__all__ = ["check_fields", "decode", "decode_struct", "encode", "encode_struct", "message_class"]

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_ENVELOPE = struct.Struct("<4sBBHHHI")
_MESSAGES: dict[int, type[Any]] = {cls.TYPE: cls for cls in CLASSES.values() if hasattr(cls, "TYPE")}
_MAJORS = {n: tables.FROZEN_MAJOR if cls.__name__ in tables.FROZEN else tables.MAJOR for n, cls in _MESSAGES.items()}
_HEADS = {
    cls: _ENVELOPE.pack(tables.MAGIC, _MAJORS[n], tables.MINOR if _MAJORS[n] else 0, n, 0, 0, 0)[:12]
    for n, cls in _MESSAGES.items()
}
_MINOR = 5
"""Offset of the minor in the envelope."""


def _spoken(head: bytes, minor: int) -> bytes:
    """The head of a frame in a session of an earlier minor; that of a frozen message is the same in all."""
    return head if head[_MINOR - 1] == tables.FROZEN_MAJOR else head[:_MINOR] + bytes((minor,)) + head[_MINOR + 1 :]


_FAST = {
    n: (tuple({_spoken(_HEADS[cls], minor) for minor in range(tables.MINOR + 1)}), straight.DECODE[cls.__name__])
    for n, cls in _MESSAGES.items()
}
_SMALL = 1 << 16
"""Buffers up to this size are copied into bytes, which are faster to index than a view."""


def encode(message: messages.Message, grease: int | None = None, minor: int = tables.MINOR) -> bytes:
    """The canonical frame of a message.

    `grease` is a field id of `tables.GREASE_FIELD_IDS` to add, which every reader ignores. `minor` is that of the
    session, if it is not the latest that this package speaks. Raises WireError if a field breaks its range or a rule,
    and LocalError(BAD_TYPE) for what is not a message. Clauses KVP-FRAME-W-*, KVP-BODY-W-*, KVP-GREASE-SEND.
    """
    cls = type(message)
    head = _HEADS.get(cls)
    if head is None:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message", cls.__name__)
    if minor != tables.MINOR:
        head = _spoken(head, minor)
    parts: list[Any] = [head]
    try:
        if grease is not None:
            raise Doubt
        straight.ENCODE[cls](message, parts)
        if len(parts) <= 64:  # few parts, of which some may be large: one copy
            size = sum(map(len, parts)) - 12
            parts[0] = head + size.to_bytes(4, "little")
            if size <= tables.MAX_BODY:
                return b"".join(parts)
        else:
            parts[0] = b""
            body = b"".join(parts)
            if len(body) <= tables.MAX_BODY:
                return head + len(body).to_bytes(4, "little") + body
    except DOUBTS:
        pass
    body = pack(message, grease)
    return head + len(body).to_bytes(4, "little") + body


def encode_struct(value: Any) -> bytes:
    """The canonical map of a message or struct without an envelope, as in digests; raises WireError as `encode`."""
    parts: list[Any] = []
    fast = straight.ENCODE.get(type(value))
    try:
        if fast is not None:
            fast(value, parts)
            body = b"".join(parts)
            if len(body) <= tables.MAX_BODY:
                return body
    except DOUBTS:
        pass
    return pack(value)


def check_fields(value: Any) -> None:
    """Raise WireError if a message or struct could not be encoded: types, ranges, presence, rules."""
    encode_struct(value)


def decode(frame: Buffer) -> messages.Message:
    """The message of one frame; number arrays are read-only views into it (of small frames, into a copy).

    Raises WireError, by the order of checks of framing.md. Clauses KVP-FRAME-*, KVP-BODY-*, KVP-RULE-*.
    """
    buffer = _buffer(frame)
    fast = _FAST.get(int.from_bytes(buffer[6:8], "little"))
    if (
        fast is not None
        and buffer[:12] in fast[0]
        and len(buffer) - 16 == int.from_bytes(buffer[12:16], "little") <= tables.MAX_BODY
    ):
        try:
            made, end = fast[1](buffer, 16)
            if end == len(buffer):
                return made  # type: ignore[no-any-return]
        except DOUBTS:
            pass
    view = memoryview(buffer)
    cls = message_class(view)
    size, length = len(view) - tables.HEADER_BYTES, int.from_bytes(view[12:16], "little")
    if length != size:
        code = ErrorCode.TRUNCATED if length > size else ErrorCode.TRAILING_BYTES
        raise refuse(code, "@length", f"{length} bytes", f"{size} bytes")
    slow: messages.Message = read_whole(cls.__name__, view[tables.HEADER_BYTES :])
    return slow


def message_class(view: Buffer) -> type[Any]:
    """The class that an envelope announces; raises WireError if it is refused whatever follows it."""
    start = bytes(view[:4])
    if not tables.MAGIC.startswith(start):
        raise refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), start.hex())
    if len(view) < tables.HEADER_BYTES:
        raise refuse(ErrorCode.TRUNCATED, "@length", f"{tables.HEADER_BYTES} bytes", f"{len(view)} bytes")
    _, major, _, number, flags, _, length = _ENVELOPE.unpack_from(view)
    if major not in (tables.FROZEN_MAJOR, tables.MAJOR):
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", tables.MAJOR, major)
    cls = _MESSAGES.get(number)
    if cls is None:
        raise refuse(ErrorCode.UNKNOWN_MESSAGE, "@type", "a type of v1", f"{number:#06x}")
    if major != _MAJORS[number]:
        raise refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", f"{_MAJORS[number]} for {cls.__name__}", major)
    if flags & 0xFF & ~tables.KNOWN_FLAGS:
        raise refuse(ErrorCode.UNKNOWN_FLAG, "@flags", f"{tables.KNOWN_FLAGS:#06x}", f"{flags:#06x}")
    if length > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "@length", tables.MAX_BODY, length)
    return cls


def decode_struct(cls: type[T], buffer: Buffer) -> T:
    """The message or struct of a canonical map without an envelope; raises WireError, LocalError for another `cls`."""
    name = cls.__name__
    if name not in CLASSES:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", name)
    data = _buffer(buffer)
    if len(data) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(data))
    made: T
    try:
        made, end = straight.DECODE[name](data, 0)
        if end == len(data):
            return made
    except DOUBTS:
        pass
    made = read_whole(name, memoryview(data))
    return made


def _buffer(buffer: Buffer) -> bytes | memoryview:
    if type(buffer) is bytes:
        return buffer
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes <= _SMALL:
        return view.tobytes()
    return view.cast("B").toreadonly()
