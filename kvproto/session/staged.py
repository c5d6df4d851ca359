"""Transfers whose bytes are packed into staging slots of the sink, under credit: Chunk and Credit (feature STAGED).

The slots themselves belong to a transport; the protocols here say what a session needs of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from kvproto.errors import RemoteError
from kvproto.session.core import Part, Session
from kvproto.session.push import SinkPush
from kvproto.session.table import SessionState
from kvproto.session.transfers import SinkAttempt, SinkTransfers, SourceAttempt
from kvproto.wire import messages as m
from kvproto.wire.enums import CreditKind, ErrorCode

__all__ = ["Registration", "SinkStaged", "SlotReader", "SlotWriter", "SourceStaged", "StagedPiece"]


class SlotWriter(Protocol):
    """At the source: slots of the sink that may be written."""

    def grant(self, credit: m.Credit) -> None:
        """Take a Credit; raises RemoteError, CREDIT (KVP-STG-TWICE)."""


class StagedPiece(Protocol):
    """At the source: bytes of a stream that are in a slot of the sink."""

    def chunk(self, session: int, sequence: int, attempt: int) -> m.Chunk:
        """The notice to send."""


class SlotReader(Protocol):
    """At the sink: slots for one source; streams are named by sequence and attempt."""

    def credit(self, session: int) -> m.Credit | None:
        """A Credit for the slots that are free, if there are any (KVP-STG-RETURN)."""

    def open(self, sequence: int, attempt: int, packer: Any) -> None:
        """Expect a stream."""

    def chunk(self, chunk: m.Chunk) -> None:
        """Take a Chunk; raises RemoteError (KVP-STG-BEYOND, KVP-STG-NEXT)."""

    def finish(self, sequence: int, attempt: int) -> bool:
        """No more Chunks come: whether all is unpacked; raises KvprotoError where bytes are missing (KVP-STG-END)."""

    def close(self, sequence: int, attempt: int) -> bool:
        """Discard the stream: whether nothing unpacks any more."""


@attrs.frozen
class Registration:
    """What a sink registers with one source rank."""

    regions: tuple[m.Region, ...] = attrs.field(repr=False)
    slots: SlotReader | None = None
    """Unpacks what the source writes into staging slots."""
    staged_by: int | None = None
    """The transport by which the source writes slots and not pages."""


class SourceStaged(Part):
    """The source's half: it hears Credit and says Chunk."""

    def __init__(self, session: Session, slots: SlotWriter) -> None:
        super().__init__(session)
        self._slots = slots

    def _credit(self, message: m.Credit, now: float) -> None:
        self._session.step("Credit")
        if message.kind != CreditKind.STAGING:
            kind = CreditKind(message.kind).name
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "kind", "STAGING in this session", kind)
        self._slots.grant(message)

    hears = ((m.Credit, _credit),)

    def chunk(self, attempt: SourceAttempt, piece: StagedPiece) -> None:
        """Bytes of an attempt are in a slot of the sink."""
        self._session.move(attempt, "Chunk")
        self._session.notice(piece.chunk(self._session.session, attempt.sequence, attempt.attempt))


class SinkStaged(SinkPush):
    """The sink's half: it says Credit and hears Chunk.

    The source writes staging slots alone and this side the pages, so what this side knows of its own unpacking is
    proof, whatever the source says.
    """

    polled = True

    def __init__(self, session: Session, slots: SlotReader) -> None:
        super().__init__(session)
        self._slots = slots

    def _chunk(self, message: m.Chunk, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is None:
            mine = "a transfer that is not over"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, str(message.sequence))
        transfers.heard(attempt)
        self._session.move(attempt, "Chunk")
        self._slots.chunk(message)

    hears = (*SinkPush.hears, (m.Chunk, _chunk))

    def begin(self, attempt: SinkAttempt, packer: Any) -> None:
        self._slots.open(attempt.sequence, attempt.attempt, packer)

    def finish(self, attempt: SinkAttempt) -> bool:
        return self._slots.finish(attempt.sequence, attempt.attempt)

    def stop(self, attempt: SinkAttempt) -> bool:
        return self._slots.close(attempt.sequence, attempt.attempt)

    def free(self, attempt: SinkAttempt) -> bool:
        return True

    def advance(self) -> None:
        """Grant the slots that are free."""
        credit = self._slots.credit(self._session.session) if self._session.state == SessionState.READY else None
        if credit is not None:
            self._session.step("Credit")
            self._session.notice(credit)
