"""The source's end of streams inside the session: what is packed into Data, and when."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import attrs

from kvproto.errors import RemoteError
from kvproto.transport.base import Layer, Stream
from kvproto.transport.staging.packed import PackedStream
from kvproto.wire.enums import CreditKind, ErrorCode, Proof
from kvproto.wire.messages import Data

__all__ = ["FRAME", "DataPiece", "InlineLink", "InlineStream"]

FRAME = 128 << 10
"""Bytes of one Data."""


@attrs.frozen
class DataPiece:
    """The next bytes of a stream."""

    offset: int
    data: bytearray = attrs.field(repr=False)
    last: bool

    def notice(self, session: int, sequence: int, attempt: int) -> Data:
        """The message that carries them."""
        return Data(
            session=session,
            sequence=sequence,
            attempt=attempt,
            offset=self.offset,
            data=bytes(self.data),
            last=self.last,
        )


class InlineLink:
    """What the streams of one session share: the bytes that may still be sent."""

    kind: ClassVar[CreditKind] = CreditKind.INLINE

    def __init__(self) -> None:
        self.room = 0
        self.active: set[InlineStream] = set()
        """Streams of which bytes are still to be packed."""

    def allow(self, bytes: int) -> None:
        """Let this many more bytes be packed."""
        self.room += bytes

    def restart(self) -> None:
        """Forget all credit; streams that have begun fail, as what they sent may be lost (KVP-INL-BROKEN)."""
        self.room = 0
        for stream in self.active:
            stream.broken = stream.begun


class InlineStream(Stream):
    """A packed stream that is under way; a `Copying` and its own `Stream`. Each poll of `done` packs what may go."""

    def __init__(self, link: InlineLink, packer: PackedStream, grows: bool) -> None:
        self._link, self._packer, self.bytes = link, packer, packer.length
        self._at, self._allowed = 0, 0 if grows else packer.length
        self._pieces: list[DataPiece] = []
        self.broken = False
        """Whether bytes of it may be lost."""
        if packer.length:
            link.active.add(self)

    @property
    def stream(self) -> InlineStream:
        return self

    @property
    def begun(self) -> bool:
        """Whether any of its bytes was packed."""
        return self._at > 0

    @property
    def left(self) -> int:
        return self.bytes - self._at

    def mark_ready(self, layers: Collection[Layer] | None, after: Sequence[int]) -> None:
        self._allowed = self.bytes if layers is None else max(self._allowed, self._packer.prefix_bytes(layers))

    @property
    def done(self) -> bool:
        """Whether every byte is packed, after packing what credit allows; raises PEER_LOST."""
        if self.broken:
            yours = f"{self._at} of {self.bytes} bytes sent when the connection broke"
            raise RemoteError(ErrorCode.PEER_LOST, "", "the stream to arrive", yours, "make a new ticket")
        if self.left:
            link = self._link
            share = min(link.room, max(link.room // len(link.active), FRAME))  # of what is left (KVP-INL-TURN)
            end = min(self._at + share, self._allowed)
            link.room -= max(end - self._at, 0)
            while self._at < end:
                self._pack(min(FRAME, end - self._at))
            if not self.left:
                link.active.discard(self)
        return not self.left

    def _pack(self, size: int) -> None:
        data = bytearray(size)
        self._packer.pack(self._at, data)
        self._pieces.append(DataPiece(self._at, data, self._at + size == self.bytes))
        self._at += size

    def take(self) -> list[DataPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def stop(self) -> Proof:
        """Send nothing more. Only the sink writes its pages, so nothing that is on its way can arrive in one."""
        self._link.active.discard(self)
        return Proof.PROVEN
