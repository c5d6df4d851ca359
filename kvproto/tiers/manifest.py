"""The manifest of a stored page: the record that lists its components and their digests."""

import hashlib
from collections.abc import Mapping
from operator import attrgetter

import attrs

from kvproto.errors import WireError, bad
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageComponent, PageLayout
from kvproto.wire import decode_struct
from kvproto.wire.enums import ErrorCode, KeyForm
from kvproto.wire.messages import Component, Manifest

Data = bytes | bytearray | memoryview
SEAL = 48
"""Bytes by which a sealed object is longer than its component."""
_FIELDS = [field.name for field in attrs.fields(PageComponent)]
_stated = attrgetter(*_FIELDS)
"""The fields that a component of a manifest shares with a component of a layout."""
_NEWER = (ErrorCode.UNKNOWN_FIELD, ErrorCode.UNKNOWN_ENUM_VALUE)
"""Codes of the errors that a manifest of a later version causes."""


def manifest_key(id: bytes, geometry: bytes) -> str:
    return f"m/{id.hex()}.{geometry.hex()}"


def object_key(manifest: Manifest, component: Component) -> str:
    return f"o/{manifest.id.hex()}.{manifest.geometry.hex()}.{component.group}.{component.digest.hex()}"


def object_length(manifest: Manifest, component: Component) -> int:
    """Bytes of the object of a component."""
    return component.length + (0 if manifest.seal is None else SEAL)


def make_manifest(
    layout: PageLayout, chain: Chain, i: int, data: Mapping[int, Data], key: bytes | None = None
) -> Manifest:
    """The manifest of page i with these objects, by group; raises LocalError if some are missing (KVP-TIER-ALL).

    `key` names the key with which they are sealed.
    """
    if missing := layout.required - data.keys():
        raise bad("data", f"groups {sorted(layout.required)}", f"none of {sorted(missing)}")
    components = []
    for group in sorted(data):
        component, size = layout.component(group), len(data[group]) - (0 if key is None else SEAL)
        if size != component.length:
            raise bad(f"data[{group}]", f"{component.length} bytes", size)
        stated = dict(zip(_FIELDS, _stated(component), strict=True))
        components.append(Component(**stated, digest=hashlib.sha256(data[group]).digest()))
    return Manifest(
        id=chain.ids(layout.form)[i],
        form=layout.form,
        own=chain.own[i],
        previous=chain.previous(i),
        namespace=chain.space,
        page=layout.page,
        geometry=layout.geometry,
        components=tuple(components),
        seal=key,
    )


def parse_manifest(data: Data | None, layout: PageLayout, chain: Chain, i: int) -> Manifest | None:
    """The manifest of page i, or None if its page counts as absent (KVP-TIER-MISS, KVP-TIER-PARTS)."""
    manifest = ObjectReferences().add(manifest_key(chain.ids(layout.form)[i], layout.geometry), data)
    return manifest if manifest and names(manifest, layout.form, chain, i) and matches(manifest, layout) else None


def names(manifest: Manifest, form: KeyForm, chain: Chain, i: int) -> bool:
    """Whether a manifest names page i of a prompt, with ids of this form (KVP-TIER-MISS)."""
    stated = manifest.form, manifest.own, manifest.previous, manifest.namespace, manifest.page
    return stated == (form, chain.own[i], chain.previous(i), chain.space, chain.page)


def matches(manifest: Manifest, layout: PageLayout) -> bool:
    """Whether a manifest describes a page of this layout (KVP-TIER-MISS, KVP-TIER-PARTS)."""
    if (manifest.page, manifest.geometry) != (layout.page, layout.geometry):
        return False
    ours = {component.group: _stated(component) for component in layout.components}
    theirs = {component.group: _stated(component) for component in manifest.components}
    return layout.required <= theirs.keys() and all(ours.get(group) == fields for group, fields in theirs.items())


class ObjectReferences:
    """The objects of a store that its manifests refer to, manifests of a later version included (KVP-TIER-NEWER)."""

    def __init__(self) -> None:
        self.newer: set[str] = set()
        """Keys of manifests of a later version."""
        self._keys: set[str] = set()

    def add(self, key: str, data: Data | None) -> Manifest | None:
        """Add the references of a manifest and return it; None if it is missing, damaged, newer or of another key."""
        try:
            manifest = None if data is None else decode_struct(Manifest, bytes(data))
        except WireError as error:
            if error.code in _NEWER:
                self.newer.add(key)
            return None
        if manifest is None or manifest_key(manifest.id, manifest.geometry) != key:
            return None
        self._keys.update(object_key(manifest, component) for component in manifest.components)
        return manifest

    def __contains__(self, key: str) -> bool:
        return key in self._keys or f"m/{key[2:].rsplit('.', 2)[0]}" in self.newer
