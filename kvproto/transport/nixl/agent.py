"""Transport `nixl`: one-sided writes by NIXL over UCX, between hosts or over loopback.

One thread at a time has the NIXL agent: every call of NIXL is made in turn, so nothing depends on NIXL's own locking.
Callers put work into a queue and get a `Write`, which they ask from any thread. As a rule a thread of ours does the
work: a post that copies before it returns (shared memory) blocks that thread alone; NIXL lets Python run meanwhile. An
`eager` agent's callers do it themselves, as far as they come to it: a write between GPUs ends sooner than a thread
wakes.

What is complete, and what can be proved. NIXL says DONE when the bytes are at the peer: a write that is ready has no
more to arrive. A write that is released before it is ready may arrive all the same (it does, over TCP), so nothing is
known of it: UNPROVABLE. To abort with proof, post nothing more and wait for what was posted. A write that the peer's
death ended cannot be proved by this transport.

What is posted again. The transfer of a write from slot to slot is kept when the write is complete (kept.py), and
serves the next one of the same two slots and length. It is NIXL's until its write is over, and released before either
side's memory is closed or registered anew.
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
from kvproto.transport.nixl.binding import Descriptors, Nixl
from kvproto.transport.nixl.cache import SlotPair, TransferCache
from kvproto.transport.nixl.handle import Memory, Named
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["Agent", "Peer", "Posting", "Registered", "Write"]

T = TypeVar("T")

_SOON, _LATE = 20e-6, 500e-6
"""Seconds between looks at writes that are under way: the wait doubles while none completes, up to the latter."""
_SELDOM = 2e-3
"""The same, of an eager agent's thread: for callers that do not ask."""
_MOST_KEPT = 1 << 14
"""Transfers to post again."""


# memory


@attrs.frozen
class _Slot(Memory):
    """The first bytes of a staging slot."""

    owner: _Slotted | None = attrs.field(default=None, repr=False, eq=False)


class _Slotted:
    """Memory, of it equal staging slots, if any."""

    def __init__(self, agent: Agent, memory: Memory, slot_bytes: int) -> None:
        self._agent, self.memory = agent, memory
        self.slot_bytes = slot_bytes
        """Of each slot; 0 where there is none."""
        self.slots = memory.length // slot_bytes if slot_bytes else 0
        """Staging slots."""
        self._made: dict[int, _Slot] = {}

    def slot(self, number: int, length: int) -> Memory:
        """The first bytes of a staging slot."""
        known = self._made.get(number)
        if known is None or known.length != length:
            m = self.memory.part(number * self.slot_bytes, length)
            known = self._made[number] = _Slot(m.address, length, m.kind, m.device, m.buffer, self)
        return known


class Registered(_Slotted):
    """Memory that NIXL may read and that peers with its handle may write, until it is closed."""

    def __init__(self, agent: Agent, memory: Memory, slot_bytes: int, list_: Any, metadata: bytes) -> None:
        super().__init__(agent, memory, slot_bytes)
        self._list, self._metadata = list_, metadata

    @property
    def closed(self) -> bool:
        """Whether it may no longer be read or written."""
        return self._list is None

    @property
    def handle(self) -> Handle:
        """For `Region.handles`: about 600 bytes; names this memory alone."""
        named = Named(self._agent.name, self.memory, self.slot_bytes, self._metadata)
        return Handle(transport=Transport.NIXL, data=named.encode())

    def region(self, id: int, device: str | None = None) -> Region:
        """What Register says of it; `device` is the UUID of CUDA memory."""
        memory = self.memory
        return Region(
            id=id, base=0, length=memory.length, kind=memory.kind, device=device, boot=boot_id(), handles=(self.handle,)
        )

    def close(self) -> None:
        """Deregister, when no write of it is under way; peers can write it no more."""
        if self._list is not None:
            list_, self._list = self._list, None
            self._agent._call(lambda nixl: self._agent._deregister(nixl, self.memory, list_))
            self._agent._open.discard(self)
            self._made.clear()  # their views of the buffer


# writes


