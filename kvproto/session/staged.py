"""Streams through staging slots of the sink, which a transport owns: Chunk, and Credit of slots (feature STAGED)."""

from typing import Protocol

from kvproto.copying.streams import Receiver
from kvproto.session.stream import SinkStream, SourceStream, StreamWriter
from kvproto.wire import messages as m
from kvproto.wire.enums import CreditKind, Feature


class SlotWriter(StreamWriter, Protocol):
    """At the source: the slots of the sink that may be written."""

    def grant(self, credit: m.Credit) -> None:
        """Add the slots of a Credit; raises RemoteError(CREDIT) (KVP-STG-TWICE)."""


class SlotReader(Receiver, Protocol):
    """At the sink: streams through staging slots."""

    def credit(self, session: int) -> m.Credit | None:
        """A Credit for the slots that are free, if there are any (KVP-STG-RETURN)."""

    def chunk(self, chunk: m.Chunk) -> None:
        """Unpack the slots of a Chunk; raises RemoteError (KVP-STG-BEYOND, KVP-STG-NEXT)."""

    def restart(self) -> None:
        """Take back the slots that were granted, as messages may be lost (KVP-STG-RESUMED)."""


class SourceStaged(SourceStream):
    """The source's half, which sends a Chunk for what it has put into slots."""

    kind = CreditKind.STAGING
    _writer: SlotWriter

    def grant(self, credit: m.Credit) -> None:
        self._writer.grant(credit)


class SinkStaged(SinkStream):
    """The sink's half, which grants slots and receives Chunk."""

    feature, piece = Feature.STAGED, m.Chunk
    _reader: SlotReader

    def reconnected(self) -> None:
        self._reader.restart()

    def take(self, message: m.Chunk | m.Data) -> None:
        assert isinstance(message, m.Chunk)  # checked by `Pieces`
        attempt = self._piece_of(message)
        try:
            self._check_begins(attempt, message)
        finally:  # its slot has to become free again
            self._reader.chunk(message)

    def credit(self) -> m.Credit | None:
        return self._reader.credit(self._session.session)
