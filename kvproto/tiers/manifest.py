"""The record that says what a stored page is, and what a reader makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from operator import attrgetter

import attrs

from kvproto.errors import LocalError, WireError
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Component, Manifest

__all__ = ["Data", "ObjectReferences", "describe", "encode", "fits", "manifest_key", "object_key", "take"]

Data = bytes | bytearray | memoryview
_NAMES = [field.name for field in attrs.fields(PageComponent)]
_stated = attrgetter(*_NAMES)
"""What a component of a manifest says of itself, as a part of a layout does."""
_NEWER = (ErrorCode.UNKNOWN_FIELD, ErrorCode.UNKNOWN_ENUM_VALUE)
"""Why a manifest of a later version cannot be read."""


def manifest_key(id: bytes, geometry: bytes) -> str:
    """Under which the manifest of a page is stored."""
    return f"m/{id.hex()}.{geometry.hex()}"


def object_key(manifest: Manifest, component: Component) -> str:
    """Under which the bytes of a component are stored."""
    return f"o/{manifest.id.hex()}.{manifest.geometry.hex()}.{component.group}.{component.digest.hex()}"


def describe(layout: PageLayout, chain: Chain, i: int, data: Mapping[int, Data]) -> Manifest:
    """The manifest of page i with these bytes, by group; raises LocalError for too few bytes (KVP-TIER-ALL)."""
    if missing := layout.must - data.keys():
        raise LocalError(ErrorCode.OUT_OF_RANGE, "data", f"groups {sorted(layout.must)}", f"none of {sorted(missing)}")
    listed = []
    for group in sorted(data):
        part, size = layout.part(group), len(data[group])
        if size != part.length:
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"data[{group}]", f"{part.length} bytes", str(size))
        stated = dict(zip(_NAMES, _stated(part), strict=True))
        listed.append(Component(**stated, digest=hashlib.sha256(data[group]).digest()))
    return Manifest(
        id=chain.ids(layout.form)[i], form=layout.form, own=chain.own[i], previous=chain.previous(i),
        namespace=chain.space, page=layout.page, geometry=layout.geometry, components=tuple(listed),
    )  # fmt: skip


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes."""
    return encode_struct(manifest)


def take(data: Data, layout: PageLayout, chain: Chain, i: int) -> Manifest | None:
    """The manifest that page i has, or None where its page counts as absent (KVP-TIER-MISS, KVP-TIER-PARTS)."""
    try:
        found = decode_struct(Manifest, bytes(data))
    except WireError:
        return None
    asked = (chain.ids(layout.form)[i], layout.form, chain.own[i], chain.previous(i), chain.space)
    stated = (found.id, found.form, found.own, found.previous, found.namespace)
    return found if stated == asked and fits(found, layout) else None


def fits(found: Manifest, layout: PageLayout) -> bool:
    """Whether it is a page of this layout (KVP-TIER-MISS, KVP-TIER-PARTS)."""
    if (found.page, found.geometry) != (layout.page, layout.geometry):
        return False
    parts = {part.group: _stated(part) for part in layout.parts}
    stated = {c.group: _stated(c) for c in found.components}
    return layout.must <= stated.keys() and all(parts.get(g) == one for g, one in stated.items())


class ObjectReferences:
    """Which objects of a store belong to its manifests; those of a manifest of a later version too (KVP-TIER-NEWER)."""

    def __init__(self) -> None:
        self.newer: set[str] = set()
        """Keys of manifests of a later version."""
        self._keys: set[str] = set()

    def add(self, key: str, data: Data | None) -> Manifest | None:
        """The manifest of this key, None if it is another's, damaged, or of a later version."""
        try:
            found = None if data is None else decode_struct(Manifest, bytes(data))
        except WireError as error:
            if error.code in _NEWER:
                self.newer.add(key)
            return None
        if found is None or manifest_key(found.id, found.geometry) != key:
            return None
        self._keys.update(object_key(found, component) for component in found.components)
        return found

    def __contains__(self, key: str) -> bool:
        return key in self._keys or f"m/{key[2:].rsplit('.', 2)[0]}" in self.newer
