"""Pages in packs: one file for all that is written together, so that the disk writes and reads long runs.

A pack is written under another name and then renamed, and only marks of what has been deleted are changed in it later.
It holds the bytes of its keys one after the other, then the index, a mark for each key (1: it is there), and the tail.
What is deleted gives its space back at once where the file system has holes, and else with the last key of its pack.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgpack

from kvproto.tiers.manifest import Data
from kvproto.tiers.store import GROUP, sync_folder, write_whole

__all__ = ["Packs"]

_TAIL = struct.Struct("<QId8s")
"""Where the index begins, how many keys there are, when they were written by the system's clock, and the magic."""
_MAGIC = b"kvpack1\n"
_OPEN = 32
"""Packs that are held open, so that pages of a prompt are read from one, one after the other."""
_TICK = 50_000_000
"""Nanoseconds within which a file system may give two changes of a folder the same time."""
_RELIST = 1.0
"""Seconds for which a folder that only we seem to have changed is not listed again."""
_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class _Pack:
    """One that is open, until nobody uses it."""

    def __init__(self, path: str) -> None:
        """Raises OSError, and ValueError for what is none, or was cut short by a loss of power."""
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self.file).st_size
        tail = os.pread(self.file, _TAIL.size, max(size - _TAIL.size, 0))
        if len(tail) != _TAIL.size or tail[-len(_MAGIC) :] != _MAGIC:
            raise ValueError(f"{path}: no tail")
        index, self.count, self.stamp, _ = _TAIL.unpack(tail)
        self.marks = size - _TAIL.size - self.count
        """Where the marks begin."""
        if not index <= self.marks:
            raise ValueError(f"{path}: an index of {self.marks - index} bytes")
        self.entries = _read_index(os.pread(self.file, self.marks - index, index), index, self.count)
        """Number, place and length, by key."""

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def there(self, number: int) -> bool:
        """Whether nobody has deleted it."""
        return os.pread(self.file, 1, self.marks + number) == b"\1"


def _read_index(data: bytes, end: int, count: int) -> dict[str, tuple[int, int, int]]:
    entries, at, number = dict[str, tuple[int, int, int]](), 0, 0
    try:
        for key, length in msgpack.unpackb(data):
            if not isinstance(key, str) or length < 0:
                raise ValueError(f"{length} bytes of {key!r}")
            entries[key] = number, at, length
            number, at = number + 1, at + length
    except (TypeError, ValueError) as error:
        raise ValueError(f"no index: {error}") from error
    if (number, at) != (count, end):
        raise ValueError(f"an index of {number} keys and {at} bytes, not {count} and {end}")
    return entries


