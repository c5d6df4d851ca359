"""Transport `inline`: bytes in Data of the session, between any two hosts, on host memory only; it maps nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import attrs

from kvproto.copying.execute import checksums
from kvproto.copying.program import CopyProgram, Runs
from kvproto.errors import KvprotoError, RemoteError
from kvproto.transport import base
from kvproto.transport.shm.memory import SharedMemory, buffers
from kvproto.transport.staging.packed import IncomingStream, OutgoingStream, PackedLink, PackedStream, Packer, PeerPages
from kvproto.wire.enums import CreditKind, ErrorCode, Feature, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Data, Handle, Region

FRAME = 128 << 10
"""Bytes of one Data."""
WINDOW = 2 << 20
"""Bytes that may be on their way to a sink from one source rank."""


_buffers = partial(buffers, wanted="memory of the host", kinds=(SharedMemory,))


# the source


@attrs.frozen
class DataPiece:
    """The next bytes of a stream."""

    offset: int
    data: bytearray = attrs.field(repr=False)
    last: bool

    def notice(self, session: int, sequence: int) -> Data:
        data = bytes(self.data)
        return Data(session=session, sequence=sequence, offset=self.offset, data=data, last=self.last)


class InlineLink(PackedLink):
    """The credit of one session, in bytes that may still be sent, which its streams share."""

    kind = CreditKind.INLINE
    room = 0

    def allow(self, bytes: int) -> None:
        self.room += bytes

    def restart(self) -> None:
        """See `PackedLink` (KVP-INL-BROKEN)."""
        self.room = 0
        super().restart()


class InlineStream(OutgoingStream):
    """Each poll of `done` packs what may go."""

    def __init__(self, link: InlineLink, packer: Packer, grows: bool) -> None:
        super().__init__(link, packer, grows)
        self._link = link

    @property
    def done(self) -> bool:
        """Whether every byte is packed, after packing what credit allows; raises PEER_LOST."""
        self._check()
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

    def stop(self) -> Proof:
        """Send nothing more. Only the sink writes its pages, so nothing that is on its way can arrive in one."""
        self._link.active.discard(self)
        return Proof.PROVEN


# the sink


class InlineReceiver:
    """Streams from one source; transfers are named by sequence."""

    kind: ClassVar[CreditKind] = CreditKind.INLINE
    busy = False
    """Never, since bytes are in their places when `data` returns."""

    def __init__(self, window: int) -> None:
        self.window = window
        """Bytes that may be on their way, of all streams."""
        self._streams: dict[int, IncomingStream] = {}

    def open(self, sequence: int, packer: Packer) -> None:
        self._streams[sequence] = IncomingStream(packer)

    def data(self, data: Data) -> None:
        """Unpack the next bytes of an open transfer; raises OUT_OF_RANGE or FIELD_CONFLICT (KVP-INL-NEXT, -LAST)."""
        stream = self._streams.get(data.sequence)
        if stream is None:
            return
        stream.advance(data.offset, len(data.data), data.last)
        try:
            stream.packer.unpack(data.offset, data.data)
        except KvprotoError as fault:  # `finish` tells it
            stream.error = fault.kept()

    def check_end(self, sequence: int) -> None:
        self._streams[sequence].check_end()

    def finish(self, sequence: int) -> bool:
        """True, as all that came is unpacked; raises what the packer raised."""
        if error := self._streams[sequence].error:
            raise error.again()
        return True

    def close(self, sequence: int) -> bool:
        self._streams.pop(sequence, None)
        return True


# both


class InlineTransport(base.Transport):
    """Moves bytes inside the session; `window` is what this side grants as a sink, at most `max_credit`."""

    capabilities = base.Capabilities(
        code=TransportCode.INLINE,
        features=(Feature.INLINE,),
        converts=True,
        reads=False,
        death_is_proof=True,
        batches=False,
        incremental=False,
        poll_interval=None,
    )

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window

    def expose(
        self, memory: base.Regions, next_id: int, program: CopyProgram, runs: Callable[[], Runs]
    ) -> base.Exposure:
        """Say that bytes of these regions come as Data; raises NO_TRANSPORT for memory that is not the host's."""
        views = _buffers(memory)
        receiver = InlineReceiver(self.window)
        delivery = base.StreamDelivery(receiver, lambda program: PackedStream(program, "sink", views))
        handle = Handle(transport=TransportCode.INLINE, data=b"")
        return base.Exposure(dict.fromkeys(memory, (handle,)), packed=delivery)

    def connect(self, peer: base.PeerRegions) -> base.Connection:
        """Map nothing; raises NO_TRANSPORT without feature INLINE, or to read (KVP-REG-INLINE)."""
        if not peer.writes or Feature.INLINE not in peer.features:
            mine = "INLINE in this session" if peer.writes else "a transport that reads"
            raise RemoteError(ErrorCode.NO_TRANSPORT, "regions[0].handles", mine, "INLINE", "use another transport")
        link = InlineLink()

        def connect(region: Region, path: str) -> PeerPages:
            base.handle_of(region, path, TransportCode.INLINE)
            return PeerPages(path, link)

        connection = base.connect_each(peer.regions, peer.used, connect)
        connection.link = link
        return connection

    def start(self, moves: Sequence[base.Move]) -> InlineStream:
        """Start one move; raises OUT_OF_REGION."""
        (move,) = moves
        link = next((m.link for m in move.sinks.values() if isinstance(m, PeerPages)), InlineLink())
        return InlineStream(link, PackedStream(move.program, "source", _buffers(move.sources)), move.grows)

    def begin_checksums(self, program: CopyProgram, memory: base.Regions, sink: bool) -> Callable[[], dict[int, int]]:
        return partial(checksums, program, _buffers(memory), sink)
