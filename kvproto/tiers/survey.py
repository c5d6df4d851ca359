"""What a folder of pages holds, whoever wrote it: whole pages by namespace, damaged ones, and what belongs to none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import attrs

from kvproto.errors import WireError
from kvproto.tiers.manifest import manifest_key, object_key
from kvproto.tiers.store import Files
from kvproto.wire import decode_struct
from kvproto.wire.messages import Manifest

__all__ = ["Damaged", "Survey", "drop", "prune", "survey"]

_LONGEST = 1 << 20
"""Bytes of a manifest that is worth reading."""


@attrs.frozen
class Damaged:
    """A page that no reader would use."""

    key: str
    why: str
    manifest: Manifest | None = None
    """As far as it can be read."""


@attrs.frozen
class Survey:
    """All that lies in a folder."""

    pages: list[Manifest]
    """Whole ones, as far as was looked."""
    damaged: list[Damaged]
    orphans: dict[str, int]
    """Bytes of objects that no manifest names, by key: a writer that died, or is not done yet."""
    unfinished: dict[str, int]
    """The same of files that were being written."""


def survey(files: Files, verify: bool = False) -> Survey:
    """Look at names, lengths and manifests, and with `verify` at every byte; raises OSError."""
    pages, damaged, named = [], [], set[str]()
    for key in sorted(files.keys("m")):
        manifest = _manifest(files, key)
        if manifest is None:
            damaged.append(Damaged(key, "no manifest of this name"))
            continue
        named.update(object_key(manifest, component) for component in manifest.components)
        why = next(_faults(files, manifest, verify), None)
        if why is None:
            pages.append(manifest)
        else:
            damaged.append(Damaged(key, why, manifest))
    orphans = {key: files.size(key) or 0 for key in sorted(files.keys("o")) if key not in named}
    return Survey(pages, damaged, orphans, {key: files.size(key) or 0 for key in sorted(files.keys("t"))})


def prune(files: Files, found: Survey, grace: float, verify: bool = False) -> tuple[int, int]:
    """Delete damaged pages, and what belongs to none and is older than `grace` seconds; how many of both.

    A page that somebody has mended since stays. Raises OSError.
    """
    pages = 0
    for page in found.damaged:
        now = _manifest(files, page.key)
        if now is not None and next(_faults(files, now, verify), None) is None:
            continue
        drop(files, page.key, now)
        pages += 1
    gone = 0
    named = {object_key(m, c) for key in files.keys("m") if (m := _manifest(files, key)) for c in m.components}
    for key in (*found.orphans, *found.unfinished):
        if key not in named and files.age(key) > grace:
            files.delete(key)
            gone += 1
    return pages, gone


def drop(files: Files, key: str, manifest: Manifest | None) -> None:
    """Delete a page: its manifest, then its objects (KVP-TIER-GONE)."""
    files.delete(key)
    if manifest is not None:
        for component in manifest.components:
            files.delete(object_key(manifest, component))


def _manifest(files: Files, key: str) -> Manifest | None:
    size = files.size(key)
    if size is None or size > _LONGEST:
        return None
    data, manifest = files.get(key), None
    with suppress(WireError):
        manifest = None if data is None else decode_struct(Manifest, data)
    return manifest if manifest and manifest_key(manifest.id, manifest.geometry) == key else None


def _faults(files: Files, manifest: Manifest, verify: bool) -> Iterator[str]:
    for component in manifest.components:
        key = object_key(manifest, component)
        size = files.size(key)
        if size is None:
            yield f"group {component.group} is not there"
        elif size != component.length:
            yield f"group {component.group} has {size} bytes, not {component.length}"
        elif verify and files.digest(key) != component.digest:
            yield f"group {component.group} has other bytes"
