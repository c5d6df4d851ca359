"""Bytes to typed messages and back: canonical msgpack maps in a 16-byte envelope (spec/v1/framing.md).

Theory of operation. The registry generates the classes of `messages` and the rows of `tables`; `fields.handler` turns
each row into one closure a direction, once, at import. Reading takes three steps:

1. `message_class` and `decode` check the envelope, in the order of framing.md.
2. `canonical` reads bodies of up to 64 KiB: C msgpack makes objects, closures check them by the tables, and the same
   objects, packed again, must be the same bytes. It accepts the body, or says nothing.
3. `strict` reads every other body byte by byte, holding each length against the limits before anything is made, with
   number arrays as views. Every refusal is its verdict: a code, a path, and what was expected.

So a good message costs what C msgpack and a check of each field cost, a large one is not copied, and a bad one is read
twice. Writing takes one step: `writer` checks each field by the tables and packs the map. Both readers and the writer
check the rules of a map (`fields.check`) when its fields are complete. `decode` raises nothing but WireError.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import attrs

from kvproto.errors import LocalError, WireError
from kvproto.wire import messages, tables
from kvproto.wire.canonical import LARGEST, read_canonical
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import refuse
from kvproto.wire.strict import read_whole
from kvproto.wire.tables import CLASSES
from kvproto.wire.writer import pack

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_ENVELOPE = struct.Struct("<4sBBHHHI")
_MESSAGES: dict[int, type[Any]] = {cls.TYPE: cls for cls in CLASSES.values() if hasattr(cls, "TYPE")}
_UNKNOWN_FLAGS = 0xFF & ~tables.KNOWN_FLAGS
_MAJORS = {cls: tables.FROZEN_MAJOR if cls.__name__ in tables.FROZEN else tables.MAJOR for cls in _MESSAGES.values()}
_KNOWN = {(tables.MAGIC, _MAJORS[cls], number): cls for number, cls in _MESSAGES.items()}


def encode(message: messages.Message, grease: int | None = None, minor: int = tables.MINOR) -> bytes:
    """The canonical frame of a message.

    `grease` is a field id of `tables.GREASE_FIELD_IDS` to add, which every reader ignores. `minor` is that of the
    session, if it is not the latest that this package speaks. Raises WireError if a field breaks its range or a rule,
    and LocalError(BAD_TYPE) for a value that is not a message. Clauses KVP-FRAME-W-*, KVP-BODY-W-*, KVP-GREASE-SEND.
    """
    cls = type(message)
    major = _MAJORS.get(cls)
    if major is None:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message", cls.__name__)
    body = pack(message, grease)
    if major == tables.FROZEN_MAJOR:
        minor = 0  # the frame of a frozen message is the same in all versions
    return _ENVELOPE.pack(tables.MAGIC, major, minor, message.TYPE, 0, 0, len(body)) + body


def encode_struct(value: Any) -> bytes:
    """The canonical map of a message or struct without an envelope, as in digests; raises WireError as `encode`."""
    return pack(value)


def decode(frame: Buffer) -> messages.Message:
    """The message of one frame; number arrays are read-only views into it (of small frames, into a copy).

    Raises WireError, by the order of checks of framing.md. Clauses KVP-FRAME-*, KVP-BODY-*, KVP-RULE-*.
    """
    view = _bytes_of(frame)
    cls = message_class(view)
    size, length = len(view) - tables.HEADER_BYTES, int.from_bytes(view[12:16], "little")
    if length != size:
        code = ErrorCode.TRUNCATED if length > size else ErrorCode.TRAILING_BYTES
        raise refuse(code, "@length", f"{length} bytes", f"{size} bytes")
    message: messages.Message = _read(cls.__name__, view[tables.HEADER_BYTES :])
    return message


def message_class(view: Buffer) -> type[Any]:
    """The class that an envelope announces; raises WireError if the envelope alone is a reason to refuse the frame."""
    if len(view) >= tables.HEADER_BYTES:
        magic, major, _, number, flags, _, length = _ENVELOPE.unpack_from(view)
        cls = _KNOWN.get((magic, major, number))
        if cls is not None and not flags & _UNKNOWN_FLAGS and length <= tables.MAX_BODY:
            return cls
    raise _refusal(view)


def _refusal(view: Buffer) -> WireError:
    """The first reason to refuse an envelope, in the order of framing.md."""
    start = bytes(view[:4])
    if not tables.MAGIC.startswith(start):
        return refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), start.hex())
    if len(view) < tables.HEADER_BYTES:
        return refuse(ErrorCode.TRUNCATED, "@length", f"{tables.HEADER_BYTES} bytes", f"{len(view)} bytes")
    _, major, _, number, flags, _, length = _ENVELOPE.unpack_from(view)
    if major not in (tables.FROZEN_MAJOR, tables.MAJOR):
        return refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", tables.MAJOR, major)
    cls = _MESSAGES.get(number)
    if cls is None:
        return refuse(ErrorCode.UNKNOWN_MESSAGE, "@type", "a type of v1", f"{number:#06x}")
    if major != _MAJORS[cls]:
        return refuse(ErrorCode.UNSUPPORTED_VERSION, "@major", f"{_MAJORS[cls]} for {cls.__name__}", major)
    if flags & _UNKNOWN_FLAGS:
        return refuse(ErrorCode.UNKNOWN_FLAG, "@flags", f"{tables.KNOWN_FLAGS:#06x}", f"{flags:#06x}")
    return refuse(ErrorCode.TOO_LARGE, "@length", tables.MAX_BODY, length)


def decode_struct(cls: type[T], buffer: Buffer) -> T:
    """The message or struct of a canonical map without an envelope; raises WireError, LocalError for another `cls`."""
    name = cls.__name__
    if name not in CLASSES:
        raise LocalError(ErrorCode.BAD_TYPE, "", "a message or struct", name)
    view = _bytes_of(buffer)
    if len(view) > tables.MAX_BODY:
        raise refuse(ErrorCode.TOO_LARGE, "", tables.MAX_BODY, len(view))
    value: T = _read(name, view)
    return value


def _read(name: str, body: bytes | memoryview) -> Any:
    if len(body) <= LARGEST:
        value = read_canonical(name, bytes(body))
        if value is not None:
            return value
    return read_whole(name, memoryview(body))


def _bytes_of(buffer: Buffer) -> bytes | memoryview:
    """The bytes of a buffer of any shape, without a copy if they are many: large bodies are views into it."""
    if type(buffer) is bytes and len(buffer) <= LARGEST:
        return buffer
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes <= LARGEST:
        return view.tobytes()
    return view.cast("B").toreadonly()


_IDS = ("session", "request", "sequence")


@attrs.frozen
class Head:
    """Type and ids of a message; None where it lacks one or a reader cannot find it."""

    cls: type[Any] | None = None
    session: int | None = None
    request: int | None = None
    sequence: int | None = None

    @classmethod
    def of(cls, message: Any) -> "Head":
        """The head of a message that was decoded."""
        return cls(type(message), *(getattr(message, name, None) for name in _IDS))

    @property
    def delivery(self) -> str:
        """Delivery class of the type; "request" if the type is not known."""
        return tables.DELIVERY[self.cls.__name__] if self.cls is not None else "request"


def read_head(frame: Buffer) -> Head:
    """Read as much of the head as a malformed frame has; never raises."""
    ids: dict[str, int] = {}
    cls = None
    trace: list[tuple[int, str, Any]] = []
    if len(frame) >= tables.HEADER_BYTES:
        magic, major, _, number, *_ = _ENVELOPE.unpack_from(frame)
        cls = _KNOWN.get((magic, major, number))
    with suppress(WireError):
        read_whole(message_class(frame).__name__, memoryview(frame)[tables.HEADER_BYTES :], trace)
    name = None
    for _, kind, note in trace:
        if kind == "id":
            if note not in (*_IDS, "resume"):
                break
            name = note
        elif kind == "value" and name in _IDS:
            ids[name] = note
    return Head(cls, **ids)


class Decoder:
    """Cuts a stream into frames, or errors of those refused; a wrong magic ends it with BAD_MAGIC (KVP-STREAM-*)."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._skip = 0
        self._broken: WireError | None = None

    def feed(self, data: Buffer) -> Iterator[messages.Message | WireError]:
        """The messages and errors that these bytes complete, in order; `data` is consumed at once."""
        if self._broken is not None:
            raise self._broken
        view = memoryview(data).cast("B")
        skipped = min(self._skip, len(view))
        self._skip -= skipped
        self._held += view[skipped:]
        return iter(self._cut())

    def _cut(self) -> list[messages.Message | WireError]:
        items: list[messages.Message | WireError] = []
        at = 0
        held = self._held
        while self._broken is None:
            start = bytes(held[at : at + 4])
            if not tables.MAGIC.startswith(start):
                self._broken = refuse(ErrorCode.BAD_MAGIC, "@magic", tables.MAGIC.hex(), start.hex())
                items.append(self._broken)
                break
            if len(held) - at < tables.HEADER_BYTES:
                break
            length = int.from_bytes(held[at + 12 : at + 16], "little")
            end = at + tables.HEADER_BYTES + length
            if length > tables.MAX_BODY:
                items.append(_decoded(bytes(held[at : at + tables.HEADER_BYTES])))
                self._skip = max(0, end - len(held))
                at = min(end, len(held))
                continue
            if len(held) < end:
                break
            items.append(_decoded(bytes(held[at:end])))
            at = end
        del held[:at]
        return items

    def close(self) -> None:
        """End the stream; raises TRUNCATED inside a frame."""
        if self._broken is not None:
            raise self._broken
        if self._held or self._skip:
            raise refuse(ErrorCode.TRUNCATED, "@length", "a whole frame", f"{len(self._held)} bytes")


def _decoded(frame: bytes) -> messages.Message | WireError:
    try:
        return decode(frame)
    except WireError as error:
        return error
