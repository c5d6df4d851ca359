"""What a session needs of staging slots (feature STAGED); `kvproto.transport.staging.staged` has both sides."""

from __future__ import annotations

from typing import Any, Protocol

from kvproto.wire.messages import Chunk, Credit

__all__ = ["SlotReader", "SlotWriter", "StagedPiece"]


class SlotWriter(Protocol):
    """At the source: slots of the sink that may be written."""

    def grant(self, credit: Credit) -> None:
        """Take a Credit; raises RemoteError, CREDIT (KVP-STG-TWICE)."""


class StagedPiece(Protocol):
    """At the source: bytes of a stream that are in a slot of the sink."""

    def chunk(self, session: int, sequence: int, attempt: int) -> Chunk:
        """The notice to send."""


class SlotReader(Protocol):
    """At the sink: slots for one source; streams are named by sequence and attempt."""

    def credit(self, session: int) -> Credit | None:
        """A Credit for the slots that are free, if there are any (KVP-STG-RETURN)."""

    def open(self, sequence: int, attempt: int, packer: Any) -> None:
        """Expect a stream."""

    def chunk(self, chunk: Chunk) -> None:
        """Take a Chunk; raises RemoteError (KVP-STG-BEYOND, KVP-STG-NEXT)."""

    def finish(self, sequence: int, attempt: int) -> bool:
        """No more Chunks come: whether all is unpacked; raises KvprotoError where bytes are missing (KVP-STG-END)."""

    def close(self, sequence: int, attempt: int) -> bool:
        """Discard the stream: whether nothing unpacks any more."""
