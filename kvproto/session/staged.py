"""Transfers whose bytes are packed into staging slots of the sink, under credit: Chunk and Credit (feature STAGED).

The slots themselves belong to a transport; the protocols here say what a session needs of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from kvproto.errors import RemoteError
from kvproto.session.core import Part, Session
from kvproto.session.push import SinkPush, Unpacker, check_begins
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

    def chunk(self, attempt: SourceAttempt, piece: StagedPiece, begins: tuple[m.Begin, ...]) -> None:
        """Bytes of an attempt are in a slot of the sink; the first say where late windows begin (KVP-GRANT-LATE)."""
        self._session.move(attempt, "Chunk")
        chunk = piece.chunk(self._session.session, attempt.sequence, attempt.attempt)
        self._session.notice(attrs.evolve(chunk, begins=begins) if begins and not chunk.offset else chunk)


class SinkStaged(SinkPush):
    """The sink's half: it says Credit and hears Chunk.

    The source writes staging slots alone and this side the pages, so what this side knows of its own unpacking is
    proof, whatever the source says.
    """

    polled = True

    def __init__(self, session: Session, slots: SlotReader) -> None:
        super().__init__(session)
        self._slots = slots
        self._unopened: dict[tuple[int, int], Unpacker] = {}
        """Of attempts of which no Chunk has said yet where their windows begin."""
        self._begins: dict[tuple[int, int], Mapping[int, int]] = {}
        """Where the windows of the others begin."""

    def _chunk(self, message: m.Chunk, now: float) -> None:
        transfers = self._session.part(SinkTransfers)
        attempt = transfers.find(message)
        if attempt is None:
            mine = "a transfer that is not over"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, str(message.sequence))
        transfers.heard(attempt)
        self._session.move(attempt, "Chunk")
        key = attempt.sequence, attempt.attempt
        try:
            if key in self._unopened or (message.begins is not None and key in self._begins):
                self._begin_at(attempt, check_begins(attempt, message.begins))
        finally:  # its slot comes back
            self._slots.chunk(message)

    hears = (*SinkPush.hears, (m.Chunk, _chunk))

    def begin(self, attempt: SinkAttempt, unpacker: Unpacker | None) -> None:
        assert unpacker is not None
        self._unopened[attempt.sequence, attempt.attempt] = unpacker
        if not attempt.late:
            self._open(attempt, {})

    def _open(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        """Expect the stream, now that it is known where its windows begin."""
        unpacker = self._unopened.pop((attempt.sequence, attempt.attempt))
        self._begins[attempt.sequence, attempt.attempt] = begins
        self._slots.open(attempt.sequence, attempt.attempt, unpacker(begins))

    def _begin_at(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        key = attempt.sequence, attempt.attempt
        if key in self._unopened:  # its stream is empty
            self._open(attempt, begins)
        elif self._begins[key] != begins:
            mine, yours = (str(dict(sorted(each.items()))) for each in (self._begins[key], begins))
            raise RemoteError(ErrorCode.BAD_GRANT, "begins", mine, yours, "state in Done what the first Chunk says")

    def finish(self, attempt: SinkAttempt) -> bool:
        return self._slots.finish(attempt.sequence, attempt.attempt)

    def stop(self, attempt: SinkAttempt) -> bool:
        for known in (self._unopened, self._begins):
            known.pop((attempt.sequence, attempt.attempt), None)
        return self._slots.close(attempt.sequence, attempt.attempt)

    def free(self, attempt: SinkAttempt) -> bool:
        return True

    def advance(self) -> None:
        """Grant the slots that are free."""
        credit = self._slots.credit(self._session.session) if self._session.state == SessionState.READY else None
        if credit is not None:
            self._session.step("Credit")
            self._session.notice(credit)