class Packs:
    """A folder of packs, for any number of processes of one machine.

    With `durable`, `put_all` syncs the pack and then the folder before it returns. Without it, the death of a process
    loses nothing, and a loss of power may lose or damage the latest pages, which their digests reveal.
    """

    group = GROUP

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self._packs, self._drafts = os.fspath(root / "p"), os.fspath(root / "t")
        for folder in (self._packs, self._drafts):
            os.makedirs(folder, exist_ok=True)
        self._lock = Lock()
        self._where: dict[int, str] = {}
        """Name of the latest pack of a key, by the key's hash: keys of a million pages are a gigabyte."""
        self._names: set[str] = set()
        self._former: list[tuple[str, str]] = []
        """Packs and keys in them that a later pack has as well, to be deleted."""
        self._open: OrderedDict[str, _Pack] = OrderedDict()
        self._seen, self._ours, self._listed = 0, 0, 0.0
        """Time of the folder when it was listed, and after our own latest change; and when that was, on our clock."""

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        self.put_all([(key, data)])

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `Grouped`; all of them or none."""
        draft, listed, size = f"{self._drafts}/{secrets.token_hex(12)}", list[tuple[str, int]](), 0
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for key, data in pairs:
                    length = write_whole(file, data)
                    listed.append((key, length))
                    size += length
                last = {key: number for number, (key, _) in enumerate(listed)}
                marks = bytes(last[key] == number for number, (key, _) in enumerate(listed))
                end = _TAIL.pack(size, len(listed), time.time(), _MAGIC)
                write_whole(file, b"".join((msgpack.packb(listed), marks, end)))
                if self.durable:
                    os.fsync(file)
            finally:
                os.close(file)
            self._name(draft, last)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        if self.durable:
            sync_folder(self._packs)
        self._tidy()

    def _name(self, draft: str, keys: Iterable[str]) -> None:
        """Give a pack its name, which is after all that are known: of two that have a key, the latter counts."""
        with self._lock:
            self._list()
            name = f"{int(max(self._names, default='0').partition('.')[0], 16) + 1:016x}.{secrets.token_hex(4)}"
            os.replace(draft, f"{self._packs}/{name}")
            self._names.add(name)
            self._add(name, keys)
            self._changed()

    def _add(self, name: str, keys: Iterable[str]) -> None:
        """Know what is in a pack; the lock is held."""
        for key in keys:
            other = self._where.get(hash(key), name)
            self._where[hash(key)] = max(name, other)
            if other != name:
                self._former.append((min(name, other), key))

    def _tidy(self) -> None:
        """Delete what a later pack has."""
        while self._former:
            with suppress(OSError, IndexError):  # it counts no more, and space is all that it costs
                self._mark(*self._former.pop())

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        found = self._find(key)
        if found is None:
            return None
        pack, at, length = found
        data = bytearray(length)
        return bytes(memoryview(data)[: _fill(pack.file, memoryview(data), at)])

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `Filling`."""
        found = self._find(key)
        if found is None:
            return None
        pack, at, length = found
        return length if length > len(room) else _fill(pack.file, room[:length], at)

    def delete(self, key: str) -> None:
        """See `Store`."""
        if key.startswith("t/"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._drafts}/{key[2:]}")
            return
        with self._lock:
            self._list()
            name = self._where.get(hash(key))
        self._tidy()
        if name is not None:
            self._mark(name, key)
            with self._lock:
                if self._where.get(hash(key)) == name:
                    del self._where[hash(key)]

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; of kind `t` are packs that a writer had not finished."""
        if kind == "t":
            yield from (f"t/{name}" for name in os.listdir(self._drafts))
            return
        with self._lock:
            self._list()
            names = sorted(self._names)
        self._tidy()
        for name in names:
            pack = self._pack(name)
            for key, (number, *_) in pack.entries.items() if pack else ():
                if key.startswith(f"{kind}/") and self._where.get(hash(key)) == name and pack and pack.there(number):
                    yield key

    def age(self, key: str) -> float:
        """See `Store`."""
        if key.startswith("t/"):
            with suppress(FileNotFoundError):
                return time.time() - os.stat(f"{self._drafts}/{key[2:]}").st_mtime
            return 0.0
        found = self._find(key)
        return 0.0 if found is None else time.time() - found[0].stamp

    def size(self, key: str) -> int | None:
        """See `Store`."""
        if key.startswith("t/"):
            with suppress(FileNotFoundError):
                return os.stat(f"{self._drafts}/{key[2:]}").st_size
            return None
        found = self._find(key)
        return None if found is None else found[2]

    def _find(self, key: str) -> tuple[_Pack, int, int] | None:
        """The pack that has a key, its place and its length."""
        for fresh in (False, True):
            with self._lock:
                if fresh:
                    self._list()
                name = self._where.get(hash(key))
            pack = self._pack(name) if name is not None else None
            entry = pack.entries.get(key) if pack else None
            if pack and entry and pack.there(entry[0]):
                return pack, *entry[1:]
        return None

    def _pack(self, name: str) -> _Pack | None:
        """A pack that is known; None if it has gone."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
        try:
            pack = _Pack(f"{self._packs}/{name}")
        except (FileNotFoundError, ValueError):
            return None
        with self._lock:
            self._open[name] = pack
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return pack

    def _list(self) -> None:
        """Know the packs that others have made, and forget those that have gone; the lock is held."""
        changed = os.stat(self._packs).st_mtime_ns
        settled = abs(time.time_ns() - changed) > _TICK
        lately = changed == self._ours and time.monotonic() < self._listed + _RELIST
        if settled and (lately or changed == self._seen):
            return
        names = set(os.listdir(self._packs))
        for name in sorted(names - self._names):
            try:
                pack = _Pack(f"{self._packs}/{name}")
            except FileNotFoundError:
                continue
            except ValueError:
                names.discard(name)
                with suppress(OSError):  # where what is unfinished is looked for, and deleted in time
                    os.replace(f"{self._packs}/{name}", f"{self._drafts}/{name}")
                continue
            self._add(name, (key for key, (number, *_) in pack.entries.items() if pack.there(number)))
        if gone := self._names - names:
            self._where = {key: name for key, name in self._where.items() if name not in gone}
            for name in gone:
                self._open.pop(name, None)
        self._names, self._listed = names, time.monotonic()
        self._seen = changed if settled else 0

    def _changed(self) -> None:
        """Note a change of our own; the lock is held."""
        self._ours = os.stat(self._packs).st_mtime_ns

    def _mark(self, name: str, key: str) -> None:
        """Mark a key of a pack as deleted, and give its space back; delete a pack that has none left."""
        path, pack = f"{self._packs}/{name}", self._pack(name)
        entry = pack.entries.get(key) if pack else None
        if pack is None or entry is None or not pack.there(entry[0]):
            return
        number, at, length = entry
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.pwrite(file, b"\0", pack.marks + number)
            _libc.fallocate(file, _HOLE, at, length)  # where that fails, space is given back later
            over = not any(os.pread(file, pack.count, pack.marks))
        finally:
            os.close(file)
        if over:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with self._lock:
                self._names.discard(name)
                self._open.pop(name, None)
                self._changed()


def _fill(file: int, room: memoryview, at: int) -> int:
    """Read until there is no more room, or no more; how many bytes."""
    done = 0
    while done < len(room):
        got = os.preadv(file, [room[done:]], at + done)
        if not got:
            break
        done += got
    return done
