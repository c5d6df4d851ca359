"""Pages in files, one for each key."""

import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from itertools import groupby, islice
from math import inf
from pathlib import Path

from kvproto.tiers.manifest import Data
from kvproto.tiers.store import BATCH, BatchStore, IntoStore
from kvproto.tiers.workers import Workers

_OPEN = 128
"""Files that a call of `put_all` has open at once."""
SYNCS = 16
"""Threads that sync."""


class FileStore(BatchStore, IntoStore):
    """A folder with a file for each key, written under another name and then renamed, so no process sees half of one.

    With `durable`, files and folders are synced before `put` returns, so that their bytes survive a loss of power.
    Files that are written together share these syncs: one for each file, one for each folder of objects, then one for
    each folder of manifests. Several threads request the syncs of one kind at the same time, so that they share flushes
    of the disk. Without `durable`, the death of a process loses nothing, and a loss of power may lose or damage the
    latest pages, which their digests reveal.
    """

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self.batch = BATCH if durable else 1
        self._root = os.fspath(root)
        self._folders: set[str] = set()
        """Folders that exist, and with `durable` survive a loss of power."""
        self._sync_workers: dict[int, Workers] = {}
        """Threads that sync, by process: a forked process does not have those of its parent."""
        make_folders(root, ("m", "o", "g", "t"), durable)

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        rest = iter(pairs)
        while self._put_some(islice(rest, _OPEN)):
            continue

    def _put_some(self, pairs: Iterable[tuple[str, Data]]) -> int:
        """Write some pairs, and return how many; on any failure, delete the files that have no name yet."""
        drafts: list[tuple[str, str]] = []
        try:
            self._write_drafts(pairs, drafts)
            for _, same_kind in groupby(drafts, lambda draft: os.path.dirname(os.path.dirname(draft[1]))):
                self._rename([*same_kind])
        except BaseException:
            for draft, path in drafts:
                self._folders.discard(os.path.dirname(path))
                with suppress(OSError):
                    os.unlink(draft)
            raise
        return len(drafts)

    def _write_drafts(self, pairs: Iterable[tuple[str, Data]], drafts: list[tuple[str, str]]) -> None:
        """Write files under their first names; the disk works on one while the next is made, and has all at the end."""
        with ExitStack() as stack:
            syncs: list[Future[None]] = []
            try:
                for key, data in pairs:
                    drafts.append((f"{self._root}/t/{secrets.token_hex(12)}", self._path(key)))
                    file = os.open(drafts[-1][0], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                    stack.callback(os.close, file)
                    write_whole(file, data)
                    if self.durable:
                        syncs.append(self._syncing().submit(os.fsync, file))
            finally:
                wait_for(syncs)  # a file must stay open while a thread syncs it
            _join(syncs)

    def _rename(self, drafts: Sequence[tuple[str, str]]) -> None:
        """Give files of one kind their names, which with `durable` survive a loss of power."""
        folders = dict.fromkeys(os.path.dirname(path) for _, path in drafts)
        new = [folder for folder in folders if folder not in self._folders]
        for folder in new:
            with suppress(FileExistsError):
                os.mkdir(folder)
        for draft, path in drafts:
            os.replace(draft, path)
        if self.durable:
            above = dict.fromkeys(os.path.dirname(folder) for folder in new)
            syncs = [self._syncing().submit(sync_folder, folder) for folder in (*above, *folders)]
            _join(syncs)
        self._folders.update(new)

    def _syncing(self) -> Workers:
        workers = self._sync_workers.get(os.getpid())
        return workers or self._sync_workers.setdefault(os.getpid(), Workers(SYNCS, inf, 0))

    def get(self, key: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return Path(self._path(key)).read_bytes()
        return None

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `IntoStore`; one more than there is room for stands for all greater numbers."""
        with suppress(FileNotFoundError), open(self._path(key), "rb", buffering=0) as file:
            at, more = 0, bytearray(1)
            while at <= len(room) and (count := os.readv(file.fileno(), [room[at:], more])):
                at += count
            return at
        return None

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; kind `t` lists files that a writer has not finished."""
        for folder, _, names in os.walk(self.root / kind, onerror=_raise):
            yield from (f"{kind}/{name}" for name in names if kind == "t" or Path(folder).name == name[:2])

    def age(self, key: str) -> float:
        """See `Store`; a new file tells the time of the file system's clock."""
        now = self.root / "t" / f"now{secrets.token_hex(8)}"
        try:
            now.touch()
            return now.stat().st_mtime - os.stat(self._path(key)).st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            now.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        """See `Store`; only plain files have a size."""
        try:
            status = os.lstat(self._path(key))
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _path(self, key: str) -> str:
        kind, _, name = key.partition("/")
        return f"{self._root}/{key}" if kind == "t" else f"{self._root}/{kind}/{name[:2]}/{name}"


def _raise(error: OSError) -> None:
    """Raise: a folder that cannot be read is not an empty one, whose objects would count as orphans."""
    raise error


def _join(syncs: Collection[Future[None]]) -> None:
    """Wait for these syncs, and raise the first error of any."""
    wait_for(syncs)
    for sync in syncs:
        sync.result()


def write_whole(file: int, data: Data) -> int:
    """Write these bytes to a file, and return how many they are; raises OSError."""
    rest, size = memoryview(data), len(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    return size


def make_folders(root: Path, names: Iterable[str], durable: bool) -> None:
    """Make a folder, those above it and `names` in it, which with `durable` survive a loss of power; raises OSError."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
    if durable:
        for folder in (root, *(folder.parent for folder in missing)):
            sync_folder(os.fspath(folder))


def sync_folder(folder: str) -> None:
    """Sync the names in a folder; raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
