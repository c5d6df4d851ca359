"""A session from Hello to Goodbye: what both roles and every feature of it share.

Theory. A session is a table of handlers, one for each message that it may hear. The core puts in its own (Goodbye,
Error); each feature is a `Part` that puts in its handlers when the feature is chosen. So a message of a feature that
was not chosen has no handler, and is UNEXPECTED_MESSAGE. Requests are resent under their id until they are answered; a
repeated request is answered from the state that it left, never from stored bytes, so no number of transfers outgrows a
memory of replies. Time comes in as `now` (seconds, any origin); deadlines lie in the timers of the endpoint, frames and
events in its outbox.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeVar

import attrs

from kvproto.errors import KvprotoError, LocalError, RemoteError
from kvproto.session.events import Event, SessionClosed, SessionRefused
from kvproto.session.limits import PATIENCE, RESEND
from kvproto.session.phases import Described, Party
from kvproto.session.table import SessionState, TransferState, next_session, next_transfer
from kvproto.session.timers import Timer, Timers
from kvproto.wire import encode, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Error, Goodbye, Limits, Message, Refused

__all__ = ["Attempt", "Handler", "Host", "Part", "Session", "refusal", "refused"]

Handler = Callable[[Any, float], None]
P = TypeVar("P", bound="Part")


class Host(Protocol):
    """What a session needs of the endpoint that holds it."""

    timers: Timers

    def send(self, session: Session, frame: bytes) -> None:
        """Queue a frame for the session's connection."""

    def tell(self, session: Session, event: Event) -> None:
        """Tell the engine, after the endpoint has drawn its own conclusions."""

    def closed(self, session: Session) -> None:
        """The session is over."""

    def ended(self, session: Session, attempt: Attempt) -> None:
        """Something of an attempt has changed that the request or the transfer above it may wait for."""


class Part:
    """What a feature adds to a session."""

    def handlers(self) -> Mapping[type, Handler]:
        """Messages that it hears."""
        return {}

    def closed(self) -> None:
        """The session is over."""


@attrs.define(eq=False)
class Attempt:
    """One attempt of one transfer, as this side sees it."""

    sequence: int
    attempt: int
    state: TransferState = TransferState.NEW

    @property
    def over(self) -> bool:
        """Whether nothing of it needs to be remembered once all before it are over too."""
        return self.state == TransferState.ENDED


@attrs.define(eq=False)
class _Pending:
    frame: bytes
    name: str
    until: float
    timer: Timer
    on_error: Callable[[RemoteError, float], None] | None


def refused(message: Any) -> RemoteError:
    """The error that a Refused, Failed or Error reports; an unknown code counts as INTERNAL (KVP-ERR-UNKNOWN)."""
    code = ErrorCode(message.code) if message.code in set(ErrorCode) else ErrorCode.INTERNAL
    return RemoteError(code, message.path, message.mine, message.yours, message.advice or "")


def refusal(error: KvprotoError) -> dict[str, Any]:
    """Fields that every refusal carries (KVP-ERR-REPORT)."""
    advice = {"advice": error.advice[:1000]} if error.advice else {}
    return {
        "code": error.code,
        "path": error.path[:1000],
        "mine": error.mine[:1000],
        "yours": error.yours[:1000],
        **advice,
    }


