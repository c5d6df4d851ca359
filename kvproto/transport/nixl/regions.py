"""Memory that NIXL may read and write, staging slots in it, and writes that are under way."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.nixl.binding import Nixl
from kvproto.transport.nixl.handle import ByteRange, Named
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

if TYPE_CHECKING:
    from kvproto.transport.nixl.agent import Agent

__all__ = ["Make", "Peer", "Registered", "SlotPair", "Write"]

Make = Callable[[Nixl], Iterator[int]]
"""Makes the handles of a write, to be posted one by one."""


# memory


@attrs.frozen
class Slot(ByteRange):
    """The first bytes of a staging slot."""

    owner: Slotted | None = attrs.field(default=None, repr=False, eq=False)


class Slotted:
    """Memory that may be divided into equal staging slots."""

    def __init__(self, agent: Agent, memory: ByteRange, slot_bytes: int) -> None:
        self.agent, self.memory = agent, memory
        self.slot_bytes = slot_bytes
        """Bytes of each slot; 0 if there is none."""
        self.slots = memory.length // slot_bytes if slot_bytes else 0
        """Number of staging slots."""
        self._made: dict[int, Slot] = {}

    def slot(self, number: int, length: int) -> ByteRange:
        """The first bytes of a staging slot."""
        known = self._made.get(number)
        if known is None or known.length != length:
            m = self.memory.part(number * self.slot_bytes, length)
            known = self._made[number] = Slot(m.address, length, m.kind, m.device, m.buffer, self)
        return known


class Registered(Slotted):
    """Memory that NIXL may read and that peers with its handle may write, until it is closed."""

    def __init__(self, agent: Agent, memory: ByteRange, slot_bytes: int, list_: Any, metadata: bytes) -> None:
        super().__init__(agent, memory, slot_bytes)
        self._list, self._metadata = list_, metadata

    @property
    def closed(self) -> bool:
        """Whether it may no longer be read or written."""
        return self._list is None

    @property
    def handle(self) -> Handle:
        """The handle for `Region.handles`: about 600 bytes that name this memory alone."""
        named = Named(self.agent.name, self.memory, self.slot_bytes, self._metadata)
        return Handle(transport=TransportCode.NIXL, data=named.encode())

    def region(self, id: int, device: str | None = None) -> Region:
        """Its entry in Register; `device` is the UUID of the GPU of CUDA memory."""
        memory = self.memory
        return Region(
            id=id, base=0, length=memory.length, kind=memory.kind, device=device, boot=boot_id(), handles=(self.handle,)
        )

    def close(self) -> None:
        """Deregister, so that peers can no longer write it; no write of it may be under way."""
        if self._list is not None:
            list_, self._list = self._list, None
            self.agent.deregister(self, list_)
            self.forget_slots()

    def forget_slots(self) -> None:
        """Release the views of the buffer."""
        self._made.clear()


class Peer(Slotted):
    """A peer's memory that this agent may write; its addresses are the peer's."""

    def __init__(self, agent: Agent, named: Named, path: str) -> None:
        super().__init__(agent, named.memory, named.slot_bytes)
        self.name, self.path = named.name, path
        """The name of the peer's agent; the path of the region for errors."""
        self.lost: KvprotoError | None = None
        """Why no write to it can succeed any more."""

    def write(self, source: ByteRange, to: ByteRange) -> Write:
        """Post one write of memory inside a `Registered` to memory of this peer, of equal length."""
        if source.length != to.length:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "", f"{source.length} bytes", f"{to.length} bytes", "")
        slots = None
        if isinstance(source, Slot) and isinstance(to, Slot) and to.owner is self:
            own = source.owner
            if isinstance(own, Registered) and own.agent is self.agent:
                slots = SlotPair(own, source.address, self, to.address, source.length)
        write = Write(self.agent, source.length, (self,), slots)

        def make(nixl: Nixl) -> Iterator[int]:
            local, remote = (np.array([m.descriptor], np.uint64) for m in (source, to))
            yield nixl.make((local, source.kind), (remote, self.memory.kind), self.name)

        return self.agent.begin(write, make)

    def close(self) -> None:
        """Stop writing it; writes under way end UNPROVABLE. The connection ends with the last memory of its agent."""
        self.agent.disconnect(self)


@attrs.frozen(cache_hash=True)
class SlotPair:
    """From the first bytes of a slot to those of a peer's slot."""

    source: Registered
    at: int
    """Address at the source."""
    peer: Peer
    to: int
    """Address at the peer."""
    length: int

    @property
    def usable(self) -> bool:
        """Whether the memory of both sides is still there."""
        return not self.source.closed and not self.peer.lost


# writes


class Write:
    """Bytes on their way to one peer's memory."""

    def __init__(self, agent: Agent, bytes_: int, peers: tuple[Peer, ...], slots: SlotPair | None = None) -> None:
        self._agent, self.bytes, self.peers, self.slots = agent, bytes_, peers, slots
        self._proof: Proof | None = None
        self._error: KvprotoError | None = None
        self._over = False
        """Set last, so that a thread that sees it set sees the others too."""
        self.bell: threading.Event | None = None
        """Wakes threads that wait, if any do."""
        self.handles: list[int] = []
        self.cancelled = False

    def ready(self) -> bool:
        """Whether every byte is at the peer; raises PEER_LOST, TRANSPORT_FAILED or ABORTED if that failed."""
        if not self._over:
            self._agent.advance(self)
            if not self._over:
                return False
        if self._error is not None:
            raise self._error.again()
        return True

    def wait(self, timeout: float) -> bool:
        """As `ready`, after at most `timeout` seconds."""
        until = time.monotonic() + timeout
        while not self.ready() and (left := until - time.monotonic()) > 0:
            bell = self._agent.bell_of(self)  # before `_over` is read: whoever ends the write rings after setting it
            if not self._over:
                bell.wait(self._agent.patience(left))
        return self.ready()

    @property
    def proof(self) -> Proof | None:
        """PROVEN if no byte can arrive any more, else UNPROVABLE, once the write is over; None before that."""
        return self._proof

    def abandon(self) -> None:
        """Give the write up; `proof` is soon PROVEN if it was complete or never posted, else UNPROVABLE."""
        self.cancelled = True
        with contextlib.suppress(KvprotoError):  # a closed agent has ended it
            self._agent.abandon(self)

    def end(self, error: KvprotoError | None, proof: Proof) -> None:
        if self._over:
            return
        self._proof, self._error = proof, error.kept() if error is not None else None
        self._over = True
        if self.bell is not None:
            self.bell.set()
