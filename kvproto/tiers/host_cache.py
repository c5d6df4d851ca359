"""A rank's pages on the host and in storage, and the copies between them and a pool.

`HostCache.save` copies pages of the pool to the host, and threads write them to storage; `fetch` reads pages of storage
to the host, and `load` copies them into the pool. While a copy runs, its slots are FILLING or pinned. Threads touch
only host slots that are pinned for them. One thread at a time may call this module.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

import attrs
import numpy.typing as npt

from kvproto.errors import KvprotoError
from kvproto.observability.counts import MetricSample, sample
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.index import Hit, Index, Reservation
from kvproto.tiers.manifest import Data
from kvproto.tiers.page_ids import Chain, namespace
from kvproto.tiers.storage_io import StorageIO, StorageRead
from kvproto.transport.base import Paging

_OF_STORAGE = "missed", "damaged", "evicted"
_PAGES = "device", "host", "new", "fetched", "stored", "not_kept", "not_stored", *_OF_STORAGE
"""Label values of `kvproto_tier_pages_total`."""


@attrs.define(eq=False)
class HostBackup:
    """The first pages of a prompt, to be copied to the host; `hit` pins them on the device if they need it."""

    chain: Chain
    slots: list[int]
    groups: list[list[int]]
    """Components that each page has."""
    hit: Hit | None = None

    def close(self) -> None:
        if self.hit is not None:
            self.hit.close()


class HostCache:
    """The pages of one rank in host memory and in a page store, for an engine that owns the pages of its pool."""

    def __init__(self, copies: HostCopies, io: StorageIO | None = None, names: Mapping[str, str] | None = None) -> None:
        """`names` state what computes the pages (KVP-TIER-NAMESPACE)."""
        self.copies, self.io, self.page_store = copies, io, io.pages if io else None
        self._names = dict(names or {})
        self.space = namespace(self._names)
        self.host = Index(copies.layout, copies.slots)
        self.indexes = {"host": self.host}
        """The pages of each tier, by its name in metrics."""
        self.counts: Counter[str] = Counter()
        """Pages that requests found on the `device`, on the `host`, and not at all (`new`); pages `fetched` from
        storage and `stored`; pages `not kept` and `not stored` for want of room; and copies that `failed`."""
        self.moved: Counter[tuple[str, int]] = Counter()
        """Bytes copied `to_host`, `from_host`, `to_storage` and `from_storage`, by direction and component."""
        self._running: list[tuple[Paging, Callable[[bool], None]]] = []
        """Copies under way, and what to call with whether their bytes have arrived."""
        self._backups: list[HostBackup] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is waiting for a step or a copy."""
        return bool(self._backups or self._running)

    @property
    def busy(self) -> bool:
        """Whether anything is waiting for a step, a copy, or storage."""
        return self.waiting or bool(self.io and self.io.busy)

    def chain(self, tokens: npt.ArrayLike, **more: str) -> Chain:
        """The ids of the pages that hold these token ids, [tokens]; `Chain.extend` adds tokens.

        `more` are names of a request beside those of models: `adapter`, and `salt` of a tenant (KVP-TIER-NAMESPACE).
        """
        return Chain(namespace(self._names | more) if more else self.space, self.host.layout.page, tokens)

    def save(self, chain: Chain, slots: Sequence[int]) -> None:
        """Have the next `step` copy the first pages of a prompt, in these slots of the pool, and store them.

        Pages that the host has are not copied again. On a GPU the engine's stream waits for the copy, so that the slots
        may be given to another request at once.
        """
        every = [component.group for component in self.copies.layout.components]
        self._backups.append(HostBackup(chain, list(slots), [every] * len(slots)))

    def find(self, chain: Chain) -> Hit:
        """The first pages of a prompt that are on the host, pinned there until the hit is closed."""
        return self.host.find(chain)

    def load(self, hit: Hit, first: int, slots: Sequence[int], finish: Callable[[bool], None]) -> None:
        """Copy pages of the host, from page `first` of `hit` on, into these slots of the pool.

        `finish` is called with whether they have arrived, here or by `settle`; `hit` stays open until then.
        """
        sources = [page.slot for page in hit.pages[first : first + len(slots)]]
        groups = [self.host.groups(slot) for slot in sources]

        def ended(arrived: bool) -> None:
            if arrived:
                self.counts["host"] += len(sources)
                self._count_moved("from_host", groups)
            finish(arrived)

        self._start(self.copies.to_pool, sources, list(slots), ended)

    def step(self) -> None:
        """Start the copies to the host that wait, as one program; then see to storage."""
        self.settle()
        self._back_up()
        self._collect_stored()

    def settle(self) -> None:
        """Check which copies are over; their pages can be found from now on."""
        running, self._running = self._running, []
        for copy, finish in running:
            self._check(copy, finish)

    def fetch(self, chain: Chain, deadline: float = 0.0) -> StorageRead:
        """Begin to read pages that the host lacks from storage; `deadline` 0 waits for none, infinity for all."""
        with self.host.find(chain) as hit:
            first = len(hit.pages)
        last = min(len(chain.ids(self.host.layout.form)), first + self._io_room())
        return StorageRead(self.io, chain, range(first, last), deadline, self._put_on_host)

    def drain(self) -> None:
        """Step until nothing waits and everything is stored, unless storage hangs."""
        while self.busy:
            self.step()
            for copy, _ in self._running:
                copy.wait()
            if self.io and not self.io.wait() and not self.waiting:
                break
        self._collect_stored()

    def close(self) -> None:
        """Wait for copies, and for storage unless it hangs; drop waiting work, and free the host memory."""
        for copy, _ in self._running:
            copy.wait()
        self.settle()
        if self.io:
            self.io.close()
        for backup in self._backups:
            backup.close()
        self._backups = []
        self._collect_stored()
        if not (self.io and self.io.busy):  # a write that hangs still reads that memory
            self.copies.close()

    def metrics(self, engine: str) -> list[MetricSample]:
        """The metrics of tiers (spec/v1/metrics.md), for `Collector(lambda: tiers.metrics("prefill"))`; thread-safe."""
        geometry, rank = self.copies.pool.geometry, self.copies.pool.rank
        base = {"engine": engine, "replica": str(geometry.replica), "rank": str(rank), "role": "tiers"}
        names = {group.id: group.name for group in geometry.groups}
        pages, stored = dict(self.counts), dict(self.page_store.counts) if self.page_store else {}
        counts = pages | {what: stored.get(what, 0) for what in _OF_STORAGE}
        samples = [
            sample(base, "kvproto_tier_pages_total", (what,), counts.get(what.replace("_", " "), 0)) for what in _PAGES
        ]
        for what, count in (("copy", pages.get("failed", 0)), ("storage", stored.get("failed", 0))):
            samples.append(sample(base, "kvproto_tier_failures_total", (what,), count))
        for (way, group), moved in dict(self.moved).items():
            samples.append(sample(base, "kvproto_tier_bytes_total", (way, names[group]), moved))
        for tier, index in self.indexes.items():
            for state, count in index.slots.counts().items():
                samples.append(sample(base, "kvproto_tier_slots", (tier, state.name.lower()), count))
            for group, count in index.page_counts().items():
                samples.append(sample(base, "kvproto_tier_held_pages", (tier, names[group]), count))
        return samples

    def _put_on_host(self, chain: Chain, first: int, pages: Sequence[Mapping[int, Data]]) -> int:
        """Put pages of a prompt, from `first` on, on the host; returns how many were not there before."""
        with self.host.find(chain) as hit:
            start = len(hit.pages)
            new = pages[start - first :] if start >= first else []
            new = new[: self.host.slots.free + self.host.slots.idle]
            reservation = self.host.reserve_pages(chain, start, len(new))
            if reservation is None:
                return 0
            with reservation:
                for slot, data in zip(reservation.fill_all(), new, strict=True):
                    for group, view in self.copies.page(slot).items():
                        view[:] = data.get(group, bytes(len(view)))
                reservation.seal_all([[*data] for data in new])
                published = reservation.publish()
        self.counts["fetched"] += published
        self._count_moved("from_storage", new[:published])
        return published

    def _io_room(self) -> int:
        """The number of pages that may still go to or from storage."""
        return self.io.workers.room if self.io else 0

    def _back_up(self, pinned: bool = True) -> None:
        """Copy the pages of all backups to the host that it lacks; without `pinned`, only of backups without a hit."""
        backups = [backup for backup in self._backups if pinned or backup.hit is None]
        self._backups = [backup for backup in self._backups if not pinned and backup.hit is not None]
        flying: set[bytes] = set()
        started: list[tuple[HostBackup, Hit, range, Reservation]] = []
        for backup in backups:
            ids = backup.chain.ids(self.host.layout.form)[: len(backup.slots)]
            hit = self.host.find_with(backup.chain, backup.groups)
            first = len(hit.pages)
            first += len([*takewhile(flying.__contains__, ids[first:])])
            wanted = range(first, min(len(ids), first + self.host.slots.free + self.host.slots.idle))
            self.counts["not kept"] += len(ids) - wanted.stop
            reservation = self.host.reserve_pages(backup.chain, first, len(wanted)) if wanted else None
            if reservation is None:
                hit.close()
                backup.close()
            else:
                flying.update(ids[first : wanted.stop])
                started.append((backup, hit, wanted, reservation))
        sources = [slot for backup, _, pages, _ in started for slot in backup.slots[pages.start : pages.stop]]
        sinks = [slot for *_, reservation in started for slot in reservation.fill_all()]

        def finish(arrived: bool) -> None:
            for backup, hit, pages, reservation in started:
                with hit, reservation:
                    if arrived:
                        groups = backup.groups[pages.start : pages.stop]
                        self._count_moved("to_host", groups)
                        reservation.seal_all(groups)
                        reservation.publish()
                        self._store(backup.chain, pages)
                backup.close()

        copy = self._start(self.copies.to_host, sources, sinks, finish)
        if copy is not None and any(backup.hit is None for backup, *_ in started):
            copy.hold()  # the pages that it reads are not pinned

    def _start(
        self,
        copy: Callable[[Sequence[int], Sequence[int]], Paging],
        sources: list[int],
        sinks: list[int],
        finish: Callable[[bool], None],
    ) -> Paging | None:
        """Start a copy, unless it is empty; a copy that fails loses its pages and nothing else."""
        if not sources:
            finish(True)
            return None
        try:
            paging = copy(sources, sinks)
        except KvprotoError:
            self.counts["failed"] += 1
            finish(False)
            return None
        self._check(paging, finish)
        return paging

    def _check(self, copy: Paging, finish: Callable[[bool], None]) -> None:
        """Finish a copy that is over or has failed; else keep it in the list of running copies."""
        try:
            done = copy.done
        except KvprotoError:
            self.counts["failed"] += 1
            finish(False)
            return
        if done:
            finish(True)
        else:
            self._running.append((copy, finish))

    def _store(self, chain: Chain, pages: range) -> None:
        """Have threads write pages of the host, which stay pinned meanwhile."""
        if self.io is None:
            return
        hit = self.host.find(chain)
        hit.cut(pages.stop)
        numbers = range(pages.start, min(len(hit.pages), pages.start + self._io_room()))
        self.counts["not stored"] += len(pages) - len(numbers)
        views = [self._host_views(hit.pages[i].slot) for i in numbers]
        self._count_moved("to_storage", views)
        self.io.write(hit, chain, zip(numbers, views, strict=True))

    def _host_views(self, slot: int) -> dict[int, memoryview]:
        """The bytes of each component that a host page holds."""
        held = self.host.groups(slot)
        return {group: view for group, view in self.copies.page(slot).items() if group in held}

    def _count_moved(self, way: str, pages: Iterable[Iterable[int]]) -> None:
        """Count the bytes of these components of pages that were copied."""
        for group in (group for page in pages for group in page):
            self.moved[way, group] += self.host.layout.component(group).length

    def _collect_stored(self) -> None:
        """Unpin pages whose writes to storage are over."""
        if self.io:
            self.counts["stored"] += self.io.collect()
