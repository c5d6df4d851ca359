"""Pages in a store: objects first, the manifest last, nothing used that was not checked, and the oldest given up.

No failure of the store gets out of here: a page that cannot be written is not kept, and one that cannot be read is a
miss. `Shelf.counts` says how often. One thread at a time; other processes may use the same store.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

import attrs

from kvproto.errors import LocalError, WireError
from kvproto.tiers.components import Layout
from kvproto.tiers.identity import Chain
from kvproto.tiers.lengths import Found, found
from kvproto.tiers.manifest import Data, describe, encode, manifest_key, object_key, take
from kvproto.tiers.store import Store
from kvproto.wire import decode_struct
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Manifest

__all__ = ["Shelf"]

GRACE = 600.0
"""Seconds that an object may be without a manifest before it is swept: its writer may not be done yet."""


@attrs.define
class _Known:
    """A manifest that this process has seen."""

    manifest: Manifest
    pins: int = 0

    @property
    def size(self) -> int:
        return sum(component.length for component in self.manifest.components)


class Shelf:
    """The pages of one rank's layout in a store that may hold others' as well."""

    def __init__(self, store: Store, layout: Layout, low: int = 0, high: int = 0) -> None:
        """Above `high` bytes pages are given up until there are `low`; 0: never."""
        if not 0 <= low <= high:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "low", f"within [0, {high}]", str(low))
        self.store, self.layout, self.low, self.high = store, layout, low, high
        self.counts: Counter[str] = Counter()
        """How many pages were `written`, `read`, `missed`, `damaged`, `evicted`, and calls that `failed`."""
        self.bytes = 0
        """Of the pages that are known, whoever wrote them."""
        self._known: OrderedDict[str, _Known] = OrderedDict()
        with self._failing():
            for key in self.store.keys("m"):
                self._look(key)

    def write(self, chain: Chain, i: int, data: Mapping[int, Data]) -> bool:
        """Keep page i, bytes by group; whether it is kept. Raises LocalError for other bytes than the layout's.

        What is there already is written anew, so a page that was damaged is whole again (KVP-TIER-REWRITE).
        """
        manifest = describe(self.layout, chain, i, data)
        key = manifest_key(manifest.id, manifest.geometry)
        with self._failing():
            for component in manifest.components:
                self.store.put(object_key(manifest, component), data[component.group])
            self.store.put(key, encode(manifest))
            self._note(key, manifest)
            self.counts["written"] += 1
            self._evict()
            return True
        return False

    def read(self, chain: Chain, i: int, groups: Collection[int] | None = None) -> dict[int, bytes] | None:
        """Page i, bytes by group, of these groups or of all that it has; None if it is not there whole.

        A page that is found damaged is there no more (KVP-TIER-CHECK).
        """
        key = self._key(chain, i)
        with self._failing():
            known = self._take(key, chain, i)
            if known is None or (groups is not None and {*groups} - {c.group for c in known.components}):
                self.counts["missed"] += 1
                return None
            data = {}
            for component in known.components:
                if groups is not None and component.group not in groups:
                    continue
                got = self.store.get(object_key(known, component))
                if got is None or len(got) != component.length or hashlib.sha256(got).digest() != component.digest:
                    self.counts["damaged"] += 1
                    self._forget(key)
                    self.store.delete(key)
                    return None
                data[component.group] = got
            self.counts["read"] += 1
            return data
        return None

    def find(self, chain: Chain) -> Found:
        """How many leading pages are there, and the sets of the other components; `read` has the last word."""
        has: dict[int, list[bool]] = {part.group: [] for part in self.layout.parts}
        keys = []
        for i in range(len(chain.ids(self.layout.form))):
            key = self._key(chain, i)
            known = self._known.get(key)
            manifest = known.manifest if known else None
            if manifest is None:
                with self._failing():
                    manifest = self._take(key, chain, i)
            if manifest is None:
                break
            keys.append(key)
            held = {component.group for component in manifest.components}
            for group, pages in has.items():
                pages.append(group in held)
        for key in reversed(keys):
            self._known.move_to_end(key)
        return found(self.layout, has)

    @contextmanager
    def hold(self, chain: Chain, length: int) -> Iterator[None]:
        """Keep this process from giving up pages [0, length) meanwhile."""
        held = [known for i in range(length) if (known := self._known.get(self._key(chain, i)))]
        for known in held:
            known.pins += 1
        try:
            yield
        finally:
            for known in held:
                known.pins -= 1
            self._evict()

    def sweep(self, grace: float = GRACE) -> int:
        """Delete what no manifest names and is older than `grace` seconds; how many there were."""
        gone = 0
        with self._failing():
            there = {*self.store.keys("m")}
            named = {object_key(m, c) for key in there if (m := self._manifest(key)) for c in m.components}
            for kind in ("o", "t"):
                for key in [key for key in self.store.keys(kind) if key not in named and self.store.age(key) > grace]:
                    self.store.delete(key)
                    gone += 1
        return gone

    def _key(self, chain: Chain, i: int) -> str:
        return manifest_key(chain.ids(self.layout.form)[i], self.layout.geometry)

    def _take(self, key: str, chain: Chain, i: int) -> Manifest | None:
        """The manifest of page i as the store has it now, which may be another's since."""
        data = self.store.get(key)
        manifest = None if data is None else take(data, self.layout, chain, i)
        if manifest is None:
            self._forget(key)
            return None
        self._note(key, manifest)
        return manifest

    def _manifest(self, key: str) -> Manifest | None:
        data = self.store.get(key)
        with suppress(WireError):
            return None if data is None else decode_struct(Manifest, data)
        return None

    def _look(self, key: str) -> None:
        manifest = self._manifest(key)
        if manifest is not None and manifest_key(manifest.id, manifest.geometry) == key:
            self._note(key, manifest)

    def _note(self, key: str, manifest: Manifest) -> None:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(manifest)
        else:
            self.bytes -= known.size
            known.manifest = manifest
            self._known.move_to_end(key)
        self.bytes += known.size

    def _forget(self, key: str) -> None:
        if known := self._known.pop(key, None):
            self.bytes -= known.size

    def _evict(self) -> None:
        """Above the high mark, give up what was not used for longest, but what is held, down to the low one."""
        if not self.high or self.bytes <= self.high:
            return
        for key in [key for key, known in self._known.items() if not known.pins]:
            if self.bytes <= self.low:
                return
            manifest = self._known[key].manifest
            self._forget(key)
            self.counts["evicted"] += 1
            with self._failing():
                self.store.delete(key)
                for component in manifest.components:
                    self.store.delete(object_key(manifest, component))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.counts["failed"] += 1
