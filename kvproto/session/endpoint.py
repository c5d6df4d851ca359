"""The sessions of one rank, for both roles; connections are opaque keys, and time comes in as `now`."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from kvproto.errors import KvprotoError, RemoteError
from kvproto.events import Event, ProtocolError
from kvproto.planning.geometry import Geometry, validate
from kvproto.session.descriptions import Described, Party, Stated
from kvproto.session.error_fields import refusal
from kvproto.session.plan_cache import Plans
from kvproto.session.records import Counters, SourceAttempt
from kvproto.session.timers import Timers
from kvproto.wire import encode
from kvproto.wire import messages as m
from kvproto.wire.codec import Head, read_head


class EndpointCalls(Protocol):
    """The calls that any endpoint makes on the rank that drives it."""

    def report(self, event: Event) -> None:
        """Report an event to the engine."""

    def attest(self, attestation: bytes, holds: bool) -> None:
        """Write down that this process has memory registered in a session, or remove that (KVP-REG-ATTEST)."""

    def map_memory(self, session: Any, register: m.Register, described: Described) -> None:
        """Map the peer's memory, and then report it as mapped, or refuse its Register."""

    def unmap_memory(self, session: Any, epoch: int) -> None:
        """Unmap an epoch that the peer wants back and nothing uses, and then report it as unmapped."""


class SourceCalls(EndpointCalls, Protocol):
    """The calls that a source endpoint makes on the rank that drives it; `request` is the engine's own record."""

    def request_changed(self, request: Any) -> None:
        """Note that a transfer of a request has come, was granted more, or is not wanted any more."""

    def transfer_due(self, attempt: SourceAttempt) -> None:
        """Copy the rows of a transfer whose items are all granted, as prefill is over."""

    def transfer_read(self, attempt: SourceAttempt, count: int) -> None:
        """Note that a sink rank has read `count` bytes of what it was offered; 0 if it gave up reading."""

    def request_released(self, request: Any, routed: tuple[int, ...], lost: Mapping[int, KvprotoError]) -> None:
        """Note that no sink rank needs a request; `lost` says why some may not have it, by rank (KVP-TRN-DUMMY)."""

    def request_expired(self, request: Any) -> None:
        """Note that the deadline passed before every sink rank had the request (KVP-TKT-DEADLINE)."""


class Endpoint:
    """The sessions of one rank that share a Description: all of a source's, or a sink's with one source replica."""

    geometry: Geometry
    stated: Stated
    calls: EndpointCalls

    def __init__(self, me: Party, geometry: Geometry | None = None) -> None:
        """Describe `geometry` to all peers; None if the rank moves no bytes."""
        self.me = me
        if geometry is not None:
            validate(geometry)
            self.geometry, self.stated = geometry, Stated.of(geometry)
        self.timers = Timers()
        self.sessions: dict[Any, Any] = {}
        self.out: list[tuple[Hashable, bytes]] = []
        """Frames to send, in order, each with its connection."""
        self.plans = Plans()
        self.name_of: Callable[[Hashable], str] = lambda conn: "(unknown peer)"
        """The peer of a connection without a session, for display."""
        self.advice: Callable[[str], str] = lambda address: "check that it runs at this address"
        """The advice about an address that does not answer."""
        self.resends = 0
        """The number of requests that were sent again."""

    def send(self, conn: Hashable, frame: bytes) -> None:
        """Queue a frame for a connection."""
        self.out.append((conn, frame))

    def tell(self, session: Any, event: Event) -> None:
        """Report an event of a session to the engine."""
        self.report(event)

    def report(self, event: Event) -> None:
        self.calls.report(event)

    def closed(self, session: Any) -> None:
        """Called when a session has ended."""
        raise NotImplementedError

    def unsettled(self) -> None:
        """Called when the plan or the memory of a session is about to change: no transfer starts until it is known."""

    def ended(self, session: Any, attempt: Any) -> None:
        """Called when an attempt has ended, or changed in a way that its request or transfer may wait for."""
        raise NotImplementedError

    def _after(self, now: float) -> None:
        """Act on changes; called after timers and calls, before frames are sent, and at a sink after every frame."""
        raise NotImplementedError

    def to_send(self, now: float) -> list[tuple[Hashable, bytes]]:
        """The frames to send, in order, each with its connection."""
        self._after(now)
        frames, self.out = self.out, []
        return frames

    def on_time(self, now: float) -> None:
        """Resend, give up and expire everything that is due; `timers.next` says when it is to be called."""
        self.timers.run(now)
        self._after(now)

    def returned(self, conn: Hashable, now: float) -> None:
        """Note that a connection to a source broke and came back, perhaps to another run of it."""
        if (session := self.sessions.get(str(conn))) is not None:
            session.returned(now)

    def census(self) -> Counters:
        """Count the peers of its sessions now, and the requests that were sent again so far."""
        peers = [session for session in self.sessions.values() if session.open and session.known]
        names = frozenset(session.name for session in peers)
        return Counters(len(peers), sum(session.suspect for session in peers), self.resends, names)

    def goodbye(self, reason: str) -> None:
        """End every session in order."""
        for session in list(self.sessions.values()):
            session.goodbye(reason)

    def _report(
        self, conn: Hashable, session: Any, frame: bytes, message: m.Message | None, error: RemoteError
    ) -> Head:
        """Answer a refused frame with Error, if due; returns what its head says (KVP-ERR-ANSWER, KVP-ERR-SILENT)."""
        head = read_head(frame) if message is None else Head.of(message)
        if head.cls is not m.Error and (message is not None or head.delivery == "request"):
            about = head.cls.TYPE if head.cls is not None else None
            answer = m.Error(session=head.session, request=head.request, about=about, **refusal(error))
            self.send(conn, encode(answer))
        self.report(ProtocolError(session.name if session else self.name_of(conn), error.kept()))
        return head
