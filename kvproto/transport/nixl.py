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

What is trusted. A handle is a frame with magic, length and SHA-256, then msgpack whose types, ranges and names are
checked, then NIXL's metadata, whose agent name must be the frame's own. The digest finds accidents, not malice: inside
the metadata are UCX addresses and keys that only UCX can read, and UCX ends the process on some that it did not make. A
peer that passed the session's authentication is trusted with that; do not connect handles from anyone else. After NIXL
has refused an agent's metadata half-way it refuses that agent for good: the peer makes a new one. A peer with a handle
may write the memory that is named in it, no more: in packed mode name staging memory only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import queue
import re
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

import attrs
import msgpack
import numpy as np
import numpy.typing as npt

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.process import boot_id
from kvproto.wire.enums import ErrorCode, MemoryKind, Proof, Transport
from kvproto.wire.messages import Handle, Region

__all__ = ["Agent", "Memory", "Peer", "Posting", "Registered", "Write"]

Descriptors = npt.NDArray[np.uint64]
"""[descriptor, (address, bytes, device)]"""
T = TypeVar("T")

_MAGIC = b"KVNX\x01"
_HEAD = len(_MAGIC) + 32
_MOST_METADATA = 1 << 16
_NAME = re.compile(r"kvproto-[0-9a-f]{32}")
_SOON, _LATE = 20e-6, 500e-6
"""Seconds between looks at writes that are under way: the wait doubles while none completes, up to the latter."""
_SELDOM = 2e-3
"""The same, of an eager agent's thread: for callers that do not ask."""


# memory


@attrs.frozen
class Memory:
    """Bytes of this process, on the host or on a device."""

    address: int = attrs.field(repr=False)
    length: int
    kind: MemoryKind = MemoryKind.HOST
    device: int = 0
    """CUDA ordinal in this process; 0 on the host."""
    buffer: memoryview | None = attrs.field(default=None, repr=False, eq=False)
    """On the host: the same bytes."""

    @classmethod
    def of(cls, buffer: Any) -> Memory:
        """A contiguous buffer of the host."""
        view = memoryview(buffer).cast("B")
        address = np.ndarray(view.nbytes, np.uint8, view).ctypes.data
        return cls(address, view.nbytes, buffer=view)

    def part(self, offset: int, length: int) -> Memory:
        """Bytes [offset, offset + length); raises OUT_OF_RANGE beyond."""
        if not 0 <= offset <= offset + length <= self.length:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "", f"{self.length} bytes", f"{offset} to {offset + length}", "")
        buffer = None if self.buffer is None else self.buffer[offset : offset + length]
        return Memory(self.address + offset, length, self.kind, self.device, buffer)

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Address, bytes, device: as NIXL takes it."""
        return self.address, self.length, self.device


class Registered:
    """Memory that NIXL may read and that peers with its handle may write, until it is closed."""

    def __init__(self, agent: Agent, memory: Memory, slot_bytes: int, list_: Any, metadata: bytes) -> None:
        self._agent, self.memory, self.slot_bytes, self._list = agent, memory, slot_bytes, list_
        self._metadata = metadata

    @property
    def slots(self) -> int:
        """Staging slots; 0 where the memory is none."""
        return self.memory.length // self.slot_bytes if self.slot_bytes else 0

    def slot(self, number: int, length: int) -> Memory:
        """The first bytes of a staging slot."""
        return self.memory.part(number * self.slot_bytes, length)

    @property
    def handle(self) -> Handle:
        """For `Region.handles`: about 600 bytes; names this memory alone."""
        memory = self.memory
        fields = [self._agent.name, *memory.descriptor, int(memory.kind), self.slot_bytes, self._metadata]
        body = msgpack.packb(fields)
        return Handle(transport=Transport.NIXL, data=_MAGIC + hashlib.sha256(body).digest() + body)

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
            self._agent._call(lambda nixl: nixl.deregister(list_))
            self._agent._open.discard(self)


@attrs.frozen
class _Named:
    """What a handle says."""

    name: str
    memory: Memory
    slot_bytes: int
    metadata: bytes = attrs.field(repr=False)

    @property
    def connection(self) -> bytes:
        """The part of the metadata that is the same for all memory of an agent."""
        return self.metadata.split(b"MemSection", 1)[0]


def _read(data: bytes) -> _Named:
    """A handle's bytes; raises ValueError with what is wrong."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) > _MOST_METADATA:
        raise ValueError("not a handle of NIXL")
    if hashlib.sha256(data[_HEAD:]).digest() != data[len(_MAGIC) : _HEAD]:
        raise ValueError("its digest differs")
    fields = msgpack.unpackb(data[_HEAD:])
    kinds = (str, int, int, int, int, int, bytes)
    if not isinstance(fields, list) or [type(f) for f in fields] != list(kinds):
        raise ValueError("its fields have other types")
    name, address, length, device, kind, slot_bytes, metadata = fields
    if not _NAME.fullmatch(name):
        raise ValueError("its agent has another kind of name")
    if address <= 0 or length <= 0 or address + length >= 1 << 63 or not 0 <= device < 1 << 16:
        raise ValueError("its memory is none")
    if not 0 <= slot_bytes <= length:
        raise ValueError("its slots are none")
    tagged = b"nixlSerDes|Agent" + len(name).to_bytes(8, "little") + name.encode() + b"|"
    if not metadata.startswith(tagged):
        raise ValueError("its metadata is another agent's")
    return _Named(name, Memory(address, length, MemoryKind(kind), device), slot_bytes, metadata)


