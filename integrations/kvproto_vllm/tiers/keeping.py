"""A worker's side of the tiers: pages between its blocks, memory of the host, and storage."""

from __future__ import annotations

import logging
import time
from functools import partial

from kvproto.tiers import Chain, Hit, HostTiers, StorageRead
from kvproto_vllm.tiers.finding import Found, TierOrders, TierSettings

__all__ = ["Keeping"]

logger = logging.getLogger("vllm.kvproto")


class Keeping:
    """Of one rank. Nothing here waits for storage."""

    def __init__(self, tiers: HostTiers, settings: TierSettings) -> None:
        self.tiers, self._settings = tiers, settings
        self._chains: dict[str, Chain] = {}
        self._reads: dict[str, StorageRead] = {}
        self._hits: dict[str, Hit] = {}
        """Pages that were found, pinned on the host until they are loaded or not wanted."""
        self._done, self._failed = set[str](), set[str]()

    def take(self, orders: TierOrders) -> None:
        """Begin to read what is looked for, and load what was found."""
        for look in orders.looks:
            chain = self._chain(look.request, look.tokens, look.names)
            until = time.monotonic() + self._settings.patience(len(look.tokens))
            self._reads[look.request] = self.tiers.fetch(chain, until)
        for name in orders.hurried:
            if name in self._reads:
                self._reads[name].deadline = 0.0
        for place in orders.places:
            hit = self._hits.pop(place.request, None)
            if hit is None or place.first + len(place.blocks) > len(hit.pages):
                self._placed(place.request, hit, False)
            else:
                self.tiers.load(hit, place.first, place.blocks, partial(self._placed, place.request, hit))

    def _placed(self, name: str, hit: Hit | None, arrived: bool) -> None:
        if hit is not None:
            hit.close()
        self._done.add(name)
        if not arrived:
            logger.error("request %s: its pages could not be copied from the host", name)
            self._failed.add(name)

    def _chain(self, name: str, more: list[int], names: dict[str, str]) -> Chain:
        """The chain of a request, with the tokens that follow."""
        if (chain := self._chains.get(name)) is None:
            chain = self._chains[name] = self.tiers.chain([], **names)
        chain.extend(more)
        return chain

    def keep(self, orders: TierOrders) -> None:
        """After a forward: copy what it completed to the host, from which threads store it."""
        for keep in orders.keeps:
            self.tiers.save(self._chain(keep.request, keep.tokens, keep.names), keep.blocks)
        for name in (*orders.dropped, *orders.over):
            self._drop(name)
        for name in orders.over:
            self._chains.pop(name, None)
        self.tiers.step()

    def _drop(self, name: str) -> None:
        if (read := self._reads.pop(name, None)) is not None:
            read.take()
        if (hit := self._hits.pop(name, None)) is not None:
            hit.close()

    def found(self) -> Found:
        """Prompts whose reads are over since the last call, and how many of their pages are on the host."""
        now, found = time.monotonic(), Found()
        for name in [name for name, read in self._reads.items() if read.over(now)]:
            self._reads.pop(name).take()
            hit = self._hits[name] = self.tiers.find(self._chains[name])
            found[name] = len(hit.pages), 1
        return found

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over since the last call, and those among them that failed."""
        self.tiers.settle()
        found, self._done, self._failed = (self._done, self._failed), set(), set()
        return found

    def close(self) -> None:
        """Store what is on its way, unless storage hangs."""
        for name in [*self._reads, *self._hits]:
            self._drop(name)
        self.tiers.drain()
        self.tiers.close()
