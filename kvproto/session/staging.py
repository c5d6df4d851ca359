"""What a session asks of packed bytes (feature STAGED); `kvproto.transport.staging.staged` has both sides."""

from __future__ import annotations

from typing import Any, Protocol

from kvproto.wire.messages import Chunk, Credit

__all__ = ["Granted", "Piece", "Slots"]


class Granted(Protocol):
    """Source: slots of the sink that may be written."""

    def grant(self, credit: Credit) -> None:
        """Take a Credit; raises RemoteError, CREDIT (KVP-STG-TWICE)."""


class Piece(Protocol):
    """Source: bytes of a stream that are in a slot of the sink."""

    def chunk(self, session: int, sequence: int, attempt: int) -> Chunk:
        """The notice to send."""


class Slots(Protocol):
    """Sink: slots for one source; streams are named by sequence and attempt."""

    def credit(self, session: int) -> Credit | None:
        """Grant what is free (KVP-STG-RETURN)."""

    def open(self, sequence: int, attempt: int, packer: Any) -> None:
        """Expect a stream."""

    def chunk(self, chunk: Chunk) -> None:
        """Take a Chunk; raises RemoteError (KVP-STG-BEYOND, KVP-STG-NEXT)."""

    def finish(self, sequence: int, attempt: int) -> bool:
        """No more comes: whether all is unpacked; raises KvprotoError where bytes are missing (KVP-STG-END)."""

    def close(self, sequence: int, attempt: int) -> bool:
        """Expect no more: whether nothing unpacks any more."""
