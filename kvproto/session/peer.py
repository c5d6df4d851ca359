"""One session: what both roles share. Time comes in as `now` (seconds, any origin), frames go out by `to_send`."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import attrs

from kvproto.errors import KvprotoError, RemoteError
from kvproto.session.events import Event
from kvproto.session.table import SessionState, TransferState, next_session, next_transfer
from kvproto.wire import encode, tables
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Goodbye, Message

__all__ = ["RESEND", "Attempt", "Party", "Peer", "refusal", "refused"]

RESEND = 2.0
"""Seconds until a request goes out again under its id."""
PATIENCE = 30.0
"""Seconds until an unanswered request is given up."""
_KEPT = 64
"""Replies kept for requests that come again."""


@attrs.frozen
class Party:
    """One rank of one run of an engine."""

    engine: str
    replica: int
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.engine} rank {self.rank}"


@attrs.define
class Attempt:
    """One attempt of one transfer, as this side sees it."""

    sequence: int
    attempt: int
    state: TransferState = TransferState.NEW

    @property
    def key(self) -> tuple[int, int]:
        """What names it in the session."""
        return self.sequence, self.attempt


@attrs.define
class _Pending:
    frame: bytes
    name: str
    again: float
    until: float


def refused(message: Any) -> RemoteError:
    """The error that a Refused, Failed or Error reports; a code that is not known here counts as INTERNAL."""
    code = ErrorCode(message.code) if message.code in set(ErrorCode) else ErrorCode.INTERNAL
    return RemoteError(code, message.path, message.mine, message.yours, message.advice or "")


def refusal(error: KvprotoError) -> dict[str, Any]:
    """Fields that every refusal carries."""
    advice = {"advice": error.advice[:1000]} if error.advice else {}
    return {
        "code": error.code,
        "path": error.path[:1000],
        "mine": error.mine[:1000],
        "yours": error.yours[:1000],
        **advice,
    }


class Peer:
    """State, outbox, resends and the memory of replies of one session."""

    def __init__(self, me: Party) -> None:
        self.me = me
        self.peer: Party | None = None
        self.session = 0
        self.state = SessionState.IDLE
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self.low_water = 0
        """Every sequence at or below it is over and forgotten."""
        self.events: list[Event] = []
        self.outbox: list[bytes] = []
        """Frames to send, in order."""
        self._pending: dict[int, _Pending] = {}
        self._replies: OrderedDict[int, bytes] = OrderedDict()
        self._next_request = 1

    @property
    def name(self) -> str:
        """The peer, for people."""
        return str(self.peer) if self.peer else "(unknown peer)"

    def to_send(self) -> list[bytes]:
        """Frames to send, in order."""
        frames, self.outbox = self.outbox, []
        return frames

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self.events = self.events, []
        return events

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do."""
        return min((min(p.again, p.until) for p in self._pending.values()), default=None)

    def on_time(self, now: float) -> list[str]:
        """Resend what is due; returns the names of requests that were given up."""
        late = [i for i, p in self._pending.items() if now >= p.until]
        names = [self._pending.pop(i).name for i in late]
        for pending in self._pending.values():
            if now >= pending.again:
                pending.again = now + RESEND
                self.outbox.append(pending.frame)
        return names

    def hush(self) -> None:
        """Ask nothing again: nobody is there."""
        self._pending.clear()

    def step(self, event: str) -> None:
        """Move the session."""
        self.state = next_session(self.state, event)

    def goodbye(self, reason: str) -> None:
        """End the session in order; before its Welcome there is nothing to end."""
        if self.state not in (SessionState.CLOSED, SessionState.IDLE, SessionState.GREETED):
            self.step("Goodbye")
            self.notice(Goodbye(session=self.session, reason=reason[:1000]))

    def ended(self, key: tuple[int, int]) -> bool:
        """Whether the attempt is over, be it forgotten or not."""
        attempt = self.attempts.get(key)
        return attempt is None or attempt.state == TransferState.ENDED

    def forget(self) -> None:
        """Raise the low-water mark over what is over."""
        while keys := [k for k in self.attempts if k[0] == self.low_water + 1]:
            if not all(self.ended(k) for k in keys):
                break
            for key in keys:
                del self.attempts[key]
            self.low_water += 1

    def move(self, attempt: Attempt, event: str) -> None:
        """Move a transfer."""
        attempt.state = next_transfer(attempt.state, event)

    def request(
        self, cls: type[Any], now: float, patience: float = PATIENCE, grease: bool = False, **fields: Any
    ) -> int:
        """Queue a request under a fresh id; it is resent until answered."""
        number, self._next_request = self._next_request, self._next_request + 1
        head = {} if cls.__name__ == "Hello" else {"session": self.session}
        ids = tables.GREASE_FIELD_IDS
        more = ids[self.me.incarnation % len(ids)] if grease else None
        frame = encode(cls(**head, request=number, **fields), grease=more)
        self._pending[number] = _Pending(frame, cls.__name__, now + RESEND, now + patience)
        self.outbox.append(frame)
        return number

    def answered(self, number: int) -> bool:
        """Whether this answers a request under way."""
        return self._pending.pop(number, None) is not None

    def reply(self, message: Message, number: int) -> None:
        """Queue a reply and remember it for the request that comes again."""
        frame = encode(message)
        self._replies[number] = frame
        if len(self._replies) > _KEPT:
            self._replies.popitem(last=False)
        self.outbox.append(frame)

    def repeated(self, number: int) -> bool:
        """Answer a request that came before as it was answered then."""
        frame = self._replies.get(number)
        if frame is not None:
            self.outbox.append(frame)
        return frame is not None

    def notice(self, message: Message) -> None:
        """Queue a message that has no answer."""
        self.outbox.append(encode(message))