# writes


class Write:
    """Bytes on their way to one peer's memory."""

    def __init__(self, agent: Agent, bytes_: int) -> None:
        self._agent, self.bytes = agent, bytes_
        self._future: Future[None] = Future()
        self._proof: Proof | None = None
        self._handles: list[int] = []
        self._peers: tuple[Peer, ...] = ()
        self._cancelled = False

    def ready(self) -> bool:
        """Whether every byte is at the peer; raises PEER_LOST, TRANSPORT_FAILED or ABORTED where that failed."""
        if not self._future.done():
            self._agent.move()
        if not self._future.done():
            return False
        self._future.result()
        return True

    def wait(self, timeout: float) -> bool:
        """The same, after at most `timeout` seconds."""
        until = time.monotonic() + timeout
        while not self.ready() and (left := until - time.monotonic()) > 0:
            wait_for([self._future], self._agent.patience(left))
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
        if self._future.done():
            return
        self._proof = proof
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)


class Peer:
    """A peer's memory, as far as this agent may write it."""

    def __init__(self, agent: Agent, named: _Named, path: str) -> None:
        self._agent, self._named, self.path = agent, named, path
        self.lost: KvprotoError | None = None
        """Why no write can succeed any more."""

    @property
    def name(self) -> str:
        """The peer's agent."""
        return self._named.name

    @property
    def memory(self) -> Memory:
        """Addresses in the peer."""
        return self._named.memory

    @property
    def slot_bytes(self) -> int:
        """Bytes of a staging slot; 0 where the memory has none."""
        return self._named.slot_bytes

    @property
    def slots(self) -> int:
        """Staging slots."""
        return self.memory.length // self.slot_bytes if self.slot_bytes else 0

    def slot(self, number: int, length: int) -> Memory:
        """The first bytes of a staging slot of the peer."""
        return self.memory.part(number * self.slot_bytes, length)

    def write(self, source: Memory, to: Memory) -> Write:
        """Post one write of memory inside a `Registered` to memory of this peer, of equal length."""
        if source.length != to.length:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "", f"{source.length} bytes", f"{to.length} bytes", "")
        local, remote = (np.array([m.descriptor], np.uint64) for m in (source, to))
        return self._agent.post([(local, source.kind, remote, self)], source.length)

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
        self._jobs: deque[Callable[[_Nixl], None]] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._rests = False
        """Whether the thread waits for the bell alone."""
        self._turn = threading.Lock()
        self._nixl: _Nixl | None = None
        self._posted: list[Write] = []
        self._open: set[Registered] = set()
        """Registered memory: it must not go away while peers may write it, even where nobody else holds it."""
        self._remotes: dict[str, tuple[bytes, list[Peer]]] = {}
        self._stuck: list[int] = []
        self._closed, self._door = False, threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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

        def work(nixl: _Nixl) -> Registered:
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
            named = _read(bytes(handle.data))
            if named.name == self.name:
                raise ValueError("it is our own")
            if named.memory.length < region.length or named.memory.kind != region.kind:
                raise ValueError("it is shorter than the region, or of another kind")
        except Exception as e:
            reason = str(e) if type(e) is ValueError else type(e).__name__
            raise _unreachable(path, reason, "send the handle as `Registered` makes it") from None

        def work(nixl: _Nixl) -> Peer:
            connection, peers = self._remotes.get(named.name, (named.connection, []))
            if connection != named.connection:
                raise _unreachable(path, "another agent has its name", "make an agent anew after a restart")
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
        readable = bool(poller.poll(timeout * 1000))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return readable

    def close(self) -> None:
        """End all writes as UNPROVABLE, forget all peers, stop the thread."""
        with self._door:
            if self._closed:
                return
            self._closed = True
        self._bell.put(None)
        self._thread.join()
        os.close(self._wake)

    # the thread

    def _run(self, started: Future[None]) -> None:
        try:
            self._nixl = _start(self.name)
        except Exception as e:
            started.set_exception(e if isinstance(e, KvprotoError) else _local("cannot start UCX", e))
            return
        started.set_result(None)
        soon, late = (_SELDOM, _SELDOM) if self._eager else (_SOON, _LATE)
        pause = soon
        while not self._closed:
            self._rests = True  # before the look at what is posted: who posts rings after it
            timeout = pause if self._posted else None
            self._rests = timeout is None
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=timeout)
            with self._turn:
                pause = soon if self._move() else min(pause * 2, late)
        with self._turn:
            self._move()
            nixl, self._nixl = self._nixl, None
            assert nixl is not None
            self._finish(nixl)
        self._open.clear()

    # whoever has the turn

    def _move(self) -> bool:
        """Do what was asked for, and look at what is under way; whether anything came of it."""
        if self._nixl is None:
            return False
        some = bool(self._jobs)
        while self._jobs:
            self._jobs.popleft()(self._nixl)
        return self._look(self._nixl) or some

    def _finish(self, nixl: _Nixl) -> None:
        for write in self._posted:
            self._release(nixl, write)
            write._end(_closed(), Proof.UNPROVABLE)
        self._posted.clear()
        for name in self._remotes:
            nixl.forget(name)
        for handle in self._stuck:
            with contextlib.suppress(Exception):
                nixl.release(handle)
        nixl.close()

    def _look(self, nixl: _Nixl) -> bool:
        """Ask after every posted write; whether one ended."""
        ended = False
        for write in list(self._posted):
            error: KvprotoError | None = None
            try:
                if not all(nixl.ask(h) for h in write._handles):
                    continue
            except Exception as e:
                error = self._lost(write._peers, e)
            self._posted.remove(write)
            self._release(nixl, write)
            write._end(error, Proof.UNPROVABLE if error else Proof.PROVEN)
            ended = True
        if ended:
            self._tell()
        return ended

    def _release(self, nixl: _Nixl, write: Write) -> None:
        for handle in write._handles:
            try:
                nixl.release(handle)
            except Exception:  # NIXL keeps it: under way, and it cannot be cancelled
                self._stuck.append(handle)
        write._handles.clear()

    def _lost(self, peers: tuple[Peer, ...], cause: Exception) -> KvprotoError:
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
        return error

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def _abandon(self, nixl: _Nixl, write: Write) -> None:
        self._look(nixl)  # it may be complete
        if write in self._posted:
            self._posted.remove(write)
            self._release(nixl, write)
        write._end(RemoteError(ErrorCode.ABORTED, "", "given up", "under way", ""), Proof.UNPROVABLE)
        self._tell()

    def _disconnect(self, nixl: _Nixl, peer: Peer) -> None:
        _, peers = self._remotes.get(peer.name, (b"", []))
        if peer not in peers:
            return
        for write in [w for w in self._posted if peer in w._peers]:
            self._abandon(nixl, write)
        peers.remove(peer)
        peer.lost = LocalError(ErrorCode.TRANSPORT_FAILED, peer.path, "closed", "a write", "connect first")
        if not peers:
            del self._remotes[peer.name]
            nixl.forget(peer.name)

    # any thread

    def move(self) -> None:
        """Of an eager agent: do what its thread would do next.

        It waits for its turn: a thread that has it needs the interpreter, which the wait leaves to it.
        """
        if self._eager:
            with self._turn:
                self._move()

    def patience(self, seconds: float) -> float:
        """How long a caller that waits leaves it to the thread."""
        return min(seconds, _SOON) if self._eager else seconds

    def _enqueue(self, job: Callable[[_Nixl], None]) -> None:
        with self._door:
            if self._closed:
                raise _closed()
            self._jobs.append(job)
        self.move()
        if self._rests or not self._eager:
            self._bell.put(None)

    def _call(self, work: Callable[[_Nixl], T]) -> T:
        """Do it with NIXL, in turn; raises what it raises, TRANSPORT_FAILED for what is NIXL's."""
        answer: Future[T] = Future()

        def job(nixl: _Nixl) -> None:
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
        write = Write(self, bytes_)
        write._peers = tuple(p for *_, p in postings)

        def job(nixl: _Nixl) -> None:
            begun, ready = False, True
            try:
                if write._cancelled:
                    raise RemoteError(ErrorCode.ABORTED, "", "given up", "not posted", "")
                for peer in write._peers:
                    if peer.lost:
                        raise peer.lost
                for posting in postings:
                    write._handles.append(nixl.make(posting))
                for handle in write._handles:
                    begun = True
                    ready &= nixl.post(handle)
            except Exception as e:
                self._release(nixl, write)
                write._end(self._lost(write._peers, e), Proof.UNPROVABLE if begun else Proof.PROVEN)
                self._tell()
                return
            if not ready:
                self._posted.append(write)
                return
            self._release(nixl, write)
            write._end(None, Proof.PROVEN)
            self._tell()

        self._enqueue(job)
        return write


