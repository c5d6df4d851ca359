"""The sessions of one source rank: which sinks may greet it, and the API that a node calls."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial

from kvproto.copying.streams import Piece
from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Refused
from kvproto.planning.geometry import Geometry
from kvproto.session.catalogue import Catalogue, Changes, SourceCatalogue
from kvproto.session.descriptions import Party, Stated
from kvproto.session.endpoint import Endpoint, SourceCalls
from kvproto.session.error_fields import refusal
from kvproto.session.limits import MAX_ENGINE_SESSIONS, MAX_SESSIONS
from kvproto.session.negotiation import LIMITS, Terms, negotiate
from kvproto.session.records import Answer, SourceAttempt
from kvproto.session.source import SourceSession
from kvproto.session.table import SessionState
from kvproto.session.tickets import Tickets
from kvproto.session.transfers import changed
from kvproto.wire import decode, encode
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, Proof, Role, word

Admit = Callable[[Hashable, Party, int], None]

_LEAVES = 0.5
"""Seconds in which Transfers of other ranks arrive, before the sessions of a replica that uses no ticket end."""
_MAX_REMEMBERED = 1 << 16
"""The most superseded sessions, and drained sessions, that are remembered."""


class SourceEndpoint(Endpoint):
    """All sessions of one source rank."""

    sessions: dict[int, SourceSession]
    calls: SourceCalls

    def __init__(
        self,
        calls: SourceCalls,
        me: Party,
        geometry: Geometry,
        endpoints: dict[int, str],
        features: tuple[Feature, ...],
        mint: Callable[[], int],
        process: m.Process | None = None,
        admit: Admit | None = None,
    ) -> None:
        """`endpoints` are the addresses of all ranks of the replica, and `process` is the one that will write.

        `mint` makes random session ids of 64 bits, not 0, that nobody can guess (KVP-SES-GUESS). `admit` raises
        NOT_ALLOWED for a peer that may not use a connection.
        """
        super().__init__(me, geometry)
        self.calls, self.process, self._admit = calls, process, admit or (lambda conn, peer, role: None)
        self._endpoints = tuple(m.Endpoint(rank=r, address=a) for r, a in sorted(endpoints.items()))
        self._features, self._mint = features, mint
        self._closed: set[int] = set()
        """Sessions that have ended and may be forgotten; one that is still needed is added again later."""
        self.tickets = Tickets(me.rank, self.timers, calls, self._closed)
        self.catalogue: Catalogue | None = None
        """The pages to announce to sinks that watch, if any."""
        self.draining = False
        """Whether new sessions and transfers are refused; those under way go on (KVP-SES-DRAINING)."""
        self._greetings: dict[Hashable, int] = {}
        """The last session that each connection opened."""
        self.over: set[int] = set()
        """Sessions that have ended while the memory of their sinks may still be mapped; the rank removes them."""
        self._runs: dict[tuple[str, int, int], set[int]] = {}
        """The sessions that are held of each engine, replica and rank."""
        self._superseded: OrderedDict[int, tuple[Hashable, str]] = OrderedDict()
        """The connection and the incarnations of each session that a later incarnation has ended."""
        self._drained: OrderedDict[int, int] = OrderedDict()
        """The minor versions of forgotten sessions whose writes are proven to have ended."""
        self._bare: OrderedDict[int, None] = OrderedDict()
        """Sessions, the earliest first; some have described themselves since they began, or have ended."""

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

    def _find(self, conn: Hashable, message: m.Message) -> SourceSession | None:
        """The session of a message; None if it needs no session. Raises UNKNOWN_SESSION or SUPERSEDED."""
        number = getattr(message, "session", None) or 0
        session = self.sessions.get(number)
        if session is not None and session.open and session.conn == conn:
            return session
        known, incarnations = self._superseded.get(number, (None, ""))
        ended = session if session is not None and not session.open and self._answers(session, message) else None
        if ended is not None and isinstance(message, m.Abort) and ended.conn != conn:
            self._unbind(ended)
            ended.conn = conn  # a session that has ended is not resumed
        if ended is not None and ended.conn == conn and known is None:
            return ended
        if isinstance(message, m.Error):
            return None
        if isinstance(message, m.Abort) and number in self._drained:
            ids = {"session": number, "request": message.request, "sequence": message.sequence}
            drained = m.Drained(**ids, proof=Proof.PROVEN)
            self.send(conn, encode(drained, minor=self._drained[number]))
            return None
        if known == conn:
            mine = f"a later incarnation took over: {incarnations}"
            raise RemoteError(ErrorCode.SUPERSEDED, "session", mine, str(number), "end this run of the engine")
        raise RemoteError(ErrorCode.UNKNOWN_SESSION, "session", "no such session", str(number), "greet again")

    def _answers(self, ended: SourceSession, message: m.Message) -> bool:
        """Whether a session that has ended answers a message: an Abort, or a Transfer that it knows or refuses."""
        if isinstance(message, m.Transfer):
            return message.sequence in ended.attempts or self.refuses(bytes(message.ticket))
        return isinstance(message, m.Abort)

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
            self.calls.report(Refused(str(peer), error, by_us=True))
            return
        if session is not None and hello.request < session.greeting:
            return  # it is late: the sink has greeted again since (KVP-SES-LATE)
        self._supersede(peer)
        resumed = False
        if session is not None:
            self._greetings.pop(session.conn, None)
            resumed = session.greeting != hello.request
            if resumed:
                session.reconnected()
            session.conn, session.greeting, self._greetings[conn] = conn, hello.request, session.session
        else:
            session = self.sessions.get(self._greetings.get(conn, 0))
        if session is None or session.greeting != hello.request or session.peer != peer:
            if session is not None and session.state == SessionState.OPEN:
                session.lose("its connection has opened another")
            number = self._fresh()
            session = SourceSession(self, conn, number, hello, chosen, now)
            self.sessions[number], self._greetings[conn], self._bare[number] = session, number, None
            self._runs.setdefault(peer.place, set()).add(number)
        welcome = m.Welcome(
            session=session.session,
            request=hello.request,
            version=chosen[0],
            engine=self.me.engine,
            incarnation=self.me.incarnation,
            rank=self.me.rank,
            replica=self.me.replica,
            features=session.features,
            limits=LIMITS,
            endpoints=self._endpoints,
        )
        session.notice(welcome)
        if resumed:
            session.resend(now)

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
        held = max((session.peer.incarnation for session in self._open(peer.place)), default=0)
        if peer.incarnation < held:
            advice = (
                "end the other run, or give each a name or replica of its own: this one is served once that is gone"
            )
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
        for session in self._open(peer.place):
            if session.peer.incarnation < peer.incarnation:
                incarnations = f"{peer.incarnation} after {session.peer.incarnation}"
                self._superseded[session.session] = session.conn, incarnations
                session.lose(f"incarnation {incarnations}")
        for bounded in (self._superseded, self._drained):
            while len(bounded) > _MAX_REMEMBERED:
                bounded.popitem(last=False)

    def _open(self, place: tuple[str, int, int]) -> list[SourceSession]:
        """The open sessions of a rank."""
        held = [self.sessions.get(number) for number in self._runs.get(place, ())]
        return [session for session in held if session is not None and session.open]

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
                session.describing.describe(now, self._endpoints)
            elif session.state not in (SessionState.OPEN, SessionState.DESCRIBING):
                session.goodbye("its Description changes")
        self.tickets.restated(self.stated.version, changed, now)
        self._after(now)

    def keep_catalogue(self, catalogue: Catalogue) -> None:
        """Offer CATALOGUE from now on, so that sinks which open a session can watch this rank's cached pages."""
        self.catalogue = catalogue
        self._features = tuple(sorted({*self._features, Feature.CATALOGUE}))

    def kept(self, pages: Changes) -> None:
        """Announce changes of cached pages to all sinks that watch (KVP-CAT-NUMBER)."""
        kept = self.catalogue.change(pages) if self.catalogue is not None else []
        for session in self.sessions.values() if kept else ():
            if session.open and session.has(SourceCatalogue):
                session.part(SourceCatalogue).tell(kept)

    def refuses(self, ticket: bytes) -> bool:
        """Whether to refuse Transfers of a ticket; once one rank of a sink has asked, the others are served as well."""
        return self.draining and not self.tickets.is_asked(ticket)

    def drain(self, now: float) -> None:
        """Refuse new sessions and transfers from now on, and end sessions of sinks that need nothing more."""
        self.draining = True
        self.timers.at(now + _LEAVES, self._leave)

    def _leave(self, now: float) -> None:
        """End the sessions of replicas that use no ticket here, so that these hear of it before they ask in vain."""
        served = {state.bound for state in self.tickets if state.users}
        for session in [s for s in self.sessions.values() if s.open and s.peer.place[:2] not in served]:
            session.goodbye("it drains")
        self.timers.at(now + _LEAVES, self._leave)

    def goodbye(self, reason: str) -> None:
        """End every session in order, and refuse new ones."""
        self.draining = True
        super().goodbye(reason)

    # copies of the rank

    def progress(self, attempt: SourceAttempt, tokens: int, now: float) -> None:
        """Ask the sink to grant items for tokens below this one, whose rows are computed (feature SPANS)."""
        session = attempt.session
        if session.open and not attempt.whole and session.intent is not None and Feature.SPANS in session.features:
            session.intent.progress(attempt, tokens, now)

    def stream(self, attempt: SourceAttempt, piece: Piece, begins: tuple[m.Begin, ...] = ()) -> None:
        """Send the next piece of the stream of a transfer; `begins` states where its late windows begin."""
        if attempt.epoch is not None:
            attempt.epoch.stream.send(attempt, piece, begins)

    def done(self, attempt: SourceAttempt, written: int, answer: Answer, now: float) -> None:
        """Send Done, as a copy of `written` bytes is complete."""
        if self._copied(attempt) and attempt.session.push is not None:
            attempt.session.push.done(attempt, written, answer, now)

    def offer(
        self, attempt: SourceAttempt, lease: float, grants: tuple[m.Grants, ...], answer: Answer, now: float
    ) -> None:
        """Offer these items to the sink for `lease` seconds, but not beyond the ticket's deadline."""
        deadline = attempt.ticket.deadline if attempt.ticket is not None else now
        end = min(now + lease, deadline)
        if (end - now) * 1000 < 1:
            error = RemoteError(ErrorCode.DEADLINE, "ticket", "no time to read", "", "make a new one")
            self.failed(attempt, error, now)
        elif self._copied(attempt) and attempt.session.pull is not None:
            attempt.session.pull.offer(attempt, end, deadline, grants, answer, now)

    def failed(self, attempt: SourceAttempt, error: KvprotoError, now: float, proof: Proof = Proof.PROVEN) -> None:
        """Send Failed, as a copy has failed; with PROVEN, none of its writes can arrive any more."""
        if self._copied(attempt, proof):
            attempt.fail(error, now)

    @staticmethod
    def _copied(attempt: SourceAttempt, proof: Proof = Proof.PROVEN) -> bool:
        """Note that a copy has ended; whether its transfer is still wanted."""
        attempt.session.transfers.copied(attempt, proof)
        return attempt.wanted

    def ended(self, session: SourceSession, attempt: SourceAttempt) -> None:
        """Note that an attempt of a session has ended or changed."""
        self.tickets.touch(attempt)
        session.forget()
        if session.holder.unregisters:
            session.holder.unmap_unused()
        if not session.open:
            self._closed.add(session.session)

    def closed(self, session: SourceSession) -> None:
        """Note that a session has ended, and so perhaps its requests, now or when its leases end."""
        self._closed.add(session.session)
        self.over.add(session.session)
        for attempt in session.attempts.values():
            self.tickets.touch(attempt)
            if attempt.loan is not None:
                self.timers.at(attempt.loan.end, partial(self._returned, attempt))

    def _returned(self, attempt: SourceAttempt, now: float) -> None:
        """Note that the lease of a session that has ended is over as well."""
        self.tickets.touch(attempt)

    def _after(self, now: float) -> None:
        """Release requests that have ended, and forget sessions that are not needed any more."""
        if self.tickets.touched:
            self.tickets.settle(now)
        if self._closed and not self.draining:
            self._forget()

    def _forget(self) -> None:
        closed = list(self._closed)
        self._closed.clear()
        for session in [s for n in closed if (s := self.sessions.get(n)) is not None and s.forgettable]:
            number = session.session
            del self.sessions[number]
            self._bare.pop(number, None)
            self._runs[session.peer.place].discard(number)
            if not self._runs[session.peer.place]:
                del self._runs[session.peer.place]
            if session.transfers.proven and number not in self._superseded:
                self._drained[number] = session.minor
            self._unbind(session)

    def _unbind(self, session: SourceSession) -> None:
        """Dissociate a session that has ended from its connection."""
        if self._greetings.get(session.conn) == session.session:
            del self._greetings[session.conn]
