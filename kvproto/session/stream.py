"""Transfers packed into a stream under credit, for staging slots and Data; streams belong to a transport."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

import attrs

from kvproto.copying.streams import Piece, Receiver
from kvproto.errors import RemoteError
from kvproto.session.core import Extension, Handlers, Session
from kvproto.session.push import SinkPush, Unpacker, check_begins, check_whole
from kvproto.session.records import SinkAttempt, SourceAttempt
from kvproto.session.registering import Holder, Owner
from kvproto.session.table import SessionState
from kvproto.wire import messages as m
from kvproto.wire.enums import CreditKind, ErrorCode, Feature


class StreamWriter(Protocol):
    """At the source: what the streams of one session share."""

    kind: ClassVar[CreditKind]
    """The unit of its credit."""

    def restart(self) -> None:
        """Fail streams under way, whose bytes may be lost; withdraw all credit (KVP-STG-RESUMED, KVP-INL-RESUMED)."""


class Credits(Extension):
    """The source's half of Credit, each of which is for the streams into one epoch."""

    def _credit(self, message: m.Credit, now: float) -> None:
        self._session.step("Credit")
        holder = self._session.part(Holder)
        epoch = holder.epochs.get(message.epoch or holder.first)
        if epoch is None:
            return  # it was returned in the meantime
        if epoch.stream is None or message.kind != epoch.stream.kind:
            mine = f"{epoch.stream.kind.name} in this session" if epoch.stream is not None else "no stream"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "kind", mine, CreditKind(message.kind).name)
        epoch.stream.grant(message)

    handlers = ((m.Credit, _credit),)


class SourceStream(Extension):
    """The source's half of the streams into one epoch, which receives Credit and sends what is packed."""

    kind: CreditKind

    def __init__(self, session: Session, writer: StreamWriter) -> None:
        super().__init__(session)
        self._writer = writer

    def reconnected(self) -> None:
        self._writer.restart()

    def grant(self, credit: m.Credit) -> None:
        """Use a Credit of this kind; raises RemoteError(CREDIT)."""
        raise NotImplementedError

    def send(self, attempt: SourceAttempt, piece: Piece, begins: tuple[m.Begin, ...]) -> m.Chunk | m.Data:
        """Send a piece of the stream of an attempt; the first states where late windows begin (KVP-GRANT-LATE)."""
        said = piece.notice(self._session.session, attempt.sequence)
        for each in self.messages(attrs.evolve(said, begins=begins) if begins and not said.offset else said):
            self._session.move(attempt, type(each).__name__)
            self._session.notice(each)
        return said

    def messages(self, said: Any) -> Iterator[m.Chunk | m.Data]:
        """The messages for a piece, none longer than the sink accepts."""
        yield said


class Pieces(Extension):
    """The sink's half of Chunk and Data, which passes each to the streams into the epoch of its transfer."""

    def _piece(self, message: m.Chunk | m.Data, now: float) -> None:
        attempt, newest = self._session.attempts.get(message.sequence), self._session.part(Owner).newest
        owned = attempt.owned if attempt is not None else newest
        stream = owned.delivery if owned is not None else None
        if not isinstance(stream, SinkStream) or not isinstance(message, stream.piece):
            mine, yours = "no such stream in this session", type(message).__name__
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, yours)
        stream.take(message)

    handlers: Handlers = ((m.Chunk, _piece), (m.Data, _piece))


class SinkStream(SinkPush):
    """The sink's half of the streams into one epoch; as only it writes pages, its own unpacking is proof."""

    feature: Feature
    """The feature without which the source may not choose it."""
    piece: type[m.Chunk] | type[m.Data]
    """The message that carries its bytes, or announces them."""

    def __init__(self, session: Session, epoch: int, reader: Receiver) -> None:
        super().__init__(session)
        self._epoch, self._reader = epoch, reader
        self._unopened: dict[int, Unpacker] = {}
        """Unpackers of attempts for which it is not known yet where their windows begin."""
        self._begins: dict[int, Mapping[int, int]] = {}
        """Beginnings of the windows of the other attempts, by group id."""

    def take(self, message: m.Chunk | m.Data) -> None:
        """Handle a piece; raises RemoteError."""
        raise NotImplementedError

    def _piece_of(self, message: m.Chunk | m.Data) -> SinkAttempt:
        """The attempt that a piece belongs to, moved by it; raises UNEXPECTED_MESSAGE."""
        transfers = self._session.transfers
        attempt = transfers.find(message)
        if attempt is None:
            mine = "a transfer that is not over"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "sequence", mine, str(message.sequence))
        check_whole(attempt)
        transfers.mark_accepted(attempt)
        self._session.move(attempt, type(message).__name__)
        return attempt

    def _check_begins(self, attempt: SinkAttempt, message: m.Chunk | m.Data) -> None:
        """Open the stream with its first piece; raises BAD_GRANT (KVP-GRANT-BEGINS)."""
        key = attempt.sequence
        if key in self._unopened or (message.begins is not None and key in self._begins):
            self.begin_at(attempt, check_begins(attempt, message.begins))

    def begin(self, attempt: SinkAttempt, unpacker: Unpacker | None) -> None:
        assert unpacker is not None
        self._unopened[attempt.sequence] = unpacker
        if not attempt.late:
            self._open(attempt, {})

    def _open(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        """Open the stream of an attempt, now that it is known where its windows begin."""
        unpacker = self._unopened.pop(attempt.sequence)
        self._begins[attempt.sequence] = begins
        self._reader.open(attempt.sequence, unpacker(begins))

    def begin_at(self, attempt: SinkAttempt, begins: Mapping[int, int]) -> None:
        key = attempt.sequence
        if key in self._unopened:  # its stream is empty, so that no piece came
            self._open(attempt, begins)
        elif self._begins[key] != begins:
            mine, yours = (str(dict(sorted(each.items()))) for each in (self._begins[key], begins))
            raise RemoteError(ErrorCode.BAD_GRANT, "begins", mine, yours, "state in Done what the first piece states")

    def check_end(self, attempt: SinkAttempt) -> None:
        self._reader.check_end(attempt.sequence)

    def finish(self, attempt: SinkAttempt) -> bool:
        return self._reader.finish(attempt.sequence)

    def stop(self, attempt: SinkAttempt) -> bool:
        for known in (self._unopened, self._begins):
            known.pop(attempt.sequence, None)
        return self._reader.close(attempt.sequence)

    def free(self, attempt: SinkAttempt) -> bool:
        return True

    def advance(self) -> None:
        """Send Credit for what is free; the first epoch of a session need not be named."""
        ready = self._session.state == SessionState.READY and not self._session.resuming
        credit = self.credit() if ready else None
        if credit is not None:
            named = None if self._epoch == self._session.part(Owner).first else self._epoch
            self._session.step("Credit")
            self._session.notice(attrs.evolve(credit, epoch=named))

    def credit(self) -> m.Credit | None:
        """A Credit for what has become free, if there is any."""
        raise NotImplementedError