class _Nixl:
    """The calls of NIXL that we use, over its bindings; raises what NIXL raises.

    Its Python wrapper sets the progress thread's delay to 0, with which that thread keeps a core busy for ever. With
    any delay it sleeps until UCX has work, and wakes by then at the latest.
    """

    def __init__(self, name: str) -> None:
        self._api = api = importlib.import_module("nixl._bindings")
        config = api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, 1000  # microseconds
        config.useListenThread, config.syncMode = False, api.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixlAgent(name, config)
        self._ucx = [self._agent.createBackend("UCX", {})]
        self._segment = {MemoryKind.HOST: api.DRAM_SEG, MemoryKind.CUDA: api.VRAM_SEG}

    def register(self, memory: Memory) -> tuple[Any, bytes]:
        """The registration, and the metadata that names this memory alone."""
        made = self._api.nixlRegDList(self._segment[memory.kind], [(*memory.descriptor, "")])
        self._agent.registerMem(made, self._ucx)
        return made, self._agent.getLocalPartialMD(made, True, self._ucx)

    def deregister(self, registration: Any) -> None:
        self._agent.deregisterMem(registration, self._ucx)

    def load(self, named: _Named) -> None:
        """Make a peer's memory known and connect."""
        if self._agent.loadRemoteMD(named.metadata) not in (named.name, named.name.encode()):
            raise ValueError("its metadata is another agent's")
        self._agent.makeConnection(named.name, self._ucx)

    def forget(self, name: str) -> None:
        """End the connection; a peer that is gone already is none."""
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(name)

    def make(self, posting: Posting) -> int:
        """A transfer, not yet begun."""
        local, kind, remote, peer = posting
        here, there = (
            self._api.nixlXferDList(self._segment[k], d) for k, d in ((kind, local), (peer.memory.kind, remote))
        )
        made: int = self._agent.createXferReq(self._api.NIXL_WRITE, here, there, peer.name, b"", self._ucx)
        return made

    def post(self, handle: int) -> bool:
        """Begin; whether it is complete already."""
        return self._complete(self._agent.postXferReq(handle, b""))

    def ask(self, handle: int) -> bool:
        """Whether it is complete."""
        return self._complete(self._agent.getXferStatus(handle))

    def _complete(self, status: Any) -> bool:
        if status not in (self._api.NIXL_SUCCESS, self._api.NIXL_IN_PROG):
            raise RuntimeError(str(status))
        return bool(status == self._api.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """End UCX now, though a traceback may keep this object: from then on it reads no memory of ours."""
        del self._agent, self._ucx


def _start(name: str) -> _Nixl:
    try:
        importlib.import_module("nixl")
    except ImportError as e:
        raise LocalError(ErrorCode.NO_TRANSPORT, "", "NIXL", "not installed", "pip install 'kvproto[nixl]'") from e
    return _Nixl(name)


def _local(what: str, cause: Exception) -> LocalError:
    yours, advice = f"{type(cause).__name__}: {cause}", "look at what NIXL and UCX wrote to stderr"
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", what, yours, advice)


def _closed() -> LocalError:
    return LocalError(ErrorCode.TRANSPORT_FAILED, "", "the agent", "closed", "")


def _unreachable(path: str, reason: str, advice: str) -> RemoteError:
    return RemoteError(ErrorCode.TRANSPORT_FAILED, f"{path}.handles", "cannot connect", reason, advice)
