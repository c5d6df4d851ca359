"""The events that the session layer reports to its node."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.planning.plan import Plan
from kvproto.session.descriptions import Described
from kvproto.wire.enums import Proof
from kvproto.wire.messages import Done, Offer, Register, Transfer

__all__ = [
    "Arrived", "Changed", "Declined", "Event", "Expired", "Fetched", "Lost", "Offered", "Proven", "Ready",
    "RegisterAsked", "Released", "TransferRequested", "UnmapAsked", "Unwanted", "Useful",
]  # fmt: skip


Event = object
"""One of these events, or of those in `kvproto.events` that concern a peer."""


@attrs.frozen
class RegisterAsked:
    """The peer has registered memory: map it, then call `accept_register` or `refuse_register`.

    A source maps a sink's memory to write it; a sink maps a source's memory to read it.
    """

    session: int
    register: Register = attrs.field(repr=False)
    described: Described = attrs.field(repr=False)
    """The Descriptions and the plan of its transfers."""


@attrs.frozen
class UnmapAsked:
    """The peer wants an epoch back and nothing uses it: unmap its memory, then call `unmapped`."""

    session: int
    epoch: int


@attrs.frozen
class Ready:
    """Sink: every routed rank has registered this rank's memory."""

    plan: Plan


@attrs.frozen
class Changed:
    """Source: a transfer of this ticket has come, or is not wanted any more."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class TransferRequested:
    """Source: a sink rank asks for a request: copy its bytes, then call `done` or `failed`."""

    key: bytes = attrs.field(repr=False)
    session: int
    transfer: Transfer
    """The Transfer, with the windows and items that are granted so far."""
    whole: bool = True
    """Whether everything that was asked for is granted."""
    end: int | None = None
    """If not, only rows below this token may be written before prefill is over; None: all that can be sent early."""


@attrs.frozen
class Fetched:
    """Source: a sink rank has read `bytes` bytes of an offer; 0 if it gave up reading."""

    session: int
    sequence: int
    attempt: int
    bytes: int


@attrs.frozen
class Released:
    """Source: no sink rank needs the request of this ticket any more."""

    key: bytes = attrs.field(repr=False)
    routed: tuple[int, ...]
    """Source ranks with a route; a rank without one frees the request when these have done so (KVP-TRN-DUMMY)."""
    lost: Mapping[int, KvprotoError]
    """By sink rank, why it may not have the request."""


@attrs.frozen
class Unwanted:
    """Source: every transfer that asked for this unfinished request was aborted or has lost its session."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Declined:
    """Source: a Transfer was refused that names this ticket; the request goes on as before."""

    key: bytes = attrs.field(repr=False)
    peer: str
    error: KvprotoError


@attrs.frozen
class Expired:
    """Source: the deadline of the ticket has passed before every sink rank had the request (KVP-TKT-DEADLINE)."""

    key: bytes = attrs.field(repr=False)


@attrs.frozen
class Useful:
    """Sink: by all source ranks, items for `tokens` tokens (None: all) are of use to a transfer that lacks some."""

    transfer: int
    tokens: int | None


@attrs.frozen
class Offered:
    """Sink: a source rank offers its items; once `may_read` is true, copy them and call `read` or `unread`."""

    transfer: int
    offer: Offer


@attrs.frozen
class Arrived:
    """Sink: every required rank has said Done, or its offer was read, which `done` holds as an equivalent Done."""

    transfer: int
    done: tuple[Done, ...]
    seconds: float
    """Seconds from the Transfer to the last Done."""


@attrs.frozen
class Lost:
    """Sink: the transfer failed. Its items are free if `proof` is PROVEN, otherwise after Proven."""

    transfer: int
    error: KvprotoError
    proof: Proof


@attrs.frozen
class Proven:
    """Sink: the items of a transfer that was Lost as UNPROVABLE are free: every writer is dead or gave late proof."""

    transfer: int


@attrs.frozen
class Listed:
    """Sink: the list of a source rank's cached pages is complete; from now on it is kept up to date."""

    session: int
    peer: str
