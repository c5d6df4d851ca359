"""What the session layer tells the engine."""

from __future__ import annotations

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.plan import Plan
from kvproto.wire.enums import Proof
from kvproto.wire.messages import Done, Offer, Register, Transfer

__all__ = [
    "Arrived",
    "Event",
    "Expired",
    "Fetched",
    "Lost",
    "Offered",
    "Planned",
    "Proven",
    "Ready",
    "RegisterAsked",
    "Released",
    "Serve",
    "SessionClosed",
    "SessionRefused",
    "Troubled",
]


@attrs.frozen
class Planned:
    """Both Descriptions are known and fit."""

    session: int
    peer: str
    plan: Plan
    warnings: tuple[tuple[str, str, str], ...]


@attrs.frozen
class RegisterAsked:
    """Map the memory, then `accept_register` or `refuse_register`; at the sink it is a source's, to be read."""

    session: int
    register: Register = attrs.field(repr=False)


@attrs.frozen
class Ready:
    """Sink: every routed rank has registered this rank's memory."""

    plan: Plan


@attrs.frozen
class Serve:
    """Source: the request is finished and this sink rank asks for it: copy, then `done` or `failed`."""

    key: bytes = attrs.field(repr=False)
    session: int
    transfer: Transfer


@attrs.frozen
class Fetched:
    """Source: a sink rank has read an offer, or reads nothing of it any more."""

    session: int
    sequence: int
    attempt: int
    bytes: int


@attrs.frozen
class Released:
    """Source: no sink rank needs the request of this ticket any more."""

    key: bytes = attrs.field(repr=False)
    routed: tuple[int, ...]
    """Source ranks with a route; the others follow their verdict."""


@attrs.frozen
class Expired:
    """Source: the deadline of the ticket passed unclaimed or unfinished."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Offered:
    """Sink: a source rank's items may be read once `may_read` says so, then `read` or `unread`."""

    transfer: int
    offer: Offer


@attrs.frozen
class Arrived:
    """Sink: every required rank is Done, or read; then `done` is what its Offer said."""

    transfer: int
    done: tuple[Done, ...]
    seconds: float
    """From Transfer to the last Done."""


@attrs.frozen
class Lost:
    """Sink: the transfer failed; items are free only if `proof` is PROVEN, else once Proven tells of the transfer."""

    transfer: int
    error: KvprotoError
    proof: Proof


@attrs.frozen
class Proven:
    """Sink: the items of a transfer that was Lost as UNPROVABLE are free: its writers are dead."""

    transfer: int


@attrs.frozen
class SessionRefused:
    """The peer refused us, or we it."""

    peer: str
    error: KvprotoError
    by_us: bool


@attrs.frozen
class SessionClosed:
    """Goodbye, or no answer in time."""

    session: int
    peer: str
    reason: str


@attrs.frozen
class Troubled:
    """A malformed or unexpected frame, answered and forgotten."""

    peer: str
    error: KvprotoError


Event = (
    Planned
    | RegisterAsked
    | Ready
    | Serve
    | Fetched
    | Released
    | Expired
    | Offered
    | Arrived
    | Lost
    | Proven
    | SessionRefused
    | SessionClosed
    | Troubled
)
