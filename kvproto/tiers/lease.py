"""The slots of one request, from its beginning to its end."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvproto.tiers.index import Hit, Reservation, seal
from kvproto.tiers.page_ids import Chain
from kvproto.transport.base import Paging
from kvproto.wire.enums import LengthRule

if TYPE_CHECKING:
    from kvproto.tiers.page_cache import PageCache

__all__ = ["PageLease"]


class PageLease:
    """Pages of a prompt that were found, pages that come from the host, and room for the rest."""

    def __init__(
        self, cache: PageCache, chain: Chain, near: Hit, far: Hit, load: Reservation, rest: Reservation
    ) -> None:
        self._cache, self.chain = cache, chain
        self._near, self._far, self._rest = near, far, rest
        self.load = load
        self.coming = far.pages[len(near.pages) :]
        """Pages of the host that are being copied into the slots of `load`."""
        self.found = {"device": len(near.pages), "host": 0}
        """How many pages of the prompt were found, by tier."""
        self.ready = not self.coming
        """Whether all pages that were found are in the pool."""
        self._copy: Paging | None = None
        self._left = self._begun = False
        if self.ready:
            far.close()

    @property
    def pages(self) -> int:
        """How many pages of the prompt are in the pool, for work that follows `wait`."""
        return len(self._near.pages) + (len(self.load.pages) if self._begun else 0)

    @property
    def slots(self) -> list[int]:
        """The slots in the order of the prompt: of pages that are there or are coming, then room."""
        return [page.slot for page in (*self._near.pages, *self.load.pages, *self._rest.pages)]

    def wait(self, layer: int | None = None) -> None:
        """Let the engine's stream wait for the pages that are coming, or their layers up to `layer`; the host goes on.

        A pool in host memory has nothing to wait for.
        """
        if self._copy is not None:
            self._copy.hold(layer)

    def started(self, copy: Paging | None) -> None:
        """The copies of the pages that were coming are under way, or over."""
        if copy is not None and not self.ready:
            self._copy, self._begun = copy, True
            self.found["host"] = len(self.coming)

    def loaded(self, done: bool) -> None:
        """The copies of the pages that were coming are over, or have failed."""
        used = self._begun
        self._copy, self.ready, self._begun = None, True, done
        if self._left:
            self.load.close()
            self._far.close()
            return
        first, last = len(self._near.pages), len(self._near.pages) + len(self.coming)
        device = self._cache.device
        with self._far:
            if done:
                seal(self.load, [self._cache.host.groups(page.slot) for page in self.coming])
                ids = self.chain.ids(device.layout.form)[first:last]
                # what somebody else has brought meanwhile stays a copy of our own, if its slots are in use already
                if not used or not any(device.slot(id) is not None for id in ids):
                    self.load.name(self.chain, first)
                    self.load.publish()
                    self._cache.published(self.chain, last, copied=True)
                    near, self._near = self._near, device.find(self.chain, last)
                    near.close()
            else:
                self.load.close()
        self.coming = []
        self.found["host"] = self.pages - first
        if missing := last - self.pages:  # the slots of the load are free again, or idle
            more = self._cache.reserve(missing)
            assert more is not None
            self._rest.join(more)

    def leave(self, rows: int = 0, states: Collection[int] | None = None, windows: int = 0) -> None:
        """Give all slots back, and keep the whole pages of the first `rows` tokens of `chain`, which may have grown.

        `states` are the token counts after which a recurrent state was kept; None: after every page. `windows` is the
        token from which rows of sliding windows are there; pages that begin before it lack them.
        """
        self._cache.settle()
        ids, slots = self.chain.ids(self._cache.device.layout.form), len(self.slots)
        whole = min(rows // self.chain.page, len(ids), slots) if self.ready else 0
        self._cache.left(self)
        self._left = True
        with self._near, self._rest as rest:
            if whole > self.pages:
                rest.name(self.chain, self.pages)
                for i in range(whole - self.pages):
                    rest.fill(i)
                    rest.seal(i, self._computed(self.pages + i, states, windows))
                rest.publish()
            if whole:
                self._cache.published(self.chain, whole)
        if self._copy is None:  # else it still writes there
            self.load.close()
            self._far.close()

    def _computed(self, i: int, states: Collection[int] | None, windows: int) -> list[int]:
        """Components that page i has once it is computed."""
        page = self.chain.page
        lacks = set() if states is None or (i + 1) * page in states else {LengthRule.STATE}
        lacks |= {LengthRule.WINDOW} if i * page < windows else set()
        return [part.group for part in self._cache.device.layout.parts if part.rule not in lacks]
