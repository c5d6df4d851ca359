"""Pages in a store: objects first, the manifest last, nothing used that was not checked, and the oldest given up.

No failure of the store leaves this module: a page that cannot be written is not kept, and one that cannot be read is a
miss. `PageStore.counts` says how often. Any number of threads may call at once, so that one reads while another
computes digests; other processes may use the same store.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

import attrs

from kvproto.errors import LocalError
from kvproto.tiers.buffer_pool import PageBuffers
from kvproto.tiers.lengths import Found, found
from kvproto.tiers.manifest import Data, ObjectReferences, describe, encode, fits, manifest_key, object_key, take
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout
from kvproto.tiers.store import Grouped, Store, manifest_at
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Component, Manifest

__all__ = ["PageStore"]

GRACE = 600.0
"""Seconds before an object without a manifest is swept, as its writer may not be done yet."""


StoredPage = tuple[Chain, int, Mapping[int, Data]]
"""Of a prompt, by its number, and the bytes of its groups."""


@attrs.define
class _Known:
    """A manifest that this process has seen."""

    manifest: Manifest
    held: frozenset[int]
    """Groups that it names."""
    size: int
    """Bytes of its objects."""
    pins: int = 0


class PageStore:
    """The pages of one rank's layout in a store that may hold others' as well."""

    def __init__(self, store: Store, layout: PageLayout, low: int = 0, high: int = 0, *, look: bool = True) -> None:
        """Above `high` bytes pages are given up until there are `low`; 0: never. With `look` see what is there."""
        if not 0 <= low <= high:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "low", f"within [0, {high}]", str(low))
        self.store, self.layout, self.low, self.high = store, layout, low, high
        self.counts: Counter[str] = Counter()
        """How many pages were `written`, `read`, `missed`, `damaged`, `evicted`, and calls that `failed`."""
        self.bytes = 0
        """Of the pages that are known, whoever wrote them."""
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._lock = Lock()
        if look:
            self.look()

    def look(self) -> None:
        """List the pages that are there, whoever wrote them, and evict what exceeds the high mark."""
        with self._failing():
            for key in self.store.keys("m"):
                manifest = ObjectReferences().add(key, manifest_at(self.store, key))
                if manifest is not None and self._plausible(manifest):
                    self._note(manifest)
        self._evict()

    def write(self, chain: Chain, i: int, data: Mapping[int, Data]) -> bool:
        """Keep page i, bytes by group; whether it is kept. Raises LocalError for other bytes than the layout's.

        A page that is there already is written again, so that a damaged page becomes whole (KVP-TIER-REWRITE).
        """
        return self._write([(chain, i, data)])

    def write_all(self, pages: Sequence[StoredPage]) -> list[bool]:
        """As `write`, several pages for little more than the price of one where the store can do that.

        Where that fails, each is tried by itself, so that no page is lost to a fault of another.
        """
        if len(pages) > 1 and isinstance(self.store, Grouped) and self._write(pages):
            return [True] * len(pages)
        return [self._write([page]) for page in pages]

    def _write(self, pages: Sequence[StoredPage]) -> bool:
        """All objects, then all manifests (KVP-TIER-LAST)."""
        manifests: list[Manifest] = []
        with self._failing():
            if isinstance(self.store, Grouped):
                self.store.put_all(self._pairs(pages, manifests))
            else:
                for key, data in self._pairs(pages, manifests):
                    self.store.put(key, data)
            for manifest in manifests:
                self._note(manifest)
                self._count("written")
            self._evict()
            return True
        return False

    def _pairs(self, pages: Sequence[StoredPage], manifests: list[Manifest]) -> Iterator[tuple[str, Data]]:
        """What is stored under which key; the digests of a page are computed when the page before it has been taken."""
        for chain, i, data in pages:
            manifest = describe(self.layout, chain, i, data)
            manifests.append(manifest)
            for component in manifest.components:
                yield object_key(manifest, component), data[component.group]
        for manifest in manifests:
            yield manifest_key(manifest.id, manifest.geometry), encode(manifest)

    def read(
        self, chain: Chain, i: int, groups: Collection[int] | None = None, room: PageBuffers | None = None
    ) -> dict[int, Data] | None:
        """Page i, bytes by group, of these groups or of all that it has; None if it is not there whole.

        The bytes are in `room`, if there is one and the store can read into it. A page that is found damaged, twice as
        somebody may have mended it meanwhile, is there no more (KVP-TIER-CHECK).
        """
        with self._failing():
            for last in (False, True):
                known = self._take(chain, i)
                manifest = known.manifest if known else None
                if manifest is None or (groups is not None and {*groups} - {c.group for c in manifest.components}):
                    self._count("missed")
                    return None
                if (data := self._whole(manifest, groups, room)) is not None:
                    self._count("read")
                    return data
                if last:
                    self._count("damaged")
                    self._forget(manifest.id + manifest.geometry)
                    self.store.delete(manifest_key(manifest.id, manifest.geometry))
        return None

    def _whole(
        self, manifest: Manifest, groups: Collection[int] | None, room: PageBuffers | None
    ) -> dict[int, Data] | None:
        """The bytes of a page by group, None if one of them is not right."""
        data: dict[int, Data] = {}
        for component in manifest.components:
            if groups is None or component.group in groups:
                got = self._get(manifest, component, room)
                if got is None or len(got) != component.length or hashlib.sha256(got).digest() != component.digest:
                    return None
                data[component.group] = got
        return data

    def _get(self, manifest: Manifest, component: Component, room: PageBuffers | None) -> Data | None:
        """The bytes of an object, as many as there are; fewer or more than its length are not right."""
        key, fill = object_key(manifest, component), getattr(self.store, "get_into", None)  # of a Filling
        if room is None or fill is None:
            return self.store.get(key)
        there = fill(key, room[component.group])
        return None if there != component.length else room[component.group]

    def find(self, chain: Chain) -> Found:
        """How many leading pages are there, and the sets of the other components; `read` has the last word."""
        held, names = [], []
        for i, id in enumerate(chain.ids(self.layout.form)):
            names.append(id + self.layout.geometry)
            known = self._known.get(names[-1])
            if known is None:
                with self._failing():
                    known = self._take(chain, i)
            if known is None:
                break
            held.append(known.held)
        with self._lock:
            for name in reversed(names):
                if name in self._known:
                    self._known.move_to_end(name)
        return found(self.layout, {part.group: [part.group in each for each in held] for part in self.layout.parts})

    @contextmanager
    def hold(self, chain: Chain, length: int) -> Iterator[None]:
        """Keep this process from evicting pages [0, length) meanwhile."""
        with self._lock:
            names = [id + self.layout.geometry for id in chain.ids(self.layout.form)[:length]]
            held = [self._known[name] for name in names if name in self._known]
            for known in held:
                known.pins += 1
        try:
            yield
        finally:
            with self._lock:
                for known in held:
                    known.pins -= 1
            self._evict()

    def sweep(self, grace: float = GRACE) -> int:
        """Delete objects that no manifest names and that are older than `grace` seconds; return how many."""
        gone = 0
        with self._failing():
            named = ObjectReferences()
            for key in self.store.keys("m"):
                named.add(key, manifest_at(self.store, key))
            for kind in ("o", "t"):
                for key in [key for key in self.store.keys(kind) if key not in named and self.store.age(key) > grace]:
                    self.store.delete(key)
                    gone += 1
        return gone

    def _take(self, chain: Chain, i: int) -> _Known | None:
        """The manifest of page i as the store has it now, which may be another's since."""
        id = chain.ids(self.layout.form)[i]
        data = manifest_at(self.store, manifest_key(id, self.layout.geometry))
        manifest = None if data is None else take(data, self.layout, chain, i)
        if manifest is None:
            self._forget(id + self.layout.geometry)
            return None
        return self._note(manifest)

    def _plausible(self, manifest: Manifest) -> bool:
        """Whether its lengths can be right: nobody checks them, and whole pages would be evicted for wrong ones."""
        if manifest.geometry == self.layout.geometry:
            return fits(manifest, self.layout)
        return not self.high or sum(c.length for c in manifest.components) <= self.high

    def _note(self, manifest: Manifest) -> _Known:
        """Know this manifest, in place of an earlier one of the page."""
        held, size = frozenset(c.group for c in manifest.components), sum(c.length for c in manifest.components)
        name = manifest.id + manifest.geometry
        with self._lock:
            known = self._known.setdefault(name, _Known(manifest, held, 0))
            self.bytes += size - known.size
            known.manifest, known.held, known.size = manifest, held, size
            self._known.move_to_end(name)
        return known

    def _forget(self, name: bytes) -> None:
        with self._lock:
            if known := self._known.pop(name, None):
                self.bytes -= known.size

    def _evict(self) -> None:
        """Above the high mark, evict the least recently used pages that are not held, down to the low mark."""
        gone = []
        with self._lock:
            if not self.high or self.bytes <= self.high:
                return
            for name, known in [*self._known.items()]:
                if self.bytes <= self.low:
                    break
                if not known.pins:
                    self.bytes -= self._known.pop(name).size
                    gone.append(known.manifest)
        for manifest in gone:
            self._count("evicted")
            with self._failing():
                self.store.delete(manifest_key(manifest.id, manifest.geometry))
                for component in manifest.components:
                    self.store.delete(object_key(manifest, component))

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._count("failed")
