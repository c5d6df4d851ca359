"""Transport `nixl`: one-sided writes by NIXL over UCX, between hosts or over loopback.

One thread at a time has the turn to call NIXL, so nothing depends on NIXL's own locking. Callers queue work and get a
`Write`, which any thread may poll. As a rule the agent's thread does the work: a post that copies before it returns
(shared memory) blocks only that thread, and NIXL releases the GIL meanwhile. The callers of an `eager` agent do the
work themselves, because a write between GPUs ends sooner than a thread wakes.

Proof: NIXL says DONE when the bytes are at the peer, so nothing of a write that is ready can arrive later.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs
import numpy as np

from kvproto.closing import Closing
from kvproto.errors import KvprotoError, LocalError, RemoteError, bad
from kvproto.transport.base import handle_of
from kvproto.transport.nixl.binding import Descriptors, Nixl
from kvproto.transport.nixl.handle import ByteRange, HandleContents
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Handle, Region

T = TypeVar("T")

_SOON, _LATE = 20e-6, 500e-6
"""Seconds between polls of writes under way: the pause doubles while none completes, up to the latter."""
_SELDOM = 2e-3
"""The same for an eager agent's thread, which serves callers that do not poll."""
_MOST_CACHED = 1 << 14
"""Transfers in a cache."""


# memory


class Slotted:
    """Memory that may be divided into equal staging slots."""

    def __init__(self, agent: Agent, memory: ByteRange, slot_bytes: int) -> None:
        self.agent, self.memory = agent, memory
        self.slot_bytes = slot_bytes
        """Bytes of each slot; 0 if there is none."""
        self.slots = memory.length // slot_bytes if slot_bytes else 0
        """Number of staging slots."""
        self._slots: dict[int, ByteRange] = {}

    def slot(self, number: int, length: int) -> ByteRange:
        """The first bytes of a staging slot."""
        known = self._slots.get(number)
        if known is None or known.length != length:
            part = self.memory.part(number * self.slot_bytes, length)
            known = self._slots[number] = attrs.evolve(part, owner=self)
        return known


class Registered(Slotted):
    """Memory that NIXL may read and that peers with its handle may write, until it is closed."""

    def __init__(self, agent: Agent, memory: ByteRange, slot_bytes: int, registration: Any, metadata: bytes) -> None:
        super().__init__(agent, memory, slot_bytes)
        self._registration, self._metadata = registration, metadata

    @property
    def closed(self) -> bool:
        """Whether it may no longer be read or written."""
        return self._registration is None

    @property
    def handle(self) -> Handle:
        """The handle for `Region.handles`: about 600 bytes that name this memory alone."""
        contents = HandleContents(self.agent.name, self.memory, self.slot_bytes, self._metadata)
        return Handle(transport=TransportCode.NIXL, data=contents.encode())

    def region(self, id: int, device: str | None = None) -> Region:
        """Its entry in Register; `device` is the UUID of the GPU of CUDA memory."""
        memory = self.memory
        return Region(
            id=id, base=0, length=memory.length, kind=memory.kind, device=device, boot=boot_id(), handles=(self.handle,)
        )

    def close(self) -> None:
        """Deregister, so that peers can no longer write it; no write of it may be under way."""
        if self._registration is not None:
            registration, self._registration = self._registration, None
            self.agent.deregister(self, registration)
            self.forget_slots()

    def forget_slots(self) -> None:
        """Release the views of the buffer."""
        self._slots.clear()


