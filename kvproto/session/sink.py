"""The sink's side of a session: it dials, describes itself, registers its memory, and asks for transfers."""

from collections.abc import Collection, Hashable
from functools import partial
from typing import Any

import attrs

from kvproto.errors import RemoteError
from kvproto.events import Refused
from kvproto.session.core import Session
from kvproto.session.describing import Describing
from kvproto.session.descriptions import Owned, Party
from kvproto.session.endpoint import Endpoint
from kvproto.session.error_fields import refused
from kvproto.session.inline import SinkInline
from kvproto.session.intent import SinkIntent
from kvproto.session.negotiation import LIMITS, Terms, check_features, check_version, greased
from kvproto.session.ping import PingPart
from kvproto.session.pull import SinkPull
from kvproto.session.push import Delivery, DoneHandler, SinkPush
from kvproto.session.registering import Holder, Owner, Registration
from kvproto.session.staged import SinkStaged
from kvproto.session.stream import Pieces
from kvproto.session.table import SessionState
from kvproto.session.transfers import SinkTransfers
from kvproto.wire import messages as m
from kvproto.wire.enums import Access, CreditKind, ErrorCode, Feature, Role

_STREAMS: dict[CreditKind, Any] = {CreditKind.STAGING: SinkStaged, CreditKind.INLINE: SinkInline}
"""The class that receives a stream, by what its credit counts."""


