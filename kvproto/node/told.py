"""What a node tells, by key and group id; `kvproto.events` has the same for engines, by handle and name."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.events import Connected, Disconnected, Event, ProtocolError, Recovered, Refused, Suspected
from kvproto.session import events as session
from kvproto.session.events import Unwanted as RequestUnwanted
from kvproto.wire.enums import Outcome

__all__ = [
    "Copied",
    "PagesNeeded",
    "PoolReturned",
    "Received",
    "RequestOver",
    "RequestUnwanted",
    "TransferLost",
    "TransferProven",
    "shared_event",
]


@attrs.frozen
class Copied:
    """Source: a sink rank has all bytes of a request, copied by this rank or read by itself."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: Mapping[str, int]
    """By the name of the sink's group."""
    seconds: float
    """For what was left when prefill was over."""
    left: int
    """Bytes of that."""
    peer: str = ""
    """The sink rank's engine and rank, for people."""
    epoch: int = 0
    """Of the sink's registration."""


@attrs.frozen
class RequestOver:
    """Source: the pages of a request are free."""

    key: bytes = attrs.field(repr=False)
    routed: tuple[int, ...] | None
    """Source ranks with a route; None: the ticket's deadline has passed."""
    lost: Mapping[int, KvprotoError] = {}
    """Sink ranks that have not said that they have the request, and why."""


@attrs.frozen
class Received:
    """Sink: everything of a transfer is here."""

    number: int
    outcome: Outcome
    handoff: Mapping[tuple[int, str], bytes] = attrs.field(repr=False)
    """By this side's group id and part name."""
    checksums: Mapping[tuple[int, int], int]
    """By source rank and group id, equal on both sides."""
    bytes: Mapping[int, int]
    """Written by each source rank."""
    seconds: float
    since: Mapping[int, int] = {}
    """By group id: the first token that is here, of late windows that do not begin where they were asked for."""


@attrs.frozen
class PagesNeeded:
    """Sink: pages of a transfer that has not named them are of use."""

    number: int
    tokens: int | None
    """Up to which token; None: all of them."""


@attrs.frozen
class TransferLost:
    """Sink: a transfer failed; its pages are free if `proven`, else once TransferProven tells of it."""

    number: int
    error: KvprotoError
    proven: bool


@attrs.frozen
class TransferProven:
    """Sink: nothing can write the pages of a lost transfer any more."""

    number: int


@attrs.frozen
class PoolReturned:
    """Nobody can touch a pool any more that was taken back; `epoch` is that of its first registration."""

    epoch: int


def shared_event(event: object) -> Event:
    """The engine's event for one of the session's that is about a peer, not about a request."""
    match event:
        case session.Planned():
            return Connected(event.peer, event.plan, event.warnings)
        case session.SessionClosed():
            return Disconnected(event.peer, event.reason)
        case session.SessionRefused():
            return Refused(event.peer, event.error, event.by_us)
        case session.Suspected():
            return Suspected(event.peer)
        case session.Recovered():
            return Recovered(event.peer)
        case session.ProtocolError():
            return ProtocolError(event.peer, event.error)
    raise TypeError(f"no event for engines: {event!r}")
