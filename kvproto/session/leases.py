"""What a sink holds of an offer that it may read (feature PULL).

Theory. A lease is a duration, and a frame may wait anywhere on its way. So the sink counts it from when it sent the
request that it answers, the Transfer or the Renew: the source cannot have begun to count before that, and the lease
never ends later here than there.
"""

from __future__ import annotations

import attrs

from kvproto.wire.messages import Offer

__all__ = ["Lease"]

_RENEW, _START = 0.5, 0.25
"""Shares of a lease: with less left it is renewed, or no copy begins."""


@attrs.define(eq=False)
class Lease:
    """An offer, and until when it holds."""

    offer: Offer
    end: float
    length: float
    """Seconds."""
    renewal: int | None = None
    """Request id of a Renew under way."""
    sent: float = 0.0
    """When it was sent first."""
    told: bool = False
    """Whether the node knows."""
    reading: bool = False

    @classmethod
    def of(cls, offer: Offer, asked: float) -> Lease:
        """From when the Transfer was sent."""
        return cls(offer, asked + offer.lease / 1000, offer.lease / 1000)

    def over(self, now: float) -> bool:
        """Whether nothing may be read any more (KVP-PUL-READ)."""
        return now >= self.end

    def fresh(self, now: float) -> bool:
        """Whether a copy may begin."""
        return self.end - now >= _START * self.length

    def due(self, now: float) -> bool:
        """Whether to ask for more time."""
        return self.renewal is None and self.end - now < _RENEW * self.length

    def renewed(self, lease: int) -> None:
        """Take a longer lease of `lease` ms, or a shorter one."""
        self.length = min(lease, self.offer.lease) / 1000
        self.end, self.renewal = max(self.end, self.sent + self.length), None
