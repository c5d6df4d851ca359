"""What the endpoints of both roles share: sessions, frames to send, events, timers, and what is answered by Error.

An endpoint is all sessions of one rank. Addresses and connections are opaque keys (`Hashable`), so nothing here knows
what carries the frames. Time comes in as `now` (seconds, any origin) and goes out as `next_deadline`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvproto.errors import RemoteError
from kvproto.session.core import Session, refusal
from kvproto.session.events import Event, ProtocolError
from kvproto.session.timers import Timers
from kvproto.wire import encode
from kvproto.wire.head import Head, read_head
from kvproto.wire.messages import Error, Message

__all__ = ["Endpoint"]


class Endpoint:
    """Outbox, events and timers; a role adds its sessions."""

    def __init__(self) -> None:
        self.timers = Timers()
        self._events: list[Event] = []
        self._out: list[tuple[Hashable, bytes]] = []

    def send(self, session: Session, frame: bytes) -> None:
        """Queue a frame of a session."""
        self._out.append((session.conn, frame))

    def tell(self, session: Session, event: Event) -> None:
        """Queue an event for the engine."""
        self._events.append(event)

    def _after(self, now: float) -> None:
        """Draw the conclusions of what has changed."""
        raise NotImplementedError

    def _peers(self) -> Sequence[Session]:
        raise NotImplementedError

    def to_send(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Frames, in order, and the connection of each."""
        self._after(now)
        out, self._out = self._out, []
        return out

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def next_deadline(self) -> float | None:
        """When `on_time` next has something to do; None: only a frame or a call can change anything."""
        return self.timers.next()

    def on_time(self, now: float) -> None:
        """Resend, give up, expire: whatever is due."""
        self.timers.run(now)
        self._after(now)

    def goodbye(self, reason: str) -> None:
        """End every session in order."""
        for session in list(self._peers()):
            session.goodbye(reason)

    def _report(
        self, conn: Hashable, session: Session | None, frame: bytes, message: Message | None, error: RemoteError
    ) -> Head:
        """Answer a refused frame by Error, unless it is an Error itself, or a reply or notice that cannot be read.

        Returns what can be read of it (KVP-ERR-ANSWER, KVP-ERR-SILENT).
        """
        head = read_head(frame) if message is None else Head.of(message)
        readable = message is not None
        if head.cls is not Error and (readable or head.delivery == "request"):
            about = head.cls.TYPE if head.cls is not None else None
            answer = Error(session=head.session, request=head.request, about=about, **refusal(error))
            self._out.append((conn, encode(answer)))
        self._events.append(ProtocolError(session.name if session else "(unknown peer)", error))
        return head