class Session:
    """State, requests under way and handlers of one rank pair; a role adds how it opens and registers."""

    role = ""

    def __init__(self, me: Party, host: Host, conn: Hashable) -> None:
        self.me, self.host, self.conn = me, host, conn
        self.session = 0
        self.state = SessionState.IDLE
        self.features: tuple[int, ...] = ()
        self.closed_in = SessionState.IDLE
        """The state in which the session ended."""
        self.said_goodbye = False
        """Whether the peer has ended the session in order: it writes and reads nothing any more."""
        self.heard = 0.0
        """When the last frame of the peer came."""
        self.attempts: dict[int, Any] = {}
        """The latest attempt of each sequence above the low-water mark."""
        self.low_water = 0
        """Every sequence at or below it is over and forgotten."""
        self._peer: Party | None = None
        self._peer_limits: Limits | None = None
        self._described: Described | None = None
        self._parts: dict[type[Part], Part] = {}
        self._handlers: dict[type, Handler] = {Goodbye: self._goodbye, Error: self._error}
        self._pending: dict[int, _Pending] = {}
        self._next_request = 1

    @property
    def peer(self) -> Party:
        """The other rank; raises LocalError before Welcome."""
        return _known(self._peer, "the peer")

    @property
    def described(self) -> Described:
        """Both Descriptions and the plan; raises LocalError before they are known."""
        return _known(self._described, "the plan")

    @property
    def is_described(self) -> bool:
        """Whether both Descriptions are known."""
        return self._described is not None

    @property
    def open(self) -> bool:
        """Whether the session is not over."""
        return self.state != SessionState.CLOSED

    @property
    def name(self) -> str:
        """The peer, for people."""
        return str(self._peer) if self._peer else str(self.conn)

    def install(self, part: Part) -> None:
        """Add the handlers of a part; they take the place of others for the same messages."""
        self._parts[type(part)] = part
        self._handlers.update(part.handlers())

    def hear(self, handlers: Mapping[type, Handler]) -> None:
        """Add handlers of the role."""
        self._handlers.update(handlers)

    def part(self, cls: type[P]) -> P:
        """A part that is installed; raises LocalError where the session has not chosen it."""
        found = self._parts.get(cls)
        if not isinstance(found, cls):
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", "a session without it", cls.__name__)
        return found

    def receive(self, message: Any, now: float) -> None:
        """Take one message; only RemoteError escapes, and then the message had no effect."""
        self.heard = now
        handler = self._handlers.get(type(message))
        if handler is None:
            mine = f"{self.role} in state {self.state.value}, with the features of this session"
            raise RemoteError(ErrorCode.UNEXPECTED_MESSAGE, "", mine, type(message).__name__)
        handler(message, now)

    def step(self, event: str) -> None:
        """Move the session; raises UNEXPECTED_MESSAGE where the table has no row."""
        self.state = next_session(self.state, event, self.features)

    def move(self, attempt: Attempt, event: str) -> None:
        """Move an attempt; raises UNEXPECTED_MESSAGE where the table has no row."""
        attempt.state = next_transfer(attempt.state, event, self.features)
        if attempt.state == TransferState.ENDED:
            self.host.ended(self, attempt)

    def forget(self) -> None:
        """Raise the low-water mark over what is over."""
        while (attempt := self.attempts.get(self.low_water + 1)) is not None and attempt.over:
            del self.attempts[self.low_water + 1]
            self.low_water += 1

    def tell(self, event: Event) -> None:
        """Tell the endpoint, and with it the engine."""
        self.host.tell(self, event)

    def refuse(self, request: int, error: KvprotoError) -> None:
        """Answer Describe or Register by Refused."""
        self.notice(Refused(session=self.session, request=request, **refusal(error)))
        self.tell(SessionRefused(self.name, error, by_us=True))

    def goodbye(self, reason: str) -> None:
        """End the session in order; before its Welcome there is nothing to end."""
        if self.state not in (SessionState.CLOSED, SessionState.IDLE, SessionState.GREETED):
            self.notice(Goodbye(session=self.session, reason=reason[:1000]))
            self.close()

    def close(self) -> None:
        """The session is over; nothing is asked again."""
        if self.open:
            self.closed_in, self.state = self.state, SessionState.CLOSED
            self._end()

    def _end(self) -> None:
        self.cancel_requests()
        for part in self._parts.values():
            part.closed()
        self.host.closed(self)

    def lose(self, reason: str) -> None:
        """Give the session up; this proves nothing about the peer (KVP-SES-DEAD)."""
        if self.open:
            self.close()
            self.tell(SessionClosed(self.session, self.name, reason))

    def _goodbye(self, message: Goodbye, now: float) -> None:
        self.closed_in = self.state
        self.step("Goodbye")
        self.said_goodbye = True
        self._end()
        self.tell(SessionClosed(self.session, self.name, message.reason))

    def _error(self, message: Error, now: float) -> None:
        """An Error ends the request that it is about: no other answer will come."""
        error = refused(message)
        pending = self._pending.get(message.request) if message.request is not None else None
        if error.code in (ErrorCode.UNKNOWN_SESSION, ErrorCode.SUPERSEDED) and pending is not None:
            self.lose(f"{error.code.name}: the peer does not go on with this session")
        elif pending is not None:
            self.answered(message.request or 0)
            if pending.on_error is not None:
                pending.on_error(error, now)
            else:
                self.tell(SessionRefused(self.name, error, by_us=False))

    def compose(
        self, cls: type[Any], now: float, *, grease: bool = False, patience: float = PATIENCE,
        on_error: Callable[[RemoteError, float], None] | None = None, **fields: Any,
    ) -> Callable[[], int]:  # fmt: skip
        """Encode a request under a fresh id; the result sends it, and returns the id.

        Raises LocalError, TOO_LARGE, where the body is longer than the peer takes, and then nothing was sent.
        """
        number = self._next_request
        head = {} if cls.__name__ == "Hello" else {"session": self.session}
        ids = tables.GREASE_FIELD_IDS
        frame = encode(
            cls(**head, request=number, **fields), grease=ids[self.me.incarnation % len(ids)] if grease else None
        )
        size = len(frame) - tables.HEADER_BYTES
        most = self._peer_limits.max_body if self._peer_limits is not None else tables.MAX_BODY
        if size > most:
            raise LocalError(ErrorCode.TOO_LARGE, cls.__name__, f"at most {most} bytes for this peer", f"{size} bytes")
        self._next_request = number + 1

        def send() -> int:
            timer = self.host.timers.at(now + RESEND, lambda at: self._again(number, at))
            self._pending[number] = _Pending(frame, cls.__name__, now + patience, timer, on_error)
            self.host.send(self, frame)
            return number

        return send

    def request(self, cls: type[Any], now: float, **fields: Any) -> int:
        """Send a request under a fresh id; it is resent until answered or given up (KVP-SES-RESEND).

        A session whose peer does not take a request of this length is given up.
        """
        try:
            return self.compose(cls, now, **fields)()
        except LocalError as error:
            if error.code != ErrorCode.TOO_LARGE:
                raise
            self.lose(str(error))
            return 0

    def _again(self, number: int, now: float) -> None:
        pending = self._pending.get(number)
        if pending is None or not self.open:
            return
        if now >= pending.until:
            self.lose(f"no answer to {pending.name} in {PATIENCE:.0f} s")
            return
        pending.timer = self.host.timers.at(min(now + RESEND, pending.until), lambda at: self._again(number, at))
        self.host.send(self, pending.frame)

    def asks(self, number: int) -> bool:
        """Whether this request is under way."""
        return number in self._pending

    def answered(self, number: int) -> bool:
        """End a request; whether it was under way."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.timer.cancel()
        return pending is not None

    def cancel_requests(self) -> None:
        """Ask nothing again."""
        for number in list(self._pending):
            self.answered(number)

    def notice(self, message: Message) -> None:
        """Send a message that has no answer of its own: a notice or a reply."""
        self.host.send(self, encode(message))


T = TypeVar("T")


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "", f"{what} is not known yet", "asked for", "wait for Planned")
    return value
