"""The sessions of one sink rank with one source replica; connections are the source's addresses.

A pool of the sink is registered with every routed source rank, and is free when none holds it. A rank holds it from
Register until it answers Unregistered as PROVEN, until its process is dead, or until its session has ended and its
transfers are proven to write no more (KVP-EPO-FREE).
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Connected, Disconnected, Event, Recovered, Refused, Suspected
from kvproto.planning.compare import first_difference
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.session import limits
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party, Stated
from kvproto.session.endpoint import Endpoint, EndpointCalls
from kvproto.session.intent import useful
from kvproto.session.pull import SinkPull
from kvproto.session.push import SinkPush, Unpacker, check_outcome
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.session.registering import Holder, Registration
from kvproto.session.sink import SinkSession
from kvproto.session.table import SessionState, TransferState
from kvproto.session.timers import SharedTimers, Timer, Timers
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, Transport, word

_STREAM_FEATURES = frozenset({Feature.STAGED, Feature.INLINE})
_AWAITED = {SessionState.GREETED: "Hello", SessionState.DESCRIBING: "Describe", SessionState.REGISTERING: "Register"}
"""The request that a session waits to have answered, by its state."""


@attrs.frozen(eq=False)
class Exposed:
    """A pool of this rank, as it is registered with source ranks."""

    epoch: int
    """The epoch of its first registration."""
    columns: tuple[m.Columns, ...]
    registration: Callable[[int], Registration]
    """Makes the registration for one source rank."""


class SinkCalls(EndpointCalls, Protocol):
    """Calls of an endpoint to its rank, made within a call of the rank, which may call back only later."""

    def needs_turn(self) -> None:
        """Call `settle` and then `to_send` soon: there are frames to send, or a timer has run."""

    def planned(self, event: Connected) -> None:
        """Note the plan with a source rank, under which the pool has to be registered."""

    def ready(self) -> None:
        """Every routed rank has mapped the current pool: transfers may start."""

    def useful(self, transfer: SinkTransfer) -> None:
        """Items below token `transfer.useful` (None: all) are of use to a transfer that lacks some."""

    def offered(self, attempt: SinkAttempt) -> None:
        """A source rank offers its items: once `may_read`, copy them and call `read` or `unread`."""

    def arrived(self, transfer: SinkTransfer, done: tuple[m.Done, ...], seconds: float) -> None:
        """Every required rank has said Done, or its offer was read, in `seconds` since the Transfer."""

    def lost(self, transfer: SinkTransfer, proof: Proof) -> None:
        """The transfer failed with `transfer.error`; its items are free if PROVEN, otherwise after `proven`."""

    def proven(self, transfer: SinkTransfer) -> None:
        """The items of a transfer that was lost as UNPROVABLE are free: every writer is dead or gave late proof."""


class SinkEndpoint(Endpoint):
    """All sessions of one sink rank with one source replica."""

    calls: SinkCalls

    def __init__(
        self,
        me: Party,
        geometry: Geometry,
        features: tuple[Feature, ...],
        seed: str,
        calls: SinkCalls,
        proving: Collection[int] = (),
        replica: tuple[str, int] | None = None,
        timers: Timers | None = None,
    ) -> None:
        """`seed` is the address of any source rank; the others follow from its Welcome and the plan.

        `replica` is the engine and replica that must answer there (None: any). `proving` are the transports with which
        the end of the writer's process is proof that none of its writes can arrive any more (KVP-REG-DEATH). `timers`
        is a heap that endpoints share (None: one of its own). Call `expose` before `dial`.
        """
        super().__init__(me, geometry)
        self.calls = calls
        if timers is not None:
            self.timers = SharedTimers(timers, calls.needs_turn)
        self._seed, self._features, self._proving, self._replica = seed, features, proving, replica
        self._pulls, self._streams = Feature.PULL in features, not _STREAM_FEATURES.isdisjoint(features)
        self.exposed: Exposed | None = None
        """The pool that new transfers go into, if any."""
        self.source: Geometry | None = None
        self.plan: Plan | None = None
        self.digests = b"", b""
        """Digests of the Descriptions that the plan is made from, the source's first."""
        self.ready = False
        self.suspect = False
        """Whether a source rank is suspect, so that no transfer starts (KVP-SES-SUSPECT)."""
        self.refused: KvprotoError | None = None
        self.over = False
        """Whether a session has ended, so that only a new endpoint can become ready."""
        self.forgotten = False
        """Whether it is over only because a run of the source that goes on has forgotten a session."""
        self.gone = ""
        """The source rank whose session ended first, for display."""
        self.sessions: dict[Any, SinkSession] = {}
        self._ranks: dict[int, SinkSession] = {}
        """Sessions whose plan is known, by source rank."""
        self.transfers: dict[SinkTransfer, None] = {}
        """Transfers under way, in order."""
        self._changed: dict[SinkTransfer, None] = {}
        """Of these, the ones to examine."""
        self._unpacking: dict[SinkTransfer, None] = {}
        """Of these, the ones whose last bytes are still being unpacked, which ends without notice."""
        self._unproven: dict[SinkTransfer, None] = {}
        """Transfers that were lost as UNPROVABLE."""
        self._asking: Timer | None = None
        self.elsewhere: Callable[[m.Message], None] = lambda message: None
        """Called with a message of another session than its connection's, which may prove something (KVP-SES-OTHER)."""
        self._unhandled: deque[tuple[SinkSession, Event]] = deque()
        """Events of sessions that the endpoint has not acted on yet."""

    def dial(self, now: float) -> None:
        """Greet the seed; the other ranks follow from its Welcome and the plan."""
        expected = ""
        if self._replica is not None:
            engine, replica = self._replica
            expected = f"{engine}{f' replica {replica}' * bool(replica)} at {self._seed}"
        self._greet(self._seed, now, expected)

    def _greet(self, address: str, now: float, expected: str = "", rank: int | None = None) -> None:
        if address not in self.sessions:
            session = SinkSession(self, address, self._features, self._proving, self._replica, rank)
            self.sessions[address], session.expected = session, expected
            session.hello(now)

    def _note_suspects(self) -> None:
        self.suspect = any(session.suspect and session.open for session in self.sessions.values())

    def send(self, conn: Hashable, frame: bytes) -> None:
        if not self.out:
            self.calls.needs_turn()
        self.out.append((conn, frame))

    def tell(self, session: SinkSession, event: Event) -> None:
        """Queue an event of a session, for the endpoint itself and for the engine."""
        self._unhandled.append((session, event))
        if isinstance(event, Suspected | Recovered):
            self._note_suspects()

    def ended(self, session: SinkSession, attempt: SinkAttempt) -> None:
        """Note that an attempt has changed."""
        self._changed[attempt.transfer] = None

    def closed(self, session: SinkSession) -> None:
        """Note that a session has ended, which loses what it has not delivered."""
        self.ready, self.over, self.gone = False, True, self.gone or located(session)
        self.forgotten = self.forgotten or session.forgotten
        self._note_suspects()
        self._changed |= self.transfers

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Take one frame from the source rank at this address."""
        session = self.sessions.get(str(conn))
        message = None
        try:
            message = decode(frame)
            if session is not None:
                self._prove_late(session, message)
                if getattr(message, "session", None) not in (None, session.session):
                    self.elsewhere(message)
                if session.open and session.concerned(message):
                    session.receive(message, now)
        except RemoteError as error:
            head = self._report(conn, session, frame, message, error)
            if session is not None and head.delivery != "reply" and head.session == session.session:
                # what its transfer lacks now will not come again
                named: SinkAttempt | None = session.attempts.get(head.sequence or 0)
                if named is not None and named.done is None:
                    self._fail(named.transfer, error, now)
        self._after(now)

    def prove(self, message: m.Message) -> None:
        """Take a message that came over a connection of another endpoint as proof about one of these sessions."""
        for session in self.sessions.values():
            self._prove_late(session, message)

    def _prove_late(self, session: SinkSession, message: m.Message) -> None:
        """Accept Done, and Drained or Unregistered with PROVEN, as proof however late they come (KVP-EPO-PROOF)."""
        if not self._unproven:
            return
        match message:
            case m.Done(session=session.session):
                self._prove(
                    session, lambda attempt: attempt.sequence == message.sequence and is_right(attempt, message)
                )
            case m.Drained(session=session.session, proof=Proof.PROVEN):
                self._prove(session, lambda attempt: attempt.sequence == message.sequence)
            case m.Unregistered(session=session.session, proof=Proof.PROVEN):
                pools = [owned.memory for owned in session.owner.epochs.values() if owned.asking == message.request]
                self._prove(session, lambda attempt: attempt.transfer.into in pools)

    def _ask_late(self, now: float) -> None:
        """Repeat the Abort of unproven transfers, as a source that was stopped or cut off may return (KVP-END-LATE)."""
        attempts = [a for transfer in self._unproven for a in transfer.unproven if a.owned.delivery.provable]
        for attempt in sorted(attempts, key=lambda a: (a.session.session, a.sequence)):
            attempt.session.abort_late(attempt.sequence)
        self._asking = self.timers.at(now + limits.PING_SILENCE, self._ask_late) if attempts else None

    def _prove(self, session: SinkSession, covers: Callable[[SinkAttempt], bool]) -> None:
        """Note that no write of a session can arrive any more into the unproven attempts that the proof covers."""
        for transfer in list(self._unproven):
            transfer.unproven = [
                a
                for a in transfer.unproven
                if a.session is not session or not (a.owned.delivery.provable and covers(a))
            ]
            if not transfer.unproven:
                del self._unproven[transfer]
                self.calls.proven(transfer)
        if not self._unproven and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def features(self) -> tuple[int, ...]:
        """The features that all sessions have."""
        first, *others = {session.features for session in self.sessions.values()} or {tuple(Feature)}
        return tuple(f for f in first if all(f in features for features in others)) if others else first

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of all ranks, by name."""
        used = {session.transport for session in self._ranks.values()}
        return tuple(sorted(word(Transport, code).lower() for code in used if code is not None))

    def streamed(self, transfer: SinkTransfer | None = None) -> dict[int, int]:
        """The transport of each source rank whose bytes come as a stream; for a transfer, as when it was requested."""
        streamed: dict[int, int] = {}
        for rank, session in self._ranks.items() if self._streams else ():
            by = session.streamed_by
            if transfer is not None:
                by = transfer.parts[rank].owned.delivery.streamed_by if rank in transfer.parts else None
            if by is not None:
                streamed[rank] = by
        return streamed

    def transfer(
        self,
        key: bytes,
        content: bytes,
        grants: dict[int, m.Grants],
        now: float,
        unpackers: Mapping[int, Unpacker] | None = None,
        fetch: Any = None,
    ) -> SinkTransfer:
        """Send a Transfer to every required rank, for `fetch`, the caller's record of it.

        `grants` are by group id; `unpackers` are for the streams of the ranks that are `streamed`. Raises LocalError,
        and sends nothing: UNEXPECTED_MESSAGE before `ready`, BUSY or TOO_LARGE beyond the limits of a source.
        """
        if not self.ready or self.plan is None or self.exposed is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "registered memory", "none yet", "wait for Connected")
        if self.suspect:
            advice = "try again when it answers"
            raise LocalError(ErrorCode.BUSY, "", "no new transfer with a suspect source", "one", advice)
        transfer, requests = SinkTransfer(fetch, self.exposed, now), []
        for rank in self.plan.required(self.me.rank):
            transfers = self._ranks[rank].transfers
            attempt, request = transfers.compose(now, transfer, key, content, grants)
            if attempt.session.intent is not None:
                attempt.session.intent.take(attempt)
            transfer.parts[rank] = attempt
            requests.append((transfers, attempt, request))
        for (transfers, attempt, request), rank in zip(requests, transfer.parts, strict=True):
            if attempt.whole:
                attempt.owned.delivery.begin(attempt, (unpackers or {}).get(rank))
            transfers.ask(attempt, request, now)
        self.transfers[transfer] = None
        return transfer

    def grant(
        self,
        transfer: SinkTransfer,
        grants: Mapping[int, m.Grants],
        now: float,
        unpackers: Mapping[int, Unpacker] | None = None,
    ) -> None:
        """Name items of a transfer that lacks some: `grants` holds everything granted so far, by group id.

        Grants are sent as soon as they may be, but to ranks that are `streamed` only when all items are named, which
        needs `unpackers`. Harmless once the transfer has ended.
        """
        for rank, attempt in transfer.parts.items() if transfer in self.transfers and transfer.error is None else ():
            if attempt.session.intent is not None and attempt.session.open:
                begin = partial(attempt.owned.delivery.begin, attempt, (unpackers or {}).get(rank))
                packed = attempt.owned.delivery.streamed_by is not None
                attempt.session.intent.grant(attempt, grants, now, begin, packed)
        self._after(now)

    def hindrances(self, transfer: SinkTransfer | None = None) -> list[str]:
        """Reasons why a transfer waits, by source rank, for display; None for one that was not requested yet."""
        if transfer is not None and transfer in self.transfers:
            asked = [attempt.session for attempt in transfer.parts.values() if attempt.state == TransferState.ASKED]
            return [f"no answer to Transfer from {located(session)}" for session in asked]
        waits, error = [], None
        for session in self.sessions.values():
            if (awaited := _AWAITED.get(session.state)) is not None:
                waits.append(f"no answer to {awaited} from {located(session)}")
            elif session.suspect and session.open:
                waits.append(f"nothing heard from {located(session)}, which is suspect")
            elif error is None and (error := disagreement(session, self.sessions.values())) is not None:
                waits.append(f"{error.path} is {error.mine} and {error.yours}")
        return waits

    def abort(self, transfer: SinkTransfer, error: KvprotoError, now: float) -> None:
        """Stop a transfer; `lost` follows, with what is known about its writes."""
        self._fail(transfer, error, now)
        self._after(now)

    def _fail(self, transfer: SinkTransfer, error: KvprotoError, now: float) -> None:
        """Abort the parts that have not arrived, except for those being read, as Abort states that nothing is read."""
        if transfer not in self.transfers:
            return
        self._changed[transfer] = None
        transfer.error = transfer.error or error
        for attempt in transfer.parts.values():
            pending = attempt.done is None and attempt.proof is None and not attempt.reading
            if pending and attempt.session.open:
                attempt.session.transfers.abort(attempt, now, str(transfer.error))

    def accept_register(self, session: SinkSession, transport: Transport, now: float) -> None:
        """Report that the memory of `map_memory` is mapped."""
        session.part(Holder).accept(transport, None)
        self._after(now)
        for offer in session.part(SinkPull).take_early():
            self.receive(session.conn, encode(offer), now)

    def refuse_register(self, session: SinkSession, error: KvprotoError, now: float) -> None:
        """Report that the memory of `map_memory` cannot be mapped."""
        session.part(Holder).refuse(error)
        self._after(now)

    def unmapped(self, session: SinkSession, epoch: int, now: float) -> None:
        """Report that the memory of `unmap_memory` is unmapped."""
        session.part(Holder).unmapped(epoch)
        self._after(now)

    def writers(self) -> dict[SinkSession, m.Process]:
        """The live processes that write this rank's memory and whose end is proof, by session."""
        writers: dict[SinkSession, m.Process] = {}
        for session in self.sessions.values():
            for owned in session.owner.epochs.values():
                push = owned.delivery
                if isinstance(push, SinkPush) and push.process is not None and not push.dead:
                    writers[session] = push.process
        return writers

    def died(self, session: SinkSession, now: float) -> None:
        """Report that the writer's process of a session has ended, so that none of its writes can arrive any more."""
        for delivery in session.deliveries:
            if isinstance(delivery, SinkPush):
                delivery.dead = True
        session.lose("its process has ended")
        self._after(now)
        self._prove(session, lambda attempt: True)

    # pools

    def unsettled(self) -> None:
        self.ready = False

    def adaptable(self, geometry: Geometry) -> bool:
        """Whether its sessions can go on with another pool of this geometry (feature EPOCHS)."""
        routed: list[SinkSession | None] = self._routed()
        if geometry != self.geometry:
            routed += self.sessions.values()
        return bool(routed) and all(session is not None and _adaptable(session) for session in routed)

    def expose(self, exposed: Exposed, now: float, geometry: Geometry | None = None) -> None:
        """Register a pool for new transfers once all ranks have mapped it; a changed `geometry` is planned first."""
        self.exposed, self.ready = exposed, False
        if geometry is not None and geometry != self.geometry:
            self.geometry, self.stated = geometry, Stated.of(geometry, self.stated.version + 1)
            for session in filter(_adaptable, list(self.sessions.values())):
                session.part(Describing).describe(now)
        self._after(now)

    def give_back(self, exposed: Exposed, at_once: bool, now: float) -> None:
        """Take a pool back from sources that can return it; with `at_once`, transfers into it end with POOL_MOVED."""
        if exposed is self.exposed:
            self.exposed, self.ready = None, False
        for session in filter(_adaptable, list(self.sessions.values())):
            for owned in list(session.owner.epochs.values()):
                if owned.memory is exposed:
                    session.owner.unregister(owned, at_once, now)
        self._after(now)

    def holders(self, exposed: Exposed) -> list[str]:
        """Parties that may still read or write a pool, for display; it is free once there are none (KVP-EPO-FREE)."""
        names = [session.name for session in self.sessions.values() if self._holds(session, exposed)]
        unproven = [attempt for transfer in self._unproven if transfer.into is exposed for attempt in transfer.unproven]
        under_way = any(transfer.into is exposed for transfer in self.transfers)
        ours = any(not attempt.owned.delivery.provable for attempt in unproven)
        return names + ["transfers that are not over"] * (under_way or ours)

    def given_back(self, exposed: Exposed) -> bool:
        """Whether every source rank that mapped a pool has reported that it is unmapped."""
        return all(o.memory is not exposed for s in self.sessions.values() for o in s.owner.epochs.values())

    def outdated(self, exposed: Exposed) -> bool:
        """Whether a source rank mapped a pool under an earlier Description, of whose epoch it accepts no more."""
        return any(
            owned.memory is exposed and owned.described.of_source.version != session.described.of_source.version
            for session in self._routed()
            if session is not None
            for owned in session.owner.epochs.values()
        )

    def _holds(self, session: SinkSession, exposed: Exposed) -> bool:
        held = [owned for owned in session.owner.epochs.values() if owned.memory is exposed]
        if not held or any(isinstance(delivery, SinkPush) and delivery.dead for delivery in session.deliveries):
            return False
        attempts = [a for transfer in self._unproven for a in transfer.unproven if a.owned.delivery.provable]
        unproven = any(attempt.session is session for attempt in attempts)
        return session.open or unproven or any(owned.unprovable for owned in held)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the source ranks' Descriptions that new transfers are planned by."""
        return tuple([session.described.of_source.version for session in self._routed() if session is not None])

    def _routed(self) -> list[SinkSession | None]:
        """The sessions of routed ranks, None for a rank without one."""
        return [self._ranks.get(rank) for rank in self.plan.required(self.me.rank)] if self.plan is not None else []

    def _register(self, now: float) -> bool:
        """Register the current pool with routed ranks that lack it, one Register at a time; whether there were any."""
        exposed = self.exposed
        if exposed is None or self.ready or self.refused is not None:
            return False
        due = [session for session in self._routed() if session is not None and self._due(session, exposed)]
        for session in due:
            try:
                session.register(exposed.epoch, exposed, exposed.columns, exposed.registration(session.peer.rank), now)
            except KvprotoError as error:  # the memory cannot be exposed to this source
                session.give_up(error.kept())
        return bool(due)

    def _all_ready(self) -> bool:
        """Whether every routed rank has mapped the current pool."""
        current = [each.owner.current if each is not None and each.ready else None for each in self._routed()]
        known = bool(current) and all(owned is not None and owned.memory is self.exposed for owned in current)
        agreed = known and all(each is not None and self._agrees(each) for each in self._routed())
        return agreed and self.exposed is not None and not self.outdated(self.exposed)

    def _due(self, session: SinkSession, exposed: Exposed) -> bool:
        """Whether to register this pool with this session now."""
        newest = session.owner.newest
        known = newest is not None and newest.memory is exposed
        may = session.state == SessionState.DESCRIBED or _adaptable(session)
        return may and self._agrees(session) and not known and not session.owner.registering

    def _agrees(self, session: SinkSession) -> bool:
        """Whether a session's plan is made from the current Descriptions."""
        pending = session.part(Describing).pending
        return not pending and session.described.digests == self.digests == (self.digests[0], self.stated.digest)

    # reads

    def wanted(self, attempt: SinkAttempt) -> bool:
        """Whether an offer is still wanted; if not, a copy of it should be stopped."""
        transfer = attempt.transfer
        return transfer in self.transfers and transfer.error is None and attempt.lease is not None

    def may_read(self, attempt: SinkAttempt, now: float) -> bool:
        """Begin to read an offer, if its lease allows it; after True, call `read` or `unread` (KVP-PUL-READ)."""
        lease = attempt.lease if self.wanted(attempt) else None
        if lease is None or not lease.fresh(now):
            return False
        lease.reading = True
        self._watch(attempt, now)
        return True

    def _watch(self, attempt: SinkAttempt, now: float) -> None:
        """Fail a copy that outlasts its lease, or set the timer to check that."""
        if attempt.transfer.error is not None or attempt.lease is None or not attempt.reading:
            return
        if attempt.lease.over(now):
            error = RemoteError(ErrorCode.DEADLINE, "lease", "a copy under way", "over", "make a new ticket")
            self._fail(attempt.transfer, error, now)
        else:
            self.timers.at(attempt.lease.end, partial(self._watch, attempt))

    def postpone(self, attempt: SinkAttempt) -> None:
        """Undo `may_read`, as the copy could not begin yet."""
        if attempt.transfer in self.transfers:
            attempt.stop_reading(Proof.PROVEN)

    def read(self, attempt: SinkAttempt, count: int, now: float) -> None:
        """Report a complete copy of an offer, of `count` bytes; after the end of its lease it is of no use."""
        if attempt.lease is not None and attempt.lease.over(now):
            self._watch(attempt, now)
        if attempt.transfer not in self.transfers or attempt.transfer.error is not None or not attempt.session.open:
            self.unread(attempt, None, now)
            return
        attempt.session.part(SinkPull).pulled(attempt, count)
        self._after(now)

    def unread(self, attempt: SinkAttempt, error: KvprotoError | None, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Report a copy of an offer that ended before it was complete; `error` is the reason if it was still wanted."""
        if attempt.transfer in self.transfers:
            attempt.stop_reading(proof)
            self._fail(attempt.transfer, error or LocalError(ErrorCode.ABORTED, "", "", ""), now)
        self._after(now)

    # what follows from a frame, a timer or a call

    def _after(self, now: float) -> None:
        if self._unhandled or not self.ready:
            self._act_on_events(now)
        if not self.ready and self.plan is not None and self._all_ready():
            self.ready = True
            self.calls.ready()
        for session in self.sessions.values() if self._streams else ():
            session.advance()
        if self._unpacking:
            self._changed |= self._unpacking
        while self._changed:
            changed, self._changed = self._changed, {}
            for transfer in changed:
                if transfer in self.transfers:
                    self._progress(transfer, now)
        for session in self.sessions.values() if self._pulls else ():
            session.unmap_unused()
        if self._unhandled or not self.ready:
            self._act_on_events(now)

    def _act_on_events(self, now: float) -> None:
        while self._unhandled or self._register(now):
            if self._unhandled:
                self._conclude(*self._unhandled.popleft(), now)

    def _conclude(self, session: SinkSession, event: Event, now: float) -> None:
        if isinstance(event, Connected):
            self._planned(session, now)
            self.calls.planned(event)
            return
        if isinstance(event, Refused):
            self.refused = event.error
        elif isinstance(event, Disconnected) and session.closed_in != SessionState.READY:
            advice = self.advice(str(session.conn))
            lost = RemoteError(ErrorCode.PEER_LOST, "", f"a session with {session.name}", event.reason, advice)
            self.refused = self.refused or lost
        self.calls.report(event)

    def _planned(self, session: SinkSession, now: float) -> None:
        """Act on a plan: register if there are routes, and greet the other ranks that have some."""
        described, rank = session.described, session.peer.rank
        known = self._ranks.setdefault(rank, session)
        if known is not session:
            mine, yours = f"rank {rank} at {known.conn}", f"rank {rank} at {session.conn}"
            advice = "give each rank a different address"
            session.give_up(RemoteError(ErrorCode.WRONG_PEER, "rank", mine, yours, advice))
            return
        if (conflict := disagreement(session, self.sessions.values(), unchanged=True)) is not None:
            session.part(Describing).refuse(conflict)
            return
        if described.digests != self.digests or (self.exposed is not None and self.outdated(self.exposed)):
            self.plan, self.source, self.digests = described.plan, described.source, described.digests
            self.ready = False
        for other in described.writers:
            if other not in session.endpoints:
                yours, advice = str(sorted(session.endpoints)), "list every rank in Welcome"
                self.refused = RemoteError(ErrorCode.COVERAGE, "endpoints", f"rank {other}", yours, advice)
            elif other not in self._ranks and session.endpoints[other] != session.conn:
                address = session.endpoints[other]
                self._greet(address, now, f"{attrs.evolve(session.peer, rank=other)} at {address}", other)

    def _progress(self, transfer: SinkTransfer, now: float) -> None:
        """Report offers of a transfer, fail it if it cannot succeed any more, and report its end."""
        attempts = transfer.parts.values()
        for attempt in attempts if transfer.error is None else ():
            if transfer.error is None and attempt.error is not None:
                self._fail(transfer, attempt.error, now)
            if transfer.error is None and not attempt.session.open and attempt.done is None:
                unheard = all(other.state == TransferState.ASKED for other in attempts)
                transfer.unheard = attempt.session.forgotten and unheard
                self._fail(transfer, attempt.session.revoked or gone(located(attempt.session)), now)
            if transfer.error is None and attempt.lease is not None and not attempt.lease.reported:
                attempt.lease.reported = True
                self.calls.offered(attempt)
        if transfer.error is None and (tokens := useful(attempts, transfer.useful)) != transfer.useful:
            transfer.useful = tokens
            self.calls.useful(transfer)
        for attempt in attempts:
            if (attempt.state != TransferState.ENDED and attempt.session.open) or attempt.reading:
                return
        if not self._stopped(transfer):
            self._unpacking[transfer] = None
            return
        self._unpacking.pop(transfer, None)
        del self.transfers[transfer]
        self._end(transfer, now)
        for attempt in attempts:
            attempt.settled, attempt.ask = True, None
            attempt.session.forget()

    @staticmethod
    def _stopped(transfer: SinkTransfer) -> bool:
        """Whether all bytes of a transfer are here, or it is lost, and this side writes none of them any more."""
        deliveries = [(attempt, attempt.owned.delivery) for attempt in transfer.parts.values()]
        try:
            for attempt, delivery in deliveries if transfer.error is None else ():
                if not delivery.finish(attempt):
                    return False
        except KvprotoError as error:
            transfer.error = error.kept()
        stopped = [delivery.stop(attempt) for attempt, delivery in deliveries]
        return False not in stopped

    def _end(self, transfer: SinkTransfer, now: float) -> None:
        attempts = transfer.parts.values()
        if transfer.error is None:
            done = {attempt.done.writer: attempt.done for attempt in attempts if attempt.done is not None}
            self.calls.arrived(transfer, tuple([done[writer] for writer in sorted(done)]), now - transfer.started)
            return
        transfer.unproven = [attempt for attempt in attempts if not attempt.owned.delivery.free(attempt)]
        if transfer.unproven:
            self._unproven[transfer] = None
            if self._asking is None:
                self._asking = self.timers.at(now, self._ask_late)
        self.calls.lost(transfer, Proof.UNPROVABLE if transfer.unproven else Proof.PROVEN)


def is_right(attempt: SinkAttempt, done: m.Done) -> bool:
    """Whether a late Done says what the routes of its pair promise: any other proves nothing (KVP-TRN-WRITER)."""
    try:
        check_outcome(attempt.owned.described, attempt.session.features, done)
    except RemoteError:
        return False
    return True


def _adaptable(session: SinkSession) -> bool:
    return session.state == SessionState.READY and Feature.EPOCHS in session.features


def located(session: SinkSession) -> str:
    """A source rank and its address, for display."""
    return f"{session.name} at {session.conn}" if session.known else session.name


def gone(rank: str) -> RemoteError:
    """The error for a transfer from a source rank that is gone."""
    mine, advice = "a source that stays until the transfer is over", "compute the prompt again, under a new ticket"
    return RemoteError(ErrorCode.PEER_LOST, "", mine, f"{rank}, which is gone", advice)


def disagreement(
    session: SinkSession, sessions: Collection[SinkSession], unchanged: bool = False
) -> RemoteError | None:
    """The error for a source rank whose Description is not that of another rank, if there is one.

    With `unchanged`, ranks are compared only while both state version 1: a change reaches the ranks of a replica one
    after another, and until it has reached all of them they differ rightly (KVP-DSC-RANKS).
    """
    if not session.planned:
        return None
    stated = session.described.of_source
    for other in sessions:
        if not (other.open and other.planned):
            continue
        known = other.described.of_source
        if unchanged and (known.version, stated.version) != (1, 1):
            continue
        if known.digest != stated.digest:
            path, one, another = first_difference(known.geometry, stated.geometry)
            mine, yours = f"{one} at {other.name}", f"{another} at {session.name}"
            advice = "ranks of one replica state different Descriptions: give all of them the same geometry"
            return RemoteError(ErrorCode.DESCRIPTION_MISMATCH, path, mine, yours, advice)
    return None
