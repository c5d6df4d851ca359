"""The two ends of a lease (feature PULL).

A lease is a duration, and a frame may be delayed anywhere. The source counts the lease from when it sends its answer.
The sink counts it from when it first sent the request that was answered, the Transfer or the Renew: the source cannot
have begun earlier, so the lease never ends later at the sink than at the source. The sink also counts it 1/64 shorter,
as its clock may be slower (KVP-PUL-SPEED).
"""

import attrs

from kvproto.wire.messages import Offer

_RENEW, _START = 0.5, 0.25
"""Shares of a lease: it is renewed when `_RENEW` is left, and no copy starts when less than `_START` is left."""
_COUNTED = 63 / 64 / 1000
"""Seconds that a sink counts for each millisecond of a lease."""


@attrs.define(eq=False)
class Loan:
    """At the source: what a sink may read."""

    request: int
    """The request id of the Offer."""
    end: float
    """The end of the lease."""
    latest: float
    """The ticket's deadline, beyond which no lease extends."""
    renewed: tuple[int, int] = (0, 0)
    """The request id of the last Renew that was granted, and its lease in milliseconds."""


@attrs.define(eq=False)
class Lease:
    """At the sink: an offer, and until when it may be read."""

    offer: Offer
    end: float
    """The end of the lease."""
    length: float
    """The length of the lease in seconds."""
    renewal: int | None = None
    """The request id of a Renew under way."""
    sent: float = 0.0
    """The time at which that Renew was first sent."""
    reported: bool = False
    """Whether the offer was reported to the engine."""
    reading: bool = False
    """Whether a copy is under way."""

    @classmethod
    def of(cls, offer: Offer, asked: float) -> "Lease":
        """The lease of an Offer whose Transfer was first sent at `asked`."""
        length = offer.lease * _COUNTED
        return cls(offer, asked + length, length)

    def over(self, now: float) -> bool:
        """Whether the lease has ended, so that nothing may be read any more (KVP-PUL-READ)."""
        return now >= self.end

    def fresh(self, now: float) -> bool:
        """Whether a copy may begin."""
        return self.end - now >= _START * self.length

    @property
    def renew_at(self) -> float:
        """The time at which to ask for more."""
        return self.end - _RENEW * self.length

    def renewed(self, lease: int) -> None:
        """Extend the lease to `lease` milliseconds from when the Renew was sent, but no longer than the Offer's."""
        self.length = min(lease, self.offer.lease) * _COUNTED
        self.end, self.renewal = max(self.end, self.sent + self.length), None