class Write:
    """Bytes on their way to one peer's memory."""

    def __init__(self, agent: Agent, bytes_: int, peers: tuple[Peer, ...], slots: SlotPair | None = None) -> None:
        self._agent, self.bytes, self._peers, self._slots = agent, bytes_, peers, slots
        self._proof: Proof | None = None
        self._error: KvprotoError | None = None
        self._over = False
        """The last to be set: who sees it sees the others."""
        self._bell: threading.Event | None = None
        """Of those who wait, if any."""
        self._handles: list[int] = []
        self._cancelled = False

    def ready(self) -> bool:
        """Whether every byte is at the peer; raises PEER_LOST, TRANSPORT_FAILED or ABORTED where that failed."""
        if not self._over:
            self._agent.move(self)
            if not self._over:
                return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float) -> bool:
        """The same, after at most `timeout` seconds."""
        until = time.monotonic() + timeout
        while not self.ready() and (left := until - time.monotonic()) > 0:
            bell = self._agent._bell_of(self)  # before the look at whether it is over: who ends it rings after that
            if not self._over:
                bell.wait(self._agent.patience(left))
        return self.ready()

    @property
    def proof(self) -> Proof | None:
        """What is known once it is over: PROVEN, no byte can arrive any more, or UNPROVABLE; None while under way."""
        return self._proof

    def abandon(self) -> None:
        """Give it up: PROVEN where it was complete or never posted, else UNPROVABLE; `proof` says which, soon."""
        self._cancelled = True
        with contextlib.suppress(KvprotoError):  # a closed agent has ended it
            self._agent._enqueue(lambda nixl: self._agent._abandon(nixl, self))

    def _end(self, error: KvprotoError | None, proof: Proof) -> None:
        if self._over:
            return
        self._proof, self._error = proof, error
        self._over = True
        if self._bell is not None:
            self._bell.set()


class Peer(_Slotted):
    """A peer's memory, as far as this agent may write it; its addresses are the peer's."""

    def __init__(self, agent: Agent, named: Named, path: str) -> None:
        super().__init__(agent, named.memory, named.slot_bytes)
        self.name, self.path = named.name, path
        """Of the peer's agent; of the region."""
        self.lost: KvprotoError | None = None
        """Why no write can succeed any more."""

    def write(self, source: Memory, to: Memory) -> Write:
        """Post one write of memory inside a `Registered` to memory of this peer, of equal length."""
        if source.length != to.length:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "", f"{source.length} bytes", f"{to.length} bytes", "")
        slots = None
        if isinstance(source, _Slot) and isinstance(to, _Slot) and to.owner is self:
            own = source.owner
            if isinstance(own, Registered) and own._agent is self._agent:
                slots = SlotPair(own, source.address, self, to.address, source.length)
        write = Write(self._agent, source.length, (self,), slots)

        def make(nixl: Nixl) -> Iterator[int]:
            local, remote = (np.array([m.descriptor], np.uint64) for m in (source, to))
            yield nixl.make((local, source.kind), (remote, self.memory.kind), self.name)

        return self._agent._post(write, make)

    def close(self) -> None:
        """Write no more; what is under way becomes UNPROVABLE. With the agent's last memory the connection ends."""
        self._agent._call(lambda nixl: self._agent._disconnect(nixl, self))


Posting = tuple[Descriptors, MemoryKind, Descriptors, Peer]


