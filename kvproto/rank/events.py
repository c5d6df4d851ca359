"""The events of a node, by key and group id; `kvproto.events` has those for engines, by handle and name."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvproto.errors import KvprotoError
from kvproto.session.events import Declined as RequestDeclined
from kvproto.session.events import Unwanted as RequestUnwanted

__all__ = [
    "Copied",
    "PoolReturned",
    "RequestDeclined",
    "RequestOver",
    "RequestUnwanted",
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
class PoolReturned:
    """Nothing can use a pool that was taken back any more; `epoch` is that of its first registration."""

    epoch: int
