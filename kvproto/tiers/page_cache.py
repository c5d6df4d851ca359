"""A rank's pages on the device, on the host and in storage, as an engine uses them.

A request opens a `PageLease`: the pages of its prompt that were found, and room for the rest. Copies for all requests
wait for `PageCache.step`, which starts one program from the host and one to it, for any number of pages and components.
`HostCache` has what concerns the host and storage. One thread at a time may call this module.

Each rank finds other pages, and has other slots to spare. An `Agreement` states in a vector which prompts the rank was
given, how many slots it has, and at which lengths of each prompt it could continue; the MIN of these vectors is what
all ranks can do. Every rank decides by that alone, so all decide the same, and a page that one rank lacks shortens the
hit on all.
"""

import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.tiers.host_cache import HostBackup, HostCache
from kvproto.tiers.host_copies import HostCopies
from kvproto.tiers.index import Hit, Index, Reservation
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.storage_io import StorageIO
from kvproto.transport.base import Paging
from kvproto.wire.enums import ErrorCode, LengthRule, Tier

LENGTHS = 8192
"""Lengths that one vector has room for: 16 prompts of 32K tokens in pages of 64. Pages beyond are computed."""
_DIGEST, _SLOTS, _HEAD = slice(0, 16), 16, 17


class WritePolicy(Enum):
    """The time at which a page of the device is copied to the host, and from there to storage."""

    WRITE_THROUGH = "write-through"
    """At the next step after it was published."""
    SELECTIVE = "selective write-through"
    """At the next step after a second request has found it."""
    WRITE_BACK = "write-back"
    """Just before its slot is given to another request."""


def patience(tokens: int) -> float:
    """Default number of seconds that storage may take for this many tokens."""
    return 1.0 + tokens / 4096


