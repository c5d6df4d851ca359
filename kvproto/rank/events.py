"""The events of a node, by key and group id; `kvproto.events` has those for engines, by handle and name."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.session.events import Declined as RequestDeclined
from kvproto.session.events import Unwanted as RequestUnwanted
from kvproto.wire.enums import Outcome

__all__ = [
    "Copied",
    "PagesNeeded",
    "PoolReturned",
    "Received",
    "RequestDeclined",
    "RequestOver",
    "RequestUnwanted",
    "TransferLost",
    "TransferProven",
]


@attrs.frozen
class Copied:
    """Source: a sink rank has all bytes of a request, copied by this rank or read by itself."""

    key: bytes = attrs.field(repr=False)
    sink: int
    bytes: Mapping[str, int]
    """Bytes by the name of the sink's group."""
    seconds: float
    """Seconds that it took to copy what was left when prefill was over."""
    left: int
    """The bytes that were left then."""
    peer: str = ""
    """The sink's engine and rank, for display."""
    epoch: int = 0
    """The epoch of the sink's registration."""


@attrs.frozen
class RequestOver:
    """Source: the pages of a request are free."""

    key: bytes = attrs.field(repr=False)
    routed: tuple[int, ...] | None
    """Source ranks with a route; None if the ticket's deadline has passed."""
    lost: Mapping[int, KvprotoError] = {}
    """By sink rank, why it may not have the request."""


@attrs.frozen
class Received:
    """Sink: every byte of a transfer has arrived."""

    number: int
    outcome: Outcome
    handoff: Mapping[tuple[int, str], bytes] = attrs.field(repr=False)
    """Hand-off data by this side's group id and part name."""
    checksums: Mapping[tuple[int, int], int]
    """Checksums by source rank and group id, equal on both sides."""
    bytes: Mapping[int, int]
    """Bytes written by each source rank."""
    seconds: float
    since: Mapping[int, int] = {}
    """By group id, the first token that arrived, for late windows that begin later than requested."""


@attrs.frozen
class PagesNeeded:
    """Sink: pages that a transfer has not named yet are of use."""

    number: int
    tokens: int | None
    """The number of tokens to name pages for; None: all of them."""


@attrs.frozen
class TransferLost:
    """Sink: a transfer failed; its pages are free if `proven`, otherwise after TransferProven."""

    number: int
    error: KvprotoError
    proven: bool


@attrs.frozen
class TransferProven:
    """Sink: nothing can write the pages of a lost transfer any more."""

    number: int


@attrs.frozen
class PoolReturned:
    """Nothing can use a pool that was taken back any more; `epoch` is that of its first registration."""

    epoch: int
