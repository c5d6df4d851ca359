"""A check of all pages in a store, whichever engine wrote them: whole pages, damaged ones, and orphaned objects."""

from collections.abc import Iterable, Iterator
from hashlib import sha256

import attrs

from kvproto.tiers.manifest import ObjectReferences, object_key, object_length
from kvproto.tiers.store import Store, get_manifest
from kvproto.wire.messages import Manifest

GRACE = 600.0
"""Seconds after which an object without a manifest is an orphan: before, its writer may still be at work."""
_LONGEST = 1 << 32
"""Most bytes of an object that is read: no page of tokens has more, but a sparse file may."""
_TRIES = 3
"""The number of times that a page is checked: others may evict it meanwhile, and write it again."""


@attrs.frozen
class DamagedPage:
    """A page that no reader would use."""

    key: str
    why: str
    manifest: Manifest | None = None
    """None if it cannot be read."""


@attrs.frozen
class StoreReport:
    """The contents of a store."""

    pages: list[Manifest]
    """Pages without damage, as far as was checked."""
    damaged: list[DamagedPage]
    orphans: dict[str, int]
    """Bytes of objects that no manifest refers to, by key: their writer died, or is not done yet."""
    unfinished: dict[str, int]
    """Bytes of files that were being written, by key."""
    newer: list[str]
    """Keys of manifests of a later version, which are left alone (KVP-TIER-NEWER)."""


def check_store(store: Store, verify: bool = False) -> StoreReport:
    """Check names, lengths and manifests, and with `verify` every byte, while others may write; raises OSError."""
    references = ObjectReferences()
    pages, damaged = _check_pages(store, sorted(store.keys("m")), references, verify)
    orphans = {key: store.size(key) or 0 for key in sorted(store.keys("o")) if key not in references}
    unfinished = {key: store.size(key) or 0 for key in sorted(store.keys("t"))}
    return StoreReport(pages, damaged, orphans, unfinished, sorted(references.newer))


def prune(store: Store, report: StoreReport, grace: float = GRACE, verify: bool = False) -> tuple[int, int]:
    """Delete pages still damaged, and orphans older than `grace` seconds; returns how many of both; raises OSError."""
    _, damaged = _check_pages(store, [page.key for page in report.damaged], ObjectReferences(), verify)
    for page in damaged:
        delete_page(store, page.key, page.manifest)
    references, deleted = ObjectReferences(), 0
    for key in store.keys("m"):
        references.add(key, get_manifest(store, key))
    for key in (*report.orphans, *report.unfinished):
        if key not in references and store.age(key) > grace:
            store.delete(key)
            deleted += 1
    return len(damaged), deleted


def delete_page(store: Store, key: str, manifest: Manifest | None) -> None:
    """Delete the manifest of a page, then its objects (KVP-TIER-GONE)."""
    store.delete(key)
    if manifest is not None:
        for component in manifest.components:
            store.delete(object_key(manifest, component))


def _check_pages(
    store: Store, keys: Iterable[str], references: ObjectReferences, verify: bool
) -> tuple[list[Manifest], list[DamagedPage]]:
    """Whole pages and damaged ones; leaves out pages that have gone or are of a later version."""
    checked = [_check_page(store, key, references, verify) for key in keys]
    damaged = [page for page in checked if isinstance(page, DamagedPage)]
    if any(page.manifest is None for page in damaged):  # a manifest that cannot be read is listed, a deleted one is not
        listed = {*store.keys("m")}
        damaged = [page for page in damaged if page.manifest is not None or page.key in listed]
    return [page for page in checked if isinstance(page, Manifest)], damaged


def _check_page(store: Store, key: str, references: ObjectReferences, verify: bool) -> Manifest | DamagedPage | None:
    """A page, which counts as damaged if it looks so at each of a few tries; None for one of a later version."""
    damaged = None
    for _ in range(_TRIES):
        manifest = references.add(key, get_manifest(store, key))
        if key in references.newer:
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
        elif size != (length := object_length(manifest, component)):
            yield f"group {component.group} has {size} bytes, not {length}"
        elif size > _LONGEST:
            yield f"group {component.group} has {size} bytes, more than any page"
        elif verify and sha256(store.get(key) or b"").digest() != component.digest:
            yield f"group {component.group} has other bytes"
