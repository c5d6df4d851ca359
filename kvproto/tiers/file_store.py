"""Pages in files, one for each key, written by the system or by NIXL (`pip install 'kvproto[nixl]'`)."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from importlib import import_module
from io import FileIO
from itertools import groupby, islice
from math import inf
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from kvproto.errors import LocalError
from kvproto.tiers.manifest import Data
from kvproto.tiers.store import BATCH, BatchStore, IntoStore
from kvproto.tiers.workers import Workers
from kvproto.wire.enums import ErrorCode

__all__ = ["FileStore", "NixlFileStore", "make_folders", "sync_folder", "write_whole"]

_OPEN = 128
"""Files that a call of `put_all` has open at once."""
SYNCS = 16
"""Threads that sync."""
_SOON, _LATE = 20e-6, 1e-3
"""Seconds between looks at a transfer of NIXL: the pause doubles up to the latter."""


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
                    self._fill(file, data)
                    if self.durable:
                        syncs.append(self._syncing().submit(os.fsync, file))
            finally:
                wait_for(syncs)  # a file must stay open while a thread syncs it
            _join(syncs)

    def _fill(self, file: int, data: Data) -> None:
        write_whole(file, data)

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
        with suppress(FileNotFoundError), open(self._path(key), "rb", buffering=0) as file:
            return self._read(file)
        return None

    def get_into(self, key: str, room: memoryview) -> int | None:
        with suppress(FileNotFoundError), open(self._path(key), "rb", buffering=0) as file:
            return self._read_into(file.fileno(), room)
        return None

    def _read(self, file: FileIO) -> bytes:
        return file.readall()

    def _read_into(self, file: int, room: memoryview) -> int:
        """Read a file into `room`, and return how many bytes it has, or one more than there is room for."""
        at, more = 0, bytearray(1)
        while at <= len(room):
            count = os.readv(file, [room[at:], more] if at < len(room) else [more])
            at += count
            if not count:
                break
        return at

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


class NixlFileStore(FileStore):
    """A `FileStore` whose bytes NIXL moves, with an agent for each thread.

    Names, renames, syncs and the layout on the disk are those of `FileStore`: either reads what the other wrote. NIXL
    is given descriptors of open files, so that a file gets the name that readers look for once it is whole.
    """

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError, and LocalError if NIXL or its plug-in is missing."""
        try:
            self._api = import_module("nixl._bindings")
        except ImportError as error:
            wants = "pip install 'kvproto[nixl]'"
            raise LocalError(ErrorCode.NO_TRANSPORT, "storage", wants, f"{error}") from error
        self._of_thread = local()
        try:
            self._agent()
        except Exception as error:  # NIXL's own classes have no other base
            wants, advice = "NIXL's plug-in POSIX", "use a plain folder: what is stored is the same"
            raise LocalError(ErrorCode.TRANSPORT_FAILED, "storage", wants, f"{error}", advice) from error
        super().__init__(root, durable)

    def _read(self, file: FileIO) -> bytes:
        data = bytearray(os.fstat(file.fileno()).st_size)
        self._move(self._api.NIXL_READ, data, file.fileno())
        return bytes(data)

    def _read_into(self, file: int, room: memoryview) -> int:
        size = os.fstat(file).st_size
        if size <= len(room):
            self._move(self._api.NIXL_READ, room[:size], file)
        return size

    def _fill(self, file: int, data: Data) -> None:
        self._move(self._api.NIXL_WRITE, data, file)

    def _agent(self) -> tuple[str, Any, list[int]]:
        """The name of this thread's agent, the agent, and its back end."""
        if not hasattr(self._of_thread, "agent"):
            name, config = f"kvproto-{secrets.token_hex(16)}", self._api.nixlAgentConfig()
            config.useProgThread = config.useListenThread = False
            agent = self._api.nixlAgent(name, config)
            self._of_thread.agent = name, agent, [agent.createBackend("POSIX", {})]
        named: tuple[str, Any, list[int]] = self._of_thread.agent
        return named

    def _move(self, way: Any, data: Data, file: int) -> None:
        """Move all bytes of a file, from its beginning; raises OSError."""
        size = memoryview(data).nbytes
        if not size:
            return
        api, (name, agent, posix) = self._api, self._agent()
        address = np.frombuffer(data, np.uint8).ctypes.data
        places = [(api.DRAM_SEG, (address, size, 0)), (api.FILE_SEG, (0, size, file))]
        with ExitStack() as stack:
            try:
                for segment, place in places:
                    registered = api.nixlRegDList(segment, [(*place, "")])
                    agent.registerMem(registered, posix)
                    stack.callback(agent.deregisterMem, registered, posix)
                here, there = (api.nixlXferDList(segment, [place]) for segment, place in places)
                handle = agent.createXferReq(way, here, there, name, b"", posix)
                stack.callback(agent.releaseXferReq, handle)
                status, pause = agent.postXferReq(handle, b""), _SOON
                while status == api.NIXL_IN_PROG:
                    time.sleep(pause)
                    pause = min(2 * pause, _LATE)
                    status = agent.getXferStatus(handle)
            except Exception as error:
                raise OSError(errno.EIO, f"NIXL: {error}") from error
            if status != api.NIXL_SUCCESS:
                raise OSError(errno.EIO, f"NIXL: {status}")


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
