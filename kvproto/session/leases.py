"""The two ends of a lease (feature PULL).

Theory. A lease is a duration, and a frame may wait anywhere on its way. The source counts it from when it sends its
answer. The sink counts it from when it first sent the request that was answered, the Transfer or the Renew: the source
cannot have begun to count before that, so the lease never ends later at the sink than at the source. The sink counts it
1/64 shorter, since its clock may be slower (KVP-PUL-SPEED).
"""

from __future__ import annotations

import attrs

from kvproto.wire.messages import Offer

__all__ = ["Lease", "Loan"]

_RENEW, _START = 0.5, 0.25
"""Shares of a lease: with less than `_RENEW` left it is renewed, with less than `_START` no copy begins."""
_COUNTED = 63 / 64 / 1000
"""Seconds that a sink counts for each millisecond that is stated."""


@attrs.define(eq=False)
class Loan:
    """At the source: what a sink may read."""

    request: int
    """Of the Offer."""
    end: float
    """Of the lease."""
    latest: float
    """The ticket's deadline: no lease goes beyond it."""
    renewed: tuple[int, int] = (0, 0)
    """The last Renew that was granted, and its lease in ms."""


@attrs.define(eq=False)
class Lease:
    """At the sink: an offer, and until when it may be read."""

    offer: Offer
    end: float
    length: float
    """Seconds."""
    renewal: int | None = None
    """Request id of a Renew under way."""
    sent: float = 0.0
    """When that Renew was sent first."""
    told: bool = False
    """Whether the engine has been told of the offer."""
    reading: bool = False
    """Whether a copy is under way."""

    @classmethod
    def of(cls, offer: Offer, asked: float) -> Lease:
        """The lease of an Offer whose Transfer was first sent at `asked`."""
        length = offer.lease * _COUNTED
        return cls(offer, asked + length, length)

    def over(self, now: float) -> bool:
        """Whether nothing may be read any more (KVP-PUL-READ)."""
        return now >= self.end

    def fresh(self, now: float) -> bool:
        """Whether a copy may begin."""
        return self.end - now >= _START * self.length

    @property
    def renew_at(self) -> float:
        """When to ask for more time."""
        return self.end - _RENEW * self.length

    def renewed(self, lease: int) -> None:
        """Take a lease of `lease` ms from when the Renew was sent, and no longer than the Offer's."""
        self.length = min(lease, self.offer.lease) * _COUNTED
        self.end, self.renewal = max(self.end, self.sent + self.length), None
