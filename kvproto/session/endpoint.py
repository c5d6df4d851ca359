"""What spans sessions.

At the source, tickets and who asks for them; at the sink, one session for each routed source rank.

Addresses and connections are opaque keys (`Hashable`), so nothing here knows what carries the frames.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError, WireError
from kvproto.geometry import Geometry, encode_geometry, validate
from kvproto.plan import Plan
from kvproto.session.events import (
    Arrived,
    Event,
    Expired,
    Lost,
    Planned,
    Ready,
    Released,
    Serve,
    SessionClosed,
    SessionRefused,
    Troubled,
)
from kvproto.session.peer import PATIENCE, Party, refusal
from kvproto.session.sink import LIMITS, SinkSession
from kvproto.session.source import SourceSession
from kvproto.session.table import SessionState, TransferState
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof, RequestState, Role
from kvproto.wire.messages import (
    Checksum,
    Columns,
    Endpoint,
    Error,
    Grants,
    HandOff,
    Hello,
    Refused,
    Region,
    Ticket,
    Transfer,
    Version,
    Welcome,
)

__all__ = ["SinkEndpoint", "SourceEndpoint"]

UNCLAIMED = 10.0
"""Seconds that a Transfer waits for its ticket to become known here."""


@attrs.define
class _Claim:
    """A ticket at the source."""

    deadline: float
    content: bytes | None = None
    """None until the engine expects the request."""
    bound: tuple[str, int] | None = None
    waiting: list[tuple[int, Transfer]] = attrs.Factory(list)
    """(session, transfer) accepted and not answered."""
    asked: list[tuple[int, tuple[int, int]]] = attrs.Factory(list)
    """(session, attempt key) of every transfer that took the ticket."""
    finished: bool = False
    error: KvprotoError | None = None
    """Why the engine cannot produce the request."""


class SourceEndpoint:
    """All sessions of one source rank."""

    def __init__(
        self,
        me: Party,
        geometry: Geometry,
        endpoints: dict[int, str],
        features: tuple[Feature, ...],
        first_session: int,
    ) -> None:
        validate(geometry)
        self.me, self.geometry = me, geometry
        self._encoded = encode_geometry(geometry)
        self._endpoints, self._features = endpoints, features
        self.sessions: dict[int, SourceSession] = {}
        self._of: dict[int, Hashable] = {}
        self._claims: dict[bytes, _Claim] = {}
        self._events: list[Event] = []
        self._out: list[tuple[Hashable, bytes]] = []
        self._next_session = first_session

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Take one frame; whatever it holds, no other session is touched."""
        message = None
        session = None
        try:
            message = decode(frame)
            if isinstance(message, Hello):
                self._hello(conn, message)
                return
            number = getattr(message, "session", None)
            session = self.sessions.get(number) if number is not None else None
            if isinstance(message, Error):
                return
            if session is None or self._of[session.session] != conn:
                raise RemoteError(ErrorCode.UNKNOWN_SESSION, "session", "no such session", str(number), "greet again")
            transfer = session.receive(message, now)
            if transfer is not None:
                self._ask(session, transfer, now)
        except (WireError, RemoteError) as error:
            request = getattr(message, "request", None)
            about: dict[str, Any] = {"about": type(message).TYPE} if message is not None else {}
            head: dict[str, Any] = {"session": session.session} if session else {}
            tail: dict[str, Any] = {"request": request} if request is not None else {}
            self._out.append((conn, encode(Error(**head, **tail, **refusal(error), **about))))
            self._events.append(Troubled(session.name if session else "(unknown peer)", error))
        self._after(now)

    def _hello(self, conn: Hashable, hello: Hello) -> None:
        peer = Party(hello.engine, hello.replica, hello.rank, hello.incarnation)
        error = self._unwelcome(hello)
        if error is not None:
            self._out.append((conn, encode(Refused(request=hello.request, **refusal(error)))))
            self._events.append(SessionRefused(str(peer), error, by_us=True))
            return
        number = next((n for n, s in self.sessions.items() if self._greeted(s, conn, peer, hello.request)), None)
        if number is None:
            number, self._next_session = self._next_session, self._next_session + 1
            self.sessions[number] = SourceSession(self.me, peer, number, hello.request, self.geometry, self._encoded)
            self._of[number] = conn
        chosen = tuple(f for f in self._features if f in hello.offered)
        welcome = Welcome(
            session=number, request=hello.request, version=Version(major=1, minor=0), engine=self.me.engine,
            incarnation=self.me.incarnation, rank=self.me.rank, replica=self.me.replica, features=chosen, limits=LIMITS,
            endpoints=tuple(Endpoint(rank=r, address=a) for r, a in sorted(self._endpoints.items())),
        )  # fmt: skip
        self._out.append((conn, encode(welcome)))

    def _greeted(self, session: SourceSession, conn: Hashable, peer: Party, request: int) -> bool:
        """Whether this session was opened by the same Hello."""
        return session.peer == peer and session.greeting == request and self._of[session.session] == conn

    def _unwelcome(self, hello: Hello) -> KvprotoError | None:
        ranges = [(v.major, v.min_minor, v.max_minor) for v in hello.versions]
        if not any(major == 1 and low == 0 for major, low, _ in ranges):
            return RemoteError(ErrorCode.UNSUPPORTED_VERSION, "versions", "1.0", str(ranges), "offer 1.0")
        if hello.role != Role.SINK:
            return RemoteError(ErrorCode.WRONG_PEER, "role", "a SINK dials", Role(hello.role).name)
        lacking = [f for f in hello.needed if f not in self._features]
        if lacking:
            return RemoteError(
                ErrorCode.UNSUPPORTED_VERSION, "needed", str([f.name for f in self._features]), str(lacking)
            )
        return None

    def expect(self, ticket: Ticket, content: bytes, now: float) -> None:
        """The engine has the request of this ticket; its first use binds it to one sink."""
        key = bytes(ticket.key)
        claim = self._claims.setdefault(key, _Claim(now))
        claim.deadline, claim.content = now + ticket.deadline / 1000, content
        waiting, claim.waiting = claim.waiting, []
        for number, transfer in waiting:
            self._match(claim, self.sessions[number], transfer, now)
        self._after(now)

    def _ask(self, session: SourceSession, transfer: Transfer, now: float) -> None:
        claim = self._claims.setdefault(bytes(transfer.ticket), _Claim(now + UNCLAIMED))
        claim.asked.append((session.session, (transfer.sequence, transfer.attempt)))
        self._match(claim, session, transfer, now)

    def _match(self, claim: _Claim, session: SourceSession, transfer: Transfer, now: float) -> None:
        """Accept a transfer whose ticket, sink and prompt are right."""
        assert session.peer is not None
        sink = (session.peer.engine, session.peer.replica)
        error = claim.error
        if error is None and claim.content is not None and claim.content != transfer.content:
            error = RemoteError(
                ErrorCode.CONTENT_MISMATCH,
                "content",
                claim.content.hex(),
                bytes(transfer.content).hex(),
                "route the same prompt to both",
            )
        elif error is None and claim.bound not in (None, sink):
            error = RemoteError(
                ErrorCode.TICKET_BOUND, "ticket", "bound to another sink", str(session.peer), "make a new ticket"
            )
        if error is not None:
            session.fail(transfer, error, now)
            return
        claim.bound = sink
        attempt = session.attempts[transfer.sequence, transfer.attempt]
        if attempt.state == TransferState.ASKED:
            known = RequestState.PENDING if claim.content is None else RequestState.RUNNING
            session.accept(transfer, RequestState.READY if claim.finished else known)
        claim.waiting.append((session.session, transfer))
        self._serve(bytes(transfer.ticket), claim)

    def finish(self, key: bytes) -> None:
        """Prefill of this request is over: whoever waits is served."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.finished = True
            self._serve(key, claim)

    def _serve(self, key: bytes, claim: _Claim) -> None:
        if claim.finished and claim.content is not None:
            waiting, claim.waiting = claim.waiting, []
            self._events += [Serve(key, number, transfer) for number, transfer in waiting]

    def refuse(self, key: bytes, error: KvprotoError, now: float) -> None:
        """The engine cannot produce this request: whoever waits, or comes later, gets Failed."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.error = error
            waiting, claim.waiting = claim.waiting, []
            for number, transfer in waiting:
                self.sessions[number].fail(transfer, error, now)
        self._after(now)

    def done(
        self, serve: Serve, now: float, written: int, outcome: Outcome, handoff: tuple[HandOff, ...],
        checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """The copy of a Serve is complete."""
        session = self.sessions[serve.session]
        state = session.attempts[serve.transfer.sequence, serve.transfer.attempt].state
        if state == TransferState.ACCEPTED:
            session.done(serve.transfer, now, written, outcome, handoff, checksums)

    def failed(self, serve: Serve, error: KvprotoError, now: float) -> None:
        """The copy of a Serve failed."""
        session = self.sessions[serve.session]
        if session.attempts[serve.transfer.sequence, serve.transfer.attempt].state == TransferState.ACCEPTED:
            session.fail(serve.transfer, error, now)

    def active(self, serve: Serve) -> bool:
        """Whether the transfer of a Serve is still wanted."""
        session = self.sessions.get(serve.session)
        if session is None or session.state != SessionState.READY:
            return False
        return session.attempts[serve.transfer.sequence, serve.transfer.attempt].state == TransferState.ACCEPTED

    def on_time(self, now: float) -> None:
        """Resend, expire."""
        for session in self.sessions.values():
            for name in session.on_time(now):
                self._events.append(
                    SessionClosed(session.session, session.name, f"no answer to {name} in {PATIENCE:.0f} s")
                )
                session.state = SessionState.CLOSED
        for key, claim in list(self._claims.items()):
            if now >= claim.deadline:
                del self._claims[key]
                known = claim.content is not None and claim.error is None
                code = ErrorCode.DEADLINE if known else ErrorCode.UNKNOWN_TICKET
                for number, transfer in claim.waiting:
                    self.sessions[number].fail(
                        transfer, RemoteError(code, "ticket", "not finished in time", "", "make a new ticket"), now
                    )
                if known:
                    self._events.append(Expired(key))
        self._after(now)

    def _after(self, now: float) -> None:
        """Collect what the sessions made; release requests that every routed sink rank has ended."""
        for number, session in self.sessions.items():
            self._out += [(self._of[number], frame) for frame in session.to_send()]
            self._events += session.take_events()
        for key, claim in list(self._claims.items()):
            if claim.finished and claim.asked and not claim.waiting and self._all_ended(claim):
                plan = self.sessions[claim.asked[0][0]].plan
                routed = tuple(sorted({r.source for r in plan.routes})) if plan else ()
                del self._claims[key]
                self._events.append(Released(key, routed))
        for number in [n for n, s in self.sessions.items() if s.state == SessionState.CLOSED]:
            if not any(n == number for claim in self._claims.values() for n, _ in claim.asked):
                del self.sessions[number], self._of[number]

    def _all_ended(self, claim: _Claim) -> bool:
        first = self.sessions[claim.asked[0][0]]
        needed = set(first.plan.served(self.me.rank)) if first.plan else set()
        for number, key in claim.asked:
            session = self.sessions[number]
            if session.attempts[key].state != TransferState.ENDED and session.state != SessionState.CLOSED:
                return False
            if session.peer is not None and (session.peer.engine, session.peer.replica) == claim.bound:
                needed.discard(session.peer.rank)
        return not needed

    def to_send(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Frames and the connection of each."""
        self._after(now)
        out, self._out = self._out, []
        return out

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def goodbye(self, reason: str) -> None:
        """End every session in order."""
        for session in self.sessions.values():
            session.goodbye(reason)


@attrs.define
class _Want:
    """A transfer at the sink: one attempt in the session of each required rank."""

    parts: dict[int, tuple[int, int]]
    started: float
    error: KvprotoError | None = None
    last: float = 0.0


class SinkEndpoint:
    """All sessions of one sink rank with one source replica; connections are the source's addresses."""

    def __init__(
        self, me: Party, geometry: Geometry, regions: tuple[Region, ...], columns: tuple[Columns, ...],
        features: tuple[Feature, ...], seed: str,
    ) -> None:  # fmt: skip
        validate(geometry)
        self.me, self.geometry, self.columns = me, geometry, {c.group: c for c in columns}
        self._parts = (me, geometry, encode_geometry(geometry), regions, columns, features)
        self._seed = seed
        self.plan: Plan | None = None
        self.source: Geometry | None = None
        self.ready = False
        self.refused: KvprotoError | None = None
        self._sessions: dict[str, SinkSession] = {}
        self._ranks: dict[int, str] = {}
        self._wants: dict[int, _Want] = {}
        self._next = 1
        self._events: list[Event] = []
        self._out: list[tuple[Hashable, bytes]] = []

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
        try:
            message = decode(frame)
            if session is not None:
                session.receive(message, now)
        except (WireError, RemoteError) as error:
            self._events.append(Troubled(session.name if session else str(conn), error))
        self._after(now)

    def features(self) -> tuple[int, ...]:
        """Features that every session has."""
        return tuple(f for f in Feature if all(f in s.features for s in self._sessions.values()))

    def transfer(self, key: bytes, content: bytes, grants: dict[int, Grants], now: float) -> int:
        """Ask every required rank for one request; returns the number that Arrived or Lost will carry."""
        if not self.ready or self.plan is None:
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "not registered", "transfer", "wait for Ready")
        number, self._next = self._next, self._next + 1
        parts = {
            rank: self._sessions[self._ranks[rank]].transfer(now, key, content, grants)
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
            if key not in session.done:
                session.abort(key, now, str(error))

    def _session(self, rank: int) -> SinkSession:
        return self._sessions[self._ranks[rank]]

    def on_time(self, now: float) -> None:
        """Resend, give up."""
        for session in self._sessions.values():
            for name in session.on_time(now):
                self._gone(session, f"no answer to {name} in {PATIENCE:.0f} s", now)
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
        for address, session in list(self._sessions.items()):
            for event in session.take_events():
                self._events.append(event)
                if isinstance(event, SessionRefused):
                    self.refused = event.error
                if isinstance(event, SessionClosed):
                    self.ready = False
                if isinstance(event, Planned):
                    self._planned(session, address, event.plan, now)
            self._out += [(address, frame) for frame in session.to_send()]
        if self.plan is not None and not self.ready and self._all_ready():
            self.ready = True
            self._events.append(Ready(self.plan))
        for number, want in list(self._wants.items()):
            self._progress(number, want, now)
        for address, session in self._sessions.items():
            self._out += [(address, frame) for frame in session.to_send()]

    def _planned(self, session: SinkSession, address: str, plan: Plan, now: float) -> None:
        self.plan, self.source = plan, session.source
        assert session.peer is not None
        self._ranks[session.peer.rank] = address
        required = plan.required(self.me.rank)
        if session.peer.rank in required:
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
        return all(r in self._ranks and self._session(r).state == SessionState.READY for r in required)

    def _progress(self, number: int, want: _Want, now: float) -> None:
        for rank, key in want.parts.items():
            session = self._session(rank)
            if want.error is None and key in session.failures:
                self._fail(want, session.failures[key], now)
            if want.error is None and session.state == SessionState.CLOSED and key not in session.done:
                want.error = RemoteError(
                    ErrorCode.PEER_LOST, "", "waiting", f"{session.name} is gone", "make a new ticket"
                )
        states = {r: self._session(r).attempts[k].state for r, k in want.parts.items()}
        over = {
            r for r, s in states.items() if s == TransferState.ENDED or self._session(r).state == SessionState.CLOSED
        }
        if len(over) < len(states):
            return
        del self._wants[number]
        if want.error is None:
            done = tuple(self._session(r).done[k] for r, k in sorted(want.parts.items()))
            self._events.append(Arrived(number, done, now - want.started))
            return
        drained = [
            k in self._session(r).done or self._session(r).proofs.get(k) == Proof.PROVEN for r, k in want.parts.items()
        ]
        self._events.append(Lost(number, want.error, Proof.PROVEN if all(drained) else Proof.UNPROVABLE))

    def to_send(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Frames and the address of each."""
        self._after(now)
        out, self._out = self._out, []
        return out

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def goodbye(self, reason: str) -> None:
        """End every session in order."""
        for session in self._sessions.values():
            session.goodbye(reason)
