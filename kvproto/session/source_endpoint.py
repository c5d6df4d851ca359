"""The sessions of one source rank: tickets, who asks for them, and when a request may be freed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import attrs

from kvproto.errors import KvprotoError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, encode_geometry, validate
from kvproto.session.endpoint import Endpoint
from kvproto.session.events import Expired, Released, Serve, SessionClosed, SessionRefused, Troubled
from kvproto.session.negotiation import Terms, negotiate
from kvproto.session.peer import PATIENCE, Party, refusal
from kvproto.session.sink import LIMITS
from kvproto.session.source import SourceSession
from kvproto.session.staging import Piece
from kvproto.session.table import SessionState, TransferState
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof, RequestState, Role
from kvproto.wire.messages import (
    Checksum,
    Error,
    Grants,
    HandOff,
    Hello,
    Process,
    Refused,
    Ticket,
    Transfer,
    Version,
    Welcome,
)
from kvproto.wire.messages import Endpoint as Address

__all__ = ["SourceEndpoint"]

UNCLAIMED = 10.0
"""Seconds that a Transfer waits for its ticket to become known here."""
_MOST_SESSIONS = 4096


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


class SourceEndpoint(Endpoint):
    """All sessions of one source rank."""

    def __init__(
        self,
        me: Party,
        geometry: Geometry,
        endpoints: dict[int, str],
        features: tuple[Feature, ...],
        first_session: int,
        process: Process | None = None,
    ) -> None:
        """`process` is the one that will write."""
        super().__init__()
        validate(geometry)
        self.me, self.geometry = me, geometry
        self._encoded = encode_geometry(geometry)
        self._endpoints, self._features = endpoints, features
        self.sessions: dict[int, SourceSession] = {}
        self._of: dict[int, Hashable] = {}
        self._claims: dict[bytes, _Claim] = {}
        self._next_session, self._process = first_session, process

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
        terms = Terms(tuple(hello.offered), tuple(hello.needed), tuple(hello.versions))
        try:
            chosen = negotiate(terms, Terms(self._features))
            self._check(hello)
        except RemoteError as error:
            self._out.append((conn, encode(Refused(request=hello.request, **refusal(error)))))
            self._events.append(SessionRefused(str(peer), error, by_us=True))
            return
        number = next((n for n, s in self.sessions.items() if self._greeted(s, conn, peer, hello.request)), None)
        if number is None:
            number, self._next_session = self._next_session, self._next_session + 1
            self.sessions[number] = SourceSession(
                self.me, peer, number, hello.request, self.geometry, self._encoded, chosen.features, self._process
            )
            self._of[number] = conn
        welcome = Welcome(
            session=number, request=hello.request, version=Version(major=chosen.major, minor=chosen.minor),
            engine=self.me.engine, incarnation=self.me.incarnation, rank=self.me.rank, replica=self.me.replica,
            features=chosen.features, limits=LIMITS,
            endpoints=tuple(Address(rank=r, address=a) for r, a in sorted(self._endpoints.items())),
        )  # fmt: skip
        self._out.append((conn, encode(welcome)))

    def _greeted(self, session: SourceSession, conn: Hashable, peer: Party, request: int) -> bool:
        """Whether this session was opened by the same Hello."""
        return session.peer == peer and session.greeting == request and self._of[session.session] == conn

    def _check(self, hello: Hello) -> None:
        """Raise what else speaks against a Hello."""
        if hello.role != Role.SINK:
            raise RemoteError(ErrorCode.WRONG_PEER, "role", "a SINK dials", Role(hello.role).name)
        if len(self.sessions) >= _MOST_SESSIONS:
            raise RemoteError(ErrorCode.BUSY, "", f"{_MOST_SESSIONS} sessions", "one more", "try again later")

    def expect(self, ticket: Ticket, content: bytes, now: float) -> None:
        """The engine has the request of this ticket; its first use binds it to one sink."""
        key = bytes(ticket.key)
        claim = self._claims.setdefault(key, _Claim(now))
        claim.deadline, claim.content = now + ticket.deadline / 1000, content
        for number, transfer in self._waiting(claim):
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

    def _waiting(self, claim: _Claim) -> list[tuple[int, Transfer]]:
        """Take out the transfers that are still wanted."""
        waiting, claim.waiting = claim.waiting, []
        return [(n, t) for n, t in waiting if self._state(n, t) in (TransferState.ASKED, TransferState.ACCEPTED)]

    def _state(self, number: int, transfer: Transfer) -> TransferState:
        session = self.sessions.get(number)
        attempt = session.attempts.get((transfer.sequence, transfer.attempt)) if session else None
        closed = session is None or session.state == SessionState.CLOSED
        return TransferState.ENDED if attempt is None or closed else attempt.state

    def finish(self, key: bytes) -> None:
        """Prefill of this request is over: whoever waits is served."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.finished = True
            self._serve(key, claim)

    def _serve(self, key: bytes, claim: _Claim) -> None:
        if claim.finished and claim.content is not None:
            self._events += [Serve(key, number, transfer) for number, transfer in self._waiting(claim)]

    def asking(self, key: bytes) -> list[Serve]:
        """Who waits for this request while its prefill runs; its first rows may be copied to them."""
        claim = self._claims.get(key)
        if claim is None or claim.content is None:
            return []
        claim.waiting = self._waiting(claim)
        return [Serve(key, number, transfer) for number, transfer in claim.waiting]

    def refuse(self, key: bytes, error: KvprotoError, now: float) -> None:
        """The engine cannot produce this request: whoever waits, or comes later, gets Failed."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.error = error
            for number, transfer in self._waiting(claim):
                self.sessions[number].fail(transfer, error, now)
        self._after(now)

    def copying(self, serve: Serve) -> None:
        """The copy of a Serve begins; `done` or `failed` ends it."""
        self.sessions[serve.session].copying(serve.transfer)

    def chunk(self, serve: Serve, piece: Piece) -> None:
        """Bytes of a Serve are in a slot of the sink."""
        self.sessions[serve.session].chunk(serve.transfer, piece)

    def _copied(self, serve: Serve, proof: Proof = Proof.PROVEN) -> None:
        session = self.sessions.get(serve.session)
        if session is not None:
            self._touched |= session.copied(serve.transfer, proof)

    def done(
        self, serve: Serve, now: float, written: int, outcome: Outcome, handoff: tuple[HandOff, ...],
        checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """The copy of a Serve is complete."""
        self._copied(serve)
        if self.active(serve):
            self.sessions[serve.session].done(serve.transfer, now, written, outcome, handoff, checksums)

    def offer(
        self, serve: Serve, now: float, lease: float, grants: tuple[Grants, ...], outcome: Outcome,
        handoff: tuple[HandOff, ...], checksums: tuple[Checksum, ...] | None,
    ) -> None:  # fmt: skip
        """The sink of a Serve may read these items for `lease` seconds, and no longer than the ticket lives."""
        self._copied(serve)
        claim = self._claims.get(serve.key)
        end = min(now + lease, claim.deadline if claim else now)
        if claim is None or (end - now) * 1000 < 1:
            self.failed(serve, RemoteError(ErrorCode.DEADLINE, "ticket", "no time to read", "", "make a new one"), now)
        elif self.active(serve):
            session = self.sessions[serve.session]
            session.offer(serve.transfer, now, end, claim.deadline, grants, outcome, handoff, checksums)

    def failed(self, serve: Serve, error: KvprotoError, now: float, proof: Proof = Proof.PROVEN) -> None:
        """The copy of a Serve failed; PROVEN: no write of it can arrive any more."""
        self._copied(serve, proof)
        if self.active(serve):
            self.sessions[serve.session].fail(serve.transfer, error, now)

    def offered(self, serve: Serve) -> bool:
        """Whether the sink of a Serve may read what it was offered, and has not said Pulled."""
        return self._state(serve.session, serve.transfer) == TransferState.OFFERED

    def active(self, serve: Serve) -> bool:
        """Whether the transfer of a Serve is still wanted."""
        return self._state(serve.session, serve.transfer) == TransferState.ACCEPTED

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
                self._release(key)
                known = claim.content is not None and claim.error is None
                code = ErrorCode.DEADLINE if known else ErrorCode.UNKNOWN_TICKET
                for number, transfer in self._waiting(claim):
                    self.sessions[number].fail(
                        transfer, RemoteError(code, "ticket", "not finished in time", "", "make a new ticket"), now
                    )
                if known:
                    self._events.append(Expired(key))
        self._after(now)

    def _after(self, now: float) -> None:
        """Collect what the sessions made; release requests that every routed sink rank has ended."""
        self._touched = False
        self._collect()
        for session in self.sessions.values():
            self._events += session.take_events()
        for key, claim in list(self._claims.items()):
            if claim.finished and claim.asked and not claim.waiting and self._all_ended(claim, now):
                plan = self.sessions[claim.asked[0][0]].plan
                routed = tuple(sorted({r.source for r in plan.routes})) if plan else ()
                self._release(key)
                self._events.append(Released(key, routed))
        self._collect()
        for session in self.sessions.values():
            session.forget()
        for number in [n for n, s in self.sessions.items() if s.state == SessionState.CLOSED]:
            if not any(n == number for claim in self._claims.values() for n, _ in claim.asked):
                del self.sessions[number], self._of[number]

    def _collect(self) -> None:
        for number, session in self.sessions.items():
            if session.outbox:
                self._out += [(self._of[number], frame) for frame in session.to_send()]

    def _release(self, key: bytes) -> None:
        for number, attempt in self._claims.pop(key).asked:
            if number in self.sessions:
                self.sessions[number].released(attempt)

    def _all_ended(self, claim: _Claim, now: float) -> bool:
        first = self.sessions[claim.asked[0][0]]
        needed = set(first.plan.served(self.me.rank)) if first.plan else set()
        for number, key in claim.asked:
            session = self.sessions[number]
            if not session.ended(key) and (session.state != SessionState.CLOSED or session.lent(key, now)):
                return False
            if session.peer is not None and (session.peer.engine, session.peer.replica) == claim.bound:
                needed.discard(session.peer.rank)
        return not needed

    def _peers(self) -> list[SourceSession]:
        return list(self.sessions.values())
