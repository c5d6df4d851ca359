"""Where pages are stored: the interface of a back end, and files.

A back end keeps bytes under keys and knows nothing of pages. What it promises is little: what `put` has written may be
torn or gone by the time it is read, since whoever reads checks it. Failures are OSError.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from itertools import groupby, islice
from math import inf
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvproto.tiers.manifest import Data
from kvproto.tiers.workers import Workers

__all__ = ["FileStore", "Filling", "Grouped", "Store", "make_folders", "manifest_at", "sync_folder", "write_whole"]

GROUP = 16
"""Pages that are worth writing together: more of them do not make a page any cheaper."""
_OPEN = 128
"""Files that a call of `put_all` has open at once."""
LONGEST = 1 << 20
"""Bytes of a manifest that is worth reading."""
SYNCS = 16
"""Threads that sync."""


class Store(Protocol):
    """A back end."""

    def put(self, key: str, data: Data) -> None:
        """Keep these bytes, in place of others under the same key; raises OSError."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a key, None if there is none; raises OSError."""

    def delete(self, key: str) -> None:
        """Forget a key, which may be gone already; raises OSError."""

    def keys(self, kind: str) -> Iterator[str]:
        """Keys that begin with `kind` and a slash, in any order; raises OSError."""

    def age(self, key: str) -> float:
        """Seconds since a key was written, as the store's own clock has it; 0 if there is none. Raises OSError."""

    def size(self, key: str) -> int | None:
        """Bytes of a key, None if there is none, or nothing that `get` could read; raises OSError."""


@runtime_checkable
class Grouped(Store, Protocol):
    """A back end that keeps many keys for little more than the price of one, as one sync serves them all."""

    group: int
    """How many pages are best written together; 1: each by itself."""

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """As `put`, for each key in turn; raises OSError, when any number of them may have been kept.

        Each pair takes time to make, for its digest, so write one before asking for the next where that is possible.
        Whatever ends the writer, a manifest is not found before the objects that precede it here have been written.
        """


@runtime_checkable
class Filling(Store, Protocol):
    """A back end that reads into memory that is there already."""

    def get_into(self, key: str, room: memoryview) -> int | None:
        """As `get`, into `room`: how many bytes there are, or any number above its length; raises OSError."""


