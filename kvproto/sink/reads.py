"""Reads of items that sources offer, by the sink's own transports (feature PULL)."""

from collections.abc import Sequence

import attrs

from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window, windows
from kvproto.errors import KvprotoError
from kvproto.planning.plan import Route
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.rank.registration import PeerMapping, map_peer
from kvproto.session import SinkEndpoint
from kvproto.session.descriptions import Described
from kvproto.session.records import SinkAttempt
from kvproto.session.registering import attestation_of
from kvproto.session.sink import SinkSession
from kvproto.transport.base import Copying, Move, Transport
from kvproto.wire.enums import Access, ErrorCode
from kvproto.wire.messages import Offer, Register

_RETRY = 1e-3
"""Seconds before a copy that could not start is tried again."""
_POLL = 1e-4
"""Seconds between looks at a copy that has to end before memory is unmapped."""


@attrs.define(eq=False)
class _Pull:
    """An offer that waits for its copy, or is being read."""

    attempt: SinkAttempt
    offer: Offer
    sinks: dict[int, Window]
    into: Pool
    routes: tuple[Route, ...]
    peer: PeerMapping | None = None
    program: CopyProgram | None = None
    copying: Copying | None = None
    error: KvprotoError | None = None
    """The reason why it is being stopped."""


class Puller:
    """Maps the memory of sources and reads their offers while they are leased."""

    def __init__(self, endpoint: SinkEndpoint, transports: Sequence[Transport]) -> None:
        self._endpoint, self._transports = endpoint, transports
        self._peers: dict[tuple[SinkSession, int], PeerMapping] = {}
        """The mapped memory of sources, by session and epoch."""
        self.unmapping: set[tuple[SinkSession, int]] = set()
        """Mappings that sources have asked to take back, until nothing reads them."""
        self._pulls: list[_Pull] = []

    @property
    def busy(self) -> bool:
        """Whether offers wait for their copies, or are being read."""
        return bool(self._pulls)

    @property
    def poll_interval(self) -> float | None:
        """Seconds until `advance` should be called; None if there are no offers, or a descriptor announces progress."""
        if any(p.copying is None for p in self._pulls):
            return _RETRY
        intervals = [p.peer.transport.capabilities.poll_interval for p in self._pulls if p.peer is not None]
        return min((seconds for seconds in intervals if seconds is not None), default=None)

    def map(self, session: SinkSession, register: Register, described: Described, pool: Pool, asleep: bool) -> None:
        """Map a source's memory with its first transport that works here, to read it into `pool` or a later one."""
        if not session.open:  # it has said Goodbye in the meantime
            return
        try:
            there = RankLayout(described.source, session.peer.rank, {c.group: c for c in register.columns})
            pair = Pair(described.routes, there, pool.layout)
            own = None if asleep else pool.memories
            owned = attestation_of(session, Access.READ)
            peer = map_peer(register, described, self._transports, pair, own, owned, writes=False)
        except KvprotoError as error:
            self._endpoint.refuse_register(session, error.kept(), machine.monotonic())
            return
        self._peers[session, register.epoch] = peer
        self._endpoint.accept_register(session, peer.transport.capabilities.code, machine.monotonic())

    def offered(self, attempt: SinkAttempt, sinks: dict[int, Window], into: Pool, routes: tuple[Route, ...]) -> None:
        """Read an offer as soon as possible, by these routes; `sinks` are this side's windows by group id."""
        assert attempt.lease is not None
        self._pulls.append(_Pull(attempt, attempt.lease.offer, sinks, into, routes))

    def advance(self) -> bool:
        """Start, stop and finish copies; whether any has ended, so that the endpoint may have events."""
        if not (self._pulls or self._peers or self.unmapping):
            return False
        before = len(self._pulls)
        self._pulls = [p for p in self._pulls if not (self._begin(p) if p.copying is None else self._finish(p))]
        used = {(p.attempt.session, p.offer.epoch) for p in self._pulls if p.copying is not None}
        over = {key for key in self._peers if not key[0].open}
        for key in (over | self.unmapping) - used:
            if (peer := self._peers.pop(key, None)) is not None:
                peer.connection.close()
            if key in self.unmapping:
                self.unmapping.discard(key)
                self._endpoint.unmapped(*key, machine.monotonic())
        return len(self._pulls) < before

    def _begin(self, pull: _Pull) -> bool:
        """Start a copy if it may begin; whether it has already ended."""
        attempt, now = pull.attempt, machine.monotonic()
        if not self._endpoint.wanted(attempt):
            return True
        try:
            pull.peer = self._peers[attempt.session, pull.offer.epoch]
            if pull.program is None:
                pair = pull.peer.pair
                if pair.sink is not pull.into.layout or pair.routes != pull.routes:
                    pair = Pair(pull.routes, pair.source, pull.into.layout)
                pull.program = pair.lower(windows(pull.offer.grants), pull.sinks)
        except KvprotoError as error:
            self._endpoint.unread(attempt, error.kept(), now)
            return True
        if not self._endpoint.may_read(attempt, now):
            return False
        try:
            moves = [Move(pull.program, pull.peer.connection.mapped, pull.into.memories)]
            pull.copying = pull.peer.transport.start(moves)
        except KvprotoError as error:
            if error.code == ErrorCode.BUSY:
                self._endpoint.postpone(attempt)
                return False
            self._endpoint.unread(attempt, error.kept(), now)
            return True
        return self._finish(pull)

    def _finish(self, pull: _Pull) -> bool:
        """Report a complete copy as Pulled, and stop one that is not wanted; whether it has ended."""
        assert pull.copying is not None
        if pull.error is None and self._endpoint.wanted(pull.attempt):
            try:
                done = pull.copying.done
            except KvprotoError as error:
                pull.error, done = error.kept(), False
            if done:
                # the time is taken after the copy: what was read after the lease ended cannot be used
                self._endpoint.read(pull.attempt, pull.copying.bytes, machine.monotonic())
            if done or pull.error is None:
                return done
        proof = pull.copying.stop()
        if proof is not None:
            self._endpoint.unread(pull.attempt, pull.error, machine.monotonic(), proof)
        return proof is not None

    def close(self) -> None:
        """Stop reading, then unmap."""
        for pull in self._pulls:
            while pull.copying is not None and pull.copying.stop() is None:
                machine.sleep(_POLL)
        self._pulls.clear()
        for peer in self._peers.values():
            peer.connection.close()
        self._peers.clear()
