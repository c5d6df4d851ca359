"""What the session layer tells the engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.plan import Plan
from kvproto.session.phases import Described
from kvproto.wire.enums import Proof
from kvproto.wire.messages import Done, Offer, Register, Transfer

__all__ = [
    "Arrived", "Changed", "Event", "Expired", "Fetched", "Lost", "Offered", "Planned", "ProtocolError", "Proven",
    "Ready", "Recovered", "RegisterAsked", "Released", "SessionClosed", "SessionRefused", "Suspected",
    "TransferRequested", "UnmapAsked", "Unwanted", "Useful",
]  # fmt: skip


class Event:
    """Base of what `take_events` returns."""


@attrs.frozen
class Planned(Event):
    """Both Descriptions are known and fit."""

    session: int
    peer: str
    plan: Plan
    warnings: tuple[tuple[str, str, str], ...]


@attrs.frozen
class RegisterAsked(Event):
    """The peer has registered memory: map it, then call `accept_register` or `refuse_register`.

    At the source it is a sink's, to be written; at the sink a source's, to be read.
    """

    session: int
    register: Register = attrs.field(repr=False)
    described: Described = attrs.field(repr=False)
    """What its transfers will be planned by."""


@attrs.frozen
class UnmapAsked(Event):
    """The peer wants an epoch back and nothing uses it: unmap its memory, then call `unmapped`."""

    session: int
    epoch: int


@attrs.frozen
class Ready(Event):
    """Sink: every routed rank has registered this rank's memory."""

    plan: Plan


@attrs.frozen
class Changed(Event):
    """Source: a transfer of this ticket has come, or is wanted no more."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class TransferRequested(Event):
    """Source: a sink rank asks for a request: copy its bytes, then call `done` or `failed`."""

    key: bytes = attrs.field(repr=False)
    session: int
    transfer: Transfer
    """With the windows and items that are granted so far."""
    whole: bool = True
    """Whether that is all that was asked for."""
    end: int | None = None
    """If not, the token below which rows may be written that may move before prefill is over; None: all of those."""


@attrs.frozen
class Fetched(Event):
    """Source: a sink rank has read `bytes` bytes of an offer; 0: it reads nothing of it any more."""

    session: int
    sequence: int
    attempt: int
    bytes: int


@attrs.frozen
class Released(Event):
    """Source: no sink rank needs the request of this ticket any more."""

    key: bytes = attrs.field(repr=False)
    routed: tuple[int, ...]
    """Source ranks with a route; a rank without one frees the request when these have (KVP-TRN-DUMMY)."""
    lost: Mapping[int, KvprotoError]
    """Sink ranks that were to have it and have not said that they do, and why."""


@attrs.frozen
class Unwanted(Event):
    """Source: every transfer that asked for this unfinished request was aborted or has lost its session."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Expired(Event):
    """Source: the deadline of the ticket has passed before every sink rank had the request (KVP-TKT-DEADLINE)."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Useful(Event):
    """Sink: items of a transfer that lacks some are of use up to this token, None: all; every source rank says so."""

    transfer: int
    tokens: int | None


@attrs.frozen
class Offered(Event):
    """Sink: a source rank offers its items; once `may_read` is true, copy them and call `read` or `unread`."""

    transfer: int
    offer: Offer


@attrs.frozen
class Arrived(Event):
    """Sink: every required rank is Done, or what it offered is read; `done` then says what the Offer said."""

    transfer: int
    done: tuple[Done, ...]
    seconds: float
    """From Transfer to the last Done."""


@attrs.frozen
class Lost(Event):
    """Sink: the transfer failed. Its items are free if `proof` is PROVEN, or else when Proven follows."""

    transfer: int
    error: KvprotoError
    proof: Proof


@attrs.frozen
class Proven(Event):
    """Sink: the items of a transfer that was Lost as UNPROVABLE are free: every writer is dead, or has said so late."""

    transfer: int


@attrs.frozen
class SessionRefused(Event):
    """A Hello, Describe or Register was refused, by the peer or `by_us`."""

    peer: str
    error: KvprotoError
    by_us: bool


@attrs.frozen
class SessionClosed(Event):
    """The session is over: Goodbye, no answer in time, or a newer incarnation of the peer."""

    session: int
    peer: str
    reason: str


@attrs.frozen
class Suspected(Event):
    """The peer has been silent for twice `ping_silence`: it may be dead, stopped or cut off (KVP-SES-SUSPECT)."""

    session: int
    peer: str


@attrs.frozen
class Recovered(Event):
    """A peer that was Suspected has said something."""

    session: int
    peer: str


@attrs.frozen
class Listed(Event):
    """Sink: the list of a source rank's cached pages has come to its end; from now on it is kept up to date."""

    session: int
    peer: str


@attrs.frozen
class ProtocolError(Event):
    """A malformed or unexpected frame; it was answered where it needs an answer, and had no other effect."""

    peer: str
    error: KvprotoError
