"""The sessions of one sink rank with one source replica; connections are the source's addresses."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from functools import partial

import attrs

from kvproto import events as told
from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.planning.geometry import Geometry
from kvproto.session import events as e
from kvproto.session import limits
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party
from kvproto.session.exposing import OURS
from kvproto.session.hindrances import disagreement, gone, hindrances, located
from kvproto.session.intent import SinkIntent, useful
from kvproto.session.ping import PingPart
from kvproto.session.push import SinkPush, Unpacker
from kvproto.session.reading import Reading
from kvproto.session.records import SinkAttempt, SinkTransfer
from kvproto.session.registering import Holder
from kvproto.session.sink import SinkSession
from kvproto.session.table import SessionState, TransferState
from kvproto.session.timers import Timer
from kvproto.session.transfers import SinkTransfers
from kvproto.wire import decode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, Transport

__all__ = ["SinkEndpoint"]

_STREAMS = frozenset({Feature.STAGED, Feature.INLINE})


class SinkEndpoint(Reading):
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
