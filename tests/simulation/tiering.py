"""The tiers of a prefill rank: real `PageCache` code between its pool, memory of the host and simulated storage.

Rows are labelled by what they are computed from, so a page that comes back from the host or from storage holds the
labels of its prompt, or is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvproto import allocate
from kvproto.copying.execute import execute
from kvproto.copying.program import CopyProgram
from kvproto.errors import RemoteError
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.page_cache import PageCache, PageLease, WritePolicy, patience
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import page_layout
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.storage_io import StorageIO, StorageRead
from kvproto.transport.base import Regions
from kvproto.wire.enums import ErrorCode, Tier
from tests.simulation.memory import GhostPool
from tests.simulation.simulated import Process, Violation
from tests.simulation.storage import SimulatedStore

NAMES = {"model": "none"}
_POLL = 5e-3
_PIECE = 1024


class SimulatedPaging:
    """A copy between the pool and the host, in small parts that land one after the other."""

    def __init__(self, pager: SimulatedPager, program: CopyProgram, sources: Regions, sinks: Regions) -> None:
        self._pager, self._sources, self._sinks = pager, sources, sinks
        self._parts = [*program.slices(_PIECE)]
        self._error: RemoteError | None = None
        self._next()

    def _next(self) -> None:
        if self._parts:
            self._pager.owner.simulation.hardware(self._pager.delay(), self._land)

    def _land(self) -> None:
        if self._parts and self._pager.owner.alive:
            if self._pager.fails():
                self._parts, self._error = [], RemoteError(ErrorCode.TRANSPORT_FAILED, "", "a copy", "none", "")
            else:
                self._run(self._parts.pop(0))
                self._next()
            self._pager.owner.wake()

    def _run(self, part: CopyProgram) -> None:
        execute(part, _bytes(self._sources), _bytes(self._sinks))

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination."""
        if self._error is not None:
            raise self._error.again()
        return not self._parts

    def hold(self, layer: int | None = None) -> None:
        """Do all of it before anything else of the engine."""
        while self._parts:
            self._run(self._parts.pop(0))

    def wait(self) -> None:
        """Do all of it now."""
        self.hold()


def _bytes(regions: Regions) -> Mapping[int, Any]:
    return {id: region.buffer for id, region in regions.items()}


class SimulatedPager:
    """Copies between the pool of a process and the host."""

    def __init__(self, owner: Process, pace: float) -> None:
        self.owner, self._pace, self._copies, self.fails_until = owner, pace, 0, 0.0

    def delay(self) -> float:
        """Seconds until the next part lands."""
        self._copies += 1
        return self._pace * self.owner.simulation.draw("page", self.owner.name, self._copies)

    def fails(self) -> bool:
        """Whether a copy fails now."""
        fails = self.fails_until > self.owner.simulation.now and self.owner.simulation.draw("fails", self._copies) < 0.3
        self.owner.simulation.reached["copy of tiers failed"] += fails
        return fails

    def allocate(self, length: int) -> Any:
        """Memory of the host."""
        return allocate(length)

    def save(self, program: CopyProgram, pool: Regions, host: Regions) -> SimulatedPaging:
        """Start a copy to the host."""
        return SimulatedPaging(self, program, pool, host)

    def load(self, program: CopyProgram, host: Regions, pool: Regions) -> SimulatedPaging:
        """Start a copy to the pool."""
        return SimulatedPaging(self, program, host, pool)

    def close(self) -> None:
        """Do nothing: its memory is closed by its owner."""


@attrs.define(eq=False)
class Held:
    """The pages of a request: found in tiers, or to be computed."""

    chain: Chain
    content: int
    """The prompt that the labels of its rows name."""
    lease: PageLease | None = None
    read: StorageRead | None = None
    over: bool = False


class RankTiers:
    """The tiers of one rank, with the ghost of its pool."""

    def __init__(
        self, rank: Process, ghost: GhostPool, store: SimulatedStore | None, host: int, policy: WritePolicy, pace: float
    ) -> None:
        self._rank, self._ghost = rank, ghost
        pool, self.pager = ghost.pool, SimulatedPager(rank, pace)
        layout = page_layout(pool.geometry, pool.rank, ghost.page)
        pages = None if store is None else PageStore(store, layout, scan=False)
        if pages is not None and store is not None:
            pages.others = RelayoutReader(store, pool.geometry, pool.rank, layout)
        copies = HostCopies(layout, pool.layout, pool.memories, host, self.pager)
        self.cache = PageCache(copies, StorageIO(pages) if pages is not None else None, policy, NAMES)
        self.held: list[Held] = []
        self.kept: dict[bytes, Tier | None] = {}
        """The pages that it has announced, by id, with the nearest tier of each."""

    def tell(self, announce: Callable[[PageCache], None]) -> None:
        """Announce pages to routers, and note the same."""
        announce(self.cache)
        self.cache.subscribe(self.kept.update)

    def step(self) -> bool:
        """Take a step; whether something is under way."""
        self.cache.step()
        return self.cache.busy

    def begin(self, content: int, tokens: list[int]) -> Held:
        """Look for the pages of a prompt."""
        held = Held(self.cache.chain(tokens), content)
        self.held.append(held)
        return held

    def pages(self, held: Held, tokens: int, wait: bool) -> list[int] | None:
        """The pages for a prompt of so many tokens, once those that are stored have come; None until then."""
        now = self._rank.monotonic()
        if held.lease is None:
            if held.read is None:
                held.read = self.cache.fetch(held.chain, now + patience(tokens))
            if not held.read.over(now):
                return None
            came = held.read.take()
            self._rank.simulation.reached["page from storage"] += came
            held.lease = self.cache.open(held.chain, -(-tokens // self._ghost.page))
            if held.lease is None:
                self._rank.simulation.reached["tiers out of pages"] += 1
                held.read = None
                return None
            first = held.lease.pages
            self._ghost.fill(held.lease.slots[first : first + len(held.lease.coming)])
            self.step()
        if not held.lease.ready:
            if not wait:
                return None
            held.lease.wait()
        return held.lease.slots

    def found(self, held: Held, request: int, tokens: int) -> int:
        """The tokens that need not be computed; raises Violation for a page that holds other rows."""
        assert held.lease is not None
        count = min(held.lease.pages * self._ghost.page, tokens)
        self._ghost.find(request, held.content, held.lease.slots, count)
        self._rank.simulation.reached["page found on the device"] += held.lease.found["device"]
        self._rank.simulation.reached["page found on the host"] += held.lease.found["host"]
        return count

    def leave(self, held: Held, tokens: int) -> None:
        """Keep the pages of the first `tokens` tokens, and free the others."""
        if held.read is not None and held.lease is None:
            held.read.take()
        if held.lease is not None:
            self._ghost.release(held.lease.slots)
            held.lease.leave(tokens)
        self.held.remove(held)

    def check_over(self) -> None:
        """Raise Violation for what waits for storage, or is not free, although no request is under way."""
        slots = {
            name: (index.slots.free + index.slots.idle, index.slots.count) for name, index in self.cache.indexes.items()
        }
        if self.cache.busy:
            raise Violation("hang", f"{self._rank}: tiers are busy")
        for name, (free, count) in slots.items():
            if not self.held and free != count:
                raise Violation("leak", f"{self._rank}: {free} of {count} pages of the {name} are free")

    def close(self) -> None:
        """Close in good order."""
        self.cache.close()
        self.die()

    def die(self) -> None:
        """Release the memory."""
        self.cache.copies.close()
