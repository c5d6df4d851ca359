"""Sessions of a watcher of a source replica's cached pages, with the ranks of Welcome, which move no bytes."""

from collections.abc import Hashable
from functools import partial
from typing import Any

from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Event, Refused
from kvproto.session import limits
from kvproto.session.catalogue import Listed, SinkCatalogue
from kvproto.session.core import Session
from kvproto.session.descriptions import Party
from kvproto.session.endpoint import Endpoint
from kvproto.session.negotiation import Terms
from kvproto.session.sink import SinkSession
from kvproto.wire import decode
from kvproto.wire.enums import ErrorCode, Feature

MOST_RANKS = 256
"""The most ranks of a replica that are watched: whoever listens could name any number of addresses."""


class WatchSession(SinkSession):
    """The sink's side of a rank pair with no feature but CATALOGUE."""

    def __init__(self, host: "WatchEndpoint", address: str) -> None:
        super().__init__(host, address, (Feature.CATALOGUE,), ())
        self._terms, self._watcher = Terms((Feature.CATALOGUE,), (Feature.CATALOGUE,)), host

    def begin(self, now: float) -> None:
        self.install(SinkCatalogue(self, now, self._watcher.report, self._watcher.room))
        self._watcher.welcomed(self, now)


class WatchEndpoint(Endpoint):
    """All sessions of one watcher with one source replica; connections are the source's addresses."""

    def __init__(self, me: Party, seed: str) -> None:
        """`seed` is the address of any source rank."""
        super().__init__(me)
        self.sessions: dict[str, WatchSession] = {}
        self.refused: KvprotoError | None = None
        """The last refusal of a session; None once one was opened."""
        self._seed = seed
        self._ranks: set[str] = {seed}
        """The addresses of the ranks, by the last Welcome."""
        self._lost: list[str] = []
        self._events: list[Event | Listed] = []

    def dial(self, now: float) -> None:
        """Greet the seed; the other ranks follow from its Welcome."""
        self._greet(self._seed, now)

    def _greet(self, address: str, now: float) -> None:
        if address not in self.sessions and address in self._ranks:
            self.sessions[address] = WatchSession(self, address)
            self.sessions[address].hello(now)

    def welcomed(self, session: WatchSession, now: float) -> None:
        """Greet the ranks that the Welcome of a session lists, and from now on no others."""
        if len(session.endpoints) > MOST_RANKS:
            advice = "correct the address if this is no source of yours"
            mine, yours = f"at most {MOST_RANKS} ranks of a replica", str(len(session.endpoints))
            session.give_up(RemoteError(ErrorCode.TOO_LARGE, "endpoints", mine, yours, advice))
            return
        self.refused = None
        known = {s.peer.rank: str(s.conn) for s in self.sessions.values() if s.known}  # perhaps by another address
        self._ranks = {known.get(rank, address) for rank, address in session.endpoints.items()} | {self._seed}
        for address in self._ranks:
            self._greet(address, now)

    def room(self) -> int:
        """The number of pages beyond those that are remembered of this replica, of all its ranks together."""
        held = (s.part(SinkCatalogue).pages for s in self.sessions.values() if s.has(SinkCatalogue))
        return limits.MAX_CATALOGUE - sum(map(len, held))

    def known(self) -> dict[int, SinkCatalogue] | None:
        """The pages of each rank, by rank; None while any of them are not known, or ranks name pages differently."""
        catalogues = {s.peer.rank: s.part(SinkCatalogue) for s in self.sessions.values() if s.known and s.open}
        listed = {rank for s in self.sessions.values() if s.known for rank in s.endpoints}
        heads = [catalogue.head for catalogue in catalogues.values() if catalogue.whole]
        if not heads or len(heads) < len(catalogues) or not listed <= catalogues.keys():
            return None
        if len({(bytes(head.namespace), head.page) for head in heads if head is not None}) > 1:
            mine, advice = "one namespace and page length of all ranks", "this is a bug of the source"
            self.refused = RemoteError(ErrorCode.FIELD_CONFLICT, "namespace", mine, "several", advice)
            return None
        return catalogues

    def party(self) -> Party | None:
        """The rank that answered first; None if none has yet."""
        return next((session.peer for session in self.sessions.values() if session.known), None)

    def receive(self, conn: Hashable, frame: bytes, now: float) -> None:
        """Take one frame from the source rank at this address."""
        session = self.sessions.get(str(conn))
        message = None
        try:
            message = decode(frame)
            if session is not None and session.open and session.concerned(message):
                session.receive(message, now)
        except RemoteError as error:
            self._report(conn, session, frame, message, error)
        self._after(now)

    def report(self, event: Event | Listed) -> None:
        self._events.append(event)

    def take_events(self) -> list[Event | Listed]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def tell(self, session: Any, event: Event) -> None:
        """Report an event, and keep a refusal as the reason why nothing is known."""
        super().tell(session, event)
        if isinstance(event, Refused):
            self.refused = event.error
            self._lost.append(str(session.conn))

    def closed(self, session: Session) -> None:
        """Note that a session has ended, in order to open it again after a while."""
        self._lost.append(str(session.conn))

    def ended(self, session: Any, attempt: Any) -> None:
        """Do nothing: there are no transfers."""

    def _after(self, now: float) -> None:
        lost, self._lost = {*self._lost}, []
        for address in lost:
            self.sessions.pop(address, None)
        if lost and not self.sessions:  # the engine may be started again with other ranks
            self._ranks = lost = {self._seed}
        for address in lost:
            self.timers.at(now + limits.PING_SILENCE, partial(self._greet, address))
