"""The sessions of one sink rank with one source replica; connections are the source's addresses.

A pool of the sink is registered with every routed source rank, and is free when none holds it. A rank holds it from
Register until it answers Unregistered as PROVEN, until its process is dead, or until its session has ended and its
transfers are proven to write no more (KVP-EPO-FREE).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import Any

import attrs

from kvproto import events as told
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.planning.compare import first_difference
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.session import events as e
from kvproto.session import limits
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party, Stated
from kvproto.session.endpoint import Endpoint
from kvproto.session.intent import SinkIntent, useful
from kvproto.session.ping import PingPart
from kvproto.session.pull import SinkPull
from kvproto.session.push import SinkPush, Unpacker
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.session.registering import Holder
from kvproto.session.sink import SinkSession
from kvproto.session.stream import Registration
from kvproto.session.table import SessionState, TransferState
from kvproto.session.timers import Timer
from kvproto.session.transfers import SinkTransfers
from kvproto.wire import decode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, Transport

__all__ = ["OURS", "Exposed", "SinkEndpoint", "gone"]

_STREAMS = frozenset({Feature.STAGED, Feature.INLINE})
_AWAITED = {SessionState.GREETED: "Hello", SessionState.DESCRIBING: "Describe", SessionState.REGISTERING: "Register"}
"""The request that a session waits to have answered, by its state."""
OURS = 0
"""A session number that no session has; it stands for this side's own copies, which no peer's death ends."""


@attrs.frozen(eq=False)
class Exposed:
    """A pool of this rank, as it is registered with source ranks."""

    epoch: int
    """The epoch of its first registration."""
    columns: tuple[m.Columns, ...]
    registration: Callable[[int], Registration]
    """Makes the registration for one source rank."""


class SinkEndpoint(Endpoint):
    """All sessions of one sink rank with one source replica."""

    def __init__(
        self, me: Party, geometry: Geometry, features: tuple[Feature, ...], seed: str,
        proving: Collection[int] = (), replica: tuple[str, int] | None = None,
    ) -> None:  # fmt: skip
        """`seed` is the address of any source rank; the others follow from its Welcome and the plan.

        `replica` is the engine and replica that must answer there (None: any). `proving` are the transports with which
        the end of the writer's process is proof that none of its writes can arrive any more (KVP-REG-DEATH). Call
        `expose` before `dial`.
        """
        super().__init__(me, geometry)
        self.exposed: Exposed | None = None
        """The pool that new transfers go into, if any."""
        self.plan: Plan | None = None
        self.digests = b"", b""
        """Digests of the Descriptions that the plan is made from, the source's first."""
        self.ready = False
        self.refused: KvprotoError | None = None
        self.sessions: dict[Any, SinkSession] = {}
        """Sessions by address."""
        self._ranks: dict[int, SinkSession] = {}
        """Sessions whose plan is known, by source rank."""
        self._wants: dict[int, SinkTransfer] = {}
        self._unproven: dict[int, tuple[object, set[tuple[int, int]]]] = {}
        """By transfer that was Lost as UNPROVABLE: its pool, and the session and sequence of each unproven part."""
        self._seed, self._features, self._proving, self._replica = seed, features, proving, replica
        self._pulls, self._streams = Feature.PULL in features, not _STREAMS.isdisjoint(features)
        self.source: Geometry | None = None
        self.over = False
        """Whether a session has ended, so that only a new endpoint can become ready."""
        self.gone = ""
        """The source rank whose session ended first, for display."""
        self._changed: set[int] = set()
        """Transfers that have changed."""
        self._unpacking: set[int] = set()
        """Transfers whose last bytes are still being unpacked, which ends without notice."""
        self._asking: Timer | None = None
        self._unhandled: list[tuple[SinkSession, e.Event]] = []
        """Events of sessions that the endpoint has not acted on yet."""
        self._next = 1

    def dial(self, now: float) -> None:
        """Greet the seed; the other ranks follow from its Welcome and the plan."""
        expected = ""
        if self._replica is not None:
            engine, replica = self._replica
            expected = f"{engine}{f' replica {replica}' * bool(replica)} at {self._seed}"
        self._greet(self._seed, now, expected)

    def _greet(self, address: str, now: float, expected: str = "") -> None:
        if address not in self.sessions:
            session = SinkSession(self, address, self._features, self._proving, self._replica)
            self.sessions[address], session.expected = session, expected
            session.hello(now)

    def tell(self, session: SinkSession, event: e.Event) -> None:
        """Queue an event of a session, for the endpoint itself and for the engine."""
        self._unhandled.append((session, event))

    def ended(self, session: SinkSession, attempt: SinkAttempt) -> None:
        """Note that an attempt has changed."""
        self._changed.add(attempt.transfer)

    def closed(self, session: SinkSession) -> None:
        """Note that a session has ended, which loses what it has not delivered."""
        self.ready, self.over, self.gone = False, True, self.gone or located(session)
        self._changed.update(self._wants)

    def returned(self, conn: Hashable, now: float) -> None:
        """Send Ping on a connection that broke and came back, perhaps to another run of the source (KVP-SES-BACK)."""
        session = self.sessions.get(str(conn))
        if session is not None and session.open and session.has(PingPart):
            session.part(PingPart).ask(now)

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Take one frame from the source rank at this address."""
        session = self.sessions.get(str(conn))
        message = None
        try:
            message = decode(frame)
            if session is not None:
                self._prove_late(session, message)
                if session.open and session.concerned(message):
                    session.receive(message, now)
        except RemoteError as error:
            head = self._report(conn, session, frame, message, error)
            if session is not None and head.delivery != "reply" and head.session == session.session:
                # what its transfer lacks now will not come again
                found = session.attempts.get(head.sequence or 0)
                want = self._wants.get(found.transfer) if found and found.attempt == head.attempt else None
                self._fail(want, error, now)
        self._after(now)

    def _prove_late(self, session: SinkSession, message: m.Message) -> None:
        """Accept Done, and Drained or Unregistered with PROVEN, as proof however late they come (KVP-EPO-PROOF)."""
        if not self._unproven:
            return
        match message:
            case m.Done(session=session.session) | m.Drained(session=session.session, proof=Proof.PROVEN):
                self._prove({(session.session, message.sequence)})
            case m.Unregistered(session=session.session, proof=Proof.PROVEN):
                pools = [each.memory for each in session.owner.epochs.values() if each.asking == message.request]
                parts = (missing for into, missing in self._unproven.values() if into in pools)
                self._prove({part for missing in parts for part in missing if part[0] == session.session})

    def _ask_late(self, now: float) -> None:
        """Repeat the Abort of unproven transfers, as a source that was stopped or cut off may return (KVP-END-LATE)."""
        parts = sorted({part for _, missing in self._unproven.values() for part in missing if part[0] != OURS})
        for number, sequence in parts:
            self._numbered(number).abort_late(sequence)
        self._asking = self.timers.at(now + limits.PING_SILENCE, self._ask_late) if parts else None

    def _prove(self, proven: Collection[tuple[int, int]]) -> None:
        for transfer, (_, missing) in list(self._unproven.items()):
            missing.difference_update(proven)
            if not missing:
                del self._unproven[transfer]
                self._events.append(e.Proven(transfer))
        if not self._unproven and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    @property
    def suspect(self) -> bool:
        """Whether a source rank is suspect, so that no transfer starts (KVP-SES-SUSPECT)."""
        return any(session.suspect and session.open for session in [*self.sessions.values()])  # from any thread

    def features(self) -> tuple[int, ...]:
        """The features that all sessions have."""
        every = [session.features for session in self.sessions.values()] or [tuple(Feature)]
        return tuple(f for f in every[0] if all(f in some for some in every))

    def streamed(self, number: int | None = None) -> dict[int, int]:
        """The transport of each source rank whose bytes come as a stream; for a transfer, as when it was requested."""
        if number is None:
            found = {rank: session.streamed_by for rank, session in self._ranks.items()}
        else:
            want = self._wants.get(number)
            found = {rank: part.delivery.streamed_by for rank, part in (want.parts if want is not None else {}).items()}
        return {rank: transport for rank, transport in found.items() if transport is not None}

    def transfer(
        self, key: bytes, content: bytes, grants: dict[int, m.Grants], now: float,
        unpackers: Mapping[int, Unpacker] | None = None,
    ) -> int:  # fmt: skip
        """Send a Transfer to every required rank; returns the number that Arrived or Lost will have.

        `grants` are by group id; `unpackers` are for the streams of the ranks that are `streamed`. Raises LocalError,
        and sends nothing: UNEXPECTED_MESSAGE before Ready, BUSY or TOO_LARGE beyond the limits of a source.
        """
        if not self.ready or self.plan is None or self.exposed is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "registered memory", "none yet", "wait for Ready")
        if self.suspect:
            advice = "try again when it answers"
            raise LocalError(ErrorCode.BUSY, "", "no new transfer with a suspect source", "one", advice)
        number, made = self._next, {}
        for rank in self.plan.required(self.me.rank):
            made[rank] = self._ranks[rank].part(SinkTransfers).compose(now, number, key, content, grants)
            if self._ranks[rank].has(SinkIntent):
                self._ranks[rank].part(SinkIntent).take(made[rank][0])
        self._next += 1
        for rank, (attempt, request) in made.items():
            session = self._ranks[rank]
            if attempt.whole:
                attempt.delivery.begin(attempt, (unpackers or {}).get(rank))
            session.part(SinkTransfers).ask(attempt, request, now)
        self._wants[number] = SinkTransfer(
            number, self.exposed, {rank: attempt for rank, (attempt, _) in made.items()}, now
        )
        return number

    def grant(
        self, number: int, grants: Mapping[int, m.Grants], now: float, unpackers: Mapping[int, Unpacker] | None = None
    ) -> None:  # fmt: skip
        """Name items of a transfer that lacks some: `grants` holds everything granted so far, by group id.

        Grants are sent as soon as they may be, but to ranks that are `streamed` only when all items are named, which
        needs `unpackers`. Harmless once the transfer has ended.
        """
        want = self._wants.get(number)
        for rank, attempt in want.parts.items() if want is not None and want.error is None else ():
            session = self._ranks[rank]
            if session.has(SinkIntent) and session.open:
                begin = partial(attempt.delivery.begin, attempt, (unpackers or {}).get(rank))
                packed = attempt.delivery.streamed_by is not None
                session.part(SinkIntent).grant(attempt, grants, now, begin, packed)
        self._after(now)

    def accepted(self, number: int) -> bool:
        """Whether every source rank has answered this transfer, or it has ended."""
        want = self._wants.get(number)
        return want is None or all(part.state != TransferState.ASKED for part in want.parts.values())

    def hindrances(self, number: int | None) -> list[str]:
        """What a transfer still waits for, by source rank, for display; None for one that was not requested yet."""
        want = self._wants.get(number) if number is not None else None
        if want is None:
            return hindrances(self.sessions.values())
        asked = [rank for rank, part in want.parts.items() if part.state == TransferState.ASKED]
        return [f"no answer to Transfer from {located(self._ranks[rank])}" for rank in asked]

    def abort(self, number: int, error: KvprotoError, now: float) -> None:
        """Stop a transfer; Lost follows, with what is known about its writes."""
        self._fail(self._wants.get(number), error, now)
        self._after(now)

    def _fail(self, want: SinkTransfer | None, error: KvprotoError, now: float) -> None:
        """Abort the parts that have not arrived, except for those being read, as Abort states that nothing is read."""
        if want is None:
            return
        self._changed.add(want.number)
        want.error = want.error or error
        for rank, attempt in want.parts.items():
            pending = attempt.done is None and attempt.proof is None and not attempt.reading
            if pending and self._ranks[rank].open:
                self._ranks[rank].part(SinkTransfers).abort(attempt, now, str(want.error))

    def accept_register(self, number: int, transport: Transport, now: float) -> None:
        """Report that the memory of a RegisterAsked is mapped."""
        self._numbered(number).part(Holder).accept(transport, None)
        self._after(now)

    def refuse_register(self, number: int, error: KvprotoError, now: float) -> None:
        """Report that the memory of a RegisterAsked cannot be mapped."""
        self._numbered(number).part(Holder).refuse(error)
        self._after(now)

    def unmapped(self, number: int, epoch: int, now: float) -> None:
        """Report that the memory of an UnmapAsked is unmapped."""
        self._numbered(number).part(Holder).unmapped(epoch)
        self._after(now)

    def _numbered(self, number: int) -> SinkSession:
        return next(s for s in self.sessions.values() if s.session == number)

    def rank_of(self, number: int) -> int | None:
        """The source rank of a session; None if there is no such session, or it has ended."""
        return next((rank for rank, s in self._ranks.items() if s.session == number and s.open), None)

    def writers(self) -> dict[int, m.Process]:
        """The live processes that write this rank's memory and whose end is proof, by session."""
        found = {s.session: d for s in self.sessions.values() for d in s.deliveries}
        return {n: d.process for n, d in found.items() if isinstance(d, SinkPush) and d.process and not d.dead}

    def died(self, number: int, now: float) -> None:
        """Report that the writer's process of a session has ended, so that none of its writes can arrive any more."""
        session = self._numbered(number)
        for delivery in session.deliveries:
            if isinstance(delivery, SinkPush):
                delivery.dead = True
        session.lose("its process has ended")
        self._after(now)
        self._prove({part for _, missing in self._unproven.values() for part in missing if part[0] == number})

    # pools

    def unsettled(self) -> None:
        self.ready = False

    def adaptable(self, geometry: Geometry) -> bool:
        """Whether its sessions can go on with another pool of this geometry (feature EPOCHS)."""
        routed: list[SinkSession | None] = self._routed()
        if geometry != self.geometry:
            routed += self.sessions.values()
        return bool(routed) and all(each is not None and _adaptable(each) for each in routed)

    def expose(self, exposed: Exposed, now: float, geometry: Geometry | None = None) -> None:
        """Register another pool, which new transfers go into once every routed rank has mapped it.

        `geometry` is the rank's from now on; if it has changed, every session plans again first.
        """
        self.exposed, self.ready = exposed, False
        if geometry is not None and geometry != self.geometry:
            self.geometry, self.stated = geometry, Stated.of(geometry, self.stated.version + 1)
            for session in [each for each in self.sessions.values() if _adaptable(each)]:
                session.part(Describing).describe(now)
        self._after(now)

    def give_back(self, exposed: Exposed, at_once: bool, now: float) -> None:
        """Take a pool back from sources that can return it; with `at_once`, transfers into it end with POOL_MOVED."""
        if exposed is self.exposed:
            self.exposed, self.ready = None, False
        for session in [each for each in self.sessions.values() if _adaptable(each)]:
            for owned in list(session.owner.epochs.values()):
                if owned.memory is exposed:
                    session.owner.unregister(owned, at_once, now)
        self._after(now)

    def holders(self, exposed: Exposed) -> list[str]:
        """Who may still read or write a pool, for display; it is free when the list is empty (KVP-EPO-FREE)."""
        found = [session.name for session in self.sessions.values() if self._holds(session, exposed)]
        ours = any(want.into is exposed for want in self._wants.values())
        unproven = {part[0] for into, missing in self._unproven.values() if into is exposed for part in missing}
        return found + ["transfers that are not over"] * (ours or OURS in unproven)

    def given_back(self, exposed: Exposed) -> bool:
        """Whether every source rank that mapped a pool has reported that it is unmapped."""
        return all(o.memory is not exposed for s in self.sessions.values() for o in s.owner.epochs.values())

    def outdated(self, exposed: Exposed) -> bool:
        """Whether a source rank mapped a pool under an earlier version of its Description, even one with equal content.

        It accepts no more transfers of such an epoch.
        """
        return any(
            owned.memory is exposed and owned.described.of_source.version != session.described.of_source.version
            for session in self._routed() if session is not None
            for owned in session.owner.epochs.values()
        )  # fmt: skip

    def _holds(self, session: SinkSession, exposed: Exposed) -> bool:
        held = [owned for owned in session.owner.epochs.values() if owned.memory is exposed]
        if not held or any(isinstance(each, SinkPush) and each.dead for each in session.deliveries):
            return False
        unproven = {part[0] for _, missing in self._unproven.values() for part in missing}
        return session.open or session.session in unproven or any(owned.unprovable for owned in held)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the source ranks' Descriptions that new transfers are planned by."""
        return tuple(each.described.of_source.version for each in self._routed() if each is not None)

    def _routed(self) -> list[SinkSession | None]:
        """The sessions of routed ranks, None for a rank without one."""
        return [self._ranks.get(rank) for rank in self.plan.required(self.me.rank)] if self.plan is not None else []

    def _register(self, now: float) -> bool:
        """Register the current pool with routed ranks that lack it, one Register at a time; whether there were any."""
        exposed = self.exposed
        if exposed is None or self.ready or self.refused is not None:
            return False
        due = [each for each in self._routed() if each is not None and self._due(each, exposed)]
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

    def _part(self, offered: e.Offered) -> tuple[SinkTransfer, SinkAttempt] | None:
        """The transfer and the attempt that an offer belongs to; None if the transfer has ended."""
        want = self._wants.get(offered.transfer)
        return (want, want.parts[offered.offer.writer]) if want is not None else None

    def wanted(self, offered: e.Offered) -> bool:
        """Whether an offer is still wanted; if not, a copy of it should be stopped."""
        part = self._part(offered)
        return part is not None and part[0].error is None and part[1].lease is not None

    def may_read(self, offered: e.Offered, now: float) -> bool:
        """Begin to read an offer, if its lease allows it; after True, call `read` or `unread` (KVP-PUL-READ)."""
        part = self._part(offered)
        lease = part[1].lease if part is not None and part[0].error is None else None
        if part is None or lease is None or not lease.fresh(now):
            return False
        lease.reading = True
        self._watch(*part, now)
        return True

    def _watch(self, want: SinkTransfer, attempt: SinkAttempt, now: float) -> None:
        """Fail a copy that outlasts its lease, or set the timer to check that."""
        if want.error is not None or attempt.lease is None or not attempt.reading:
            return
        if attempt.lease.over(now):
            error = RemoteError(ErrorCode.DEADLINE, "lease", "a copy under way", "over", "make a new ticket")
            self._fail(want, error, now)
        else:
            self.timers.at(attempt.lease.end, lambda at: self._watch(want, attempt, at))

    def postpone(self, offered: e.Offered) -> None:
        """Undo `may_read`, as the copy could not begin yet."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(Proof.PROVEN)

    def read(self, offered: e.Offered, count: int, now: float) -> None:
        """Report a complete copy of an offer, of `count` bytes; after the end of its lease it is of no use."""
        session, part = self._ranks[offered.offer.writer], self._part(offered)
        if part is not None and (lease := part[1].lease) is not None and lease.over(now):
            self._watch(*part, now)
        if part is None or part[0].error is not None or not session.open:
            self.unread(offered, None, now)
            return
        session.part(SinkPull).pulled(part[1], count)
        self._after(now)

    def unread(self, offered: e.Offered, error: KvprotoError | None, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Report a copy of an offer that ended before it was complete; `error` is the reason if it was still wanted."""
        if (part := self._part(offered)) is not None:
            part[1].stop_reading(proof)
            self._fail(part[0], error or LocalError(ErrorCode.ABORTED, "", "", ""), now)
        self._after(now)

    # what follows

    def _after(self, now: float) -> None:
        self._act_on_events(now)
        if not self.ready and self.plan is not None and self._all_ready():
            self.ready = True
            self._events.append(e.Ready(self.plan))
        for session in self.sessions.values() if self._streams else ():
            session.advance()
        self._changed |= self._unpacking
        while self._changed:
            if (want := self._wants.get(self._changed.pop())) is not None:
                self._progress(want, now)
        for session in self.sessions.values() if self._pulls else ():
            session.unmap_unused()
        self._act_on_events(now)

    def _act_on_events(self, now: float) -> None:
        while self._unhandled or self._register(now):
            if self._unhandled:
                self._conclude(*self._unhandled.pop(0), now)

    def _conclude(self, session: SinkSession, event: e.Event, now: float) -> None:
        self._events.append(event)
        if isinstance(event, told.Refused):
            self.refused = event.error
        elif isinstance(event, told.Disconnected) and session.closed_in != SessionState.READY:
            advice = self.advice(str(session.conn))
            lost = RemoteError(ErrorCode.PEER_LOST, "", f"a session with {session.name}", event.reason, advice)
            self.refused = self.refused or lost
        elif isinstance(event, told.Connected):
            self._planned(session, now)

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
                self._greet(address, now, f"{attrs.evolve(session.peer, rank=other)} at {address}")

    def _progress(self, want: SinkTransfer, now: float) -> None:
        """Report offers of a transfer, fail it if it cannot succeed any more, and report its end."""
        parts = [(self._ranks[rank], attempt) for rank, attempt in want.parts.items()]
        for session, attempt in parts:
            if want.error is None and attempt.error is not None:
                self._fail(want, attempt.error, now)
            if want.error is None and not session.open and attempt.done is None:
                self._fail(want, session.revoked or gone(located(session)), now)
            if want.error is None and attempt.lease is not None and not attempt.lease.reported:
                attempt.lease.reported = True
                self._events.append(e.Offered(want.number, attempt.lease.offer))
        if want.error is None and (tokens := useful(want.parts.values(), want.useful)) != want.useful:
            want.useful = tokens
            self._events.append(e.Useful(want.number, tokens))
        if any((s.open and a.state != TransferState.ENDED) or a.reading for s, a in parts):
            return
        try:
            over = want.error is not None or all(a.delivery.finish(a) for _, a in parts)
        except KvprotoError as error:
            want.error, over = error.kept(), True
        if not over or not all(a.delivery.stop(a) for _, a in parts):
            self._unpacking.add(want.number)
            return
        self._unpacking.discard(want.number)
        del self._wants[want.number]
        self._events.append(self._outcome(want, parts, now))
        for session, attempt in parts:
            attempt.settled, attempt.ask = True, None
            session.forget()

    def _outcome(
        self, want: SinkTransfer, parts: list[tuple[SinkSession, SinkAttempt]], now: float
    ) -> e.Arrived | e.Lost:
        if want.error is None:
            done = sorted((a.done for _, a in parts if a.done is not None), key=lambda each: each.writer)
            return e.Arrived(want.number, tuple(done), now - want.started)
        missing = {(a.delivery.prover or OURS, a.sequence) for _, a in parts if not a.delivery.free(a)}
        if missing:
            self._unproven[want.number] = want.into, missing
            if self._asking is None:
                self._asking = self.timers.at(now, self._ask_late)
        return e.Lost(want.number, want.error, Proof.UNPROVABLE if missing else Proof.PROVEN)


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
) -> RemoteError | None:  # fmt: skip
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


def hindrances(sessions: Collection[SinkSession]) -> list[str]:
    """Why transfers with a source replica cannot begin yet, by source rank, for display."""
    found, error = [], None
    for session in sessions:
        if (awaited := _AWAITED.get(session.state)) is not None:
            found.append(f"no answer to {awaited} from {located(session)}")
        elif session.suspect and session.open:
            found.append(f"nothing heard from {located(session)}, which is suspect")
        elif error is None and (error := disagreement(session, sessions)) is not None:
            found.append(f"{error.path} is {error.mine} and {error.yours}")
    return found
