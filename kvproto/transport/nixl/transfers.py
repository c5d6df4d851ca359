"""The transfers that NIXL has for one agent: under way, cached to be posted again, or stuck; and its peers.

Nothing here locks, because callers have the agent's turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.transport.nixl.binding import Nixl
from kvproto.transport.nixl.handle import ByteRange, Named
from kvproto.transport.nixl.regions import Make, Peer, SlotPair, Write
from kvproto.wire.enums import ErrorCode, Proof

if TYPE_CHECKING:
    from kvproto.transport.nixl.agent import Agent

__all__ = ["Transfers", "closed", "failed", "unreachable"]

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

    def connect(self, nixl: Nixl, agent: Agent, named: Named, path: str) -> Peer:
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