class PageCache(HostCache):
    """The pages of one rank in its pool, in host memory, and in a page store."""

    def __init__(
        self,
        copies: HostCopies,
        io: StorageIO | None = None,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(copies, io, names)
        self.policy, self.device = policy, Index(copies.layout, copies.pages)
        self.indexes = {"device": self.device, "host": self.host}
        self.device.on_evict = self._before_evict
        self._origins: dict[bytes, tuple[Chain, int]] = {}
        """The prompt and page number of each page on the device, by id."""
        self._loads: list[PageLease] = []
        self._listeners: list[Callable[[dict[bytes, Tier | None]], object]] = []

    @property
    def waiting(self) -> bool:
        return super().waiting or bool(self._loads)

    def subscribe(self, listener: Callable[[dict[bytes, Tier | None]], object]) -> None:
        """Report pages to continue after, by nearest tier (None: gone): all now, then changes (KVP-CAT-TELL)."""
        self._notify()  # the other listeners get the changes since the last step
        for index in (self.device, self.host):
            index.changes = {}
        self._listeners.append(listener)
        listener(self._nearest({*self.device.ids(), *self.host.ids()}))

    def _nearest(self, ids: Iterable[bytes]) -> dict[bytes, Tier | None]:
        """The nearest tier in which a request can continue after each of these pages."""

        def tier(id: bytes) -> Tier | None:
            if self.device.can_continue_after(id):
                return Tier.DEVICE
            return Tier.HOST if self.host.can_continue_after(id) else None

        return {id: tier(id) for id in ids}

    def _notify(self) -> None:
        ids = {*(self.device.changes or ()), *(self.host.changes or ())}
        if ids:
            self.device.changes, self.host.changes = {}, {}
            nearest = self._nearest(ids)
            for listener in self._listeners:
                listener(nearest)

    def agreement(self, prompts: Sequence[tuple[Chain, int]], lengths: int = LENGTHS) -> "Agreement":
        """The lengths at which this rank could continue prompts, each with its room, for all ranks to agree on."""
        self.settle()
        return Agreement(self, prompts, lengths)

    def open(self, chain: Chain, room: int, most: int | None = None) -> "PageLease | None":
        """A lease of the pages of a prompt that are there, with slots for the rest of `room` pages.

        Returns None while too few slots are free. Pages on the host are in the pool after the next `step` and
        `PageLease.wait`. `most` limits how many of the pages that are there are used.
        """
        self.settle()
        usable = room if most is None else min(room, most)
        on_device, on_host = self.device.find(chain, usable), self.host.find(chain, usable)
        first = len(on_device.pages)
        last = max(first, len(on_host.pages))
        rest = self.reserve(room - first)
        if rest is None:
            on_device.close()
            on_host.close()
            return None
        self.counts["device"] += first
        self.counts["host"] += last - first
        self.counts["new"] += max(min(room, len(chain.ids(self.device.layout.form))) - last, 0)
        if self.policy is WritePolicy.SELECTIVE and first:
            self._queue_backup(chain, first)
        lease = PageLease(self, chain, on_device, on_host, rest.split(last - first), rest)
        if not lease.ready:
            self._loads.append(lease)
        return lease

    def reserve(self, count: int) -> Reservation | None:
        """Reserve slots of the pool; pages that are evicted for them go to the host before their slots are written."""
        reservation = self.device.reserve(count)
        self._back_up(pinned=False)
        return reservation

    def step(self) -> None:
        """Start all copies that wait, as one program to the host and one from it; see to storage and listeners."""
        super().step()
        self._load()
        self._notify()

    def _queue_backup(self, chain: Chain, length: int) -> None:
        hit = self.device.find(chain)
        hit.cut(length)
        slots = [page.slot for page in hit.pages]
        self._backups.append(HostBackup(chain, slots, [self.device.groups(slot) for slot in slots], hit))

    def published(self, chain: Chain, length: int, on_host: bool = False) -> None:
        """Note that the first pages of a prompt can be found on the device now; `on_host`: the host has them too."""
        for i, id in enumerate(chain.ids(self.device.layout.form)[:length]):
            if self.device.slot(id) is not None:
                self._origins.setdefault(id, (chain, i))
        if self.policy is WritePolicy.WRITE_THROUGH and not on_host:
            self._queue_backup(chain, length)

    def cancel_load(self, lease: "PageLease") -> None:
        """Note that a lease no longer waits for pages from the host."""
        if lease in self._loads:
            self._loads.remove(lease)

    def _before_evict(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Queue backups of device pages about to be evicted; their bytes stay until the slots are written."""
        for id, _ in pages:
            chain, i = self._origins[id]
            if self.policy is WritePolicy.WRITE_BACK and self.host.slot(id) is None:
                path = (self.device.slot(id) for id in chain.ids(self.device.layout.form)[: i + 1])
                slots = [slot for slot in path if slot is not None]
                self._backups.append(HostBackup(chain, slots, [self.device.groups(slot) for slot in slots]))
        for id, _ in pages:
            del self._origins[id]

    def _load(self) -> None:
        """Copy the pages that all leases wait for to the pool."""
        loads, self._loads = self._loads, []
        sources = [page.slot for lease in loads for page in lease.coming]
        groups = [self.host.groups(slot) for slot in sources]
        sinks = [slot for lease in loads for slot in lease.load.fill_all()]

        def finish(arrived: bool) -> None:
            if arrived:
                self._count_moved("from_host", groups)
            for lease in loads:
                lease.load_ended(arrived)

        copy = self._start(self.copies.to_pool, sources, sinks, finish)
        for lease in loads:
            lease.load_started(copy)


class PageLease:
    """The slots of one request: pages of its prompt that were found, pages that come from the host, and room."""

    def __init__(
        self, cache: PageCache, chain: Chain, on_device: Hit, on_host: Hit, load: Reservation, rest: Reservation
    ) -> None:
        self._cache, self.chain = cache, chain
        self._on_device, self._on_host, self._rest = on_device, on_host, rest
        self.load = load
        self.coming = on_host.pages[len(on_device.pages) :]
        """Pages of the host that are copied into the slots of `load`."""
        self.found = {"device": len(on_device.pages), "host": 0}
        """The number of pages of the prompt that were found, by tier."""
        self.ready = not self.coming
        """Whether all pages that were found are in the pool."""
        self._copy: Paging | None = None
        self._over = self._loading = False
        if self.ready:
            on_host.close()

    @property
    def pages(self) -> int:
        """The number of pages of the prompt in the pool, for work that follows `wait`."""
        return len(self._on_device.pages) + (len(self.load.pages) if self._loading else 0)

    @property
    def slots(self) -> list[int]:
        """The slots in the order of the prompt: pages that are there or are coming, then room."""
        return [page.slot for page in (*self._on_device.pages, *self.load.pages, *self._rest.pages)]

    def wait(self, layer: int | None = None) -> None:
        """Make the engine's stream, not the host, wait for coming pages, or their layers up to `layer`."""
        if self._copy is not None:
            self._copy.hold(layer)

    def load_started(self, copy: Paging | None) -> None:
        """Note that the copy of the coming pages is under way, or over."""
        if copy is not None and not self.ready:
            self._copy, self._loading = copy, True
            self.found["host"] = len(self.coming)

    def load_ended(self, arrived: bool) -> None:
        """Note that the copy of the coming pages is over, or has failed."""
        used = self._loading
        self._copy, self.ready, self._loading = None, True, arrived
        if self._over:
            self.load.close()
            self._on_host.close()
            return
        first, last = len(self._on_device.pages), len(self._on_device.pages) + len(self.coming)
        device = self._cache.device
        with self._on_host:
            if arrived:
                self.load.seal_all([self._cache.host.groups(page.slot) for page in self.coming])
                ids = self.chain.ids(device.layout.form)[first:last]
                # if others have brought a page meanwhile, ours stay private copies once their slots are in use
                if not used or not any(device.slot(id) is not None for id in ids):
                    self.load.assign(self.chain, first)
                    self.load.publish()
                    self._cache.published(self.chain, last, on_host=True)
                    former, self._on_device = self._on_device, device.find(self.chain, last)
                    former.close()
            else:
                self.load.close()
        self.coming = []
        self.found["host"] = self.pages - first
        if missing := last - self.pages:  # the slots of the load are free again, or idle
            more = self._cache.reserve(missing)
            assert more is not None
            self._rest.prepend(more)

    def leave(self, rows: int = 0, states: Collection[int] | None = None, windows: int = 0) -> None:
        """Return all slots, and keep the whole pages of the first `rows` tokens of `chain`, which may have grown.

        `states` are the token counts after which a recurrent state was kept; None: after every page. `windows` is the
        token from which rows of sliding windows are there; pages that begin before it lack them.
        """
        self._cache.settle()
        ids, slots = self.chain.ids(self._cache.device.layout.form), len(self.slots)
        whole = min(rows // self.chain.page, len(ids), slots) if self.ready else 0
        self._cache.cancel_load(self)
        self._over = True
        with self._on_device, self._rest as rest:
            if whole > self.pages:
                rest.assign(self.chain, self.pages)
                for i in range(whole - self.pages):
                    rest.fill(i)
                    rest.seal(i, self._computed(self.pages + i, states, windows))
                rest.publish()
            if whole:
                self._cache.published(self.chain, whole)
        if self._copy is None:  # else the copy still writes to these slots
            self.load.close()
            self._on_host.close()

    def _computed(self, i: int, states: Collection[int] | None, windows: int) -> list[int]:
        """The components of page i after it was computed."""
        page = self.chain.page
        missing = set() if states is None or (i + 1) * page in states else {LengthRule.STATE}
        missing |= {LengthRule.WINDOW} if i * page < windows else set()
        return [c.group for c in self._cache.device.layout.components if c.rule not in missing]


class Agreement:
    """The prompts of one step on one rank, with the lengths that it offers; its pages are pinned until it is opened."""

    def __init__(self, cache: PageCache, prompts: Sequence[tuple[Chain, int]], lengths: int = LENGTHS) -> None:
        """`prompts` are chains with the room that each needs, in pages; the same on all ranks, in the same order."""
        self._cache, self._prompts = cache, list(prompts)
        slots = cache.device.slots
        self.vector: npt.NDArray[np.int32] = np.zeros(_HEAD + lengths, np.int32)
        """To be replaced by the MIN over all ranks, in place."""
        digest = hashlib.sha256(b"".join(_prompt_record(*prompt) for prompt in self._prompts)).digest()
        words = np.frombuffer(digest, "<u4").astype(np.int64) >> 1
        self._digest = np.concatenate([words, -words]).astype(np.int32)
        self.vector[_DIGEST], self.vector[_SLOTS] = self._digest, slots.free + slots.idle
        self._hits: list[tuple[Hit, Hit]] = []
        at = _HEAD
        for chain, room in self._prompts:
            on_device, on_host = cache.device.find(chain, room), cache.host.find(chain, room)
            self._hits.append((on_device, on_host))
            flags = self.vector[at : at + len(chain.own)]
            bits = on_device.lengths | on_host.lengths
            flags[:] = [bits >> n & 1 for n in range(1, len(flags) + 1)]
            at += len(chain.own)

    def open(self) -> list[PageLease | None]:
        """Leases of equal length on all ranks, None if one has no room; raises CONTENT_MISMATCH for other prompts."""
        try:
            if (self.vector[_DIGEST] != self._digest).any():
                advice = "let every rank ask for the same prompts and room, in the same order"
                raise LocalError(ErrorCode.CONTENT_MISMATCH, "prompts", "those of all ranks", "others", advice)
            left, at, lengths, fits = int(self.vector[_SLOTS]), _HEAD, list[int](), list[bool]()
            for chain, room in self._prompts:
                flags = np.flatnonzero(self.vector[at : at + len(chain.own)])
                lengths.append(int(flags[-1]) + 1 if flags.size else 0)
                at += len(chain.own)
                fits.append(room <= left)
                left -= room if fits[-1] else 0
            for hits, length, fit in zip(self._hits, lengths, fits, strict=True):
                for hit in hits:
                    hit.cut(length if fit else 0)
            leases = []
            for prompt, hits, length, fit in zip(self._prompts, self._hits, lengths, fits, strict=True):
                leases.append(self._cache.open(*prompt, most=length) if fit else None)
                assert (leases[-1] is not None) == fit
                for hit in hits:
                    hit.close()
            return leases
        finally:
            self.close()

    def close(self) -> None:
        for hits in self._hits:
            for hit in hits:
                hit.close()
        self._hits = []


def _prompt_record(chain: Chain, room: int) -> bytes:
    """The request of a rank for one prompt, which must be the same on all ranks."""
    return chain.space + struct.pack("<III", chain.page, len(chain.own), room) + b"".join(chain.own[-1:])
