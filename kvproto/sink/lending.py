"""The pools of a sink rank that one source replica may write: registered, taken back, and released by proof."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvproto.session import SinkEndpoint
from kvproto.sink.quarantine import Filled
from kvproto.sink.registered_pool import PoolTerms
from kvproto.sink.verification import Arrivals
from kvproto.transport.base import Transport

__all__ = ["Lending"]


class Lending:
    """The pools that one link lends; its endpoint registers them."""

    def __init__(
        self, endpoint: SinkEndpoint, transports: Sequence[Transport], arrivals: Arrivals, lent: Filled
    ) -> None:  # fmt: skip
        """`lent` is registered at once; `arrivals` may still read the pools of transfers that have ended."""
        self._endpoint, self._transports, self._arrivals = endpoint, tuple(transports), arrivals
        self.terms: PoolTerms | None = None
        """The terms of new transfers; None while the sink is asleep."""
        self._former: list[PoolTerms] = []
        """Earlier terms whose pools a source may still write."""
        self.expose(lent)

    def expose(self, lent: Filled) -> None:
        """Register a pool under the current plan; transfers under way end under the earlier terms."""
        self.withdraw(at_once=False)
        self.pool, self.terms = lent.pool, PoolTerms(self._endpoint, lent, self._transports)
        self._endpoint.expose(self.terms.exposed, time.monotonic(), lent.pool.layout.geometry)

    def planned(self) -> None:
        """Register the pool again if it was registered under a plan that has been replaced."""
        terms = self.terms
        if terms is None:
            return
        if terms.digests not in (None, self._endpoint.digests) or self._endpoint.outdated(terms.exposed):
            self.expose(terms.lent)

    def withdraw(self, at_once: bool) -> None:
        """Take the pool back from sources that can return it; with `at_once`, transfers into it end."""
        terms, self.terms = self.terms, None
        if terms is not None:
            self._former.append(terms)
            self._endpoint.give_back(terms.exposed, at_once, time.monotonic())

    def holders(self, lent: Filled) -> list[str]:
        """Who may still read or write a pool, for display."""
        found: list[str] = []
        for terms in [each for each in self._all() if each.lent is lent]:
            found += self._endpoint.holders(terms.exposed)
            found += ["checksums under way"] * self._arrivals.reads(terms)
        return found

    def release(self) -> None:
        """Release former pools that nothing holds any more."""
        for terms in [t for t in self._former if not self._endpoint.holders(t.exposed) and not self._arrivals.reads(t)]:
            if self._endpoint.given_back(terms.exposed):
                terms.close()
            self._former.remove(terms)

    @property
    def unpacking(self) -> bool:
        """Whether anything is being unpacked into one of the pools."""
        return any(each.unpacking for each in self._all())

    def _all(self) -> list[PoolTerms]:
        return [*self._former, *([] if self.terms is None else [self.terms])]
