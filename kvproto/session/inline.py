"""Streams inside the session: Data, and Credit of bytes (feature INLINE).

Both sides count the bytes of Data from Registered on, and again from 0 when the session is resumed: the source counts
what it has sent, the sink what has arrived. The sink grants what has arrived plus a window, so no more than the window
is ever under way. Packing and unpacking belong to a transport.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import attrs

from kvproto.copying.streams import Piece, Receiver
from kvproto.errors import RemoteError
from kvproto.session.core import Session
from kvproto.session.limits import MAX_CREDIT
from kvproto.session.records import SourceAttempt
from kvproto.session.stream import SinkStream, SourceStream, StreamWriter
from kvproto.wire import messages as m
from kvproto.wire.enums import CreditKind, ErrorCode, Feature

_BESIDE, _BEGIN = 64, 20
"""Upper limits, in bytes, for the size of a Data without its bytes, and of each entry of `begins`."""


class DataWriter(StreamWriter, Protocol):
    """At the source: the streams of one session."""

    def allow(self, bytes: int) -> None:
        """Allow `bytes` more bytes to be packed."""


class DataReader(Receiver, Protocol):
    """At the sink: the streams of one source."""

    window: int
    """The number of bytes that may be under way."""

    def data(self, data: m.Data) -> None:
        """Unpack the next bytes; raises RemoteError (KVP-INL-NEXT, KVP-INL-LAST)."""


class SourceInline(SourceStream):
    """The source's half, which receives Credit and sends Data."""

    kind = CreditKind.INLINE
    _writer: DataWriter
    _sent = _total = 0

    def reconnected(self) -> None:
        self._sent = self._total = 0
        super().reconnected()

    def grant(self, credit: m.Credit) -> None:
        """Allow the bytes of a Credit; raises RemoteError(CREDIT) for a total out of range (KVP-INL-CREDIT)."""
        total, most = credit.total or 0, self._sent + MAX_CREDIT
        if not self._total <= total <= most:
            mine, advice = f"{self._total} to {most}", "grant what was unpacked, and a window"
            raise RemoteError(ErrorCode.CREDIT, "total", mine, str(total), advice)
        self._writer.allow(total - self._total)
        self._total = total

    def send(self, attempt: SourceAttempt, piece: Piece, begins: tuple[m.Begin, ...]) -> m.Chunk | m.Data:
        said = super().send(attempt, piece, begins)
        self._sent += len(said.data) if isinstance(said, m.Data) else 0
        return said

    def messages(self, said: Any) -> Iterator[m.Chunk | m.Data]:
        """A piece as one Data, or as several if the sink does not accept a body of that length (KVP-FRAME-W-LENGTH)."""
        most = max(self._session.limits.max_body - _BESIDE - _BEGIN * len(said.begins or ()), 1)
        for at in range(0, max(len(said.data), 1), most):
            data = said.data[at : at + most]
            yield attrs.evolve(
                said,
                offset=said.offset + at,
                data=data,
                last=said.last and at + most >= len(said.data),
                begins=None if at else said.begins,
            )


@attrs.define
class Came:
    """The bytes of Data that a sink has received, and the total that it has granted."""

    bytes: int = 0
    total: int = 0

    def count(self, bytes: int) -> None:
        """Add received bytes; raises CREDIT, and adds none, beyond the total (KVP-INL-BEYOND, KVP-INL-COUNT)."""
        if self.bytes + bytes > self.total:
            mine, yours = f"{self.total} bytes in all", f"{self.bytes + bytes} bytes"
            raise RemoteError(ErrorCode.CREDIT, "data", mine, yours, "wait for Credit")
        self.bytes += bytes


class SinkInline(SinkStream):
    """The sink's half, which sends Credit and receives Data."""

    feature, piece = Feature.INLINE, m.Data
    _reader: DataReader

    def __init__(self, session: Session, epoch: int, reader: DataReader) -> None:
        super().__init__(session, epoch, reader)
        self._came = Came()

    def reconnected(self) -> None:
        self._came = Came()

    def take(self, message: m.Chunk | m.Data) -> None:
        assert isinstance(message, m.Data)  # checked by `Pieces`
        self._came.count(len(message.data))
        self._check_begins(self._piece_of(message), message)
        self._reader.data(message)

    def credit(self) -> m.Credit | None:
        """A Credit that grants what has been unpacked, once that is at least a quarter of the window."""
        total = self._came.bytes + self._reader.window
        if total - self._came.total < max(self._reader.window // 4, 1):
            return None
        self._came.total = total
        return m.Credit(session=self._session.session, kind=CreditKind.INLINE, total=total)
