"""Cuts a byte stream into frames."""

from collections.abc import Iterator

from kvproto.errors import WireError
from kvproto.wire import tables
from kvproto.wire.codec import Buffer, decode
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Message
from kvproto.wire.reader import refuse


class Decoder:
    """Cuts a stream into frames, or errors of those refused; a wrong magic ends it with BAD_MAGIC (KVP-STREAM-*)."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._skip = 0
        self._broken: WireError | None = None

    def feed(self, data: Buffer) -> Iterator[Message | WireError]:
        """The messages and errors that these bytes complete, in order; `data` is consumed at once."""
        if self._broken is not None:
            raise self._broken
        view = memoryview(data).cast("B")
        skipped = min(self._skip, len(view))
        self._skip -= skipped
        self._held += view[skipped:]
        return iter(self._cut())

    def _cut(self) -> list[Message | WireError]:
        items: list[Message | WireError] = []
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


def _decoded(frame: bytes) -> Message | WireError:
    try:
        return decode(frame)
    except WireError as error:
        return error
