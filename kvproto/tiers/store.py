"""Storage back ends: bytes under keys, which may be torn or gone when they are read; failures are OSError."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvproto.errors import LocalError, bad
from kvproto.tiers.manifest import Data
from kvproto.wire.enums import ErrorCode

BATCH = 16
"""Pages that are worth writing together: more of them do not make a page any cheaper."""
LONGEST = 1 << 20
"""Most bytes of a manifest, or of a record, that is worth reading."""


class Store(Protocol):
    """A back end."""

    def put(self, key: str, data: Data) -> None:
        """Keep these bytes, in place of others under the same key; raises OSError."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a key, None if there is none; raises OSError."""

    def delete(self, key: str) -> None:
        """Delete a key, which may be gone already; raises OSError."""

    def keys(self, kind: str) -> Iterator[str]:
        """Keys that begin with `kind` and a slash, in any order; raises OSError."""

    def age(self, key: str) -> float:
        """Seconds since a key was written, by the store's own clock; 0 if there is none. Raises OSError."""

    def size(self, key: str) -> int | None:
        """Bytes of a key, None if there is none, or nothing that `get` could read; raises OSError."""


@runtime_checkable
class BatchStore(Store, Protocol):
    """A back end that keeps many keys for little more than the price of one, because they share a sync."""

    batch: int
    """The number of pages that are best written together; 1: each by itself."""

    def put(self, key: str, data: Data) -> None:
        self.put_all([(key, data)])

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """Keep each pair in turn, as `put` does; raises OSError, when any number of them may have been kept.

        Each pair takes time to make, for its digest, so write one before you take the next if you can. However the
        writer ends, a manifest is not found before the objects that precede it here have been written.
        """


@runtime_checkable
class IntoStore(Store, Protocol):
    """A back end that reads into memory of the caller."""

    def get_into(self, key: str, room: memoryview) -> int | None:
        """Read a key into `room`; returns how many bytes it has, or any number above `len(room)`. Raises OSError."""


def open_store(place: Path | str | Store, durable: bool = False) -> Store:
    """The store at a place, `durable` against a loss of power; raises LocalError without its library, and OSError."""
    if not isinstance(place, Path | str):
        return place
    scheme, colon, folder = ("", "", "") if isinstance(place, Path) else place.partition(":")
    if colon and scheme in ("lmdb", "nixl"):  # which it once was, so nobody means a folder of that name
        raise bad("storage", "a folder, packs:FOLDER or the URL of an object store", place)
    store: Store
    if colon and scheme in ("s3", "gs", "az"):
        try:
            store = import_module("kvproto.tiers.object_store").ObjectStore.at(place)
        except ImportError as error:
            wants = "pip install 'kvproto[objects]'"
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "storage", wants, f"{error}") from error
    elif colon and scheme == "packs":
        store = import_module("kvproto.tiers.pack_store").PackStore(Path(folder), durable)
    else:
        store = import_module("kvproto.tiers.file_store").FileStore(Path(place), durable)
    return store


def get_exact(store: Store, key: str, length: int, room: memoryview | None = None) -> Data | None:
    """The bytes of a key that has this many, in `room` if the back end can; None for other lengths. Raises OSError."""
    get_into = getattr(store, "get_into", None)  # of an IntoStore
    if room is None or get_into is None:
        return store.get(key) if store.size(key) == length else None
    return room if get_into(key, room) == length else None


def get_manifest(store: Store, key: str) -> bytes | None:
    """The bytes under the key of a manifest or a record, None if there are none or too many; raises OSError."""
    size = store.size(key)
    return None if size is None or size > LONGEST else store.get(key)
