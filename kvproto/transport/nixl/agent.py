"""Transport `nixl`: one-sided writes by NIXL over UCX, between hosts or over loopback.

One thread at a time has the turn to call NIXL, so nothing depends on NIXL's own locking. Callers queue work and get a
`Write`, which any thread may poll. As a rule the agent's thread does the work: a post that copies before it returns
(shared memory) blocks only that thread, and NIXL releases the GIL meanwhile. The callers of an `eager` agent do the
work themselves, because a write between GPUs ends sooner than a thread wakes.

What can be proved: NIXL says DONE when the bytes are at the peer, so nothing of a write that is ready can arrive later.
A write that is released before it is ready may still arrive (over TCP it does), so it is UNPROVABLE. To abort with
proof, post nothing more and wait for what was posted. A write that the peer's death ended is UNPROVABLE too.

The transfer of a complete write from slot to slot is cached, to be posted again for the next write of the same two
slots and length. It is released before either side's memory is closed or registered again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs
import numpy as np

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.base import no_handle
from kvproto.transport.nixl.binding import Descriptors, Nixl
from kvproto.transport.nixl.handle import ByteRange, HandleContents
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

__all__ = [
    "Agent",
    "Make",
    "Peer",
    "Posting",
    "Registered",
    "SlotPair",
    "Transfers",
    "Write",
    "closed",
    "failed",
    "unreachable",
]


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
        named = HandleContents(self.agent.name, self.memory, self.slot_bytes, self._metadata)
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

    def __init__(self, agent: Agent, named: HandleContents, path: str) -> None:
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


_MOST_KEPT = 1 << 14
"""Transfers in a cache."""


def failed(what: str, cause: Exception) -> LocalError:
    """The typed error of what NIXL raised."""
    yours, advice = f"{type(cause).__name__}: {cause}", "look at what NIXL and UCX wrote to stderr"
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", what, yours, advice)


def closed() -> LocalError:
    """The refusal of a closed agent."""
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", "the agent", "closed", "")


def unreachable(path: str, reason: str, advice: str) -> RemoteError:
    """The refusal of a peer's region."""
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", "cannot connect", reason, advice)


class TransferCache:
    """NIXL's transfers from slot to slot, kept to be posted again, as making one costs more than posting it."""

    def __init__(self) -> None:
        self.handles: dict[SlotPair, int] = {}
        """Handles of transfers that are not under way, the least recently used first."""

    def keep(self, slots: SlotPair, handle: int) -> int | None:
        """Keep a handle; returns the one to release: the least recently used, or this one if the pair has one."""
        if slots in self.handles:
            return handle
        oldest = self.handles.pop(next(iter(self.handles))) if len(self.handles) == _MOST_KEPT else None
        self.handles[slots] = handle
        return oldest

    def let_go(self, which: Callable[[SlotPair], bool]) -> list[int]:
        """Remove the transfers of these pairs; returns their handles, to be released."""
        return [self.handles.pop(slots) for slots in list(self.handles) if which(slots)]


