"""Transfers whose bytes are packed into staging slots of the sink, under credit: Chunk and Credit (feature STAGED)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvproto.errors import RemoteError
from kvproto.session.core import Handler, Part, Session
from kvproto.session.push import SinkPush
from kvproto.session.staging import SlotReader, SlotWriter, StagedPiece
from kvproto.session.table import SessionState
from kvproto.session.transfers import SinkAttempt, SinkTransfers, SourceAttempt
from kvproto.wire.enums import CreditKind, ErrorCode
from kvproto.wire.messages import Chunk, Credit

__all__ = ["SinkStaged", "SourceStaged"]


class SourceStaged(Part):
    """The source's half: it hears Credit and says Chunk."""

    def __init__(self, session: Session, slots: SlotWriter) -> None:
        self._session, self._slots = session, slots

    def handlers(self) -> Mapping[type, Handler]:
        return {Credit: self._credit}

    def _credit(self, message: Credit, now: float) -> None:
        self._session.step("Credit")
        if message.kind != CreditKind.STAGING:
            kind = CreditKind(message.kind).name
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "kind", "STAGING in this session", kind)
        self._slots.grant(message)

    def chunk(self, attempt: SourceAttempt, piece: StagedPiece) -> None:
        """Bytes of an attempt are in a slot of the sink."""
        self._session.move(attempt, "Chunk")
        self._session.notice(piece.chunk(self._session.session, attempt.sequence, attempt.attempt))


class SinkStaged(SinkPush):
    """The sink's half: it says Credit and hears Chunk.

    The source writes staging slots alone and this side the pages, so what this side knows of its own unpacking is
    proof, whatever the source says.
    """

    def __init__(self, session: Session, slots: SlotReader) -> None:
        super().__init__(session, ())
        self._slots = slots

    def handlers(self) -> Mapping[type, Handler]:
        return {**super().handlers(), Chunk: self._chunk}

    def _chunk(self, message: Chunk, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is None:
            mine = "a transfer that is not over"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, str(message.sequence))
        transfers.heard(attempt)
        self._session.move(attempt, "Chunk")
        self._slots.chunk(message)

    def begin(self, attempt: SinkAttempt, packer: Any) -> None:
        self._slots.open(attempt.sequence, attempt.attempt, packer)

    def finish(self, attempt: SinkAttempt) -> bool:
        return self._slots.finish(attempt.sequence, attempt.attempt)

    def stop(self, attempt: SinkAttempt) -> bool:
        return self._slots.close(attempt.sequence, attempt.attempt)

    def free(self, attempt: SinkAttempt) -> bool:
        return True

    def advance(self, now: float) -> None:
        """Grant the slots that are free."""
        credit = self._slots.credit(self._session.session) if self._session.state == SessionState.READY else None
        if credit is not None:
            self._session.step("Credit")
            self._session.notice(credit)

    @property
    def polled(self) -> bool:
        return True