class SinkSession(Session):
    """Sink side of a rank pair."""

    role = "sink"

    def __init__(
        self,
        host: Endpoint,
        conn: Hashable,
        offered: tuple[Feature, ...],
        proving: Collection[int],
        replica: tuple[str, int] | None = None,
        rank: int | None = None,
    ) -> None:
        """`proving`: transports with which the writer's death is proof; `replica` and `rank` are who must answer."""
        super().__init__(host, conn)
        self.endpoints: dict[int, str] = {}
        """The addresses of the ranks of the source's replica, by rank."""
        self.transport: int | None = None
        """The transport that the source chose last; None before that."""
        self.owner = Owner(self, Access.WRITE)
        self.transfers = SinkTransfers(self)
        self.intent: SinkIntent | None = None
        self.revoked: RemoteError | None = None
        """The error by which the source no longer allows this session, if so."""
        self.forgotten = False
        """Whether the source goes on, in the same run, but has forgotten this session, as this side was long silent."""
        self._replica, self._rank = replica, rank
        self._terms, self._proving = Terms(offered), proving
        self._hello = 0

    @property
    def delivery(self) -> Delivery | None:
        """The delivery into the memory that was registered last; None if it is not mapped yet, or was returned."""
        newest = self.owner.newest
        return newest.delivery if newest is not None else None

    @property
    def deliveries(self) -> list[Delivery]:
        """The deliveries of all epochs that the source may hold."""
        return [owned.delivery for owned in self.owner.epochs.values() if owned.delivery is not None]

    @property
    def streamed_by(self) -> int | None:
        """The transport by which the source packs bytes for the memory that was registered last, if it does."""
        return self.delivery.streamed_by if self.delivery is not None else None

    @property
    def ready(self) -> bool:
        """Whether transfers into the memory that was registered last may run."""
        current = self.owner.current
        return self.state == SessionState.READY and current is not None and current.delivery.ready

    @property
    def resuming(self) -> bool:
        """Whether this side has asked to resume over another connection, on which counts begin at 0 again."""
        return self._peer is not None and self.asks(self._hello)

    def concerned(self, message: m.Message) -> bool:
        """Whether a frame is for this session; raises UNKNOWN_SESSION if it is for another (KVP-SES-OTHER)."""
        number = getattr(message, "session", None)
        if isinstance(message, m.Welcome) or number in (None, self.session):
            return True
        if self.session and not isinstance(message, m.Error):
            mine, advice = str(self.session), "end the other session"
            raise RemoteError(ErrorCode.UNKNOWN_SESSION, "session", mine, str(number), advice)
        return False

    def hello(self, now: float) -> None:
        """Open the session, or resume it over a new connection."""
        self.step("Hello")
        said = greased(self._terms, self.me.incarnation)
        self._hello = self.request(
            m.Hello,
            now,
            resume=self.session or None,
            versions=said.versions,
            engine=self.me.engine,
            incarnation=self.me.incarnation,
            rank=self.me.rank,
            replica=self.me.replica,
            role=Role.SINK,
            offered=said.offered,
            needed=said.needed,
            limits=LIMITS,
        )

    def returned(self, now: float) -> None:
        """Send Ping, as the source may be another run since its connection came back (KVP-SES-BACK)."""
        if self.open and self.has(PingPart):
            self.part(PingPart).ask(now)

    def resume(self, now: float) -> bool:
        """Ask the source to go on with this session, once at a time (KVP-SES-RESUME)."""
        if self._peer is not None and not self.asks(self._hello):
            self.hello(now)
        return self._peer is not None

    def _welcome(self, message: m.Welcome, now: float) -> None:
        if not self.answered(message.request, m.Hello):
            return
        self.step("Welcome")
        if self._peer is not None:
            if message.session != self.session:
                self.notice(m.Goodbye(session=message.session, reason="another session was to be resumed"))
                self.forgotten = message.incarnation == self._peer.incarnation
                self.lose("the source has forgotten it")
            else:
                self.reconnected()
                self.resend(now)
            return
        self.session = message.session
        try:
            self._check(message)
        except RemoteError as error:
            self.give_up(error)
            return
        self._met(Party(message.engine, message.replica, message.rank, message.incarnation))
        self.features, self.limits, self.minor = tuple(message.features), message.limits, message.version.minor
        self.endpoints = {e.rank: e.address for e in message.endpoints}
        self.install(PingPart(self, now))
        self.begin(now)

    def begin(self, now: float) -> None:
        """Go on after Welcome: describe this side, in order to register its memory and request transfers."""
        self.install(self.transfers)
        self.install(self.owner)
        if Feature.PULL in self.features:
            self.install(SinkPull(self))
        else:
            self.install(DoneHandler(self))
            self.install(Pieces(self))
            if Feature.INTENT in self.features:
                self.intent = SinkIntent(self)
                self.install(self.intent)
        self.install(Describing(self, source=False))
        self.part(Describing).describe(now)

    def refused(self, message: m.Refused, now: float) -> None:
        if self._peer is not None and self.answered(message.request, m.Hello):
            self.lose(str(refused(message, self.name)))
        else:
            super().refused(message, now)

    def _check(self, message: m.Welcome) -> None:
        """Raise the first fault of a Welcome, by ascending field id.

        FEATURE_MISSING for what was not offered, or is needed (KVP-NEG-CHECK); WRONG_PEER if another engine, rank or
        replica than the expected one listens at the address. Incarnations are not compared: a run whose clock
        was ahead keeps no later one out (KVP-SES-OLDER).
        """
        check_version(self._terms, message)
        engine, replica = self._replica or (message.engine, message.replica)
        rank = message.rank if self._rank is None else self._rank
        correct = f"another listens at {self.conn}: correct the address"
        rows = (
            ("engine", engine, correct),
            ("rank", rank, "correct `endpoints`"),
            ("replica", replica, correct),
        )
        for path, mine, advice in rows:
            if (yours := getattr(message, path)) != mine:
                raise RemoteError(ErrorCode.WRONG_PEER, path, str(mine), str(yours), advice)
        check_features(self._terms, message)

    def reachable(self, endpoints: tuple[m.Endpoint, ...] | None) -> None:
        if endpoints is not None:
            self.endpoints = {e.rank: e.address for e in endpoints}

    def abort_late(self, sequence: int) -> None:
        """Abort the first attempt of a sequence in a session that has ended; any answer to it is proof, or none."""
        number, self._next_request = self._next_request, self._next_request + 1
        reason = "the session is over: say what is known of its writes"
        self.notice(m.Abort(session=self.session, request=number, sequence=sequence, reason=reason))

    def register(
        self, number: int, memory: object, columns: tuple[m.Columns, ...], exposed: Registration, now: float
    ) -> None:
        """Grant the source access to this rank's memory; with PULL, the handles that it gets are empty."""
        if Feature.PULL in self.features:
            regions = exposed.regions
            exposed = Registration(
                tuple(attrs.evolve(r, handles=tuple(attrs.evolve(h, data=b"") for h in r.handles)) for r in regions)
            )
        self.owner.register(number, memory, exposed.regions, columns, now, partial(self._take, exposed))

    def advance(self) -> None:
        """Grant slots that have become free, which happens without notice."""
        for delivery in self.deliveries:
            delivery.advance()

    def unmap_unused(self) -> None:
        """Have memory of the source unmapped that it has taken back and that is not read any more."""
        if Feature.PULL in self.features:
            self.part(Holder).unmap_unused()

    def _take(self, exposed: Registration, owned: Owned, message: m.Registered) -> Delivery:
        """Make the delivery for the transport that the source chose."""
        offered = {h.transport for region in exposed.regions for h in region.handles}
        if message.transport not in offered:
            mine, yours = str(sorted(offered)), str(message.transport)
            raise RemoteError(ErrorCode.NO_TRANSPORT, "transport", mine, yours, "take a transport of the handles")
        self.transport = int(message.transport)
        if Feature.PULL in self.features:
            return self.part(SinkPull)
        delivery: SinkPush = SinkPush(self)
        if (reader := exposed.readers.get(message.transport)) is not None:
            delivery = stream = _STREAMS[reader.kind](self, owned.number, reader)
            if stream.feature not in self.features:
                mine, yours = stream.feature.name, "packed bytes without it"
                raise RemoteError(ErrorCode.FEATURE_MISSING, "transport", mine, yours, f"negotiate {mine}")
            stream.streamed_by = int(message.transport)
        delivery.registered(message, self._proving)
        return delivery

    def _ended(self, message: m.Error, now: float) -> None:
        """Handle Error; NOT_ALLOWED that answers no request ends the session (KVP-SES-REVOKED)."""
        if message.request is not None or message.code != ErrorCode.NOT_ALLOWED:
            self._error(message, now)
            return
        self.revoked = refused(message, self.name)
        self.tell(Refused(self.name, self.revoked, by_us=False))
        self.lose(str(self.revoked))

    handlers = (*Session.handlers, (m.Error, _ended), (m.Welcome, _welcome), (m.Refused, refused))
