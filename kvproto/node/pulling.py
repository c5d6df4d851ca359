"""A sink that reads what sources offer, with its own transports (feature PULL)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window, windows
from kvproto.errors import KvprotoError
from kvproto.node.pool import RankPool
from kvproto.node.registrar import PeerMapping, map_peer
from kvproto.session import SinkEndpoint
from kvproto.session.events import Offered, RegisterAsked
from kvproto.transport.base import Copying, Move, Transport
from kvproto.wire.enums import ErrorCode

__all__ = ["Puller"]

_RETRY = 1e-3
"""Seconds until a copy that could not start is tried again."""


@attrs.define(eq=False)
class _Pull:
    """An offer that waits for its copy, or is being read."""

    offered: Offered
    sinks: dict[int, Window]
    peer: PeerMapping | None = None
    program: CopyProgram | None = None
    copying: Copying | None = None
    error: KvprotoError | None = None
    """Why it is being stopped."""


class Puller:
    """Maps the memory of sources and reads their offers while they are leased."""

    def __init__(self, endpoint: SinkEndpoint, pool: RankPool, transports: Sequence[Transport]) -> None:
        self._endpoint, self._pool = endpoint, pool
        self._transports = transports
        self._peers: dict[int, PeerMapping] = {}
        """By source rank."""
        self._pulls: list[_Pull] = []

    @property
    def poll_interval(self) -> float | None:
        """Seconds until offers should be looked at again; None: there are none, or a descriptor tells."""
        if any(p.copying is None for p in self._pulls):
            return _RETRY
        found = [p.peer.transport.capabilities.poll_interval for p in self._pulls if p.peer is not None]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def map(self, event: RegisterAsked) -> None:
        """Map a source's memory by its first transport that works here."""
        rank = self._endpoint.rank_of(event.session)
        if rank is None:  # it has said Goodbye meanwhile
            return
        try:
            peer = map_peer(event, self._transports, self._pair(rank, event), self._pool.memories, writes=False)
        except KvprotoError as error:
            self._endpoint.refuse_register(event.session, error, time.monotonic())
            return
        self._peers[rank] = peer
        self._endpoint.accept_register(event.session, peer.transport.capabilities.code, time.monotonic())

    def offered(self, event: Offered, sinks: dict[int, Window]) -> None:
        """Read this as soon as may be; windows by this side's group id."""
        self._pulls.append(_Pull(event, sinks))

    def advance(self) -> bool:
        """Start, stop and finish copies; whether the endpoint may have something to tell."""
        before = len(self._pulls)
        self._pulls = [p for p in self._pulls if not (self._begin(p) if p.copying is None else self._finish(p))]
        used = {p.peer.asked.session for p in self._pulls if p.peer is not None}
        for rank, peer in list(self._peers.items()):
            if peer.asked.session not in used and self._endpoint.rank_of(peer.asked.session) is None:
                self._peers.pop(rank).close()
        return len(self._pulls) < before

    def _begin(self, pull: _Pull) -> bool:
        """Start a copy if it may begin; whether it is over already."""
        offered, now = pull.offered, time.monotonic()
        if not self._endpoint.wanted(offered):
            return True
        try:
            pull.peer = self._peers[offered.offer.writer]
            pull.program = pull.program or pull.peer.pair.lower(windows(offered.offer.grants), pull.sinks)
        except KvprotoError as error:
            self._endpoint.unread(offered, error, now)
            return True
        if not self._endpoint.may_read(offered, now):
            return False
        try:
            moves = [Move(pull.program, pull.peer.connection.mapped, self._pool.memories)]
            pull.copying = pull.peer.transport.start(moves)
        except KvprotoError as error:
            if error.code == ErrorCode.BUSY:
                self._endpoint.postpone(offered)
                return False
            self._endpoint.unread(offered, error, now)
            return True
        return self._finish(pull)

    def _finish(self, pull: _Pull) -> bool:
        """Say Pulled of a copy that is complete, stop one that nobody wants; whether it is over."""
        assert pull.copying is not None
        if pull.error is None and self._endpoint.wanted(pull.offered):
            try:
                done = pull.copying.done
            except KvprotoError as error:
                pull.error, done = error, False
            if done:
                # the clock after the copy: what was read beyond the lease is of no use
                self._endpoint.read(pull.offered, pull.copying.bytes, time.monotonic())
            if done or pull.error is None:
                return done
        proof = pull.copying.stop()
        if proof is not None:
            self._endpoint.unread(pull.offered, pull.error, time.monotonic(), proof)
        return proof is not None

    def _pair(self, rank: int, event: RegisterAsked) -> Pair:
        plan, source = self._endpoint.plan, self._endpoint.source
        assert plan is not None
        assert source is not None
        there = RankLayout(source, rank, {c.group: c for c in event.register.columns})
        return Pair(plan.between(rank, self._pool.layout.rank), there, self._pool.layout)

    def close(self) -> None:
        """Stop reading, then unmap."""
        for pull in self._pulls:
            while pull.copying is not None and pull.copying.stop() is None:
                pass
        self._pulls.clear()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