class Transfers:
    """Posts writes and tracks them; calls `tell` when one is over."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.posted: dict[Write, None] = {}
        """Writes that are under way."""
        self.cache = TransferCache()
        self.peers: dict[str, tuple[bytes, list[Peer]]] = {}
        """By name of an agent: what connects to it, and its memory."""
        self._stuck: list[int] = []
        """Handles that NIXL would not release."""

    def connect(self, nixl: Nixl, agent: Agent, named: HandleContents, path: str) -> Peer:
        """Make a peer's memory writable; raises TRANSPORT_FAILED."""
        connection, peers = self.peers.get(named.name, (named.connection, []))
        if connection != named.connection:
            raise unreachable(path, "another agent has its name", "make a new agent after a restart")
        self._let_go(nixl, lambda slots: slots.peer.name == named.name)  # NIXL may replace the keys of this agent
        for write in self.posted:  # these use the old keys, and must not be cached
            if write.slots and write.slots.peer.name == named.name:
                write.slots = None
        try:
            nixl.load(named)
        except Exception as e:
            if not peers:
                nixl.forget(named.name)
            raise unreachable(path, type(e).__name__, "compare NIXL's versions, and UCX_TLS on both sides") from e
        peer = Peer(agent, named, path)
        peers.append(peer)
        self.peers[named.name] = connection, peers
        return peer

    def begin(self, nixl: Nixl, write: Write, make: Make) -> None:
        """Post a write's transfers, cached or new."""
        begun, ready = False, True
        try:
            if write.cancelled:
                raise RemoteError(ErrorCode.ABORTED, "", "given up", "not posted", "")
            for peer in write.peers:
                if peer.lost:
                    raise peer.lost.again()
            if write.slots and (kept := self.cache.handles.pop(write.slots, None)) is not None:
                write.handles.append(kept)
            else:
                for made in make(nixl):
                    write.handles.append(made)  # at once, so that it is released if the next one is refused
            for handle in write.handles:
                begun = True
                ready &= nixl.post(handle)
        except Exception as e:
            error = self._lost(nixl, write.peers, e)
            self._over(nixl, write, error, Proof.UNPROVABLE if begun else Proof.PROVEN)
            return
        if ready:
            self._over(nixl, write)
        else:
            self.posted[write] = None

    def look(self, nixl: Nixl, write: Write) -> bool:
        """Poll a posted write; returns whether it ended."""
        try:
            for handle in write.handles:
                if not nixl.ask(handle):
                    return False
        except Exception as e:
            self._over(nixl, write, self._lost(nixl, write.peers, e))
        else:
            self._over(nixl, write)
        return True

    def _over(self, nixl: Nixl, write: Write, error: KvprotoError | None = None, proof: Proof | None = None) -> None:
        """End a write that is complete or has failed."""
        self.posted.pop(write, None)
        if error is None and write.slots and write.slots.usable:
            spare = self.cache.keep(write.slots, write.handles.pop())
            write.handles += [] if spare is None else [spare]
        self._release(nixl, write)
        write.end(error, proof or (Proof.UNPROVABLE if error else Proof.PROVEN))
        self._tell()

    def _release(self, nixl: Nixl, write: Write) -> None:
        for handle in write.handles:
            self._drop(nixl, handle)
        write.handles.clear()

    def _drop(self, nixl: Nixl, handle: int) -> None:
        try:
            nixl.release(handle)
        except Exception:  # it is under way and cannot be cancelled, so NIXL keeps it
            self._stuck.append(handle)

    def _let_go(self, nixl: Nixl, which: Callable[[SlotPair], bool]) -> None:
        for handle in self.cache.let_go(which):
            self._drop(nixl, handle)

    def deregister(self, nixl: Nixl, memory: ByteRange, registration: Any) -> None:
        """Forbid all further writes of this memory."""
        begin, end = memory.address, memory.address + memory.length  # NIXL may have used it for overlapping memory
        self._let_go(nixl, lambda slots: slots.at < end and begin < slots.at + slots.length)
        nixl.deregister(registration)

    def _lost(self, nixl: Nixl, peers: tuple[Peer, ...], cause: Exception) -> KvprotoError:
        """The typed error for what NIXL raised; if the peer is gone, all of its memory is lost."""
        if isinstance(cause, KvprotoError):
            return cause
        if "Disconnect" not in type(cause).__name__:
            return failed("the write failed", cause)
        names = {p.name for p in peers}
        error = RemoteError(ErrorCode.PEER_LOST, "", "a connection", type(cause).__name__, "register again with it")
        for name in names:
            for peer in self.peers.get(name, (b"", []))[1]:
                peer.lost = error
        self._let_go(nixl, lambda slots: slots.peer.name in names)
        return error

    def abandon(self, nixl: Nixl, write: Write) -> None:
        """Give a write up, unless it turns out to be complete."""
        if write in self.posted and not self.look(nixl, write):
            self._over(nixl, write, RemoteError(ErrorCode.ABORTED, "", "given up", "under way", ""))

    def disconnect(self, nixl: Nixl, peer: Peer) -> None:
        """Stop writing this peer's memory; the connection ends with the last memory of its agent."""
        _, peers = self.peers.get(peer.name, (b"", []))
        if peer not in peers:
            return
        for write in [w for w in self.posted if peer in w.peers]:
            self.abandon(nixl, write)
        self._let_go(nixl, lambda slots: slots.peer is peer)
        peers.remove(peer)
        peer.lost = LocalError(ErrorCode.TRANSPORT_FAILED, peer.path, "closed", "a write", "connect first")
        if not peers:
            del self.peers[peer.name]
            nixl.forget(peer.name)

    def finish(self, nixl: Nixl) -> None:
        """End all writes as UNPROVABLE, forget all peers, and stop NIXL."""
        for write in self.posted:
            self._release(nixl, write)
            write.end(closed(), Proof.UNPROVABLE)
        self.posted.clear()
        self._let_go(nixl, lambda _: True)
        for name in self.peers:
            nixl.forget(name)
        for handle in self._stuck:
            with contextlib.suppress(Exception):
                nixl.release(handle)
        nixl.close()


