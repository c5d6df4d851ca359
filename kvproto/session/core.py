"""A session from Hello to Goodbye: the core that roles and features share.

A session is a table of handlers, one for each message that it may receive. The core adds its own (Goodbye, Error); each
feature is an `Extension` that adds its handlers when the feature is chosen. So a message of a feature that was not
chosen has no handler, and is UNEXPECTED_MESSAGE. A request is resent under its id until it is answered; a repeated
request is answered from the state that it left, never from stored replies, so that their memory cannot run out.
Addresses and connections are opaque keys. Time comes in as `now` (seconds, any origin) and goes out as `Timers.next`.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.events import Connected, Disconnected, Event, ProtocolError, Recovered, Refused
from kvproto.planning.compare import differences, unstated
from kvproto.session import limits
from kvproto.session.descriptions import Described, Party, Stated
from kvproto.session.endpoint import Endpoint
from kvproto.session.error_fields import refusal, refused
from kvproto.session.negotiation import LIMITS
from kvproto.session.plan_cache import Planned
from kvproto.session.records import Attempt, PendingMessage
from kvproto.session.table import TRANSFER, TRANSFER_FEATURES, SessionState, TransferState, next_session, next_transfer
from kvproto.wire import encode, tables
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Feature, word

Handlers = tuple[tuple[type, Any], ...]
"""Pairs of a message class and its handler, a method that is called with the message and `now`."""
P = TypeVar("P", bound="Extension")
T = TypeVar("T")


class Extension:
    """The state and handlers that a feature adds to a session."""

    handlers: Handlers = ()

    def __init__(self, session: "Session") -> None:
        self._session = session

    def closed(self) -> None:
        """Called when the session has ended."""

    def reconnected(self) -> None:
        """Called when the session resumes over another connection; notices under way are lost."""

    def planned(self) -> None:
        """Called when a plan of both Descriptions was made, or could not be made."""


class Session:
    """The state, requests under way and handlers of one rank pair; a role adds how it opens and registers."""

    role = ""

    def __init__(self, host: Endpoint, conn: Hashable) -> None:
        self.host, self.me, self.conn = host, host.me, conn
        self.session = 0
        self.state = self.closed_in = SessionState.IDLE
        """`closed_in` is the state in which the session ended."""
        self.open = True
        """Whether the session has not ended."""
        self.features: tuple[int, ...] = ()
        self.minor = tables.MINOR
        """The minor version of the session, from Welcome on."""
        self.limits = LIMITS
        """The limits of the peer; until they are known, the limits of this package."""
        self.goodbye_received = False
        """Whether the peer has sent Goodbye, after which it neither writes nor reads."""
        self.received_at = 0.0
        """The time at which the last frame of the peer was received."""
        self.suspect = False
        """Whether the peer has been silent for so long that nothing new is sent to it (KVP-SES-SUSPECT)."""
        self.attempts: dict[int, Any] = {}
        """The transfers above the low-water mark, by sequence."""
        self.low_water = 0
        """Every sequence up to this one has ended and is forgotten."""
        self.expected = ""
        """The peer that should answer, for display, while its identity is not known."""
        self._peer: Party | None = None
        self._name = ""
        """The peer's name, once it is known."""
        self._described: Described | None = None
        self.theirs: Stated
        """The peer's latest Description; set when the first is known."""
        self.described_by = 0
        """The request id of the peer's last Describe that was answered."""
        self._extensions: dict[type[Extension], Extension] = {}
        self._handlers: dict[type, Callable[[Any, float], None]] = {}
        self._add_handlers(self)
        self._pending: dict[int, PendingMessage] = {}
        self._next_request = 1

    @property
    def peer(self) -> Party:
        """The other rank; raises LocalError before Welcome."""
        peer = self._peer
        return peer if peer is not None else _known(peer, "the peer")

    @property
    def described(self) -> Described:
        """Both Descriptions and their plan; raises LocalError before they are known."""
        described = self._described
        return described if described is not None else _known(described, "the plan")

    @property
    def planned(self) -> bool:
        """Whether both Descriptions and their plan are known."""
        return self._described is not None

    @property
    def known(self) -> bool:
        """Whether the peer's identity is known."""
        return self._peer is not None

    @property
    def name(self) -> str:
        """The peer's name, for display."""
        return self._name or str(self.expected or self.conn)

    def _met(self, peer: Party) -> None:
        """Note who the peer is, as its Hello or Welcome says."""
        self._peer, self._name = peer, str(peer)

    def install(self, extension: Extension) -> None:
        """Add an extension; its handlers replace others for the same messages."""
        self._extensions[type(extension)] = extension
        self._add_handlers(extension)

    def _add_handlers(self, owner: "Extension | Session") -> None:
        self._handlers |= {cls: partial(handler, owner) for cls, handler in owner.handlers}

    def has(self, cls: type[Extension]) -> bool:
        return cls in self._extensions

    def part(self, cls: type[P]) -> P:
        """An installed extension; raises LocalError if the session did not choose its feature."""
        extension = self._extensions.get(cls)
        if not isinstance(extension, cls):
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", f"a session with {cls.__name__}", "one without it")
        return extension

    def receive(self, message: Any, now: float) -> None:
        """Handle one message; the only error that it raises is RemoteError, and then the message had no effect."""
        self.received_at = now
        if self.suspect:
            self.suspect = False
            self.tell(Recovered(self.name))
        handler = self._handlers.get(type(message))
        if handler is None:
            mine = f"{self.role} in state {self.state.value}, with the features of this session"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, type(message).__name__)
        handler(message, now)

    def step(self, event: str) -> None:
        """Move the session to its next state by the table; raises UNEXPECTED_MESSAGE if there is no row."""
        self.state = next_session(self.state, event, self.features)
        self.open = self.state != SessionState.CLOSED

    def move(self, attempt: Attempt, event: str) -> None:
        """Move a transfer to its next state by the table; raises UNEXPECTED_MESSAGE if there is no row."""
        after = None if (attempt.state, event) in TRANSFER_FEATURES else TRANSFER.get((attempt.state, event))
        attempt.state = after or next_transfer(attempt.state, event, self.features)
        if attempt.state == TransferState.ENDED:
            self.host.ended(self, attempt)

    def forget(self) -> None:
        """Raise the low-water mark past transfers that have ended."""
        while (attempt := self.attempts.get(self.low_water + 1)) is not None and attempt.over:
            del self.attempts[self.low_water + 1]
            self.low_water += 1

    def describe(
        self, message: m.Describe | m.Description, from_source: bool, then: Callable[[KvprotoError | None], None]
    ) -> None:
        """Have the plan of both Descriptions made, and then call `then` with None, or the error if they do not fit.

        `then` is not called after the session has ended. A plan is dropped if that of a later Description of the peer
        was made before it (KVP-DSC-LAST).
        """
        own = self.host.stated

        def finish(planned: Planned | KvprotoError) -> None:
            if not self.open:
                return
            if own is not self.host.stated:  # it has changed in the meantime
                self.describe(message, from_source, then)
                return
            if self._described is not None and message.version < self.theirs.version:
                then(None)
                return
            if isinstance(planned, Planned):
                theirs = attrs.evolve(planned.theirs, version=message.version)
                source, sink = (theirs, own) if from_source else (own, theirs)
                ranks = (self.peer.rank, self.me.rank) if from_source else (self.me.rank, self.peer.rank)
                self.step("Description")
                self._described, self.theirs = Described(source, sink, planned.plan, ranks), theirs
                warnings = tuple(differences(source.geometry, sink.geometry))
                missing = unstated(source.geometry, sink.geometry)
                version, features = f"{tables.MAJOR}.{self.minor}", tuple(word(Feature, f) for f in self.features)
                self.tell(Connected(self.name, planned.plan, warnings, missing, version, features))
            then(planned if isinstance(planned, KvprotoError) else None)
            for extension in self._extensions.values():
                extension.planned()

        self.host.plans.make(message, own, from_source, self.features, finish)

    def reachable(self, endpoints: tuple[m.Endpoint, ...] | None) -> None:
        """Handle the addresses at which the peer's ranks listen now, if it stated any."""

    def tell(self, event: Event) -> None:
        """Report an event to the endpoint, and so to the engine."""
        self.host.tell(self, event)

    def notice(self, message: m.Message) -> None:
        """Send a message that needs no answer; if it is longer than the peer accepts, the session is given up."""
        frame = encode(message, minor=self.minor)
        if len(frame) - tables.HEADER_BYTES > self.limits.max_body:
            self.lose(f"a {type(message).__name__} is longer than the peer takes")
            return
        self.host.send(self.conn, frame)

    def reply(self, cls: type[Any], to: Any, **fields: Any) -> None:
        """Answer a request; an answer about a transfer names it as the request does."""
        if hasattr(to, "sequence"):
            fields["sequence"] = to.sequence
        self.notice(cls(session=self.session, request=to.request, **fields))

    def refuse(self, request: m.Describe | m.Register | m.Unregister, error: KvprotoError, ends: bool = True) -> None:
        """Answer with Refused, and report it to the engine; `ends` if the session has no use without the request."""
        self.reply(m.Refused, request, **refusal(error))
        self.tell(Refused(self.name, error, by_us=True) if ends else ProtocolError(self.name, error))

    def refused(self, message: m.Refused, now: float) -> None:
        """Handle Refused, the answer to a Hello, Describe or Register."""
        if self.answered(message.request, m.Hello, m.Describe, m.Register):
            self.step("Refused")
            self.tell(Refused(self.name, refused(message, self.name), by_us=False))

    def reconnected(self) -> None:
        """Resume over another connection."""
        for extension in self._extensions.values():
            extension.reconnected()

    def resume(self, now: float) -> bool:
        """Try to resume a session that the peer does not know on this connection; returns whether it is being tried."""
        return False

    def give_up(self, error: KvprotoError) -> None:
        """End the session because of an error in the peer's statements about itself."""
        self.tell(Refused(self.name, error, by_us=True))
        self.goodbye(str(error))

    def goodbye(self, reason: str) -> None:
        """End the session in order; before its Welcome, there is nothing to end."""
        if self.state not in (SessionState.CLOSED, SessionState.IDLE, SessionState.GREETED):
            self.notice(m.Goodbye(session=self.session, reason=reason[:1000]))
            self._close()

    def lose(self, reason: str) -> None:
        """Give up the session; this proves nothing about the peer (KVP-END-REUSE)."""
        if self.open:
            self._close()
            self.tell(Disconnected(self.name, reason))

    def _close(self) -> None:
        self.closed_in, self.state, self.open = self.state, SessionState.CLOSED, False
        for number in list(self._pending):
            self.answered(number)
        for extension in self._extensions.values():
            extension.closed()
        self.host.closed(self)

    def _goodbye(self, message: m.Goodbye, now: float) -> None:
        next_session(self.state, "Goodbye", self.features)  # raises if it is not legal
        self.goodbye_received = True
        self.lose(message.reason)

    def _error(self, message: m.Error, now: float) -> None:
        """Handle Error, which ends the request that it is about: no other answer will come."""
        error, number = refused(message, self.name), message.request or 0
        if (message.about, error.code) == (m.Description.TYPE, ErrorCode.DESCRIPTION_MISMATCH):  # Goodbye follows
            self.tell(Refused(self.name, error, by_us=False))
            return
        request = self._pending.get(number)
        if request is None or message.about not in (None, request.kind.TYPE):  # both directions may use the same ids
            return
        if error.code == ErrorCode.UNKNOWN_SESSION and self.resume(now):
            return
        if error.code in (ErrorCode.UNKNOWN_SESSION, ErrorCode.SUPERSEDED):
            self.lose(f"{error.code.name}: the peer does not go on with this session")
            return
        self.answered(number)
        if request.on_error is not None:
            request.on_error(error, now)
        else:  # the session has no use without the request
            self.tell(Refused(self.name, error, by_us=False))
            self.goodbye(str(error))

    handlers: Handlers = ((m.Goodbye, _goodbye), (m.Error, _error))

    def compose(
        self,
        cls: type[Any],
        now: float,
        *,
        patience: float | None = None,
        on_error: Callable[[RemoteError, float], None] | None = None,
        **fields: Any,
    ) -> PendingMessage:
        """Encode a request with a new id, for `ask`, and grease Hello; raises LocalError(TOO_LARGE)."""
        number, ids = self._next_request, tables.GREASE_FIELD_IDS
        head, grease = {"session": self.session}, None
        if cls is m.Hello:
            head, grease = {}, ids[self.me.incarnation % len(ids)]
        frame = encode(cls(**head, request=number, **fields), grease=grease, minor=self.minor)
        size, most = len(frame) - tables.HEADER_BYTES, self.limits.max_body
        if size > most:
            raise LocalError(ErrorCode.TOO_LARGE, cls.__name__, f"at most {most} bytes for this peer", f"{size} bytes")
        self._next_request = number + 1
        until = now + (limits.PATIENCE if patience is None else patience)
        return PendingMessage(number, frame, cls, until, on_error, fields.get("sequence", 0))

    def ask(self, request: PendingMessage, now: float) -> int:
        """Send a request, and resend it until it is answered or given up (KVP-SES-RESEND); returns its id."""
        self._pending[request.number] = request
        self._again(request, now)
        return request.number

    def _again(self, request: PendingMessage, now: float) -> None:
        if now >= request.until:
            self.lose(f"no answer to {request.kind.__name__} in {limits.PATIENCE:.0f} s")
            return
        self.host.resends += request.timer is not None
        request.timer = self.host.timers.at(min(now + limits.RESEND, request.until), partial(self._again, request))
        self.host.send(self.conn, request.frame)

    def resend(self, now: float) -> None:
        """Send all requests again, in order: those on their way by the former connection are lost (KVP-SES-RESEND)."""
        for request in [*self._pending.values()]:
            if self.open and request.number in self._pending:
                if request.timer is not None:
                    request.timer.cancel()
                self._again(request, now)

    def request(self, cls: type[Any], now: float, **fields: Any) -> int:
        """Compose and ask; if the request is longer than the peer accepts, the session is given up."""
        try:
            return self.ask(self.compose(cls, now, **fields), now)
        except LocalError as error:
            if error.code != ErrorCode.TOO_LARGE:
                raise
            self.lose(str(error))
            return 0

    def asks(self, number: int) -> bool:
        """Whether this request is under way."""
        return number in self._pending

    def answered(self, number: int, *kinds: type, about: int | None = None) -> bool:
        """End a request of ours, if it is of these kinds and about this; returns whether it was under way."""
        request = self._pending.get(number)
        if request is None or (kinds and request.kind not in kinds) or about not in (None, request.about):
            return False
        del self._pending[number]
        if request.timer is not None:
            request.timer.cancel()
        return True


def _known(value: T | None, fact: str) -> T:
    if value is None:
        mine, yours = f"a session that knows {fact}", "one that does not yet"
        raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, yours, "wait for Connected")
    return value
