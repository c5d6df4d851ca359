"""Pages in LMDB: one file, which is read through the page cache of the system; `pip install 'kvproto[lmdb]'`.

Processes share it, and one that is killed while it writes holds up nobody. Beside files, keys that are not there cost
microseconds, and no page is a file of its own. What is written is synced before `put` returns, since a file that is
not could be past reading after a loss of power; the last calls may be lost then.
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
from kvproto.tiers.store import GROUP

__all__ = ["LmdbStore"]

ROOM = 1 << 38
"""Bytes of address space, above which nothing is stored; the file is as long as what it holds needs."""
READERS = 1024
"""Threads of all processes that may read at once."""
_STAMP = struct.Struct("<d")
"""Behind the bytes of a key: when it was written, in seconds of the system's clock."""
_AT_ONCE = 256
"""Keys that are listed in one transaction."""

_Made = TypeVar("_Made")
_open: WeakValueDictionary[tuple[int, str], _Environment] = WeakValueDictionary()
_opening = Lock()


class _Environment:
    """One for each folder and process, as LMDB wants it."""

    def __init__(self, root: Path, room: int, durable: bool) -> None:
        self.env = lmdb.open(
            str(root), map_size=room, max_readers=READERS, metasync=durable, max_spare_txns=8, readahead=True
        )
        self.env.reader_check()  # of processes that were killed

    def __del__(self) -> None:
        if env := getattr(self, "env", None):
            env.close()


class LmdbStore:
    """A folder with one LMDB file; a process has it open once, however many of these there are."""

    group = GROUP

    def __init__(self, root: Path, durable: bool = False, room: int = ROOM) -> None:
        """Makes the folder; raises OSError.

        A loss of power may undo the latest calls, each of them as a whole; with `durable` it undoes none that returned.
        """
        root.mkdir(parents=True, exist_ok=True)
        with _opening, _failing():
            name = os.getpid(), str(root.resolve())
            held = _open.get(name)
            if held is None:
                held = _open[name] = _Environment(root, room, durable)
            self._held = held

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        self.put_all([(key, data)])

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `Grouped`; all of them or none."""
        stamp, made = _STAMP.pack(time.time()), [*pairs]  # others may write until all are there
        with _failing(), self._held.env.begin(write=True) as done:
            for key, data in made:
                done.put(key.encode(), b"".join((data, stamp)))

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        return self._look(key, lambda found: bytes(found[: -_STAMP.size]))

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `Filling`."""

        def fill(found: memoryview) -> int:
            size = len(found) - _STAMP.size
            if size <= len(room):
                room[:size] = found[:size]
            return size

        return self._look(key, fill)

    def delete(self, key: str) -> None:
        """See `Store`."""
        with _failing(), self._held.env.begin(write=True) as done:
            done.delete(key.encode())

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; no transaction is open between the pieces, so that what is deleted meanwhile can be reused."""
        last = after = f"{kind}/".encode()
        while True:
            with _failing(), self._held.env.begin() as seen, seen.cursor() as cursor:
                there = cursor.set_range(after)
                if there and after != last and cursor.key() == after:
                    there = cursor.next()
                names: list[bytes] = []
                while there and len(names) < _AT_ONCE and cursor.key().startswith(last):
                    names.append(bytes(cursor.key()))
                    there = cursor.next()
            yield from (name.decode() for name in names)
            if len(names) < _AT_ONCE:
                return
            after = names[-1]

    def age(self, key: str) -> float:
        """See `Store`."""
        written = self._look(key, lambda found: float(_STAMP.unpack(found[-_STAMP.size :])[0]))
        return 0.0 if written is None else time.time() - written

    def size(self, key: str) -> int | None:
        """See `Store`."""
        return self._look(key, lambda found: len(found) - _STAMP.size)

    def _look(self, key: str, take: Callable[[memoryview], _Made]) -> _Made | None:
        with _failing(), self._held.env.begin(buffers=True) as seen:
            found = seen.get(key.encode())
            return None if found is None or len(found) < _STAMP.size else take(found)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise OSError(errno.ENOSPC, f"{error}") from error
    except lmdb.Error as error:
        raise OSError(errno.EIO, f"{error}") from error
