"""What a session remembers of each transfer and of each request under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs

from kvproto.errors import RemoteError
from kvproto.session.table import TransferState
from kvproto.session.timers import Timer

__all__ = ["Attempt", "Census", "Request"]


class Census(NamedTuple):
    """What an endpoint has, for who looks on."""

    peers: int
    """Sessions that are open."""
    suspects: int
    """Those of them whose peer is suspect."""
    resends: int
    """Requests sent again, in its life."""


@attrs.define(eq=False)
class Attempt:
    """One attempt of one transfer, as this side sees it."""

    sequence: int
    attempt: int
    state: TransferState = TransferState.NEW

    @property
    def over(self) -> bool:
        """Whether nothing of it needs to be remembered once all before it are over too."""
        return self.state == TransferState.ENDED

    @property
    def ids(self) -> dict[str, Any]:
        """The fields that name it in a message."""
        return {"sequence": self.sequence, "attempt": self.attempt}


@attrs.define(eq=False)
class Request:
    """A message that is resent until it is answered."""

    number: int
    frame: bytes = attrs.field(repr=False)
    kind: type[Any]
    until: float
    """When it is given up."""
    on_error: Callable[[RemoteError, float], None] | None
    """Told when the peer answers by Error."""
    timer: Timer | None = None
