"""Streams through staging slots of the sink: Chunk, and Credit of slots (feature STAGED).

The slots themselves belong to a transport; the protocols here say what a session needs of them.
"""

from __future__ import annotations

from typing import Protocol

from kvproto.session.core import Session
from kvproto.session.stream import SinkStream, SourceStream, StreamReader, StreamWriter
from kvproto.wire import messages as m
from kvproto.wire.enums import CreditKind, Feature

__all__ = ["SinkStaged", "SlotReader", "SlotWriter", "SourceStaged"]


class SlotWriter(StreamWriter, Protocol):
    """At the source: slots of the sink that may be written."""

    def grant(self, credit: m.Credit) -> None:
        """Take a Credit; raises RemoteError, CREDIT (KVP-STG-TWICE)."""

    def restart(self) -> None:
        """What was said may be lost: streams under way have failed, and no slot is granted (KVP-STG-RESUMED)."""


class SlotReader(StreamReader, Protocol):
    """At the sink: streams through staging slots."""

    def credit(self, session: int) -> m.Credit | None:
        """A Credit for the slots that are free, if there are any (KVP-STG-RETURN)."""

    def chunk(self, chunk: m.Chunk) -> None:
        """Take a Chunk; raises RemoteError (KVP-STG-BEYOND, KVP-STG-NEXT)."""

    def restart(self) -> None:
        """What was said may be lost: slots that are granted come back (KVP-STG-RESUMED)."""


class SourceStaged(SourceStream):
    """The source's half: it says Chunk of what is in a slot."""

    kind = CreditKind.STAGING

    def __init__(self, session: Session, slots: SlotWriter) -> None:
        super().__init__(session)
        self._slots = slots

    def reconnected(self) -> None:
        self._slots.restart()

    def grant(self, credit: m.Credit) -> None:
        self._slots.grant(credit)


class SinkStaged(SinkStream):
    """The sink's half: slots, and Chunk."""

    feature, piece = Feature.STAGED, m.Chunk

    def __init__(self, session: Session, epoch: int, slots: SlotReader) -> None:
        super().__init__(session, epoch, slots)
        self._slots = slots

    def reconnected(self) -> None:
        self._slots.restart()

    def take(self, message: m.Chunk | m.Data) -> None:
        assert isinstance(message, m.Chunk)  # `Pieces` has looked
        attempt = self._piece_of(message)
        try:
            self._check_begins(attempt, message)
        finally:  # its slot comes back
            self._slots.chunk(message)

    def credit(self) -> m.Credit | None:
        return self._slots.credit(self._session.session)
