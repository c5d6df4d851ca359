"""Which store a name means: a folder, `packs:FOLDER`, `lmdb:FOLDER`, `nixl:FOLDER`, or the URL of an object store."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from kvproto.errors import LocalError
from kvproto.tiers.store import FileStore, Store
from kvproto.wire.enums import ErrorCode

__all__ = ["open_store"]

SCHEMES = {"s3": "objects", "gs": "objects", "az": "objects", "lmdb": "lmdb", "nixl": "nixl", "packs": "packs"}
"""What stores the pages, by the first word of a name; an extra of kvproto, but for packs."""

_MODULES = {
    "objects": ("object_store", "ObjectStore"),
    "lmdb": ("lmdb_store", "LmdbStore"),
    "nixl": ("nixl_files", "NixlFileStore"),
    "packs": ("pack_store", "PackStore"),
}
"""Their modules and classes."""


def open_store(place: Path | str | Store, durable: bool = False) -> Store:
    """The store at a place; raises LocalError for one that needs what is not installed, OSError.

    With `durable`, files and LMDB keep through a loss of power what they have said is kept; object stores always do.
    """
    if not isinstance(place, str):
        return FileStore(place, durable) if isinstance(place, Path) else place
    scheme, colon, rest = place.partition(":")
    extra = SCHEMES.get(scheme) if colon else None
    if extra is None:
        return FileStore(Path(place), durable)
    name, kind = _MODULES[extra]
    try:
        made = getattr(import_module(f"kvproto.tiers.{name}"), kind)
    except ImportError as error:
        wants = f"pip install 'kvproto[{extra}]'"
        raise LocalError(ErrorCode.TRANSPORT_FAILED, "storage", wants, f"{error}") from error
    store: Store = made.at(place) if extra == "objects" else made(Path(rest), durable)
    return store
