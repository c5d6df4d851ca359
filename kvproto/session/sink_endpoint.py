"""The sessions of one sink rank with one source replica; connections are the source's addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, encode_geometry, validate
from kvproto.planning.plan import Plan
from kvproto.session.endpoint import Endpoint
from kvproto.session.events import (
    Arrived,
    Lost,
    Offered,
    Planned,
    Proven,
    Ready,
    SessionClosed,
    SessionRefused,
    Troubled,
)
from kvproto.session.peer import PATIENCE, Party, refusal
from kvproto.session.sink import SinkSession
from kvproto.session.staging import Slots
from kvproto.session.table import SessionState
from kvproto.wire import decode
from kvproto.wire.enums import ErrorCode, Feature, Proof, Transport
from kvproto.wire.messages import Chunk, Columns, Done, Error, Grants, Offer, Process, Region, Released

__all__ = ["SinkEndpoint"]


_PARTS = (Chunk, Offer, Released, Done)
"""What a transfer does not survive where it is refused; Done where the sink should have been offered something."""


_OURS = 0
"""No session has that number."""


@attrs.define
class _Want:
    """A transfer at the sink: one attempt in the session of each required rank."""

    parts: dict[int, tuple[int, int]]
    started: float
    error: KvprotoError | None = None


class SinkEndpoint(Endpoint):
    """All sessions of one sink rank with one source replica; connections are the source's addresses."""

    def __init__(
        self, me: Party, geometry: Geometry, regions: tuple[Region, ...], columns: tuple[Columns, ...],
        features: tuple[Feature, ...], seed: str,
        staging: Callable[[int], tuple[tuple[Region, ...], Slots | None]] | None = None,
    ) -> None:  # fmt: skip
        """`staging` gives what is registered with one source rank, where that is not `regions`."""
        super().__init__()
        validate(geometry)
        self.me, self.geometry, self.columns = me, geometry, {c.group: c for c in columns}
        self._parts = (me, geometry, encode_geometry(geometry), regions, columns, features)
        self._seed, self._staging = seed, staging
        self.plan: Plan | None = None
        self.source: Geometry | None = None
        self.ready = False
        self.refused: KvprotoError | None = None
        self._sessions: dict[str, SinkSession] = {}
        self._ranks: dict[int, str] = {}
        self._wants: dict[int, _Want] = {}
        self._unproven: dict[int, set[int]] = {}
        """Transfers that were Lost as UNPROVABLE, and the sessions that no proof has come from.

        _OURS: copies of this side, which no death of a peer proves.
        """
        self._next = 1

    def dial(self, now: float) -> None:
        """Greet the seed; the other ranks follow from its Welcome and the plan."""
        self._greet(self._seed, now)

    def _greet(self, address: str, now: float) -> None:
        if address not in self._sessions:
            self._sessions[address] = SinkSession(*self._parts)
            self._sessions[address].hello(now)

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Take one frame from the source rank at this address."""
        session = self._sessions.get(str(conn))
        message = None
        try:
            message = decode(frame)
            if session is not None:
                session.receive(message, now)
        except (WireError, RemoteError) as error:
            self._events.append(Troubled(session.name if session else str(conn), error))
            if session is not None and isinstance(message, _PARTS) and (session.pulls or isinstance(message, Chunk)):
                self._refuse_part(session, message, error, now)
        self._after(now)

    def _refuse_part(
        self, session: SinkSession, message: Chunk | Offer | Released | Done, error: KvprotoError, now: float
    ) -> None:
        """Say so, and stop the transfer: what it lacks now does not come again."""
        session.notice(Error(session=session.session, about=message.TYPE, **refusal(error)))
        key = (message.sequence, message.attempt)
        for want in self._wants.values():
            if want.error is None and any(self._session(r) is session and k == key for r, k in want.parts.items()):
                self._fail(want, error, now)

    def features(self) -> tuple[int, ...]:
        """Features that every session has."""
        return tuple(f for f in Feature if all(f in s.features for s in self._sessions.values()))

    def staged(self) -> list[int]:
        """Source ranks whose bytes come through staging slots."""
        return [rank for rank, address in self._ranks.items() if self._sessions[address].staging is not None]

    def transfer(
        self,
        key: bytes,
        content: bytes,
        grants: dict[int, Grants],
        now: float,
        packers: Mapping[int, Any] | None = None,
    ) -> int:
        """Ask every required rank for one request; returns the number that Arrived or Lost will carry.

        `packers` unpack the streams of the ranks that are `staged`.
        """
        if not self.ready or self.plan is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "not registered", "transfer", "wait for Ready")
        number, self._next = self._next, self._next + 1
        parts = {
            rank: self._sessions[self._ranks[rank]].transfer(now, key, content, grants, (packers or {}).get(rank))
            for rank in self.plan.required(self.me.rank)
        }
        self._wants[number] = _Want(parts, now)
        self._after(now)
        return number

    def abort(self, number: int, error: KvprotoError, now: float) -> None:
        """Stop a transfer; Lost follows, with what is known of its writes."""
        want = self._wants.get(number)
        if want is not None and want.error is None:
            self._fail(want, error, now)
            self._after(now)

    def _fail(self, want: _Want, error: KvprotoError, now: float) -> None:
        want.error = error
        for rank, key in want.parts.items():
            session = self._session(rank)
            # an Abort says that nothing is read any more
            if key not in session.done and session.state != SessionState.CLOSED and not session.reading(key):
                session.abort(key, now, str(error))

    def accept_register(self, number: int, transport: Transport) -> None:
        """The memory of a RegisterAsked is mapped."""
        self._numbered(number).accept_register(transport)
        self._touched = True

    def refuse_register(self, number: int, error: KvprotoError) -> None:
        """The memory of a RegisterAsked cannot be mapped."""
        self._numbered(number).refuse_register(error)
        self._touched = True

    def _numbered(self, number: int) -> SinkSession:
        return next(s for s in self._sessions.values() if s.session == number)

    def rank_of(self, number: int) -> int | None:
        """The source rank of a session; None: it is not there, or over."""
        found = (s for s in self._sessions.values() if s.session == number and s.state != SessionState.CLOSED)
        return next((s.peer.rank for s in found if s.peer is not None), None)

    def _part(self, offered: Offered) -> tuple[_Want | None, SinkSession, tuple[int, int]]:
        offer = offered.offer
        return self._wants.get(offered.transfer), self._session(offer.writer), (offer.sequence, offer.attempt)

    def wanted(self, offered: Offered) -> bool:
        """Whether an offer is still of use; if not, a copy of it should stop."""
        want, session, key = self._part(offered)
        return want is not None and want.error is None and key in session.leases

    def may_read(self, offered: Offered, now: float) -> bool:
        """Whether a copy of an offer begins now: if so, `read` or `unread` must follow (KVP-PUL-READ)."""
        _, session, key = self._part(offered)
        begins = self.wanted(offered) and session.leases[key].fresh(now)
        if begins:
            session.leases[key].reading = True
        return begins

    def postpone(self, offered: Offered) -> None:
        """The copy could not begin yet."""
        _, session, key = self._part(offered)
        session.unread(key, Proof.PROVEN)

    def read(self, offered: Offered, count: int, now: float) -> None:
        """The copy of an offer is complete: `count` bytes; without a lease they are of no use."""
        self._late(now)
        want, session, key = self._part(offered)
        if want is None or want.error is not None or session.state == SessionState.CLOSED:
            self.unread(offered, None, now)
            return
        session.pulled(key, count)
        self._after(now)

    def unread(self, offered: Offered, error: KvprotoError | None, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Nothing reads an offer any more, and not all of it was; `error`: why, where it is still wanted."""
        want, session, key = self._part(offered)
        session.unread(key, proof)
        if want is not None:
            self._fail(want, want.error or error or LocalError(ErrorCode.ABORTED, "", "", ""), now)
        self._after(now)

    def _late(self, now: float) -> None:
        """Stop what is read beyond its lease."""
        for want in self._wants.values():
            for rank, key in want.parts.items():
                session = self._session(rank)
                if want.error is None and session.reading(key) and session.leases[key].over(now):
                    error = RemoteError(ErrorCode.DEADLINE, "lease", "a copy under way", "over", "make a new ticket")
                    self._fail(want, error, now)

    def writers(self) -> dict[int, Process]:
        """Processes that write this rank's memory, by session, where their end is proof; ended ones left out."""
        return {s.session: s.process for s in self._sessions.values() if s.process is not None and not s.dead}

    def died(self, number: int, now: float) -> None:
        """The writer of this session has ended: nothing of it is awaited, and no write of it can arrive any more."""
        session = self._numbered(number)
        session.dead = True
        session.hush()
        if session.state != SessionState.CLOSED:
            self._gone(session, "its process has ended", now)
        self._after(now)
        for transfer, sessions in list(self._unproven.items()):
            sessions.discard(number)
            if not sessions:
                del self._unproven[transfer]
                self._events.append(Proven(transfer))

    def _session(self, rank: int) -> SinkSession:
        return self._sessions[self._ranks[rank]]

    def on_time(self, now: float) -> None:
        """Resend, give up."""
        for session in self._sessions.values():
            for name in session.on_time(now):
                self._gone(session, f"no answer to {name} in {PATIENCE:.0f} s", now)
                self._touched = True
        self._late(now)
        # slots are emptied and leases run out without a word
        if self._touched or any(s.staging is not None or s.leases for s in self._sessions.values()):
            self._after(now)

    def _gone(self, session: SinkSession, reason: str, now: float) -> None:
        self._events.append(SessionClosed(session.session, session.name, reason))
        self.ready = False
        if session.state in (SessionState.GREETED, SessionState.DESCRIBING, SessionState.REGISTERING):
            self.refused = self.refused or RemoteError(
                ErrorCode.PEER_LOST, "", reason, session.name, "see whether it runs"
            )
        session.state = SessionState.CLOSED

    def _after(self, now: float) -> None:
        self._touched = False
        for address, session in list(self._sessions.items()):
            for event in session.take_events():
                self._events.append(event)
                if isinstance(event, SessionRefused):
                    self.refused = event.error
                if isinstance(event, SessionClosed):
                    self.ready = False
                if isinstance(event, Planned):
                    self._planned(session, address, event.plan, now)
        if self.plan is not None and not self.ready and self._all_ready():
            self.ready = True
            self._events.append(Ready(self.plan))
        for number, want in list(self._wants.items()):
            self._progress(number, want, now)
        for session in self._sessions.values():
            session.credit()
            session.renew(now)

    def _collect(self) -> None:
        for address, session in self._sessions.items():
            if session.outbox:
                self._out += [(address, frame) for frame in session.to_send()]

    def _planned(self, session: SinkSession, address: str, plan: Plan, now: float) -> None:
        self.plan, self.source = plan, session.source
        assert session.peer is not None
        self._ranks[session.peer.rank] = address
        required = plan.required(self.me.rank)
        if session.peer.rank in required:
            if self._staging is not None and not session.pulls:
                session.regions, session.staging = self._staging(session.peer.rank)
            session.register(now)
        for rank in required:
            if rank not in session.endpoints:
                error = RemoteError(
                    ErrorCode.COVERAGE,
                    "endpoints",
                    f"rank {rank}",
                    str(sorted(session.endpoints)),
                    "list every rank in Welcome",
                )
                self.refused = error
            elif rank not in self._ranks and session.endpoints[rank] != address:
                self._greet(session.endpoints[rank], now)

    def _all_ready(self) -> bool:
        assert self.plan is not None
        required = self.plan.required(self.me.rank)
        sessions = [self._session(r) for r in required if r in self._ranks]
        ready = [s for s in sessions if s.state == SessionState.READY and (s.readable or not s.pulls)]
        return len(ready) == len(required)

    def _progress(self, number: int, want: _Want, now: float) -> None:
        for rank, key in want.parts.items():
            session = self._session(rank)
            if want.error is None and key in session.failures:
                self._fail(want, session.failures[key], now)
            if want.error is None and session.state == SessionState.CLOSED and key not in session.done:
                error = RemoteError(ErrorCode.PEER_LOST, "", "waiting", f"{session.name} is gone", "make a new ticket")
                self._fail(want, error, now)
            if want.error is None and key in session.leases and not session.leases[key].told:
                session.leases[key].told = True
                self._events.append(Offered(number, session.leases[key].offer))
        over = {r for r, k in want.parts.items() if self._over(r, k)}
        if len(over) < len(want.parts):
            return
        try:
            if want.error is None and not all(self._session(r).unpacked(k) for r, k in want.parts.items()):
                return
        except KvprotoError as error:
            want.error = error
        if not all(self._session(r).let_go(k) for r, k in want.parts.items()):
            return
        del self._wants[number]
        if want.error is None:
            done = tuple(self._session(r).done[k] for r, k in sorted(want.parts.items()))
            self._events.append(Arrived(number, done, now - want.started))
            self._settle(want)
            return
        sessions = [self._session(r) for r, k in want.parts.items() if not self._session(r).proven(k)]
        unproven = {_OURS if s.pulls else s.session for s in sessions}
        if unproven:
            self._unproven[number] = unproven
        self._events.append(Lost(number, want.error, Proof.UNPROVABLE if unproven else Proof.PROVEN))
        self._settle(want)

    def _over(self, rank: int, key: tuple[int, int]) -> bool:
        session = self._session(rank)
        return (session.ended(key) or session.state == SessionState.CLOSED) and not session.reading(key)

    def _settle(self, want: _Want) -> None:
        for rank, key in want.parts.items():
            self._session(rank).settle(key)

    def _peers(self) -> list[SinkSession]:
        return list(self._sessions.values())
