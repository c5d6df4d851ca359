"""The sink's end of streams inside the session: Data is unpacked into the pages as it comes."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvproto.errors import KvprotoError, RemoteError
from kvproto.transport.staging.packed import Packer
from kvproto.wire.enums import CreditKind, ErrorCode
from kvproto.wire.messages import Data

__all__ = ["InlineReceiver"]


@attrs.define
class _Stream:
    """One transfer's stream from one source."""

    packer: Packer
    at: int = 0
    error: KvprotoError | None = None


class InlineReceiver:
    """Streams from one source; transfers are named by (sequence, attempt)."""

    kind: ClassVar[CreditKind] = CreditKind.INLINE
    busy = False
    """Never, since bytes are in their places when `data` returns."""

    def __init__(self, window: int) -> None:
        self.window = window
        """Bytes that may be on their way, of all streams."""
        self._streams: dict[tuple[int, int], _Stream] = {}

    def open(self, sequence: int, attempt: int, packer: Packer) -> None:
        """Expect the Data of a transfer, which `packer` unpacks into its pages."""
        self._streams[sequence, attempt] = _Stream(packer)

    def data(self, data: Data) -> None:
        """Unpack the next bytes; those of a transfer that is not open are dropped.

        Raises OUT_OF_RANGE for bytes that are not the next of the stream (KVP-INL-NEXT), FIELD_CONFLICT for a wrong
        `last` (KVP-INL-LAST); no page is touched then.
        """
        stream = self._streams.get((data.sequence, data.attempt))
        if stream is None:
            return
        end, length = data.offset + len(data.data), stream.packer.length
        error = None
        if data.offset != stream.at or end > length:
            error = ErrorCode.OUT_OF_RANGE, "offset", f"{stream.at} of {length}", f"{data.offset} to {end}"
        elif data.last != (end == length):
            error = ErrorCode.FIELD_CONFLICT, "last", f"{end == length}", f"{data.last}"
        if error:
            raise RemoteError(*error, "send the bytes of the stream in order, once")
        stream.at = end
        try:
            stream.packer.unpack(data.offset, data.data)
        except KvprotoError as fault:  # ours, not the peer's: `finish` tells it
            stream.error = fault.kept()

    def finish(self, sequence: int, attempt: int) -> bool:
        """True, when no more Data comes; raises OUT_OF_RANGE if bytes are missing (KVP-STG-END)."""
        stream = self._streams[sequence, attempt]
        if stream.error:
            raise stream.error.again()
        if stream.at < stream.packer.length:
            wanted, found = f"a stream of {stream.packer.length}", f"Done after {stream.at}"
            raise RemoteError(ErrorCode.OUT_OF_RANGE, "bytes", wanted, found, "send all Data before Done")
        return True

    def close(self, sequence: int, attempt: int) -> bool:
        """Drop what still comes for a transfer."""
        self._streams.pop((sequence, attempt), None)
        return True
