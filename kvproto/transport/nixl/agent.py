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

import os
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from kvproto.errors import KvprotoError, LocalError
from kvproto.transport.base import no_handle
from kvproto.transport.nixl.binding import Descriptors, Nixl
from kvproto.transport.nixl.handle import ByteRange, Named
from kvproto.transport.nixl.regions import Make, Peer, Registered, Write
from kvproto.transport.nixl.transfers import Transfers, closed, failed, unreachable
from kvproto.wire.enums import ErrorCode, MemoryKind
from kvproto.wire.enums import Transport as TransportCode
from kvproto.wire.messages import Region

__all__ = ["Agent", "Posting"]

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
            named = Named.decode(bytes(handle.data))
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
