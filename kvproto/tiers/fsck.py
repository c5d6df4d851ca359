"""What a store of pages holds, whoever wrote it: whole pages by namespace, damaged ones, and what belongs to none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256

import attrs

from kvproto.tiers.manifest import ObjectReferences, object_key
from kvproto.tiers.store import Store, manifest_at
from kvproto.wire.messages import Manifest

__all__ = ["DamagedPage", "StoreReport", "drop", "prune", "survey"]

_LOOKS = 3
"""Others evict a page while we look at it, and write it again."""


@attrs.frozen
class DamagedPage:
    """A page that no reader would use."""

    key: str
    why: str
    manifest: Manifest | None = None
    """As far as it can be read."""


@attrs.frozen
class StoreReport:
    """All that lies in a store."""

    pages: list[Manifest]
    """Whole ones, as far as was looked."""
    damaged: list[DamagedPage]
    orphans: dict[str, int]
    """Bytes of objects that no manifest names, by key: a writer that died, or is not done yet."""
    unfinished: dict[str, int]
    """The same of files that were being written."""
    newer: list[str]
    """Manifests of a later version, which are left alone (KVP-TIER-NEWER)."""


def survey(store: Store, verify: bool = False) -> StoreReport:
    """Look at names, lengths and manifests, and with `verify` at every byte; raises OSError.

    Others may write and evict pages meanwhile: a page that has gone is not damaged.
    """
    named = ObjectReferences()
    pages, damaged = _looked(store, sorted(store.keys("m")), named, verify)
    orphans = {key: store.size(key) or 0 for key in sorted(store.keys("o")) if key not in named}
    unfinished = {key: store.size(key) or 0 for key in sorted(store.keys("t"))}
    return StoreReport(pages, damaged, orphans, unfinished, sorted(named.newer))


def prune(store: Store, found: StoreReport, grace: float, verify: bool = False) -> tuple[int, int]:
    """Delete damaged pages, and what belongs to none and is older than `grace` seconds; how many of both.

    A page that somebody has mended since stays. Raises OSError.
    """
    gone, (_, damaged) = 0, _looked(store, [page.key for page in found.damaged], ObjectReferences(), verify)
    for page in damaged:
        drop(store, page.key, page.manifest)
    named = ObjectReferences()
    for key in store.keys("m"):
        named.add(key, manifest_at(store, key))
    for key in (*found.orphans, *found.unfinished):
        if key not in named and store.age(key) > grace:
            store.delete(key)
            gone += 1
    return len(damaged), gone


def drop(store: Store, key: str, manifest: Manifest | None) -> None:
    """Delete a page: its manifest, then its objects (KVP-TIER-GONE)."""
    store.delete(key)
    if manifest is not None:
        for component in manifest.components:
            store.delete(object_key(manifest, component))


def _looked(
    store: Store, keys: Iterable[str], named: ObjectReferences, verify: bool
) -> tuple[list[Manifest], list[DamagedPage]]:
    """Whole pages, and damaged ones; none that has gone, or is of a later version."""
    found = [_look(store, key, named, verify) for key in keys]
    damaged = [each for each in found if isinstance(each, DamagedPage)]
    if any(each.manifest is None for each in damaged):  # what cannot be read is listed, and what has gone is not
        there = {*store.keys("m")}
        damaged = [each for each in damaged if each.manifest is not None or each.key in there]
    return [each for each in found if isinstance(each, Manifest)], damaged


def _look(store: Store, key: str, named: ObjectReferences, verify: bool) -> Manifest | DamagedPage | None:
    """A page, which is damaged if it looks so each of a few times; None for one of a later version."""
    damaged = None
    for _ in range(_LOOKS):
        manifest = named.add(key, manifest_at(store, key))
        if key in named.newer:
            return None
        if manifest is None:
            damaged = DamagedPage(key, "no manifest of this name")
        elif (why := next(_faults(store, manifest, verify), None)) is None:
            return manifest
        else:
            damaged = DamagedPage(key, why, manifest)
    return damaged


def _faults(store: Store, manifest: Manifest, verify: bool) -> Iterator[str]:
    for component in manifest.components:
        key = object_key(manifest, component)
        size = store.size(key)
        if size is None:
            yield f"group {component.group} is not there"
        elif size != component.length:
            yield f"group {component.group} has {size} bytes, not {component.length}"
        elif verify and sha256(store.get(key) or b"").digest() != component.digest:
            yield f"group {component.group} has other bytes"
