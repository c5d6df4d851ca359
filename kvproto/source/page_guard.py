"""`Options.debug_pages`: which pages of a request an engine has changed between `finish` and the end of the request."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np

from kvproto.copying.execute import PageSums
from kvproto.copying.lowering import Pair
from kvproto.copying.program import windows
from kvproto.errors import RemoteError
from kvproto.planning.kinds import KINDS, length_of
from kvproto.planning.plan import plan
from kvproto.rank.checksums import PageSumming, Sums
from kvproto.rank.machine import machine
from kvproto.rank.pool import Pool
from kvproto.source.prefill import Finished, offered
from kvproto.source.schedule import NO_ROWS
from kvproto.transport.base import Move, Transport
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

_POLL = 1e-4
"""Seconds between looks whether a device has written the rows."""


class PageGuard:
    """Takes checksums of the finished requests of one pool, by layer and page."""

    def __init__(self, pool: Pool, transport: Transport) -> None:
        layout = pool.layout
        own = attrs.evolve(
            layout.geometry, ranks=tuple(rank for rank in layout.geometry.ranks if rank.rank == layout.rank)
        )
        stored = [route for route in plan(own, own).routes if KINDS[layout.groups[route.group].kind].has_memory]
        self._pair = Pair(tuple(stored), layout, layout)
        self.pool, self._transport = pool, transport

    def guard(self, finished: Finished, axes: Mapping[str, int]) -> GuardedPages:
        """Sum the rows of a request whose prefill is over; waits for the device that computes them."""
        layout, asked = self.pool.layout, []
        for route in self._pair.routes:
            group = layout.groups[route.group]
            first, end = finished.since.get(group.id, 0), length_of(group, finished.tokens, axes)
            asked.append(Grants(group=group.id, first=first, count=max(end - first, 0), valid=end))
        held = windows(offered(self._pair.routes, layout, asked, finished.items))
        if finished.events:
            written = self._transport.start([Move(NO_ROWS, self.pool.memories, {}, after=finished.events)])
            while not written.done:
                machine.sleep(_POLL)
        sums = Sums(self._pair.lower(held, held), self._transport, self.pool.memories, sink=False)
        return GuardedPages(self.pool, sums, finished)


class GuardedPages:
    """The checksums of one request, as its rows were when prefill was over."""

    def __init__(self, pool: Pool, sums: Sums, finished: Finished) -> None:
        self._groups, self._items = pool.layout.groups, finished.items
        self._sums = sums
        self._before = self._begin()
        self._before.advance(float("inf"))

    def check(self) -> PageCheck:
        """A comparison with the rows as they are from now on."""
        return PageCheck(self, self._begin())

    def changed(self, now: Mapping[int, PageSums]) -> RemoteError | None:
        """The error that names the first layer and page that have changed; None if none has."""
        for id, before in (self._before.by_group or {}).items():
            wrong = np.flatnonzero(before.values != now[id].values)
            if wrong.size:
                layer, page = divmod(int(wrong[0]), len(before.pages))
                group, items, number = self._groups[id], self._items.get(id, ()), before.pages[page]
                place = f"layer {before.layers[layer]}, page {number} of the request"
                if group.cp_size == 1 and number < len(items):  # otherwise pages of the request are not those of a rank
                    place += f", item {items[number]} of the pool"
                changed = f"the prefill engine changed pages after finish: first {place}; {wrong.size} in all"
                advice = f"{changed}; pages stay as they are until the request is done"
                return RemoteError(ErrorCode.VERIFY_FAILED, f"checksums[{group.name}]", advice=advice)
        return None

    def _begin(self) -> PageSumming:
        return self._sums.of_pages(self._groups.values())


@attrs.define(eq=False)
class PageCheck:
    """One comparison of a request's rows with what they were when prefill was over."""

    _pages: GuardedPages
    _summing: PageSumming
    error: RemoteError | None = None
    """The pages that have changed."""

    def advance(self, until: float) -> bool:
        """Sum rows until `until`, a time of `machine.monotonic`; returns whether all are compared."""
        if not self._summing.advance(until):
            return False
        self.error = self.error or self._pages.changed(self._summing.by_group or {})
        return True