class Peer(Slotted):
    """A peer's memory that this agent may write; its addresses are the peer's."""

    def __init__(self, agent: Agent, contents: HandleContents, path: str) -> None:
        super().__init__(agent, contents.memory, contents.slot_bytes)
        self.name, self.path = contents.name, path
        """The name of the peer's agent; the path of the region for errors."""
        self.lost: KvprotoError | None = None
        """The reason that no write to it can succeed any more."""

    def write(self, source: ByteRange, to: ByteRange) -> Write:
        """Post one write of memory inside a `Registered` to memory of this peer, of equal length."""
        if source.length != to.length:
            raise bad("", f"{source.length} bytes", f"{to.length} bytes")
        slots = None
        own = source.owner
        if to.owner is self and isinstance(own, Registered) and own.agent is self.agent:
            slots = SlotPair(own, source.address, self, to.address, source.length)

        def postings() -> list[Posting]:
            local, remote = (np.array([m.descriptor], np.uint64) for m in (source, to))
            return [(local, source.kind, remote, self)]

        return self.agent.begin(Write(self.agent, source.length, (self,), slots), postings)

    def close(self) -> None:
        """Stop writing it; writes under way end UNPROVABLE. The connection ends with the last memory of its agent."""
        self.agent.disconnect(self)


@attrs.frozen(cache_hash=True)
class SlotPair:
    """A path from the first bytes of a slot to those of a peer's slot."""

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


Posting = tuple[Descriptors, MemoryKind, Descriptors, Peer]
"""Descriptors here, their kind of memory, descriptors at a peer, and the peer."""


# writes


class Write:
    """Bytes on their way to one peer's memory."""

    def __init__(self, agent: Agent, bytes_: int, peers: tuple[Peer, ...], slots: SlotPair | None = None) -> None:
        self._agent, self.bytes, self.peers, self.slots = agent, bytes_, peers, slots
        self.proof: Proof | None = None
        """Once it is over: PROVEN if no byte can arrive any more, else UNPROVABLE."""
        self._error: KvprotoError | None = None
        self._over = False
        """Set last, so that a thread that sees it set sees the others too."""
        self.completed: threading.Event | None = None
        """Wakes threads that wait, if any do."""
        self.handles: list[int] = []

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
            completed = self._agent.completion_of(self)  # before `_over` is read, which is set before the event
            if not self._over:
                # an eager agent's thread seldom looks
                completed.wait(min(left, _SOON) if self._agent.eager else left)
        return self.ready()

    def end(self, error: KvprotoError | None, proof: Proof) -> None:
        if self._over:
            return
        self.proof, self._error = proof, error.kept() if error is not None else None
        self._over = True
        if self.completed is not None:
            self.completed.set()


# what NIXL does


