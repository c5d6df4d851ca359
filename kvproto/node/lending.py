"""The pools of a sink rank that one source replica may touch: registered, asked back, and let go of by proof."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvproto.node.arrivals import Arrivals
from kvproto.node.lent import Filled
from kvproto.node.terms import Terms
from kvproto.session import SinkEndpoint
from kvproto.transport.base import Transport

__all__ = ["Lending"]


class Lending:
    """Those of one link, whose endpoint registers them."""

    def __init__(
        self, endpoint: SinkEndpoint, transports: Sequence[Transport], arrivals: Arrivals, lent: Filled
    ) -> None:  # fmt: skip
        """`lent` is registered at once; `arrivals` still read the pools of transfers that are over."""
        self._endpoint, self._transports, self._arrivals = endpoint, tuple(transports), arrivals
        self.terms: Terms | None = None
        """Of new transfers; None: the sink is asleep."""
        self._former: list[Terms] = []
        """Those whose pool a source may still touch."""
        self.expose(lent)

    def expose(self, lent: Filled) -> None:
        """Register a pool by the plan that holds now; what is under way ends by the one of before."""
        self.withdraw(at_once=False)
        self.pool, self.terms = lent.pool, Terms(self._endpoint, lent, self._transports)
        self._endpoint.expose(self.terms.exposed, time.monotonic(), lent.pool.layout.geometry)

    def planned(self) -> None:
        """There is another plan: the pool is registered again where it was registered by the one of before."""
        terms = self.terms
        if terms is None:
            return
        if terms.digests not in (None, self._endpoint.digests) or self._endpoint.outdated(terms.exposed):
            self.expose(terms.lent)

    def withdraw(self, at_once: bool) -> None:
        """Ask the pool back from who can give it back; `at_once`: transfers into it end."""
        terms, self.terms = self.terms, None
        if terms is not None:
            self._former.append(terms)
            self._endpoint.give_back(terms.exposed, at_once, time.monotonic())

    def holders(self, lent: Filled) -> list[str]:
        """Who may still touch a pool, for people."""
        found: list[str] = []
        for terms in [each for each in self._all() if each.lent is lent]:
            found += self._endpoint.holders(terms.exposed)
            found += ["checksums of its own"] * self._arrivals.reads(terms)
        return found

    def let_go(self) -> None:
        """Let go of former pools that the source does not hold any more."""
        for terms in [t for t in self._former if not self._endpoint.holders(t.exposed) and not self._arrivals.reads(t)]:
            if self._endpoint.given_back(terms.exposed):
                terms.close()
            self._former.remove(terms)

    @property
    def unpacking(self) -> bool:
        """Whether anything is being unpacked into any of them."""
        return any(each.unpacking for each in self._all())

    def _all(self) -> list[Terms]:
        return [*self._former, *([] if self.terms is None else [self.terms])]
