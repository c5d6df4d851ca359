"""The events that the session layer reports to its node."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.session.descriptions import Described
from kvproto.wire.messages import Register, Transfer

__all__ = [
    "Changed", "Declined", "Event", "Expired", "Fetched",
    "RegisterAsked", "Released", "TransferRequested", "UnmapAsked", "Unwanted",
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
