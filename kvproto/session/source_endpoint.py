"""The sessions of one source rank: which sinks may greet it, and the API that a node calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial

from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Refused
from kvproto.planning.geometry import Geometry
from kvproto.session.catalogue import Catalogue, Changes, SourceCatalogue
from kvproto.session.core import Session
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Party, Stated
from kvproto.session.error_fields import refusal
from kvproto.session.events import TransferRequested
from kvproto.session.intent import SourceIntent
from kvproto.session.limits import MAX_ENGINE_SESSIONS, MAX_SESSIONS
from kvproto.session.negotiation import LIMITS, Terms, negotiate
from kvproto.session.pull import SourcePull
from kvproto.session.push import SourcePush
from kvproto.session.records import SourceAttempt
from kvproto.session.registering import Holder
from kvproto.session.source import SourceSession
from kvproto.session.stream import StreamPiece
from kvproto.session.table import SessionState, TransferState
from kvproto.session.tickets import Claims
from kvproto.session.transfers import SourceTransfers
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Outcome, Proof, Role, word

__all__ = ["SourceEndpoint"]

Admit = Callable[[Hashable, Party, int], None]

_MAX_REMEMBERED = 1 << 16
"""The most incarnations, superseded sessions, and drained sessions that are remembered."""


class SourceEndpoint(Claims):
    """All sessions of one source rank."""

    def __init__(
        self, me: Party, geometry: Geometry, endpoints: dict[int, str], features: tuple[Feature, ...],
        mint: Callable[[], int], process: m.Process | None = None, admit: Admit | None = None,
    ) -> None:  # fmt: skip
        """`endpoints` are the addresses of all ranks of the replica, and `process` is the one that will write.

        `mint` makes random session ids of 64 bits, not 0, that nobody can guess (KVP-SES-FRESH). `admit` raises
        NOT_ALLOWED for a peer that may not use a connection.
        """
        super().__init__(me, geometry)
        self.process, self._admit = process, admit or (lambda conn, peer, role: None)
        self._endpoints = tuple(m.Endpoint(rank=r, address=a) for r, a in sorted(endpoints.items()))
        self._features, self._mint = features, mint
        self.sessions: dict[int, SourceSession] = {}
        self._catalogue: Catalogue | None = None
        self.draining = False
        """Whether new sessions and transfers are refused."""
        self._greetings: dict[Hashable, int] = {}
        """The last session that each connection opened."""
        self.over: set[int] = set()
        """Sessions that have ended while the memory of their sinks may still be mapped; the node removes them."""
        self._incarnations: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        """The greatest incarnation of each engine, replica and rank."""
        self._superseded: OrderedDict[int, tuple[Hashable, str]] = OrderedDict()
        """The connection and the incarnations of each session that a later incarnation has ended."""
        self._drained: OrderedDict[int, int] = OrderedDict()
        """The minor versions of forgotten sessions whose writes are proven to have ended."""
        self._bare: OrderedDict[int, None] = OrderedDict()
        """Sessions whose sink has not described itself; some may have ended since."""

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Handle one frame; whatever it holds, no other session is affected (KVP-ERR-ALONE)."""
        message = session = None
        try:
            message = decode(frame)
            if isinstance(message, m.Hello):
                self._hello(conn, message, now)
            else:
                session = self._find(conn, message)
                if session is not None:
                    session.receive(message, now)
        except RemoteError as error:
            self._report(conn, session, frame, message, error)
        self._after(now)

    def _find(self, conn: Hashable, message: m.Message) -> SourceSession | None:
        """The session of a message; None if it needs no session. Raises UNKNOWN_SESSION or SUPERSEDED."""
        number = getattr(message, "session", None) or 0
        session = self.sessions.get(number)
        if session is not None and session.open and session.conn == conn:
            return session
        known, incarnations = self._superseded.get(number, (None, ""))
        late = session is not None and not session.open and isinstance(message, m.Transfer | m.Abort)
        if session is not None and late and isinstance(message, m.Abort) and session.conn != conn:
            self._unbind(session)
            session.conn = conn  # a session that has ended is not resumed
        if session is not None and late and session.conn == conn and known is None:
            return session
        if isinstance(message, m.Error):
            return None
        if isinstance(message, m.Abort) and number in self._drained:
            ids = {"sequence": message.sequence, "attempt": message.attempt}
            drained = m.Drained(session=number, request=message.request, **ids, proof=Proof.PROVEN)
            self.send(conn, encode(drained, minor=self._drained[number]))
            return None
        if known == conn:
            mine = f"a later incarnation took over: {incarnations}"
            raise RemoteError(ErrorCode.SUPERSEDED, "session", mine, str(number), "end this run of the engine")
        raise RemoteError(ErrorCode.UNKNOWN_SESSION, "session", "no such session", str(number), "greet again")

    def _hello(self, conn: Hashable, hello: m.Hello, now: float) -> None:
        peer = Party(hello.engine, hello.replica, hello.rank, hello.incarnation)
        terms = Terms(tuple(hello.offered), tuple(hello.needed), tuple(hello.versions))
        try:
            chosen = negotiate(terms, Terms(self._features))
            self._admit(conn, peer, hello.role)
            session = self.sessions.get(hello.resume or 0)
            if session is None or not session.resumes(peer, chosen):
                session = None
            self._check(hello, peer, session is None)
        except RemoteError as error:
            self.send(conn, encode(m.Refused(request=hello.request, **refusal(error))))
            self._events.append(Refused(str(peer), error, by_us=True))
            return
        if session is not None and hello.request < session.greeting:
            return  # it is late: the sink has greeted again since (KVP-SES-LATE)
        self._supersede(peer)
        if session is not None:
            self._greetings.pop(session.conn, None)
            if session.greeting != hello.request:
                session.reconnected()
            session.conn, session.greeting, self._greetings[conn] = conn, hello.request, session.session
        else:
            session = self.sessions.get(self._greetings.get(conn, 0))
        if session is None or session.greeting != hello.request or session.peer != peer:
            if session is not None and session.state == SessionState.OPEN:
                session.lose("its connection has opened another")
            number = self._fresh()
            session = SourceSession(
                self, conn, number, hello, chosen, now, self._seek, self._refuses, self._granted, self._catalogue
            )
            self.sessions[number], self._greetings[conn], self._bare[number] = session, number, None
        welcome = m.Welcome(
            session=session.session, request=hello.request, version=m.Version(major=chosen.major, minor=chosen.minor),
            engine=self.me.engine, incarnation=self.me.incarnation, rank=self.me.rank, replica=self.me.replica,
            features=session.features, limits=LIMITS, endpoints=self._endpoints,
        )  # fmt: skip
        session.notice(welcome)

    def _fresh(self) -> int:
        number = self._mint()
        while number in self.sessions or number in self._superseded or number in self._drained:
            number = self._mint()
        return number

    def _check(self, hello: m.Hello, peer: Party, new: bool) -> None:
        """Raise what else is wrong with a Hello, which opens a `new` session or resumes one."""
        if hello.role != Role.SINK:
            raise RemoteError(ErrorCode.WRONG_PEER, "role", "a SINK dials", word(Role, hello.role), "dial a source")
        if self.draining and new:
            raise RemoteError(ErrorCode.DRAINING, "", "this engine is going away", str(peer), "greet another engine")
        held = self._incarnations.get(peer.place, 0)
        if peer.incarnation < held:
            advice = "end this run: a later one has taken over"
            raise RemoteError(ErrorCode.SUPERSEDED, "incarnation", str(held), str(peer.incarnation), advice)
        if new and len(self.sessions) >= MAX_ENGINE_SESSIONS:
            self._check_engine(peer.engine)
        while new and len(self.sessions) >= MAX_SESSIONS:
            if not self._bare:
                raise RemoteError(ErrorCode.BUSY, "", f"{MAX_SESSIONS} sessions", "one more", "try again later")
            bare = self.sessions.get(self._bare.popitem(last=False)[0])
            if bare is not None and bare.state == SessionState.OPEN:
                bare.lose("others have greeted since, and it has not described itself")
                self._forget()

    def _check_engine(self, engine: str) -> None:
        """End the oldest session of an engine that has not described itself, if it has too many (KVP-SES-ENGINE)."""
        own = [s for s in self.sessions.values() if s.peer.engine == engine]
        if len(own) < MAX_ENGINE_SESSIONS:
            return
        bare = next((s for s in own if s.state == SessionState.OPEN), None)
        if bare is None:
            mine = f"{MAX_ENGINE_SESSIONS} sessions with {engine}"
            raise RemoteError(ErrorCode.BUSY, "", mine, "one more", "try again later")
        bare.lose("others of its engine have greeted since, and it has not described itself")
        self._forget()

    def _supersede(self, peer: Party) -> None:
        """End the sessions of earlier incarnations, which proves nothing about them (KVP-SES-SUPERSEDE)."""
        held = self._incarnations.get(peer.place, 0)
        if peer.incarnation > held > 0:
            for session in [s for s in self.sessions.values() if s.peer.place == peer.place and s.open]:
                incarnations = f"{peer.incarnation} after {session.peer.incarnation}"
                self._superseded[session.session] = session.conn, incarnations
                session.lose(f"incarnation {incarnations}")
        self._incarnations[peer.place] = max(held, peer.incarnation)
        self._incarnations.move_to_end(peer.place)
        for bounded in (self._incarnations, self._superseded, self._drained):
            while len(bounded) > _MAX_REMEMBERED:
                bounded.popitem(last=False)

    def readmit(self) -> None:
        """End the sessions of peers that are no longer allowed, which proves nothing about them (KVP-NET-REVOKE)."""
        for session in [s for s in self.sessions.values() if s.open]:
            try:
                self._admit(session.conn, session.peer, Role.SINK)
            except RemoteError as error:
                session.notice(m.Error(session=session.session, **refusal(error)))
                session.lose(str(error))

    def restate(self, geometry: Geometry, endpoints: Mapping[int, str], now: float) -> None:
        """Describe another geometry to every sink; sessions that cannot go on with it end, and sinks open new ones."""
        self.geometry, self.stated = geometry, Stated.of(geometry, self.stated.version + 1)
        self._endpoints = tuple(m.Endpoint(rank=r, address=a) for r, a in sorted(endpoints.items()))
        for session in [each for each in self.sessions.values() if each.open]:
            if session.state == SessionState.READY and Feature.EPOCHS in session.features:
                session.part(Describing).describe(now, self._endpoints)
            elif session.state not in (SessionState.OPEN, SessionState.DESCRIBING):
                session.goodbye("its Description changes")
        self._restated(now)
        self._after(now)

    def keep_catalogue(self, catalogue: Catalogue) -> None:
        """Offer CATALOGUE from now on, so that sinks which open a session can watch this rank's cached pages."""
        self._catalogue = catalogue
        self._features = tuple(sorted({*self._features, Feature.CATALOGUE}))

    def kept(self, pages: Changes) -> None:
        """Announce changes of cached pages to all sinks that watch (KVP-CAT-NUMBER)."""
        kept = self._catalogue.change(pages) if self._catalogue is not None else []
        for session in self.sessions.values() if kept else ():
            if session.open and session.has(SourceCatalogue):
                session.part(SourceCatalogue).tell(kept)

    def drain(self) -> None:
        """Refuse new sessions and transfers from now on; those under way go on (KVP-SES-DRAINING)."""
        self.draining = True

    def _refuses(self, ticket: bytes) -> bool:
        """Whether to refuse Transfers of a ticket; once one rank of a sink has asked, the others are served as well."""
        claim = self._claims.get(ticket)
        return self.draining and (claim is None or not claim.users)

    def goodbye(self, reason: str) -> None:
        """End every session in order, and refuse new ones."""
        self.draining = True
        super().goodbye(reason)

    def _attempt(self, asked: TransferRequested) -> tuple[SourceSession, SourceAttempt] | None:
        session = self.sessions.get(asked.session)
        attempt = session.part(SourceTransfers).find(asked.transfer) if session is not None else None
        return (session, attempt) if session is not None and attempt is not None else None

    def active(self, asked: TransferRequested) -> bool:
        """Whether the transfer is still wanted."""
        found = self._attempt(asked)
        return found is not None and found[0].open and found[1].state == TransferState.ACCEPTED

    def copying(self, asked: TransferRequested) -> None:
        """Note that a copy begins; `done`, `offer` or `failed` ends it."""
        if (found := self._attempt(asked)) is not None:
            found[1].copying = True

    def progress(self, asked: TransferRequested, tokens: int, now: float) -> None:
        """Ask the sink to grant items for tokens below this one, whose rows are computed (feature SPANS)."""
        found = self._attempt(asked)
        if found is not None and found[0].open and not found[1].whole and Feature.SPANS in found[0].features:
            found[0].part(SourceIntent).progress(found[1], tokens, now)

    def stream(self, asked: TransferRequested, piece: StreamPiece, begins: tuple[m.Begin, ...] = ()) -> None:
        """Send the next piece of the stream of a transfer; `begins` states where its late windows begin."""
        if (found := self._attempt(asked)) is not None and found[1].epoch is not None:
            found[1].epoch.stream.send(found[1], piece, begins)

    def _copied(
        self, asked: TransferRequested, proof: Proof = Proof.PROVEN
    ) -> tuple[SourceSession, SourceAttempt] | None:
        """Note that a copy has ended; returns the transfer if it is still wanted."""
        found = self._attempt(asked)
        if found is not None:
            found[0].part(SourceTransfers).copied(found[1], proof)
        return found if self.active(asked) else None

    def done(
        self, asked: TransferRequested, now: float, written: int, outcome: Outcome, handoff: tuple[m.HandOff, ...],
        checksums: tuple[m.Checksum, ...] | None, begins: tuple[m.Begin, ...] = (),
    ) -> None:  # fmt: skip
        """Report a complete copy of `written` bytes; `begins` states where late windows begin."""
        if (found := self._copied(asked)) is not None:
            found[0].part(SourcePush).done(found[1], now, written, outcome, handoff, checksums, begins)

    def offer(
        self, asked: TransferRequested, now: float, lease: float, grants: tuple[m.Grants, ...], outcome: Outcome,
        handoff: tuple[m.HandOff, ...], checksums: tuple[m.Checksum, ...] | None, begins: tuple[m.Begin, ...] = (),
    ) -> None:  # fmt: skip
        """Offer these items to the sink for `lease` seconds, but not beyond the ticket's deadline."""
        claim = self._claims.get(asked.key)
        deadline = claim.deadline if claim is not None else now
        end = min(now + lease, deadline)
        if (end - now) * 1000 < 1:
            self.failed(asked, RemoteError(ErrorCode.DEADLINE, "ticket", "no time to read", "", "make a new one"), now)
        elif (found := self._copied(asked)) is not None:
            said = outcome, handoff, checksums, begins
            found[0].part(SourcePull).offer(found[1], now, end, deadline, grants, *said)

    def failed(
        self, asked: TransferRequested, error: KvprotoError, now: float, proof: Proof = Proof.PROVEN
    ) -> None:  # fmt: skip
        """Report a failed copy; with PROVEN, none of its writes can arrive any more."""
        if (found := self._copied(asked, proof)) is not None:
            found[0].part(SourceTransfers).fail(found[1], error, now)

    def ended(self, session: Session, attempt: SourceAttempt) -> None:
        """Note that an attempt of a session has ended or changed."""
        self._touch(attempt)
        session.forget()
        session.part(Holder).unmap_unused()
        if not session.open:
            self._closed.add(session.session)

    def closed(self, session: Session) -> None:
        """Note that a session has ended, and so perhaps its requests, now or when its leases end."""
        self._closed.add(session.session)
        self.over.add(session.session)
        for attempt in session.attempts.values():
            self._touch(attempt)
            if attempt.loan is not None:
                self.timers.at(attempt.loan.end, partial(self._returned, attempt))

    def _returned(self, attempt: SourceAttempt, now: float) -> None:
        """Note that the lease of a session that has ended is over as well."""
        self._touch(attempt)

    def _after(self, now: float) -> None:
        """Release requests that have ended, and forget sessions that are not needed any more."""
        if self._touched:
            self._settle(now)
        if self._closed and not self.draining:
            self._forget()

    def _forget(self) -> None:
        closed, self._closed = self._closed, set()
        for session in [s for n in closed if (s := self.sessions.get(n)) is not None and s.forgettable]:
            number = session.session
            del self.sessions[number]
            self._bare.pop(number, None)
            if session.part(SourceTransfers).proven and number not in self._superseded:
                self._drained[number] = session.minor
            self._unbind(session)

    def _unbind(self, session: SourceSession) -> None:
        """Dissociate a session that has ended from its connection."""
        if self._greetings.get(session.conn) == session.session:
            del self._greetings[session.conn]
