"""What the endpoints of both roles share: frames to send, and events.

An endpoint is all sessions of one rank. Addresses and connections are opaque keys (`Hashable`), so nothing here knows
what carries the frames.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvproto.session.events import Event
from kvproto.session.peer import Peer

__all__ = ["Endpoint"]


class Endpoint:
    """Outbox and events; a role adds its sessions."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._out: list[tuple[Hashable, bytes]] = []
        self._touched = False
        """Whether something changed that `_after` has not seen."""

    def _after(self, now: float) -> None:
        raise NotImplementedError

    def _collect(self) -> None:
        """Take what the sessions have to send."""
        raise NotImplementedError

    def _peers(self) -> Sequence[Peer]:
        raise NotImplementedError

    def to_send(self, now: float) -> list[tuple[Hashable, bytes]]:
        """Frames and the connection of each."""
        if self._touched:
            self._after(now)
        self._collect()
        out, self._out = self._out, []
        return out

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def goodbye(self, reason: str) -> None:
        """End every session in order."""
        for session in self._peers():
            session.goodbye(reason)
