"""Packed bytes through staging slots: both sides of KVP-STG-*, without a clock, socket or thread.

The sink owns slots of equal size and grants them by Credit. The source gathers the next bytes of a packed stream into a
slot of its own, writes it into a granted one, and announces a complete write by Chunk. The sink scatters the bytes and
returns the slot by Credit. Gathering, writing and scattering are started and polled, never waited for, so that several
slots are under way at once.

    sink's slot:    free --Credit--> granted --Chunk--> unpacking --ready--> free
    source's slot:  free --step----> packing --ready--> writing ----ready--> free, and a Chunk

A source writes only staging slots, so a late write of an aborted transfer never reaches a page: the sink's pages are
free when its own unpacking has ended. A slot whose write failed is not written again in its session. When a session is
resumed, all slots that are not being emptied are granted again, and the source writes into one again only when its
earlier write to that slot is over.
"""

from collections import deque
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np

from kvproto.errors import KvprotoError, RemoteError, bad
from kvproto.transport.staging.packed import IncomingStream, OutgoingStream, PackedLink, Packer, PendingCopy
from kvproto.wire.enums import CreditKind, ErrorCode, Proof
from kvproto.wire.messages import Chunk, Credit

LEAST_SLOTS = 3
"""One to fill, one under way, and one to empty."""


class Staging(Protocol):
    """Slots of equal size in this process, such as `nixl.agent.Registered`."""

    slots: int
    """Number of slots."""
    slot_bytes: int
    """Bytes of each slot."""

    def slot(self, number: int, length: int) -> Any:
        """The first `length` bytes of a slot, in the form that packers and `Target.write` accept."""


class Target(Staging, Protocol):
    """A peer's slots, such as `nixl.agent.Peer`."""

    def write(self, source: Any, to: Any) -> PendingCopy:
        """Begin to write `source` to `to`, of equal length."""


@attrs.frozen
class ChunkPiece:
    """The content of one slot, as a Chunk states it, without session and sequence."""

    slot: int
    offset: int
    bytes: int
    last: bool

    def notice(self, session: int, sequence: int) -> Chunk:
        return Chunk(session=session, sequence=sequence, **attrs.asdict(self))


# the source


class StagedLink(PackedLink):
    """A source's slots and those granted by the sink of a session; raises OUT_OF_RANGE for fewer than three."""

    kind = CreditKind.STAGING

    def __init__(self, own: Staging, target: Target) -> None:
        super().__init__()
        self.own, self.target = own, target
        self.slot_bytes = min(own.slot_bytes, target.slot_bytes, 0xFFFF_FFFF)
        _check_slots(own.slots, own.slot_bytes)
        _check_slots(target.slots, target.slot_bytes)
        self.free = deque(range(own.slots))
        """Own slots that are not in use."""
        self.granted: deque[int] = deque()
        """The sink's slots that may be written."""
        self._away = set(range(target.slots))
        """The sink's slots that it may grant: at first all, later every slot that a Chunk has named."""
        self._used: set[int] = set()
        """The sink's slots that a stream is packing for or writing."""

    def grant(self, credit: Credit) -> None:
        """Take a Credit; raises CREDIT for a slot that the sink cannot grant, and grants none then."""
        slots = [] if credit.slots is None else credit.slots[: len(self._away) + 1].tolist()
        granted = set[int]()
        for i, slot in enumerate(slots):
            if slot not in self._away or slot in granted:
                mine = f"slots below {self.target.slots} that are not granted"
                raise RemoteError(ErrorCode.CREDIT, f"slots[{i}]", mine, str(slot), "return a slot after its Chunk")
            granted.add(slot)
        self._away -= granted
        self.granted.extend(slot for slot in slots if slot not in self._used)

    def take(self) -> int:
        """A slot of the sink for the next piece."""
        slot = self.granted.popleft()
        self._used.add(slot)
        return slot

    def leave(self, slot: int, named: bool) -> None:
        """Release a slot that nothing writes: for another grant if a Chunk names it, or else for the next piece."""
        self._used.discard(slot)
        if named:
            self._away.add(slot)
        elif slot not in self._away:
            self.granted.append(slot)

    def restart(self) -> None:
        """See `PackedLink` (KVP-STG-RESUMED)."""
        self.granted.clear()
        self._away = set(range(self.target.slots))
        super().restart()


