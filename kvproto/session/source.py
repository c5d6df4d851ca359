"""The source's side of a session: it answers Hello and Describe, and maps the sink's memory when it registers."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvproto.copying.aliasing import Overlaps
from kvproto.errors import KvprotoError, RemoteError
from kvproto.planning.geometry import Geometry, digest
from kvproto.planning.plan import Plan, differences, plan
from kvproto.session.core import Host, Session
from kvproto.session.delivery import SourceDelivery
from kvproto.session.describing import read_geometry
from kvproto.session.events import Planned, RegisterAsked
from kvproto.session.negotiation import Chosen
from kvproto.session.phases import Described, Epoch, Party
from kvproto.session.ping import PingPart
from kvproto.session.pull import SourcePull
from kvproto.session.push import SourcePush
from kvproto.session.registering import check_register
from kvproto.session.staged import SourceStaged
from kvproto.session.staging import SlotWriter
from kvproto.session.table import SessionState
from kvproto.session.transfers import SourceAttempt, SourceTransfers
from kvproto.wire.enums import Access, ErrorCode, Feature, Transport
from kvproto.wire.messages import (
    Columns,
    Describe,
    Description,
    Hello,
    Process,
    Region,
    Register,
    Registered,
)

__all__ = ["SourceSession"]

_VERSION = 1
"""Of this rank's Description."""
_DELIVERIES: tuple[tuple[Feature | None, Callable[[Session], SourceDelivery]], ...] = (
    (Feature.PULL, SourcePull),
    (None, SourcePush),
)
"""How bytes reach the sink: the first row whose feature is chosen."""


class SourceSession(Session):
    """Source side of a rank pair, from Welcome on."""

    role = "source"

    def __init__(
        self, me: Party, host: Host, conn: Hashable, number: int, hello: Hello, chosen: Chosen, geometry: Geometry,
        encoded: bytes, now: float, sought: Callable[[SourceSession, SourceAttempt, float], None],
        draining: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`number`: the id that Welcome mints; `sought` is told of each Transfer that is legal."""
        super().__init__(me, host, conn)
        self.session, self.greeting, self.features = number, hello.request, chosen.features
        self._peer = Party(hello.engine, hello.replica, hello.rank, hello.incarnation)
        self._peer_limits = hello.limits
        self._geometry, self._encoded, self._digest = geometry, encoded, digest(encoded)
        self.claims = 0
        """Requests that wait for the end of a transfer of this session."""
        self._asked: tuple[Register, Overlaps] | None = None
        self._epoch: Epoch | None = None
        self._process: Process | None = None
        self.step("Hello")
        self.step("Welcome")
        self.hear({Describe: self._describe, Register: self._register})
        self.install(
            SourceTransfers(
                self, lambda: self._epoch, lambda attempt, now: sought(self, attempt, now), draining
            )
        )  # fmt: skip
        self.install(PingPart(self, now))
        make = next(make for feature, make in _DELIVERIES if feature is None or feature in self.features)
        self.delivery = make(self)
        self.install(self.delivery)

    @property
    def plan(self) -> Plan:
        """Of the two replicas; raises LocalError before it is known."""
        return self.described.plan

    @property
    def sink(self) -> Geometry:
        """The sink's replica; raises LocalError before it is known."""
        return self.described.sink

    @property
    def pulls(self) -> bool:
        """Whether the sink reads."""
        return Feature.PULL in self.features

    def _describe(self, message: Describe, now: float) -> None:
        if self._described is not None and self._described.request == message.request:
            self._say_description(message.request)
            return
        before = self.state
        try:
            self.step("Describe")
            sink, theirs = read_geometry(message)
            made = plan(self._geometry, sink, self.features)
            self.step("Description")
        except KvprotoError as error:
            self.state = before
            self.refuse(message.request, error)
            return
        self._described = Described(
            self._geometry, sink, (self._digest, theirs), (_VERSION, message.version), made,
            (self.me.rank, self.peer.rank), message.request,
        )  # fmt: skip
        self._say_description(message.request)
        self.tell(Planned(self.session, self.name, made, tuple(differences(self._geometry, sink))))

    def _say_description(self, request: int) -> None:
        self.notice(
            Description(
                session=self.session, request=request, version=_VERSION, geometry=self._encoded, digest=self._digest
            )
        )  # fmt: skip

    def _register(self, message: Register, now: float) -> None:
        if self._asked is not None and self._asked[0].request == message.request:
            return  # its memory is being mapped, and it is answered once
        if self._epoch is not None and self._epoch.request == message.request:
            self._say_registered(self._epoch)
            return
        before = self.state
        try:
            if self._epoch is not None:
                mine = f"epoch {self._epoch.number}, without the feature EPOCHS"
                raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "epoch", mine, str(message.epoch), "open a new session")
            self.step("Register")
            overlaps = check_register(message, Access.WRITE, self.described, self.described.sink)
        except KvprotoError as error:
            self.state = before
            self.refuse(message.request, error)
            return
        self._asked = message, overlaps
        self.tell(RegisterAsked(self.session, message))

    def accept_register(
        self, transport: Transport, slots: SlotWriter | None = None, process: Process | None = None
    ) -> None:
        """The sink's memory is mapped by this transport.

        `slots`: where bytes are staged, so that Credit is heard. `process`: the one that writes, where its end is proof
        that no write of it can arrive any more (KVP-REG-PROCESS).
        """
        asked, self._asked = self._asked, None
        if asked is None or self.state != SessionState.REGISTERING:
            return
        self.step("Registered")
        register, overlaps = asked
        columns = {c.group: c for c in register.columns}
        self._epoch = Epoch(register.epoch, columns, transport, register.request, overlaps)
        self._process = process if not self.pulls else None
        if slots is not None:
            self.install(SourceStaged(self, slots))
        self._say_registered(self._epoch)

    def _say_registered(self, epoch: Epoch) -> None:
        described = self.described
        self.notice(
            Registered(
                session=self.session, request=epoch.request, epoch=epoch.number, transport=epoch.transport,
                routes=described.refs, plan=described.plan.digest, process=self._process,
            )
        )  # fmt: skip

    def refuse_register(self, error: KvprotoError) -> None:
        """The sink's memory cannot be mapped."""
        asked, self._asked = self._asked, None
        if asked is not None and self.state == SessionState.REGISTERING:
            self.step("Refused")
            self.refuse(asked[0].request, error)

    def expose(self, regions: tuple[Region, ...], columns: tuple[Columns, ...], now: float) -> None:
        """Register this rank's memory with the sink, to be read (feature PULL)."""
        self.part(SourcePull).expose(regions, columns, now)