class Agent:
    """NIXL in this process; one for a rank. Close it, or leave a `with` block.

    With `eager`, whoever posts a write or asks after one moves NIXL on. Raises NO_TRANSPORT where NIXL is not
    installed, TRANSPORT_FAILED where UCX cannot start.
    """

    def __init__(self, eager: bool = False) -> None:
        self._eager = eager
        self.name = f"kvproto-{secrets.token_hex(16)}"
        self._jobs: deque[Callable[[Nixl], None]] = deque()
        self._bell = threading.Event()
        """A SimpleQueue may wait for ever in spite of a short timeout: Python counts it down below 0."""
        self._rests = False
        """Whether the thread waits for the bell alone."""
        self._lively = False
        """Of an eager agent: whether something was posted since the thread last looked; to wake it costs more."""
        self._turn = threading.Lock()
        self._nixl: Nixl | None = None
        self._posted: dict[Write, None] = {}
        self._kept = TransferCache(_MOST_KEPT)
        self._open: set[Registered] = set()
        """Registered memory: it must not go away while peers may write it, even where nobody else holds it."""
        self._remotes: dict[str, tuple[bytes, list[Peer]]] = {}
        self._stuck: list[int] = []
        self._closed, self._door = False, threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told, self._telling = False, threading.Lock()
        """Whether that is readable."""
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

    def register(self, memory: Memory | Any, slot_bytes: int = 0) -> Registered:
        """Register memory, or a contiguous buffer; with `slot_bytes` it is staging memory of so many bytes a slot.

        Raises OUT_OF_RANGE where no slot fits, TRANSPORT_FAILED where NIXL refuses the memory.
        """
        some = memory if isinstance(memory, Memory) else Memory.of(memory)
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
        handle = next((h for h in region.handles if h.transport == Transport.NIXL), None)
        if handle is None:
            raise RemoteError(ErrorCode.NO_TRANSPORT, f"{path}.handles", "NIXL", "none", "use a common transport")
        try:
            named = Named.decode(bytes(handle.data))
            if named.name == self.name:
                raise ValueError("it is our own")
            if named.memory.length < region.length or named.memory.kind != region.kind:
                raise ValueError("it is shorter than the region, or of another kind")
        except Exception as e:
            reason = str(e) if type(e) is ValueError else type(e).__name__
            raise _unreachable(path, reason, "send the handle as `Registered` makes it") from None

        def work(nixl: Nixl) -> Peer:
            connection, peers = self._remotes.get(named.name, (named.connection, []))
            if connection != named.connection:
                raise _unreachable(path, "another agent has its name", "make an agent anew after a restart")
            self._let_go(nixl, lambda slots: slots.peer.name == named.name)  # NIXL may put new keys for old ones
            for write in self._posted:  # these use the old ones, once
                if write._slots and write._slots.peer.name == named.name:
                    write._slots = None
            try:
                nixl.load(named)
            except Exception as e:
                if not peers:
                    nixl.forget(named.name)
                raise _unreachable(path, type(e).__name__, "compare NIXL's versions, and UCX_TLS on both sides") from e
            peer = Peer(self, named, path)
            peers.append(peer)
            self._remotes[named.name] = connection, peers
            return peer

        return self._call(work)

    def fileno(self) -> int:
        """Readable when a write has ended since the last `wait`; for poll, select, or a ZeroMQ poller."""
        return self._wake

    def wait(self, timeout: float) -> bool:
        """Wait until a write has ended, or `timeout` seconds; whether one has."""
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
            started.set_exception(e if isinstance(e, KvprotoError) else _local("cannot start UCX", e))
            return
        started.set_result(None)
        soon, late = (_SELDOM, _SELDOM) if self._eager else (_SOON, _LATE)
        pause = soon
        while not self._closed:
            self._rests = True  # before the look at what is posted: who posts rings after it
            lively, self._lively = self._lively, False
            timeout = pause if self._posted or lively else None
            self._rests = timeout is None
            self._bell.wait(timeout)
            self._bell.clear()  # before the look at jobs: who adds one rings after it
            with self._turn:
                pause = soon if self._move() else min(pause * 2, late)
        with self._turn:
            self._move()
            nixl, self._nixl = self._nixl, None
            assert nixl is not None
            self._finish(nixl)
        for registered in self._open:
            registered._made.clear()
        self._open.clear()

    # whoever has the turn

    def _move(self) -> bool:
        """Do what was asked for, and look at what is under way; whether anything came of it."""
        if self._nixl is None:
            return False
        some = self._work(self._nixl)
        ended = [self._look(self._nixl, write) for write in list(self._posted)]
        return some or any(ended)

    def _work(self, nixl: Nixl) -> bool:
        """Do what was asked for; whether anything was."""
        some = bool(self._jobs)
        while self._jobs:
            self._jobs.popleft()(nixl)
        return some

    def _finish(self, nixl: Nixl) -> None:
        for write in self._posted:
            self._release(nixl, write)
            write._end(_closed(), Proof.UNPROVABLE)
        self._posted.clear()
        self._let_go(nixl, lambda _: True)
        for name in self._remotes:
            nixl.forget(name)
        for handle in self._stuck:
            with contextlib.suppress(Exception):
                nixl.release(handle)
        nixl.close()

    def _look(self, nixl: Nixl, write: Write) -> bool:
        """Ask after a posted write; whether it ended."""
        try:
            for handle in write._handles:
                if not nixl.ask(handle):
                    return False
        except Exception as e:
            self._over(nixl, write, self._lost(nixl, write._peers, e))
        else:
            self._over(nixl, write)
        return True

    def _over(self, nixl: Nixl, write: Write, error: KvprotoError | None = None, proof: Proof | None = None) -> None:
        """A write is complete, or has failed with an error."""
        self._posted.pop(write, None)
        if error is None and write._slots and write._slots.usable:
            spare = self._kept.keep(write._slots, write._handles.pop())
            write._handles += [] if spare is None else [spare]
        self._release(nixl, write)
        write._end(error, proof or (Proof.UNPROVABLE if error else Proof.PROVEN))
        self._tell()

    def _release(self, nixl: Nixl, write: Write) -> None:
        for handle in write._handles:
            self._drop(nixl, handle)
        write._handles.clear()

    def _drop(self, nixl: Nixl, handle: int) -> None:
        try:
            nixl.release(handle)
        except Exception:  # NIXL keeps it: under way, and it cannot be cancelled
            self._stuck.append(handle)

    def _let_go(self, nixl: Nixl, which: Callable[[SlotPair], bool]) -> None:
        for handle in self._kept.let_go(which):
            self._drop(nixl, handle)

    def _deregister(self, nixl: Nixl, memory: Memory, registration: Any) -> None:
        begin, end = memory.address, memory.address + memory.length  # NIXL may have taken it for another's overlapping
        self._let_go(nixl, lambda slots: slots.at < end and begin < slots.at + slots.length)
        nixl.deregister(registration)

    def _lost(self, nixl: Nixl, peers: tuple[Peer, ...], cause: Exception) -> KvprotoError:
        """The typed error of what NIXL raised; where it says that the peer is gone, all its memory is."""
        if isinstance(cause, KvprotoError):
            return cause
        if "Disconnect" not in type(cause).__name__:
            return _local("the write failed", cause)
        names = {p.name for p in peers}
        error = RemoteError(ErrorCode.PEER_LOST, "", "a connection", type(cause).__name__, "register again with it")
        for name in names:
            for peer in self._remotes.get(name, (b"", []))[1]:
                peer.lost = error
        self._let_go(nixl, lambda slots: slots.peer.name in names)
        return error

    def _tell(self) -> None:
        with self._telling:
            if not self._told:
                self._told = True
                os.eventfd_write(self._wake, 1)

    def _abandon(self, nixl: Nixl, write: Write) -> None:
        if write in self._posted and not self._look(nixl, write):  # it may be complete
            self._over(nixl, write, RemoteError(ErrorCode.ABORTED, "", "given up", "under way", ""))

    def _disconnect(self, nixl: Nixl, peer: Peer) -> None:
        _, peers = self._remotes.get(peer.name, (b"", []))
        if peer not in peers:
            return
        for write in [w for w in self._posted if peer in w._peers]:
            self._abandon(nixl, write)
        self._let_go(nixl, lambda slots: slots.peer is peer)
        peers.remove(peer)
        peer.lost = LocalError(ErrorCode.TRANSPORT_FAILED, peer.path, "closed", "a write", "connect first")
        if not peers:
            del self._remotes[peer.name]
            nixl.forget(peer.name)

    # any thread

    def move(self, write: Write | None = None) -> None:
        """Of an eager agent: do what was asked for, and look at one write, where its thread would look at all.

        It waits for its turn: a thread that has it needs the interpreter, which the wait leaves to it.
        """
        if not self._eager:
            return
        with self._turn:
            nixl = self._nixl
            if nixl is None:
                return
            self._work(nixl)
            if write in self._posted:
                self._look(nixl, write)

    def _bell_of(self, write: Write) -> threading.Event:
        with self._door:
            write._bell = write._bell or threading.Event()
            return write._bell

    def patience(self, seconds: float) -> float:
        """How long a caller that waits leaves it to the thread."""
        return min(seconds, _SOON) if self._eager else seconds

    def _enqueue(self, job: Callable[[Nixl], None]) -> None:
        with self._door:
            if self._closed:
                raise _closed()
            self._jobs.append(job)
        self.move()
        if not self._eager or (self._posted and self._rests):
            self._bell.set()

    def _call(self, work: Callable[[Nixl], T]) -> T:
        """Do it with NIXL, in turn; raises what it raises, TRANSPORT_FAILED for what is NIXL's."""
        answer: Future[T] = Future()

        def job(nixl: Nixl) -> None:
            try:
                answer.set_result(work(nixl))
            except KvprotoError as e:
                answer.set_exception(e)
            except Exception as e:
                answer.set_exception(_local("NIXL refuses", e))

        self._enqueue(job)
        return answer.result()

    def post(self, postings: list[Posting], bytes_: int) -> Write:
        """One write of descriptor lists, each to one peer."""

        def make(nixl: Nixl) -> Iterator[int]:
            for local, kind, remote, peer in postings:
                yield nixl.make((local, kind), (remote, peer.memory.kind), peer.name)

        return self._post(Write(self, bytes_, tuple(p for *_, p in postings)), make)

    def _post(self, write: Write, make: Callable[[Nixl], Iterator[int]]) -> Write:
        """Post transfers that are kept or made."""

        def job(nixl: Nixl) -> None:
            begun, ready = False, True
            self._lively = self._eager
            try:
                if write._cancelled:
                    raise RemoteError(ErrorCode.ABORTED, "", "given up", "not posted", "")
                for peer in write._peers:
                    if peer.lost:
                        raise peer.lost
                if (kept := self._kept.take(write._slots)) is not None:
                    write._handles.append(kept)
                else:
                    for made in make(nixl):
                        write._handles.append(made)  # so that it is released if the next one is refused
                for handle in write._handles:
                    begun = True
                    ready &= nixl.post(handle)
            except Exception as e:
                error = self._lost(nixl, write._peers, e)
                self._over(nixl, write, error, Proof.UNPROVABLE if begun else Proof.PROVEN)
                return
            if ready:
                self._over(nixl, write)
            else:
                self._posted[write] = None

        self._enqueue(job)
        return write


def _local(what: str, cause: Exception) -> LocalError:
    yours, advice = f"{type(cause).__name__}: {cause}", "look at what NIXL and UCX wrote to stderr"
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", what, yours, advice)


def _closed() -> LocalError:
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", "the agent", "closed", "")


def _unreachable(path: str, reason: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", "cannot connect", reason, advice)