class Transfers:
    """The transfers of one agent and its peers, without locks; `signal` is called when a write is over."""

    def __init__(self, nixl: Nixl, signal: Callable[[], None]) -> None:
        self.nixl, self._signal = nixl, signal
        self.posted: dict[Write, None] = {}
        """Writes that are under way."""
        self.cached: dict[SlotPair, int] = {}
        """Transfers from slot to slot that may be posted again, which costs less; least recently used first."""
        self.peers: dict[str, tuple[bytes, list[Peer]]] = {}
        """By name of an agent: what connects to it, and its memory."""
        self._stuck: list[int] = []
        """Handles that NIXL would not release."""

    def connect(self, agent: Agent, contents: HandleContents, path: str) -> Peer:
        """Make a peer's memory writable; raises TRANSPORT_FAILED."""
        connection, peers = self.peers.get(contents.name, (contents.connection, []))
        if connection != contents.connection:
            raise _unreachable(path, "another agent has its name", "make a new agent after a restart")
        self._evict(lambda slots: slots.peer.name == contents.name)  # NIXL may replace the keys of this agent
        for write in self.posted:  # these use the old keys, and must not be cached
            if write.slots and write.slots.peer.name == contents.name:
                write.slots = None
        try:
            self.nixl.load(contents)
        except Exception as e:
            if not peers:
                self.nixl.forget(contents.name)
            raise _unreachable(path, type(e).__name__, "compare NIXL's versions, and UCX_TLS on both sides") from e
        peer = Peer(agent, contents, path)
        peers.append(peer)
        self.peers[contents.name] = connection, peers
        return peer

    def begin(self, write: Write, postings: Callable[[], Sequence[Posting]]) -> None:
        """Post a write's transfers, cached or new."""
        begun, ready = False, True
        try:
            for peer in write.peers:
                if peer.lost:
                    raise peer.lost.again()
            if write.slots and (cached := self.cached.pop(write.slots, None)) is not None:
                write.handles.append(cached)
            else:
                for local, kind, remote, peer in postings():
                    # appended at once, so that it is released if the next one is refused
                    write.handles.append(self.nixl.make((local, kind), (remote, peer.memory.kind), peer.name))
            for handle in write.handles:
                begun = True
                ready &= self.nixl.post(handle)
        except Exception as e:
            self._over(write, self._lost(write.peers, e), Proof.UNPROVABLE if begun else Proof.PROVEN)
            return
        if ready:
            self._over(write)
        else:
            self.posted[write] = None

    def poll(self, write: Write) -> bool:
        """Poll a posted write; returns whether it ended."""
        try:
            for handle in write.handles:
                if not self.nixl.ask(handle):
                    return False
        except Exception as e:
            self._over(write, self._lost(write.peers, e))
        else:
            self._over(write)
        return True

    def _over(self, write: Write, error: KvprotoError | None = None, proof: Proof | None = None) -> None:
        """End a write that is complete or has failed."""
        self.posted.pop(write, None)
        if error is None and write.slots and write.slots.usable and write.slots not in self.cached:
            if len(self.cached) == _MOST_CACHED:
                self._release(self.cached.pop(next(iter(self.cached))))
            self.cached[write.slots] = write.handles.pop()
        self._release(*write.handles)
        write.handles.clear()
        write.end(error, proof or (Proof.UNPROVABLE if error else Proof.PROVEN))
        self._signal()

    def _release(self, *handles: int) -> None:
        for handle in handles:
            try:
                self.nixl.release(handle)
            except Exception:  # it is under way and cannot be cancelled, so NIXL keeps it
                self._stuck.append(handle)

    def _evict(self, which: Callable[[SlotPair], bool]) -> None:
        """Release the cached transfers of these pairs."""
        self._release(*[self.cached.pop(slots) for slots in list(self.cached) if which(slots)])

    def deregister(self, memory: ByteRange, registration: Any) -> None:
        """Forbid all further writes of this memory."""
        begin, end = memory.address, memory.address + memory.length  # NIXL may have used it for overlapping memory
        self._evict(lambda slots: slots.at < end and begin < slots.at + slots.length)
        self.nixl.deregister(registration)

    def _lost(self, peers: tuple[Peer, ...], cause: Exception) -> KvprotoError:
        """The typed error for what NIXL raised; if the peer is gone, all of its memory is lost."""
        if isinstance(cause, KvprotoError):
            return cause
        if "Disconnect" not in type(cause).__name__:
            return _failed("the write failed", cause)
        names = {peer.name for peer in peers}
        error = RemoteError(ErrorCode.PEER_LOST, "", "a connection", type(cause).__name__, "register again with it")
        for name in names:
            for peer in self.peers.get(name, (b"", []))[1]:
                peer.lost = error
        self._evict(lambda slots: slots.peer.name in names)
        return error

    def disconnect(self, peer: Peer) -> None:
        """Stop writing this peer's memory; the connection ends with the last memory of its agent."""
        _, peers = self.peers.get(peer.name, (b"", []))
        if peer not in peers:
            return
        for write in [write for write in self.posted if peer in write.peers]:
            if not self.poll(write):
                self._over(write, RemoteError(ErrorCode.ABORTED, "", "given up", "under way", ""))
        self._evict(lambda slots: slots.peer is peer)
        peers.remove(peer)
        peer.lost = LocalError(ErrorCode.TRANSPORT_FAILED, peer.path, "closed", "a write", "connect first")
        if not peers:
            del self.peers[peer.name]
            self.nixl.forget(peer.name)

    def finish(self) -> None:
        """End all writes as UNPROVABLE, forget all peers, and stop NIXL."""
        for write in self.posted:
            self._release(*write.handles)
            write.handles.clear()
            write.end(_closed(), Proof.UNPROVABLE)
        self.posted.clear()
        self._evict(lambda _: True)
        for name in self.peers:
            self.nixl.forget(name)
        for handle in self._stuck:
            with contextlib.suppress(Exception):
                self.nixl.release(handle)
        self.nixl.close()


