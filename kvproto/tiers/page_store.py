"""Pages in a store: objects are written first and the manifest last, every byte is checked, the oldest are evicted.

Failures of the back end stay in this module: a page that cannot be written is not kept, and one that cannot be read is
a miss. `PageStore.counts` counts them. Any number of threads may call at once, so that one reads while another
computes digests; other processes may use the same back end.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock

from kvproto.errors import bad
from kvproto.tiers.fsck import delete_page
from kvproto.tiers.manifest import (
    Data,
    ObjectReferences,
    make_manifest,
    manifest_key,
    matches,
    object_key,
    parse_manifest,
)
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout
from kvproto.tiers.relayout import RelayoutReader, get_object, opens
from kvproto.tiers.sealing import Seal
from kvproto.tiers.store import BatchStore, Store, get_manifest
from kvproto.wire import encode_struct
from kvproto.wire.messages import Manifest

SPARE = 256 << 20
"""Most bytes of buffers that are kept for later."""

StoredPage = tuple[Chain, int, Mapping[int, Data]]
"""A page to write: its prompt, its number there, and its bytes by group."""
PageBuffers = dict[int, memoryview]
"""Memory for one page, by group."""


class BufferPool:
    """Memory for pages from storage, reused because the first use of memory costs more than a read. Thread-safe."""

    def __init__(self, layout: PageLayout) -> None:
        self._lengths = layout.lengths
        self._spare = deque[PageBuffers](maxlen=SPARE // max(sum(self._lengths.values()), 1))

    def take(self) -> PageBuffers:
        """Buffers for one page, with undefined bytes; buffers that are never returned are freed."""
        with suppress(IndexError):
            return self._spare.pop()
        return {group: memoryview(bytearray(length)) for group, length in self._lengths.items()}

    def give_back(self, buffers: PageBuffers) -> None:
        """Return buffers that nothing uses any more."""
        self._spare.append(buffers)


class PageStore:
    """The pages of one rank's layout, in a back end that may hold pages of others as well."""

    def __init__(self, store: Store, layout: PageLayout, low: int = 0, high: int = 0, *, scan: bool = True) -> None:
        """Pages are evicted above `high` bytes, down to `low`; 0: never. With `scan`, list the pages that are there."""
        if not 0 <= low <= high:
            raise bad("low", f"within [0, {high}]", low)
        self.store, self.layout, self.low, self.high = store, layout, low, high
        self.seal: Seal | None = None
        """The keys with which pages are sealed; others are as good as absent then (KVP-TIER-PLAIN)."""
        self.others: RelayoutReader | None = None
        """The reader of pages that are there in other layouts alone, if there is one."""
        self.counts: Counter[str] = Counter()
        """Pages that were `written`, `read`, `missed`, `damaged` and `evicted`, those whose keys were lacking
        (`locked`), and calls that `failed`."""
        self.bytes = 0
        """Bytes of the pages that this process knows, whichever process wrote them."""
        self._known: OrderedDict[bytes, Manifest] = OrderedDict()
        """Manifests by id and geometry of the page, least recently used first."""
        self._lock = Lock()
        if scan:
            self.scan()

    def scan(self) -> None:
        """List the pages that are there, whichever process wrote them, and evict down from the high mark."""
        with self._counting_failures():
            for key in self.store.keys("m"):
                manifest = ObjectReferences().add(key, get_manifest(self.store, key))
                if manifest is not None and self._plausible(manifest):
                    self._note(manifest)
        self._evict()

    def write(self, chain: Chain, i: int, data: Mapping[int, Data]) -> bool:
        """Write page i, also over a damaged one (KVP-TIER-REWRITE); whether it is kept. Raises LocalError for sizes."""
        return self._write([(chain, i, data)])

    def write_all(self, pages: Sequence[StoredPage]) -> list[bool]:
        """Write several pages at once, or each by itself if that fails; returns which are kept."""
        if len(pages) > 1 and isinstance(self.store, BatchStore) and self._write(pages):
            return [True] * len(pages)
        return [self._write([page]) for page in pages]

    def _write(self, pages: Sequence[StoredPage]) -> bool:
        """Write all objects, then all manifests (KVP-TIER-LAST)."""
        manifests: list[Manifest] = []
        with self._counting_failures():
            if isinstance(self.store, BatchStore):
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
        """The keys and bytes to store; the digests of a page are computed once the page before it has been taken."""
        for chain, i, data in pages:
            if self.seal:
                data = self.seal.seal(chain.space, chain.ids(self.layout.form)[i], self.layout, data)
            manifest = make_manifest(self.layout, chain, i, data, self.seal.name if self.seal else None)
            manifests.append(manifest)
            for component in manifest.components:
                yield object_key(manifest, component), data[component.group]
        for manifest in manifests:
            yield manifest_key(manifest.id, manifest.geometry), encode_struct(manifest)

    def holds(self, chain: Chain, i: int) -> bool:
        """Whether page i is there, as far as its manifest says; its bytes are checked when they are read."""
        with self._counting_failures():
            return self._manifest(chain, i) is not None
        return False

    def read(self, chain: Chain, i: int, buffers: PageBuffers | None = None) -> dict[int, Data] | None:
        """The bytes of page i by group, of all groups that it has; None if it is not there whole.

        The bytes are in `buffers`, if they are given and the back end can read into them. A page that is damaged at two
        reads, because another process may have mended it after the first, is deleted (KVP-TIER-CHECK).
        """
        with self._counting_failures():
            for last in (False, True):
                manifest = self._manifest(chain, i)
                if manifest is None:
                    self._count("missed")
                    return None
                if (data := self._checked(manifest, buffers)) is not None:
                    self._count("read")
                    return data
                if last:
                    self._count("damaged")
                    self._forget(manifest.id + manifest.geometry)
                    self.store.delete(manifest_key(manifest.id, manifest.geometry))
        return None

    def _checked(self, manifest: Manifest, buffers: PageBuffers | None) -> dict[int, Data] | None:
        """The bytes of a page by group, None if any of them are wrong."""
        data: dict[int, Data] = {}
        for component in manifest.components:
            room = None if buffers is None else buffers[component.group]
            stored = get_object(self.store, manifest, component, self.seal, room)
            if stored is None:
                return None
            data[component.group] = stored
        return data

    def _manifest(self, chain: Chain, i: int) -> Manifest | None:
        """Read the manifest of page i from the back end, where another process may have changed it."""
        id = chain.ids(self.layout.form)[i]
        data = get_manifest(self.store, manifest_key(id, self.layout.geometry))
        manifest = parse_manifest(data, self.layout, chain, i)
        if manifest is None:
            self._forget(id + self.layout.geometry)
            return None
        self._note(manifest)
        if not opens(self.seal, manifest):
            self._count("locked")
            return None
        return manifest

    def _plausible(self, manifest: Manifest) -> bool:
        """Whether its lengths can be true: no reader checks them, and false ones would evict whole pages."""
        if manifest.geometry == self.layout.geometry:
            return matches(manifest, self.layout)
        return not self.high or _size(manifest) <= self.high

    def _note(self, manifest: Manifest) -> None:
        """Remember a manifest as the most recently used, in place of an earlier one of the page."""
        name = manifest.id + manifest.geometry
        with self._lock:
            if former := self._known.pop(name, None):
                self.bytes -= _size(former)
            self._known[name] = manifest
            self.bytes += _size(manifest)

    def _forget(self, name: bytes) -> None:
        with self._lock:
            if manifest := self._known.pop(name, None):
                self.bytes -= _size(manifest)

    def _evict(self) -> None:
        """Evict the least recently used pages down to the low mark, if the high one is passed."""
        evicted = []
        with self._lock:
            if not self.high or self.bytes <= self.high:
                return
            while self._known and self.bytes > self.low:
                evicted.append(self._known.popitem(last=False)[1])
                self.bytes -= _size(evicted[-1])
        for manifest in evicted:
            self._count("evicted")
            with self._counting_failures():
                delete_page(self.store, manifest_key(manifest.id, manifest.geometry), manifest)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._count("failed")


def _size(manifest: Manifest) -> int:
    return sum(component.length for component in manifest.components)
