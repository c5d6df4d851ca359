"""A rank's pages on the device, on the host and in storage, as an engine uses them.

A request opens a `PageLease`: the pages of its prompt that were found, and room for the rest. Copies for all requests
wait for `PageCache.step`, which starts one program from the host and one to it, for any number of pages and components.
While a copy runs, its slots are FILLING or pinned. Threads read and write storage; they touch only slots of the host
that are pinned for them. Nothing here may be called by two threads at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import takewhile

import attrs

from kvproto.errors import KvprotoError
from kvproto.tiers.agreement import LENGTHS, Agreement
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.index import Hit, Index, Reservation, filling, seal
from kvproto.tiers.lease import PageLease
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_store import PageStore
from kvproto.tiers.relayout import RelayoutReader
from kvproto.tiers.storage_io import StorageIO, StorageRead
from kvproto.transport.base import Paging
from kvproto.wire.enums import Tier

__all__ = ["Agreement", "PageCache", "PageLease", "StorageRead", "WritePolicy", "patience"]


class WritePolicy(Enum):
    """When a page of the device is copied to the host, and from there to storage."""

    WRITE_THROUGH = "at once"
    """At the next step after it was published: write-through."""
    SELECTIVE = "when used"
    """At the next step after a second request has found it: selective write-through."""
    WRITE_BACK = "when given up"
    """Just before its slot is given to another request: write-back."""


def patience(tokens: int) -> float:
    """Seconds that storage may take for this many tokens, as a default."""
    return 1.0 + tokens / 4096


@attrs.define(eq=False)
class _HostBackup:
    """Pages [0, len(slots)) of a prompt to copy to the host; `hit` pins them on the device, if they need it."""

    chain: Chain
    slots: list[int]
    groups: list[list[int]]
    """Components that each page has."""
    hit: Hit | None = None


class PageCache:
    """The pages of one rank in its pool, in memory of the host, and on a shelf."""

    def __init__(
        self,
        copies: HostCopies,
        page_store: PageStore | None = None,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        threads: int = 4,
        most: int = 1024,
        limit: float = 10.0,
        others: RelayoutReader | None = None,
    ) -> None:
        """`threads` threads read and write storage, with at most `most` pages under way; further pages are not stored.

        Storage hangs if a call takes more than `limit` seconds: until it returns, nobody waits for storage or uses it.
        Pages that are not there are taken from `others`.
        """
        self.copies, self.page_store, self.policy = copies, page_store, policy
        self.storing = StorageIO(page_store, threads, most, limit, others) if page_store else None
        self.device, self.host = Index(copies.layout, copies.pages), Index(copies.layout, copies.slots)
        self.device.on_gone = self._gone
        self.counts: Counter[str] = Counter()
        """Pages that requests found on the `device`, on the `host`, and not at all (`new`); that were `fetched` from
        storage, and `stored`; that were `not kept` for want of room; and copies that `failed`."""
        self.moved: Counter[tuple[str, int]] = Counter()
        """Bytes that were copied `to_host`, `from_host`, `to_storage` and `from_storage`, by that and component."""
        self._of: dict[bytes, tuple[Chain, int]] = {}
        """Of which prompt the pages of the device are."""
        self._moving: list[tuple[Paging, Callable[[bool], None]]] = []
        """Copies under way, and what is told whether their bytes are there."""
        self._jobs: list[_HostBackup] = []
        self._loads: list[PageLease] = []
        self._listeners: list[Callable[[dict[bytes, Tier | None]], object]] = []

    @property
    def busy(self) -> bool:
        """Whether anything is waiting for a step, a copy, or storage."""
        return bool(self._jobs or self._loads or self._moving or (self.storing and self.storing.busy))

    def subscribe(self, listener: Callable[[dict[bytes, Tier | None]], object]) -> None:
        """Tell of all pages after which a request can go on, now and with each step that changes some (KVP-CAT-TELL).

        The listener gets the nearest tier by id; None means that no tier has the page any more.
        """
        self._notify()  # the others hear of what has changed since the last step
        for index in (self.device, self.host):
            index.news = {}
        self._listeners.append(listener)
        listener(self._nearest({*self.device.ids(), *self.host.ids()}))

    def _nearest(self, ids: Iterable[bytes]) -> dict[bytes, Tier | None]:
        """The nearest tier in which a request can go on after each of these pages."""
        return {id: Tier.DEVICE if self.device.ends(id) else Tier.HOST if self.host.ends(id) else None for id in ids}

    def _notify(self) -> None:
        ids = {*(self.device.news or ()), *(self.host.news or ())}
        if ids:
            self.device.news, self.host.news = {}, {}
            news = self._nearest(ids)
            for listener in self._listeners:
                listener(news)

    def agreement(self, prompts: Sequence[tuple[Chain, int]], lengths: int = LENGTHS) -> Agreement:
        """What this rank could go on with of these prompts, each with its room, for all ranks to agree."""
        self.settle()
        return Agreement(self, prompts, lengths)

    def open(self, chain: Chain, room: int, most: int | None = None) -> PageLease | None:
        """The pages of a prompt that are there, and slots for the rest of `room` pages; None while too few are free.

        Pages on the host are in the pool after the next `step` and `PageLease.wait`. `most` limits how many of
        the pages that are there are used.
        """
        self.settle()
        some = room if most is None else min(room, most)
        near, far = self.device.find(chain, some), self.host.find(chain, some)
        first = len(near.pages)
        last = max(first, len(far.pages))
        rest = self.reserve(room - first)
        if rest is None:
            near.close()
            far.close()
            return None
        self.counts["device"] += first
        self.counts["host"] += last - first
        self.counts["new"] += max(min(room, len(chain.ids(self.device.layout.form))) - last, 0)
        if self.policy is WritePolicy.SELECTIVE and first:
            self._queue(chain, first)
        lease = PageLease(self, chain, near, far, rest.split(last - first), rest)
        if not lease.ready:
            self._loads.append(lease)
        return lease

    def reserve(self, count: int) -> Reservation | None:
        """Slots of the pool; pages that are evicted for them go to the host before their slots are written."""
        claim = self.device.reserve(count)
        self._back_up(written=False)
        return claim

    def step(self) -> None:
        """Start all copies that wait: one program to the host, one from it; then see to storage."""
        self.settle()
        self._back_up()
        self._load()
        self._reap()
        self._notify()

    def settle(self) -> None:
        """Check which copies are over; their pages can be found from now on."""
        moving, self._moving = self._moving, []
        for copy, over in moving:
            self._look(copy, over)

    def fetch(self, chain: Chain, deadline: float = 0.0) -> StorageRead:
        """Begin to read the pages of a prompt from storage that the host lacks.

        `deadline` is a time of the engine's clock: 0 takes what has arrived, infinity waits for everything.
        """
        with self.host.find(chain) as hit:
            first = len(hit.pages)
        last = min(len(chain.ids(self.host.layout.form)), first + self._room_for_io())
        return StorageRead(self.storing, chain, range(first, last), deadline, self.arrived)

    def drain(self) -> None:
        """Step until nothing waits and everything is stored, unless storage hangs."""
        while self.busy:
            self.step()
            for copy, _ in self._moving:
                copy.wait()
            if self.storing and not self.storing.wait() and not (self._jobs or self._loads or self._moving):
                break
        self._reap()

    def close(self) -> None:
        """Wait for copies, and for storage unless it hangs; drop what waits, and free the memory on the host."""
        for copy, _ in self._moving:
            copy.wait()
        self.settle()
        if self.storing:
            self.storing.close()
        for job in self._jobs:
            self._end(job)
        self._jobs = []
        self._reap()
        if not (self.storing and self.storing.busy):  # a write that hangs still reads there
            self.copies.close()

    def _queue(self, chain: Chain, length: int) -> None:
        hit = self.device.find(chain)
        hit.cut(length)
        slots = [page.slot for page in hit.pages]
        self._jobs.append(_HostBackup(chain, slots, [self.device.groups(slot) for slot in slots], hit))

    def left(self, lease: PageLease) -> None:
        """A lease no longer waits for its pages."""
        if lease in self._loads:
            self._loads.remove(lease)

    def arrived(self, chain: Chain, first: int, came: Sequence[Mapping[int, Data]]) -> int:
        """Put pages of a prompt, from `first` on, on the host; return how many can be found there only now."""
        with self.host.find(chain) as hit:
            start = len(hit.pages)
            some = came[start - first :] if start >= first else []
            some = some[: self.host.slots.free + self.host.slots.idle]
            claim = self.host.claim(chain, start, len(some))
            if claim is None:
                return 0
            with claim:
                for slot, data in zip(filling([claim]), some, strict=True):
                    for group, view in self.copies.page(slot).items():
                        view[:] = data.get(group, bytes(len(view)))
                seal(claim, [[*data] for data in some])
                done = claim.publish()
        self.counts["fetched"] += done
        self._move("from_storage", some[:done])
        return done

    def _room_for_io(self) -> int:
        """How many more pages may be under way to or from storage."""
        return self.storing.workers.room if self.storing else 0

    def published(self, chain: Chain, length: int, copied: bool = False) -> None:
        """The first pages of a prompt can be found on the device now; `copied`: the host has them too."""
        for i, id in enumerate(chain.ids(self.device.layout.form)[:length]):
            if self.device.slot(id) is not None:
                self._of.setdefault(id, (chain, i))
        if self.policy is WritePolicy.WRITE_THROUGH and not copied:
            self._queue(chain, length)

    def _gone(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Pages of the device are evicted; their bytes stay until the slots are written."""
        for id, _ in pages:
            chain, i = self._of[id]
            if self.policy is WritePolicy.WRITE_BACK and self.host.slot(id) is None:
                path = (self.device.slot(id) for id in chain.ids(self.device.layout.form)[: i + 1])
                slots = [slot for slot in path if slot is not None]
                self._jobs.append(_HostBackup(chain, slots, [self.device.groups(slot) for slot in slots]))
        for id, _ in pages:
            del self._of[id]

    def _back_up(self, written: bool = True) -> None:
        """Copy to the host what is not there yet, of all jobs at once; `written`: of pinned pages too."""
        jobs = [job for job in self._jobs if written or job.hit is None]
        self._jobs = [job for job in self._jobs if not written and job.hit is not None]
        flying: set[bytes] = set()
        claims: list[tuple[_HostBackup, Hit, range, Reservation]] = []
        for job in jobs:
            ids = job.chain.ids(self.host.layout.form)[: len(job.slots)]
            hit = self.host.hold(job.chain, job.groups)
            first = len(hit.pages)
            first += len([*takewhile(flying.__contains__, ids[first:])])
            wanted = range(first, min(len(ids), first + self.host.slots.free + self.host.slots.idle))
            self.counts["not kept"] += len(ids) - wanted.stop
            claim = self.host.claim(job.chain, first, len(wanted)) if wanted else None
            if claim is None:
                hit.close()
                self._end(job)
            else:
                flying.update(ids[first : wanted.stop])
                claims.append((job, hit, wanted, claim))
        ours = [slot for job, _, pages, _ in claims for slot in job.slots[pages.start : pages.stop]]

        def saved(done: bool) -> None:
            for job, hit, pages, claim in claims:
                with hit, claim:
                    if done:
                        self._move("to_host", job.groups[pages.start : pages.stop])
                        seal(claim, job.groups[pages.start : pages.stop])
                        claim.publish()
                        self._store(job.chain, pages)
                self._end(job)

        copy = self._begin(self.copies.to_host, ours, filling(claim for *_, claim in claims), saved)
        if copy is not None and any(job.hit is None for job, *_ in claims):
            copy.hold()  # nobody has pinned what it reads

    def _load(self) -> None:
        """Copy to the pool what leases wait for, of all of them at once."""
        loads, self._loads = self._loads, []
        theirs = [page.slot for lease in loads for page in lease.coming]
        groups = [self.host.groups(slot) for slot in theirs]

        def loaded(done: bool) -> None:
            if done:
                self._move("from_host", groups)
            for lease in loads:
                lease.loaded(done)

        copy = self._begin(self.copies.to_pool, theirs, filling(lease.load for lease in loads), loaded)
        for lease in loads:
            lease.started(copy)

    def _begin(
        self,
        copy: Callable[[Sequence[int], Sequence[int]], Paging],
        source: list[int],
        sink: list[int],
        over: Callable[[bool], None],
    ) -> Paging | None:
        """Start a copy, unless it is empty; one that fails loses its pages and nothing else."""
        if not source:
            over(True)
            return None
        try:
            made = copy(source, sink)
        except KvprotoError:
            self.counts["failed"] += 1
            over(False)
            return None
        self._look(made, over)
        return made

    def _look(self, copy: Paging, over: Callable[[bool], None]) -> None:
        try:
            done = copy.done
        except KvprotoError:
            self.counts["failed"] += 1
            over(False)
            return
        if done:
            over(True)
        else:
            self._moving.append((copy, over))

    def _store(self, chain: Chain, pages: range) -> None:
        """Have threads write pages of the host, which stay pinned meanwhile."""
        if self.storing is None:
            return
        hit = self.host.find(chain)
        hit.cut(pages.stop)
        some = range(pages.start, min(len(hit.pages), pages.start + self._room_for_io()))
        self.counts["not stored"] += len(pages) - len(some)
        given = [(i, self._bytes(hit.pages[i].slot)) for i in some]
        self._move("to_storage", [views for _, views in given])
        self.storing.store(hit, chain, given)

    def _bytes(self, slot: int) -> dict[int, memoryview]:
        """Those of a page of the host, of the components that it has."""
        held = self.host.groups(slot)
        return {group: view for group, view in self.copies.page(slot).items() if group in held}

    def _move(self, way: str, pages: Iterable[Iterable[int]]) -> None:
        """Count the components of pages that were copied."""
        for group in (group for page in pages for group in page):
            self.moved[way, group] += self.host.layout.part(group).length

    def _reap(self) -> None:
        """Unpin pages that storage is done with."""
        if self.storing:
            self.counts["stored"] += self.storing.reap()

    @staticmethod
    def _end(job: _HostBackup) -> None:
        if job.hit is not None:
            job.hit.close()