def _failed(what: str, cause: Exception) -> LocalError:
    yours, advice = f"{type(cause).__name__}: {cause}", "look at what NIXL and UCX wrote to stderr"
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", what, yours, advice)


def _closed() -> LocalError:
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", "the agent", "closed", "")


def _unreachable(path: str, reason: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", "cannot connect", reason, advice)


# the agent


class Agent(Closing):
    """A rank's NIXL agent, to be closed; if `eager`, callers advance it. Raises NO_TRANSPORT, TRANSPORT_FAILED."""

    _transfers: Transfers
    """Made by the thread, and used by the thread that has the turn, until `_ended`."""

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        self.name = f"kvproto-{secrets.token_hex(16)}"
        self._jobs: deque[Callable[[], None]] = deque()
        self._wakeup = threading.Event()
        """Not a SimpleQueue, which may wait for ever in spite of a short timeout, as Python counts it down below 0."""
        self._sleeps = False
        """Whether the thread waits for nothing but `_wakeup`."""
        self._posted_lately = False
        """For an eager agent: whether something was posted since the thread last polled; waking it would cost more."""
        self._nixl_lock, self._ended = threading.Lock(), False
        """Held by the thread whose turn it is to call NIXL; whether NIXL has been stopped."""
        self._open: set[Registered] = set()
        """Registered memory, which must live as long as peers may write it, even if nothing else refers to it."""
        self._closed, self._queue_lock = False, threading.Lock()
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signalled, self._signal_lock = False, threading.Lock()
        """Whether `_eventfd` is readable."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="kvproto-nixl", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            os.close(self._eventfd)
            raise

    def register(self, memory: ByteRange | Any, slot_bytes: int = 0) -> Registered:
        """Register memory, in slots of `slot_bytes` if set; raises OUT_OF_RANGE without a slot, TRANSPORT_FAILED."""
        bytes_ = memory if isinstance(memory, ByteRange) else ByteRange.of(memory)
        most = min(bytes_.length, 0xFFFF_FFFF)
        if not 0 <= slot_bytes <= most:
            raise bad("slot_bytes", f"1 to {most}", slot_bytes)

        def register() -> Registered:
            registered = Registered(self, bytes_, slot_bytes, *self._transfers.nixl.register(bytes_))
            self._open.add(registered)
            return registered

        return self._call(register)

    def connect(self, region: Region, path: str) -> Peer:
        """Make a peer's region writable from here; raises NO_TRANSPORT or TRANSPORT_FAILED."""
        handle = handle_of(region, path, TransportCode.NIXL)
        try:
            contents = HandleContents.decode(bytes(handle.data))
            if contents.name == self.name:
                raise ValueError("it is our own")
            if contents.memory.length < region.length or contents.memory.kind != region.kind:
                raise ValueError("it is shorter than the region, or of another kind")
        except Exception as e:
            reason = str(e) if type(e) is ValueError else type(e).__name__
            raise _unreachable(path, reason, "send the handle as `Registered` makes it") from None
        return self._call(lambda: self._transfers.connect(self, contents, path))

    @property
    def idle(self) -> bool:
        """Whether it has no memory that peers may write, and no peer."""
        return not self._open and not self._transfers.peers

    def fileno(self) -> int:
        """Readable when a write has ended since the last `wait`; for poll, select, or a ZeroMQ poller."""
        return self._eventfd

    def wait(self, timeout: float) -> bool:
        """Wait until a write has ended, but at most `timeout` seconds; returns whether one has."""
        poller = select.poll()  # `select` knows 1024 descriptors
        poller.register(self._eventfd, select.POLLIN)
        poller.poll(timeout * 1000)
        with self._signal_lock:
            signalled, self._signalled = self._signalled, False
            if signalled:
                os.eventfd_read(self._eventfd)
        return signalled

    def close(self) -> None:
        """End all writes as UNPROVABLE, forget all peers, stop the thread."""
        with self._queue_lock:
            if self._closed:
                return
            self._closed = True
        self._wakeup.set()
        self._thread.join()
        os.close(self._eventfd)

    # the thread

    def _run(self, started: Future[None]) -> None:
        try:
            transfers = self._transfers = Transfers(Nixl(self.name), self._signal)
        except Exception as e:
            started.set_exception(e if isinstance(e, KvprotoError) else _failed("cannot start UCX", e))
            return
        started.set_result(None)
        soon, late = (_SELDOM, _SELDOM) if self.eager else (_SOON, _LATE)
        pause = soon
        while not self._closed:
            self._sleeps = True  # before `posted` is read: a thread that posts wakes this one after posting
            posted, self._posted_lately = self._posted_lately, False
            timeout = pause if transfers.posted or posted else None
            self._sleeps = timeout is None
            self._wakeup.wait(timeout)
            self._wakeup.clear()  # before jobs are read: a thread that adds one wakes this one after adding
            with self._nixl_lock:
                pause = soon if self._advance_all() else min(pause * 2, late)
        with self._nixl_lock:
            self._advance_all()
            self._ended = True
            transfers.finish()
        for registered in self._open:
            registered.forget_slots()
        self._open.clear()

    # the thread that has the turn

    def _advance_all(self) -> bool:
        """Run queued jobs, and poll writes under way; returns whether anything happened."""
        worked = self._run_jobs()
        ended = [self._transfers.poll(write) for write in list(self._transfers.posted)]
        return worked or any(ended)

    def _run_jobs(self) -> bool:
        """Run queued jobs; returns whether there were any."""
        queued = bool(self._jobs)
        while self._jobs:
            self._jobs.popleft()()
        return queued

    def _signal(self) -> None:
        with self._signal_lock:
            if not self._signalled:
                self._signalled = True
                os.eventfd_write(self._eventfd, 1)

    # any thread

    def advance(self, write: Write | None = None) -> None:
        """Run an eager agent's queued jobs and poll one write; waiting for its turn releases the GIL."""
        if not self.eager:
            return
        with self._nixl_lock:
            if self._ended:
                return
            self._run_jobs()
            if write in self._transfers.posted:
                self._transfers.poll(write)

    def completion_of(self, write: Write) -> threading.Event:
        """The event that is set when the write is over."""
        with self._queue_lock:
            write.completed = write.completed or threading.Event()
            return write.completed

    def _enqueue(self, job: Callable[[], None]) -> None:
        with self._queue_lock:
            if self._closed:
                raise _closed()
            self._jobs.append(job)
        self.advance()
        if not self.eager or (self._transfers.posted and self._sleeps):
            self._wakeup.set()

    def _call(self, work: Callable[[], T]) -> T:
        """Do work with NIXL in turn; raises what it raises, and TRANSPORT_FAILED for errors of NIXL."""
        answer: Future[T] = Future()

        def job() -> None:
            try:
                answer.set_result(work())
            except KvprotoError as e:
                answer.set_exception(e)
            except Exception as e:
                answer.set_exception(_failed("NIXL refuses", e))

        self._enqueue(job)
        return answer.result()

    def begin(self, write: Write, postings: Callable[[], Sequence[Posting]]) -> Write:

        def job() -> None:
            self._posted_lately = self.eager
            self._transfers.begin(write, postings)

        self._enqueue(job)
        return write

    def deregister(self, registered: Registered, registration: Any) -> None:
        """Forbid all writes of this memory."""
        self._call(lambda: self._transfers.deregister(registered.memory, registration))
        self._open.discard(registered)

    def disconnect(self, peer: Peer) -> None:
        """Write this peer's memory no more; raises TRANSPORT_FAILED on a closed agent."""
        self._call(lambda: self._transfers.disconnect(peer))
