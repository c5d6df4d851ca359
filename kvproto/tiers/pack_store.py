"""Pages in packs: one file for all that is written together, so that the disk writes and reads long runs.

A pack is written under another name and then renamed, and only marks of what was deleted are changed in it later. What
is deleted gives its space back at once where the file system has holes, and else with the last key of its pack.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import ParamSpec, TypeVar
from weakref import WeakSet

from kvproto.tiers.manifest import Data
from kvproto.tiers.pack_file import PackFile, TornPack, ending
from kvproto.tiers.store import make_folders, sync_folder, write_whole

__all__ = ["PackStore"]

_NAME = re.compile(r"[0-7][0-9a-f]{15}\.[0-9a-f]{8}")
"""A number that rises, by which the latest of two packs with one key is known, and a random one."""
_GREATEST = (1 << 63) - 1
_OPEN = 32
"""Packs that are held open, so that pages of a prompt are read from one, one after the other."""
_LONG = 1 << 16
"""Bytes from which on it is worth while to have the disk begin at once."""
_RELIST = 1.0
"""Seconds after which a miss lists the folder again, whatever its time says."""
_TICK = 50_000_000
"""Nanoseconds within which a file system may give two changes of a folder the same time."""
_TRIES = 8
"""How often somebody may write a key anew while it is read."""
_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the process lacks for a while, which says nothing about a pack."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_stores: WeakSet[PackStore] = WeakSet()


class PackStore:
    """A folder of packs, for any number of processes of one machine.

    With `durable`, `put_all` syncs the pack and then the folder before it returns. Without it, the death of a process
    loses nothing, and a loss of power may lose or damage the latest pages, which their digests reveal.
    """

    group = 64
    """Pages of a pack: the system reads a file in requests that grow, so that long ones are read faster."""

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self._packs, self._drafts = os.fspath(root / "p"), os.fspath(root / "t")
        make_folders(root, ("p", "t"), durable)
        self.forget()
        _stores.add(self)

    def forget(self) -> None:
        """Know nothing: what another thread holds of it is not in a process that was forked meanwhile."""
        self._lock = Lock()
        self._where: dict[int, str] = {}
        """Name of the latest pack of a key, by the key's hash: keys of a million pages are a gigabyte."""
        self._older: dict[int, set[str]] = {}
        """Other packs that have the key, since a writer died or two wrote at once."""
        self._known: dict[str, array[int]] = {}
        """Hashes of the keys of each pack; none of one that cannot be read."""
        self._last = 0
        """The greatest number that any pack had."""
        self._open: OrderedDict[str, PackFile] = OrderedDict()
        self._seen, self._listed = 0, -math.inf
        """Time of the folder when it was listed, and when that was by our clock."""

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        self.put_all([(key, data)])

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `Grouped`; all of them or none."""
        draft, listed, size = f"{self._drafts}/{secrets.token_hex(12)}", list[tuple[str, int]](), 0
        file = self._sparing(os.open, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for key, data in pairs:
                    length = write_whole(file, data)
                    listed.append((key, length))
                    if self.durable and length >= _LONG:  # the disk begins with it while the next is made
                        os.posix_fadvise(file, size, length, os.POSIX_FADV_DONTNEED)
                    size += length
                write_whole(file, ending(listed))
                if self.durable:
                    os.fsync(file)
            finally:
                os.close(file)
            if not listed:
                os.unlink(draft)
                return
            former = self._name(draft, [*dict(listed)])
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        if self.durable:
            self._sparing(sync_folder, self._packs)
        for name, key in former:
            with suppress(OSError):  # it counts no more, and space is all that it costs
                self._mark(name, key)

    def _name(self, draft: str, keys: list[str]) -> list[tuple[str, str]]:
        """Give a pack its name, after all that are known, and say which packs have had its keys before.

        The time puts it after packs that others have made since we last looked.
        """
        with self._lock:
            number = min(max(self._last + 1, time.time_ns()), _GREATEST)
            name = f"{number:016x}.{secrets.token_hex(4)}"
            os.replace(draft, f"{self._packs}/{name}")
            former = [(other, key) for key in keys for other in self._having(key)]
            for key in keys:
                self._older.pop(hash(key), None)
            self._where.update(dict.fromkeys(map(hash, keys), name))
            self._meet(name, keys)
        return former

    def get(self, key: str) -> bytes | None:
        """See `Store`."""

        def take(pack: PackFile, at: int, length: int) -> bytes:
            room = memoryview(bytearray(length))
            return bytes(room[: pack.read(room, at)])

        return self._use(key, take)

    def get_into(self, key: str, room: memoryview) -> int | None:
        """See `Filling`."""

        def fill(pack: PackFile, at: int, length: int) -> int:
            return length if length > len(room) else pack.read(room[:length], at)

        return self._use(key, fill)

    def delete(self, key: str) -> None:
        """See `Store`; what others have written since we last saw the key stays, as it may mend what we saw."""
        if key.startswith("t/"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._drafts}/{key[2:]}")
            return
        for look in (False, True):
            with self._lock:
                if look:
                    self._list()
                names = self._having(key)
            marked = [self._mark(name, key) for name in sorted(names)]  # the latest last, or another comes to light
            if any(marked):
                break
        with self._lock:
            self._older.get(hash(key), set()).difference_update(names)

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; of kind `t` are packs that a writer had not finished.

        Packs that come meanwhile are looked at too, since keys of others may have moved there.
        """
        if kind == "t":
            with self._sparing(os.scandir, self._drafts) as found:
                names = [each.name for each in found if each.is_file(follow_symlinks=False)]
            yield from (f"t/{name}" for name in names)
            return
        told, seen = set[int](), set[str]()
        for _ in range(_TRIES):
            with self._lock:
                self._list(always=True)
                some = {name for name, keys in self._known.items() if keys} - seen
            for name in sorted(some, reverse=True):
                pack = self._pack(name)
                for key in pack.kept() if pack else ():
                    if key.startswith(f"{kind}/") and hash(key) not in told:
                        told.add(hash(key))
                        yield key
            seen |= some

    def age(self, key: str) -> float:
        """See `Store`."""
        if key.startswith("t/"):
            about = self._draft(key)
            return 0.0 if about is None else time.time() - about.st_mtime
        return self._use(key, lambda pack, at, length: time.time() - pack.stamp) or 0.0

    def size(self, key: str) -> int | None:
        """See `Store`."""
        if key.startswith("t/"):
            about = self._draft(key)
            return None if about is None else about.st_size
        return self._use(key, lambda pack, at, length: length)

    def _draft(self, key: str) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return os.stat(f"{self._drafts}/{key[2:]}", follow_symlinks=False)
        return None

    def _use(self, key: str, use: Callable[[PackFile, int, int], _Made]) -> _Made | None:
        """What `use` makes of the pack, place and length of a key, if it is there before and after."""
        tried: set[str] = set()
        for _ in range(_TRIES):
            with self._lock:
                names, came = self._having(key) - tried, False
                if not names:
                    came = self._list()
                    names = self._having(key) - tried
            if not names and not came:
                return None
            for name in sorted(names, reverse=True):
                pack = self._pack(name)
                entry = pack.entries.get(key) if pack else None
                if pack and entry and pack.there(entry[0]):
                    made = use(pack, *entry[1:])
                    if pack.there(entry[0]):
                        return made
            tried |= names
        return None

    def _having(self, key: str) -> set[str]:
        """Packs that had a key when we last looked, the latest of which counts; the lock is held."""
        return {self._where.get(hash(key), ""), *self._older.get(hash(key), ())} - {""}

    def _pack(self, name: str) -> PackFile | None:
        """A pack that is known; None if it has gone, or is none any more."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
        try:
            pack = self._sparing(PackFile, f"{self._packs}/{name}")
        except (FileNotFoundError, ValueError):
            return None
        with self._lock:
            if name in self._known:
                self._open[name] = pack
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return pack

    def _sparing(self, call: Callable[_Given, _Made], *args: _Given.args, **named: _Given.kwargs) -> _Made:
        """Call this, and once more without the packs that are held open if it lacks a descriptor."""
        try:
            return call(*args, **named)
        except OSError as error:
            if error.errno not in _SHORT:
                raise
        with self._lock:
            self._open.clear()
        return call(*args, **named)

    def _list(self, always: bool = False) -> bool:
        """Know the packs that others have made, and forget those that have gone; whether any came. The lock is held."""
        changed = os.stat(self._packs).st_mtime_ns
        if not always and changed == self._seen and time.monotonic() < self._listed + _RELIST:
            return False
        try:
            came = self._look()
        except OSError as error:
            if error.errno not in _SHORT:
                raise
            self._open.clear()
            came = self._look()
        self._listed = time.monotonic()
        self._seen = changed if abs(time.time_ns() - changed) > _TICK else 0
        return came

    def _look(self) -> bool:
        """List the folder, whatever we know; whether any came. The lock is held."""
        came = False
        for _ in range(_TRIES):
            names = {name for name in os.listdir(self._packs) if _NAME.fullmatch(name)}
            for name in self._known.keys() - names:
                self._drop(name)
            new = sorted(names - self._known.keys())
            here = [self._open_new(name) for name in new]
            came = came or not self._known.keys().isdisjoint(new)
            if all(here):
                break  # else there may be another in place of one that has gone meanwhile
        return came

    def _open_new(self, name: str) -> bool:
        """Know what is in a pack, and say whether it is still there.

        One that we cannot read is left alone, and tried again next time; one without keys is deleted.
        """
        path = f"{self._packs}/{name}"
        try:
            pack = PackFile(path)
            keys = pack.kept()
        except TornPack:
            with suppress(OSError):  # where what is unfinished is looked for, and deleted in time
                os.replace(path, f"{self._drafts}/{name}")
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _SHORT:
                raise
            return True
        except ValueError:
            keys = []
        else:
            if not keys:  # whoever deleted the last of them was killed
                with suppress(OSError):
                    os.unlink(path)
                return False
        self._meet(name, keys)
        for key in keys:
            other = self._where.setdefault(hash(key), name)
            if other != name:
                self._where[hash(key)] = max(name, other)
                self._older.setdefault(hash(key), set()).add(min(name, other))
        return True

    def _meet(self, name: str, keys: list[str]) -> None:
        self._known[name] = array("q", map(hash, keys))
        self._last = max(self._last, int(name.partition(".")[0], 16))

    def _drop(self, name: str) -> None:
        """Forget a pack; the lock is held."""
        for key in self._known.pop(name, ()):
            if self._where.get(key) == name:
                del self._where[key]
            others = self._older.get(key, set())
            others.discard(name)
            if not others:
                self._older.pop(key, None)
            elif key not in self._where:
                self._where[key] = max(others)
                others.discard(max(others))
        self._open.pop(name, None)

    def _mark(self, name: str, key: str) -> bool:
        """Mark a key of a pack as deleted, give its space back, and delete a pack that has none left.

        Returns whether it was there.
        """
        path, pack = f"{self._packs}/{name}", self._pack(name)
        if pack is None or key not in pack.entries:
            return False
        try:
            file = self._sparing(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            about = os.fstat(file)
            if (about.st_dev, about.st_ino) != pack.place:  # somebody has put another file in its place
                with self._lock:
                    self._drop(name)
                return False
            number, at, length = pack.entries[key]
            if not pack.there(number):
                return False
            os.pwrite(file, b"\0", pack.marks + number)
            marks = os.pread(file, pack.count, pack.marks)
            start, end = pack.free(marks, at, at + length)
            if start < end:
                _libc.fallocate(file, _HOLE, start, end - start)  # where that fails, space is given back later
        finally:
            os.close(file)
        if b"\1" not in marks:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with self._lock:
                self._drop(name)
        return True


def _forked() -> None:
    for store in [*_stores]:
        store.forget()


os.register_at_fork(after_in_child=_forked)