@attrs.define
class _PieceWrite:
    """A piece that is being packed or written."""

    piece: ChunkPiece
    own: int
    packing: PendingCopy
    writing: PendingCopy | None = None


class StagedSender(OutgoingStream):
    """One stream through a link: call `step` until `done`, and send what it returns, in order."""

    def __init__(self, link: StagedLink, packer: Packer, grows: bool = False) -> None:
        super().__init__(link, packer, grows)
        self._link = link
        self._parts: deque[_PieceWrite] = deque()
        self._writing = 0
        """The number of `_parts`, counted from the first, that are being written."""
        self._stopped = False
        self._lost = False

    @property
    def done(self) -> bool:
        """Whether every byte is at the sink and its Chunk was returned by `step`."""
        return not self._stopped and not self.left and not self._parts

    @property
    def under_way(self) -> int:
        """The number of slots that are being packed or written."""
        return len(self._parts)

    def step(self) -> list[ChunkPiece]:
        """Poll pieces under way, and begin one more if slots allow; returns pieces now at the sink, in order.

        Pieces are polled up to the first that is not ready. Raises what a write or the packer raises; the transfer has
        then failed, and `stop` tells what can be proved.
        """
        try:
            link, packer = self._link, self._packer
            self._check()
            self._post()
            written = self._take()
            left, allowed = self.left, self._allowed - self._at
            # only the last slot may go out before it is full
            if not self._stopped and link.free and link.granted and 0 < min(left, link.slot_bytes) <= allowed:
                size = packer.chunk_size(self._at, min(link.slot_bytes, left))
                own = link.free[0]
                packing = packer.pack(self._at, link.own.slot(own, size))
                self._parts.append(_PieceWrite(ChunkPiece(link.take(), self._at, size, size == left), own, packing))
                link.free.popleft()
                self._at += size
                self._post()
            return written
        except KvprotoError:
            self._stopped = True
            raise

    def _post(self) -> None:
        link = self._link
        while self._writing < len(self._parts) and not self._stopped:
            part = self._parts[self._writing]
            if not part.packing.ready():
                return
            piece = part.piece
            target = link.target.slot(piece.slot, piece.bytes)
            part.writing = link.target.write(link.own.slot(part.own, piece.bytes), target)
            self._writing += 1

    def _take(self) -> list[ChunkPiece]:
        written = []
        while self._parts and (first := self._parts[0]).writing is not None and first.writing.ready():
            self._parts.popleft()
            self._writing -= 1
            self._link.free.append(first.own)
            self._link.leave(first.piece.slot, named=True)
            written.append(first.piece)
        if not self.left and not self._parts:
            self._link.active.discard(self)
        return written

    def stop(self) -> Proof | None:
        """Begin nothing more; call again until the result is not None.

        PROVEN: no write of this stream can arrive in a slot any more, and the link can use its slots again. UNPROVABLE:
        a write failed, and its slots are lost to the link. No page is written in either case.
        """
        self._stopped = True
        self._link.active.discard(self)
        for part in list(self._parts):
            try:
                if part.writing is None:
                    if not part.packing.ready():
                        continue
                elif not part.writing.ready():
                    continue
            except KvprotoError:
                self._lost = True
            else:
                self._link.free.append(part.own)
                self._link.leave(part.piece.slot, named=False)
            self._parts.remove(part)
        if self._parts:
            return None
        return Proof.UNPROVABLE if self._lost else Proof.PROVEN


# the sink