T = TypeVar("T")

_SOON, _LATE = 20e-6, 500e-6
"""Seconds between polls of writes under way: the pause doubles while none completes, up to the latter."""
_SELDOM = 2e-3
"""The same for an eager agent's thread, which serves callers that do not poll."""

Posting = tuple[Descriptors, MemoryKind, Descriptors, Peer]
"""Descriptors here, their kind of memory, descriptors at a peer, and the peer."""


class Agent:
    """A rank's NIXL agent; close it, or use it in a `with` block.

    With `eager`, posting or polling a write advances NIXL. Raises NO_TRANSPORT if NIXL is not installed,
    TRANSPORT_FAILED if UCX cannot start.
    """

    def __init__(self, eager: bool = False) -> None:
        self._eager = eager
        self.name = f"kvproto-{secrets.token_hex(16)}"
        self._jobs: deque[Callable[[Nixl], None]] = deque()
        self._bell = threading.Event()
        """Not a SimpleQueue, which may wait for ever in spite of a short timeout, as Python counts it down below 0."""
        self._rests = False
        """Whether the thread waits for nothing but the bell."""
        self._lively = False
        """For an eager agent: whether something was posted since the thread last polled; waking it would cost more."""
        self._turn = threading.Lock()
        self._nixl: Nixl | None = None
        self._transfers = Transfers(self._tell)
        self._open: set[Registered] = set()
        """Registered memory, which must live as long as peers may write it, even if nothing else refers to it."""
        self._closed, self._door = False, threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told, self._telling = False, threading.Lock()
        """Whether `_wake` is readable."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kvproto-nixl", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            os.close(self._wake)
            raise

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, memory: ByteRange | Any, slot_bytes: int = 0) -> Registered:
        """Register memory, or a contiguous buffer; with `slot_bytes` as staging memory of slots of that size.

        Raises OUT_OF_RANGE if no slot fits, TRANSPORT_FAILED if NIXL refuses the memory.
        """
        some = memory if isinstance(memory, ByteRange) else ByteRange.of(memory)
        most = min(some.length, 0xFFFF_FFFF)
        if not 0 <= slot_bytes <= most:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "slot_bytes", f"1 to {most}", str(slot_bytes))

        def work(nixl: Nixl) -> Registered:
            list_, metadata = nixl.register(some)
            made = Registered(self, some, slot_bytes, list_, metadata)
            self._open.add(made)
            return made

        return self._call(work)

    def connect(self, region: Region, path: str) -> Peer:
        """Make a peer's region writable from here; raises NO_TRANSPORT or TRANSPORT_FAILED."""
        handle = next((h for h in region.handles if h.transport == TransportCode.NIXL), None)
        if handle is None:
            raise no_handle(path, TransportCode.NIXL)
        try:
            named = HandleContents.decode(bytes(handle.data))
            if named.name == self.name:
                raise ValueError("it is our own")
            if named.memory.length < region.length or named.memory.kind != region.kind:
                raise ValueError("it is shorter than the region, or of another kind")
        except Exception as e:
            reason = str(e) if type(e) is ValueError else type(e).__name__
            raise unreachable(path, reason, "send the handle as `Registered` makes it") from None

        return self._call(lambda nixl: self._transfers.connect(nixl, self, named, path))

    @property
    def idle(self) -> bool:
        """Whether it has no memory that peers may write, and no peer."""
        return not self._open and not self._transfers.peers

    def fileno(self) -> int:
        """Readable when a write has ended since the last `wait`; for poll, select, or a ZeroMQ poller."""
        return self._wake

    def wait(self, timeout: float) -> bool:
        """Wait until a write has ended, but at most `timeout` seconds; returns whether one has."""
        poller = select.poll()  # `select` knows 1024 descriptors
        poller.register(self._wake, select.POLLIN)
        poller.poll(timeout * 1000)
        with self._telling:
            told, self._told = self._told, False
            if told:
                os.eventfd_read(self._wake)
        return told

    def close(self) -> None:
        """End all writes as UNPROVABLE, forget all peers, stop the thread."""
        with self._door:
            if self._closed:
                return
            self._closed = True
        self._bell.set()
        self._thread.join()
        os.close(self._wake)

    # the thread

    def _run(self, started: Future[None]) -> None:
        try:
            self._nixl = Nixl(self.name)
        except Exception as e:
            started.set_exception(e if isinstance(e, KvprotoError) else failed("cannot start UCX", e))
            return
        started.set_result(None)
        soon, late = (_SELDOM, _SELDOM) if self._eager else (_SOON, _LATE)
        pause = soon
        while not self._closed:
            self._rests = True  # before `posted` is read: whoever posts rings after posting
            lively, self._lively = self._lively, False
            timeout = pause if self._transfers.posted or lively else None
            self._rests = timeout is None
            self._bell.wait(timeout)
            self._bell.clear()  # before jobs are read: whoever adds one rings after adding
            with self._turn:
                pause = soon if self._move_all() else min(pause * 2, late)
        with self._turn:
            self._move_all()
            nixl, self._nixl = self._nixl, None
            assert nixl is not None
            self._transfers.finish(nixl)
        for registered in self._open:
            registered.forget_slots()
        self._open.clear()

    # whoever has the turn

    def _move_all(self) -> bool:
        """Do what was queued, and poll what is under way; returns whether anything happened."""
        if self._nixl is None:
            return False
        some = self._work(self._nixl)
        ended = [self._transfers.look(self._nixl, write) for write in list(self._transfers.posted)]
        return some or any(ended)

    def _work(self, nixl: Nixl) -> bool:
        """Do what was queued; returns whether anything was."""
        some = bool(self._jobs)
        while self._jobs:
            self._jobs.popleft()(nixl)
        return some

    def _tell(self) -> None:
        with self._telling:
            if not self._told:
                self._told = True
                os.eventfd_write(self._wake, 1)

    # any thread

    def advance(self, write: Write | None = None) -> None:
        """In an eager agent, do what was queued and poll one write, as its thread polls all of them.

        It waits for its turn; the thread that has the turn needs the GIL, which waiting releases.
        """
        if not self._eager:
            return
        with self._turn:
            nixl = self._nixl
            if nixl is None:
                return
            self._work(nixl)
            if write in self._transfers.posted:
                self._transfers.look(nixl, write)

    def bell_of(self, write: Write) -> threading.Event:
        """The event that is set when the write is over."""
        with self._door:
            write.bell = write.bell or threading.Event()
            return write.bell

    def patience(self, seconds: float) -> float:
        """The seconds for which a caller that waits leaves the work to the agent's thread."""
        return min(seconds, _SOON) if self._eager else seconds

    def _enqueue(self, job: Callable[[Nixl], None]) -> None:
        with self._door:
            if self._closed:
                raise closed()
            self._jobs.append(job)
        self.advance()
        if not self._eager or (self._transfers.posted and self._rests):
            self._bell.set()

    def _call(self, work: Callable[[Nixl], T]) -> T:
        """Do work with NIXL in turn; raises what it raises, and TRANSPORT_FAILED for errors of NIXL."""
        answer: Future[T] = Future()

        def job(nixl: Nixl) -> None:
            try:
                answer.set_result(work(nixl))
            except KvprotoError as e:
                answer.set_exception(e)
            except Exception as e:
                answer.set_exception(failed("NIXL refuses", e))

        self._enqueue(job)
        return answer.result()

    def post(self, postings: list[Posting], bytes_: int) -> Write:
        """Post one write of descriptor lists, each to one peer."""

        def make(nixl: Nixl) -> Iterator[int]:
            for local, kind, remote, peer in postings:
                yield nixl.make((local, kind), (remote, peer.memory.kind), peer.name)

        return self.begin(Write(self, bytes_, tuple(p for *_, p in postings)), make)

    def begin(self, write: Write, make: Make) -> Write:
        """Post a write in its turn."""

        def job(nixl: Nixl) -> None:
            self._lively = self._eager
            self._transfers.begin(nixl, write, make)

        self._enqueue(job)
        return write

    def abandon(self, write: Write) -> None:
        """Give a write up; raises TRANSPORT_FAILED on a closed agent."""
        self._enqueue(lambda nixl: self._transfers.abandon(nixl, write))

    def deregister(self, registered: Registered, registration: Any) -> None:
        """Forbid all writes of this memory."""
        self._call(lambda nixl: self._transfers.deregister(nixl, registered.memory, registration))
        self._open.discard(registered)

    def disconnect(self, peer: Peer) -> None:
        """Write this peer's memory no more; raises TRANSPORT_FAILED on a closed agent."""
        self._call(lambda nixl: self._transfers.disconnect(nixl, peer))