class FileStore:
    """A folder with a file for each key, written under another name and then renamed, so no process sees half of one.

    With `durable`, files and folders are synced before `put` returns, so that what it kept survives a loss of power.
    Files that are written together share these syncs: one for each file, one for each folder of objects, then one for
    each folder of manifests. Several threads request those of a kind at the same time, so that they share flushes of
    the disk. Without it, the death of a process loses nothing, and a loss of power may lose or damage the latest pages,
    which their digests reveal.
    """

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self.group = GROUP if durable else 1
        self._root = os.fspath(root)
        self._made: set[str] = set()
        """Folders that are there, for good with `durable`."""
        self._pools: dict[int, Workers] = {}
        """Of this process, and of those that it was forked from, whose threads are not here."""
        make_folders(root, ("m", "o", "g", "t"), durable)

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        self.put_all([(key, data)])

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `Grouped`."""
        rest = iter(pairs)
        while self._put(islice(rest, _OPEN)):
            continue

    def _put(self, pairs: Iterable[tuple[str, Data]]) -> int:
        """Write some, and say how many; whatever fails, files that have no name yet are deleted."""
        drafts: list[tuple[str, str]] = []
        try:
            self._write(pairs, drafts)
            for _, some in groupby(drafts, lambda one: os.path.dirname(os.path.dirname(one[1]))):
                self._name([*some])
        except BaseException:
            for draft, path in drafts:
                self._made.discard(os.path.dirname(path))
                with suppress(OSError):
                    os.unlink(draft)
            raise
        return len(drafts)

    def _write(self, pairs: Iterable[tuple[str, Data]], drafts: list[tuple[str, str]]) -> None:
        """Write files under their first names; the disk works on one while the next is made, and has all at the end."""
        with ExitStack() as stack:
            syncs: list[Future[None]] = []
            try:
                for key, data in pairs:
                    drafts.append((f"{self._root}/t/{secrets.token_hex(12)}", self._path(key)))
                    file = os.open(drafts[-1][0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                    stack.callback(os.close, file)
                    self._fill(file, data)
                    if self.durable:
                        syncs.append(self._syncing().submit(os.fsync, file))
            finally:
                wait_for(syncs)  # nobody closes what a thread still syncs
            _done(syncs)

    def _fill(self, file: int, data: Data) -> None:
        write_whole(file, data)

    def _name(self, drafts: Sequence[tuple[str, str]]) -> None:
        """Give files of one kind their names, for good with `durable`."""
        folders = dict.fromkeys(os.path.dirname(path) for _, path in drafts)
        made = [folder for folder in folders if folder not in self._made]
        for folder in made:
            with suppress(FileExistsError):
                os.mkdir(folder)
        for draft, path in drafts:
            os.replace(draft, path)
        if self.durable:
            above = dict.fromkeys(os.path.dirname(folder) for folder in made)
            syncs = [self._syncing().submit(sync_folder, folder) for folder in (*above, *folders)]
            wait_for(syncs)
            _done(syncs)
        self._made.update(made)

    def _syncing(self) -> Workers:
        """The threads that sync, of this process."""
        found = self._pools.get(os.getpid())
        return found or self._pools.setdefault(os.getpid(), Workers(SYNCS, inf, 0))

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            return None

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `Filling`."""
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                return _read(file.fileno(), room)
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """See `Store`."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; of kind `t` are files that a writer had not finished."""
        for folder, _, names in os.walk(self.root / kind, onerror=_raise):
            yield from (f"{kind}/{name}" for name in names if kind == "t" or Path(folder).name == name[:2])

    def age(self, key: str) -> float:
        """See `Store`; the file system's clock is asked by a file."""
        now = self.root / "t" / f"now{secrets.token_hex(8)}"
        try:
            now.touch()
            return now.stat().st_mtime - os.stat(self._path(key)).st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            now.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        """See `Store`; of plain files."""
        try:
            found = os.lstat(self._path(key))
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _path(self, key: str) -> str:
        kind, _, name = key.partition("/")
        return f"{self._root}/{key}" if kind == "t" else f"{self._root}/{kind}/{name[:2]}/{name}"


def _raise(error: OSError) -> None:
    """A folder that cannot be read is not an empty one, or its objects would be taken for nobody's."""
    raise error


def _read(file: int, room: memoryview) -> int:
    """The bytes of a file up to the end of `room`, and how many it has, or one more than there is room for."""
    at, more = 0, bytearray(1)
    while at <= len(room):
        got = os.readv(file, [room[at:], more] if at < len(room) else [more])
        at += got
        if not got:
            break
    return at


def _done(syncs: Iterable[Future[None]]) -> None:
    """Raise what one of them has raised."""
    for sync in syncs:
        sync.result()


def manifest_at(store: Store, key: str) -> bytes | None:
    """The bytes under the key of a manifest, None if there are none, or too many to be one; raises OSError."""
    size = store.size(key)
    return None if size is None or size > LONGEST else store.get(key)


def write_whole(file: int, data: Data) -> int:
    """Write these bytes to a file, and say how many they are; raises OSError."""
    rest, size = memoryview(data), len(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    return size


def make_folders(root: Path, names: Iterable[str], durable: bool) -> None:
    """Make a folder, those above it and these in it, for good with `durable`; raises OSError."""
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    if durable:
        for folder in (root, *(folder.parent for folder in made)):
            sync_folder(os.fspath(folder))


def sync_folder(folder: str) -> None:
    """Have the disk know the names in a folder; raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
