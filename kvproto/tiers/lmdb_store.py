"""Pages in LMDB: one file, which is read through the page cache of the system; `pip install 'kvproto[lmdb]'`.

Any number of processes share it, and one that is killed while it writes blocks none of the others. A key that is not
there costs microseconds, and no page is a file of its own. Pages are synced before `put` returns, because a loss of
power could make an unsynced file unreadable; it may still undo the last calls.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

import lmdb

from kvproto.tiers.manifest import Data
from kvproto.tiers.store import BATCH, BatchStore, IntoStore

__all__ = ["LmdbStore"]

ROOM = 1 << 38
"""Bytes of address space, and the most that is stored; the file grows with its pages."""
READERS = 1024
"""Threads of all processes that may read at the same time."""
_STAMP = struct.Struct("<d")
"""The time at which a key was written, in seconds of the system's clock; it follows the bytes."""
_LISTED = 256
"""Keys that are listed in one transaction."""

_Result = TypeVar("_Result")
_open: WeakValueDictionary[tuple[int, str], _Environment] = WeakValueDictionary()
_opening = Lock()


class _Environment:
    """An open LMDB file; LMDB allows one for each folder and process."""

    def __init__(self, root: Path, room: int, durable: bool) -> None:
        self.env = lmdb.open(
            str(root), map_size=room, max_readers=READERS, metasync=durable, max_spare_txns=8, readahead=True
        )
        self.env.reader_check()  # frees the slots of processes that were killed

    def __del__(self) -> None:
        if env := getattr(self, "env", None):
            env.close()


class LmdbStore(BatchStore, IntoStore):
    """A folder with one LMDB file, which a process opens once for any number of these stores."""

    batch = BATCH

    def __init__(self, root: Path, durable: bool = False, room: int = ROOM) -> None:
        """Makes the folder; raises OSError.

        A loss of power may undo the latest calls, each of them as a whole; with `durable` it undoes none that returned.
        """
        root.mkdir(parents=True, exist_ok=True)
        with _opening, _os_errors():
            name = os.getpid(), str(root.resolve())
            environment = _open.get(name)
            if environment is None:
                environment = _open[name] = _Environment(root, room, durable)
            self._environment = environment

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `BatchStore`; keeps all of them or none."""
        stamp, listed = _STAMP.pack(time.time()), [*pairs]  # other writers are blocked only after all pairs are made
        with _os_errors(), self._environment.env.begin(write=True) as transaction:
            for key, data in listed:
                transaction.put(key.encode(), b"".join((data, stamp)))

    def get(self, key: str) -> bytes | None:
        return self._read(key, lambda stored: bytes(stored[: -_STAMP.size]))

    def get_into(self, key: str, room: memoryview) -> int | None:
        def fill(stored: memoryview) -> int:
            size = len(stored) - _STAMP.size
            if size <= len(room):
                room[:size] = stored[:size]
            return size

        return self._read(key, fill)

    def delete(self, key: str) -> None:
        with _os_errors(), self._environment.env.begin(write=True) as transaction:
            transaction.delete(key.encode())

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; each piece has its own transaction, so that LMDB can reuse deleted space meanwhile."""
        prefix = after = f"{kind}/".encode()
        while True:
            with _os_errors(), self._environment.env.begin() as transaction, transaction.cursor() as cursor:
                more = cursor.set_range(after)
                if more and after != prefix and cursor.key() == after:
                    more = cursor.next()
                names: list[bytes] = []
                while more and len(names) < _LISTED and cursor.key().startswith(prefix):
                    names.append(bytes(cursor.key()))
                    more = cursor.next()
            yield from (name.decode() for name in names)
            if len(names) < _LISTED:
                return
            after = names[-1]

    def age(self, key: str) -> float:
        written = self._read(key, lambda stored: float(_STAMP.unpack(stored[-_STAMP.size :])[0]))
        return 0.0 if written is None else time.time() - written

    def size(self, key: str) -> int | None:
        return self._read(key, lambda stored: len(stored) - _STAMP.size)

    def _read(self, key: str, take: Callable[[memoryview], _Result]) -> _Result | None:
        with _os_errors(), self._environment.env.begin(buffers=True) as transaction:
            stored = transaction.get(key.encode())
            return None if stored is None or len(stored) < _STAMP.size else take(stored)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of LMDB as OSError."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise OSError(errno.ENOSPC, f"{error}") from error
    except lmdb.Error as error:
        raise OSError(errno.EIO, f"{error}") from error