@attrs.define
class _StagedStream(IncomingStream):
    closing: bool = False
    unpacking: deque[tuple[int, PendingCopy]] = attrs.field(factory=deque)


class StagedReceiver:
    """A sink's slots for transfers, by sequence, of one session's source; raises OUT_OF_RANGE for fewer than three."""

    kind: ClassVar[CreditKind] = CreditKind.STAGING

    def __init__(self, own: Staging) -> None:
        _check_slots(own.slots, own.slot_bytes)
        self._own = own
        self._free = set(range(own.slots))
        self._granted: set[int] = set()
        self._streams: dict[int, _StagedStream] = {}

    def credit(self, session: int) -> Credit | None:
        """Grant every free slot; None if there is none. Send it at once (KVP-STG-RETURN)."""
        self.step()
        if not self._free:
            return None
        slots = np.array(sorted(self._free), np.uint32)
        self._granted |= self._free
        self._free.clear()
        return Credit(session=session, kind=CreditKind.STAGING, slots=slots)

    def restart(self) -> None:
        self._free |= self._granted
        self._granted.clear()

    def open(self, sequence: int, packer: Packer) -> None:
        self._streams[sequence] = _StagedStream(packer)

    def chunk(self, chunk: Chunk) -> None:
        """Unpack a Chunk, or free a stale one's slot; raises CREDIT (KVP-STG-BEYOND), OUT_OF_RANGE, FIELD_CONFLICT."""
        if chunk.slot not in self._granted:
            raise RemoteError(ErrorCode.CREDIT, "slot", f"granted {sorted(self._granted)}", str(chunk.slot), "")
        self._granted.remove(chunk.slot)
        stream = self._streams.get(chunk.sequence)
        if stream is None or stream.closing:
            self._free.add(chunk.slot)
            return
        try:
            if chunk.bytes > self._own.slot_bytes:
                mine, yours = f"slots of {self._own.slot_bytes} bytes", str(chunk.bytes)
                raise RemoteError(ErrorCode.OUT_OF_RANGE, "bytes", mine, yours, "send what a slot holds")
            stream.advance(chunk.offset, chunk.bytes, chunk.last)
        except RemoteError:
            self._free.add(chunk.slot)
            raise
        data = self._own.slot(chunk.slot, chunk.bytes)
        try:
            stream.unpacking.append((chunk.slot, stream.packer.unpack(chunk.offset, data)))
        except KvprotoError as fault:  # `finish` tells it
            stream.error = fault.kept()
            self._free.add(chunk.slot)

    def step(self) -> None:
        """Poll chunks that are being unpacked: in order for each stream, up to the first that is not ready."""
        for stream in self._streams.values():
            while stream.unpacking:
                slot, unpacking = stream.unpacking[0]
                try:
                    if not unpacking.ready():
                        break
                except KvprotoError as error:
                    stream.error = error.kept()
                stream.unpacking.popleft()
                self._free.add(slot)

    @property
    def busy(self) -> bool:
        return any(stream.unpacking for stream in self._streams.values())

    def check_end(self, sequence: int) -> None:
        self._streams[sequence].check_end()

    def finish(self, sequence: int) -> bool:
        stream = self._streams[sequence]
        self.step()
        if stream.error:
            raise stream.error.again()
        return stream.at == stream.packer.length and not stream.unpacking

    def close(self, sequence: int) -> bool:
        """Stop a transfer; call again until True, when nothing is being unpacked into its pages any more."""
        stream = self._streams.get(sequence)
        if stream is None:
            return True
        stream.closing = True
        self.step()
        if stream.unpacking:
            return False
        del self._streams[sequence]
        return True


def _check_slots(slots: int, slot_bytes: int) -> None:
    if slots < LEAST_SLOTS or slot_bytes < 1:
        mine, advice = f"at least {LEAST_SLOTS} slots, not empty", "register more staging memory, or smaller slots"
        raise bad("slots", mine, f"{slots} of {slot_bytes} bytes", advice)
