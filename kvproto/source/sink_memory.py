"""The memory of a source's sinks: mapped when it is registered, and unmapped when its session has ended."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError, RemoteError
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.rank.registration import PeerMapping, map_peer, register
from kvproto.session import SourceEndpoint
from kvproto.session.descriptions import Described
from kvproto.session.registering import attestation_of
from kvproto.session.source import SourceSession
from kvproto.session.timers import Timer
from kvproto.transport import default
from kvproto.transport.base import Transport
from kvproto.wire.enums import Access, ErrorCode, Feature
from kvproto.wire.messages import Region, Register

_CHECK_INTERVAL = 0.25
"""Seconds between two checks of the processes of sinks on this host."""


class SinkMemory:
    """The mappings of sinks' memory, by session and epoch."""

    def __init__(
        self,
        endpoint: SourceEndpoint,
        pool: Pool,
        transports: Sequence[Transport],
        defer: Callable[[Callable[[], Pair], Callable[[Pair | KvprotoError], None]], None],
    ) -> None:
        """`defer` runs work outside turns: lowering a pair takes long if its rows lie in many ways."""
        self._endpoint, self._pool, self._transports, self._defer = endpoint, pool, tuple(transports), defer
        self._mapped: dict[tuple[int, int], PeerMapping] = {}
        self.unmapping: set[tuple[int, int]] = set()
        """Mappings that sinks have asked to take back, until no copy uses them."""
        self._epoch = 1
        """The epoch of this rank's own memory, which sinks read."""
        self.asleep = False
        self._check_timer: Timer | None = None
        """The timer of the next check of the processes of sinks."""
        self._ended: set[int] = set()
        """Sessions whose sink's process had ended at the last check."""

    def map(self, session: SourceSession, register: Register, described: Described) -> None:
        """Map a sink's memory with the first of its transports that works here, or let the sink read ours."""
        columns = {column.group: column for column in register.columns}
        sink, source = RankLayout(described.sink, described.ranks[1], columns), self._pool.layout

        def pair() -> Pair:
            lowered = Pair(described.routes, source, sink)
            assert lowered.nothing.runs is not None  # computes a cached property here, outside the turn
            return lowered

        if described.of_source is self._endpoint.stated:
            self._defer(pair, partial(self._reach, session, register, described))
        else:
            self._reach(session, register, described, self._changed(described))

    def _reach(
        self, session: SourceSession, register: Register, described: Described, pair: Pair | KvprotoError
    ) -> None:
        if not session.open:  # it has ended in the meantime
            return
        try:
            if isinstance(pair, KvprotoError):
                raise pair
            if described.of_source is not self._endpoint.stated:
                raise self._changed(described)
            if pair.source is not self._pool.layout:  # the pool was replaced in the meantime
                pair = Pair(pair.routes, self._pool.layout, pair.sink)
            if Feature.PULL in session.features:
                self._expose(session, register, described, pair)
                return
            own, features = None if self.asleep else self._pool.memories, session.features
            owned = attestation_of(session, Access.WRITE)
            peer = map_peer(register, described, self._transports, pair, own, owned, writes=True, features=features)
        except KvprotoError as error:
            session.holder.refuse(error.kept())
            return
        self._mapped[session.session, register.epoch] = peer
        self._watch()
        capabilities = peer.transport.capabilities
        process = self._endpoint.process if capabilities.death_is_proof else None
        session.accept_register(capabilities.code, peer.connection.link, process, peer)

    def _watch(self) -> None:
        """Check from time to time whether the processes of sinks have ended, if any of them is on this host."""
        if self._check_timer is None and any(peer.connection.ended is not None for peer in self._mapped.values()):
            self._check_timer = self._endpoint.timers.at(machine.monotonic() + _CHECK_INTERVAL, self._check_processes)

    def _check_processes(self, now: float) -> None:
        self._check_timer = None
        for number in {key[0] for key, peer in self._mapped.items() if (ended := peer.connection.ended) and ended()}:
            session = self._endpoint.sessions.get(number)
            if session is not None and session.open and number in self._ended:
                session.lose("its process has ended")
            elif number not in self._ended:  # its last frames may not have been received yet
                self._ended.add(number)
        self._ended &= {key[0] for key in self._mapped}
        self._watch()

    def _changed(self, described: Described) -> RemoteError:
        """The error for a Register that followed an earlier Description of this side."""
        mine, yours = (stated.digest.hex() for stated in (self._endpoint.stated, described.of_source))
        return RemoteError(ErrorCode.DESCRIPTION_MISMATCH, "source", mine, yours, "describe again")

    def _expose(self, session: SourceSession, register: Register, described: Described, pair: Pair) -> None:
        """Let the sink read: none of its memory is mapped, and an empty copy waits for the rows."""
        transport = next((t for t in self._transports if t.capabilities.reads), None) or default(self._pool.memories)
        mapping = PeerMapping(register, described, transport, pair, reads=True)
        regions = self._regions(mapping)  # raises before anything is answered
        session.accept_register(transport.capabilities.code, mapping=mapping)
        self._mapped[mapping.key] = mapping
        if not self.asleep and self._unread(session):
            self._register(session, regions)

    def _unread(self, session: SourceSession) -> bool:
        """Whether the memory that a sink is to read was not registered with it yet."""
        newest = session.owner.newest
        return newest is None or newest.memory != self._epoch

    def _regions(self, peer: PeerMapping) -> tuple[Region, ...]:
        """The regions of this rank's memory, as registered with a sink."""
        nothing = peer.pair.nothing
        return register((peer.transport,), {} if self.asleep else self._pool.memories, nothing, nothing.runs)[0].regions

    def _register(self, session: SourceSession, regions: tuple[Region, ...]) -> None:
        """Register this rank's memory with a sink, for it to read."""
        columns = tuple(self._pool.layout.columns.values())
        session.owner.register(self._epoch, self._epoch, regions, columns, machine.monotonic())

    def sleep(self) -> None:
        """Take back at once the memory that sinks read; end the sessions of sinks that cannot return it."""
        self.asleep, now = True, machine.monotonic()
        for session in list(self._endpoint.sessions.values()):
            if not session.open or not session.pulls:
                continue
            if Feature.EPOCHS not in session.features:
                session.goodbye("the memory moves")
                continue
            owner = session.owner
            for owned in list(owner.epochs.values()):
                owner.unregister(owned, at_once=True, now=now)

    def wake(self, pool: Pool, epoch: int) -> None:
        """Serve the mapped sinks from another pool; end the sessions in which that is not possible."""
        self.asleep, self._pool, self._epoch = False, pool, epoch
        for (number, _), peer in list(self._mapped.items()):
            session = self._endpoint.sessions.get(number)
            if session is None or not session.open or peer.described.of_source is not self._endpoint.stated:
                continue  # it registers again once it has this side's new Description
            try:
                peer.pair = Pair(peer.pair.routes, pool.layout, peer.pair.sink)
                if not peer.reads:
                    peer.prepare(pool.memories, writes=True)
                elif self._unread(session):
                    self._register(session, self._regions(peer))
            except KvprotoError as error:
                session.give_up(error.kept())

    def holders(self, epoch: int) -> list[str]:
        """The names of sinks that may still read a pool that was taken back, for display."""
        names, now = [], machine.monotonic()
        for session in [reader for reader in self._endpoint.sessions.values() if reader.pulls]:
            held = any(owned.memory == epoch for owned in session.owner.epochs.values())
            if held and (session.open or any(attempt.lent(now) for attempt in session.attempts.values())):
                names.append(session.name)
        return names

    def unmap(self, used: Iterable[PeerMapping]) -> None:
        """Unmap epochs that sinks have taken back and the memory of ended sessions, unless `used` by copies."""
        ended = self._endpoint.over
        orphaned = {key for key in self._mapped if key[0] in ended} if ended else set()
        for key in (orphaned | self.unmapping).difference(peer.key for peer in used):
            if (peer := self._mapped.pop(key, None)) is not None:
                peer.connection.close()
            self.unmapping.discard(key)
            if (session := self._endpoint.sessions.get(key[0])) is not None:
                session.holder.unmapped(key[1])
        ended.intersection_update(number for number, _ in self._mapped)

    def close(self) -> None:
        """Unmap everything; no copy may be under way."""
        for peer in self._mapped.values():
            peer.connection.close()
