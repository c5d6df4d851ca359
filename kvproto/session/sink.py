"""The sink's side of a session: it dials, describes itself, registers its memory, and asks for transfers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from kvproto.errors import KvprotoError, RemoteError
from kvproto.planning.geometry import Geometry, digest
from kvproto.planning.plan import differences, plan
from kvproto.session.core import Host, Session, refused
from kvproto.session.delivery import Delivery
from kvproto.session.describing import read_geometry
from kvproto.session.events import Planned, SessionRefused
from kvproto.session.negotiation import LIMITS, Terms, check_welcome, greased
from kvproto.session.phases import Described, Party, Registration
from kvproto.session.ping import PingPart
from kvproto.session.pull import SinkPull
from kvproto.session.push import SinkPush
from kvproto.session.registering import agrees
from kvproto.session.staged import SinkStaged
from kvproto.session.table import SessionState
from kvproto.session.transfers import SinkAttempt, SinkTransfers
from kvproto.wire.enums import Access, ErrorCode, Feature, Role
from kvproto.wire.messages import (
    Columns,
    Describe,
    Description,
    Grants,
    Hello,
    Refused,
    Register,
    Registered,
    Welcome,
)

__all__ = ["SinkSession"]

_VERSION = 1
"""Of this rank's Description."""
_EPOCH = 1


class SinkSession(Session):
    """Sink side of a rank pair."""

    role = "sink"

    def __init__(
        self, me: Party, host: Host, conn: Hashable, geometry: Geometry, encoded: bytes, columns: tuple[Columns, ...],
        offered: tuple[Feature, ...], proving: Collection[int],
    ) -> None:  # fmt: skip
        """`proving`: transports by which the death of the writer is proof (KVP-REG-DEATH)."""
        super().__init__(me, host, conn)
        self.endpoints: dict[int, str] = {}
        """Where the ranks of the source's replica listen."""
        self.delivery: Delivery = Delivery()
        self._geometry, self._encoded, self._digest = geometry, encoded, digest(encoded)
        self._columns, self._terms, self._proving = columns, Terms(offered), proving
        self._exposure = Registration(())
        self.hear({
            Welcome: self._welcome, Description: self._description, Registered: self._registered,
            Refused: self._refused,
        })  # fmt: skip

    @property
    def ready(self) -> bool:
        """Whether transfers may run."""
        return self.state == SessionState.READY and self.delivery.ready

    def hello(self, now: float) -> None:
        """Open the session."""
        self.step("Hello")
        said = greased(self._terms, self.me.incarnation)
        self.request(
            Hello, now, grease=True, versions=said.versions, engine=self.me.engine, incarnation=self.me.incarnation,
            rank=self.me.rank, replica=self.me.replica, role=Role.SINK, offered=said.offered, needed=said.needed,
            limits=LIMITS,
        )  # fmt: skip

    def _refused(self, message: Refused, now: float) -> None:
        if self.answered(message.request):
            self.step("Refused")
            self.tell(SessionRefused(self.name, refused(message), by_us=False))

    def _welcome(self, message: Welcome, now: float) -> None:
        if not self.answered(message.request):
            return
        self.step("Welcome")
        self.session = message.session
        try:
            check_welcome(self._terms, message)
        except RemoteError as error:
            self.give_up(error)
            return
        self._peer = Party(message.engine, message.replica, message.rank, message.incarnation)
        self._peer_limits = message.limits
        self.features = tuple(message.features)
        self.endpoints = {e.rank: e.address for e in message.endpoints}
        self.delivery = SinkPull(self) if Feature.PULL in self.features else SinkPush(self, self._proving)
        self.install(PingPart(self, now))
        self.install(SinkTransfers(self, _EPOCH, lambda attempt: self.delivery.stop(attempt)))
        self.install(self.delivery)
        self.step("Describe")
        self.request(Describe, now, version=_VERSION, geometry=self._encoded, digest=self._digest)

    def _description(self, message: Description, now: float) -> None:
        if not self.answered(message.request):
            return
        self.step("Description")
        try:
            source, theirs = read_geometry(message)
            made = plan(source, self._geometry, self.features)
        except KvprotoError as error:
            self.give_up(error)
            return
        self._described = Described(
            source, self._geometry, (theirs, self._digest), (message.version, _VERSION), made,
            (self.peer.rank, self.me.rank), message.request,
        )  # fmt: skip
        self.tell(Planned(self.session, self.name, made, tuple(differences(source, self._geometry))))

    def give_up(self, error: KvprotoError) -> None:
        """End the session because of what the source says of itself."""
        self.tell(SessionRefused(self.name, error, by_us=True))
        self.goodbye(str(error))

    def register(self, exposure: Callable[[], Registration], now: float) -> None:
        """Grant the source access to this rank's memory."""
        described = self.described
        self._exposure = self.delivery.expose(exposure)
        self.step("Register")
        self.request(
            Register, now, source=described.digests[0], sink=described.digests[1], epoch=_EPOCH, access=Access.WRITE,
            regions=self._exposure.regions, columns=self._columns, plan=described.plan.digest, routes=described.refs,
        )  # fmt: skip

    def _registered(self, message: Registered, now: float) -> None:
        if not self.answered(message.request):
            return
        self.step("Registered")
        try:
            agrees(message, self.described)
            self._take(message)
        except RemoteError as error:
            self.give_up(error)

    def _take(self, message: Registered) -> None:
        """Go on with the transport that the source took."""
        offered = {h.transport for region in self._exposure.regions for h in region.handles}
        if message.transport not in offered:
            mine, yours = str(sorted(offered)), str(message.transport)
            raise RemoteError(ErrorCode.NO_TRANSPORT, "transport", mine, yours, "take a transport of the handles")
        slots = self._exposure.slots
        if message.transport == self._exposure.staged_by and slots is not None:
            if Feature.STAGED not in self.features:
                raise RemoteError(
                    ErrorCode.FEATURE_MISSING, "transport", "STAGED", "staging slots without it", "negotiate STAGED"
                )
            self.delivery = SinkStaged(self, slots)
            self.install(self.delivery)
        self.delivery.registered(message)

    def ask(
        self, now: float, number: int, key: bytes, content: bytes, grants: Mapping[int, Grants]
    ) -> Callable[[Any], SinkAttempt]:
        """Make a Transfer, `grants` by group id; the result sends it, and takes the packer of a staged stream.

        Raises LocalError, BUSY or TOO_LARGE, beyond the source's limits; then nothing was sent.
        """
        most = self._peer_limits.max_transfers if self._peer_limits is not None else 1
        made, send = self.part(SinkTransfers).compose(now, number, key, content, grants, most)

        def begin(packer: Any) -> SinkAttempt:
            self.delivery.begin(made, packer)
            send()
            return made

        return begin
