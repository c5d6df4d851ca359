"""Pages in packs: one file for all that is written together, so that the disk writes and reads long runs.

A pack holds the bytes of many keys, then an index, a mark for each key (1: present), and a tail. It is written under
another name and then renamed, and only its marks change later. A deleted key frees its space at once on file systems
with holes, and else with the last key of its pack.
"""

import ctypes
import errno
import math
import os
import re
import secrets
import stat
import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock
from typing import NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

import msgpack

from kvproto.tiers.file_store import make_folders, sync_folder, write_whole
from kvproto.tiers.manifest import Data
from kvproto.tiers.store import BatchStore, IntoStore

_TAIL = struct.Struct("<QId8s")
"""The beginning of the index, the number of keys, the time of writing by the system's clock, and the magic."""
_MAGIC, _FAMILY = b"kvpack1\n", b"kvpack"
_LONGEST_KEY, _LONGEST_INDEX = 1 << 12, 1 << 26
_NAME = re.compile(r"[0-7][0-9a-f]{15}\.[0-9a-f]{8}")
"""A number that rises, so that it shows the latest of two packs with one key, and a random one."""
_GREATEST = (1 << 63) - 1
_OPEN = 32
"""Packs that are held open, so that the pages of a prompt are read from one pack after the other."""
_LONG = 1 << 16
"""Least bytes of a key for which the disk is told to begin at once."""
_RELIST = 1.0
"""Seconds after which a miss lists the folder again, even if its modification time has not changed."""
_TICK = 50_000_000
"""Nanoseconds within which a file system may give two changes of a folder the same time."""
_TRIES = 8
"""The number of times that another process may write a key anew while it is read."""
_HOLE = 3
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a process that lacks a resource for a while; they say nothing about a pack."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_stores: "WeakSet[PackStore]" = WeakSet()


class TornPack(ValueError):
    """A pack that was cut short by a loss of power, or changed."""


class _Entry(NamedTuple):
    """The place of a key in a pack."""

    number: int
    at: int
    length: int


class PackFile:
    """An open pack, closed with its last reference."""

    def __init__(self, path: str) -> None:
        """Raises OSError, TornPack, and ValueError for a file that is no pack of this version."""
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self.file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no file")
        self.inode = status.st_dev, status.st_ino
        tail = os.pread(self.file, _TAIL.size, max(status.st_size - _TAIL.size, 0))
        if len(tail) == _TAIL.size and tail[-len(_MAGIC) :].startswith(_FAMILY) and not tail.endswith(_MAGIC):
            raise ValueError(f"{path} is of another version")
        if len(tail) != _TAIL.size or not tail.endswith(_MAGIC):
            raise TornPack(f"{path} has no tail")
        self.end, self.count, self.stamp, _ = _TAIL.unpack(tail)
        """The end of the bytes of keys, the number of keys, and the time of writing."""
        self.marks = status.st_size - _TAIL.size - self.count
        """The beginning of the marks."""
        length = self.marks - self.end
        if not 0 < length <= min(self.count * _LONGEST_KEY, _LONGEST_INDEX) or not math.isfinite(self.stamp):
            raise TornPack(f"{path} has {self.count} keys in {length} bytes, written at {self.stamp}")
        self.entries = _parse_index(os.pread(self.file, length, self.end), self.end, self.count)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def present(self, number: int) -> bool:
        """Whether the key of this number has not been deleted."""
        return os.pread(self.file, 1, self.marks + number) == b"\1"

    def present_keys(self) -> list[str]:
        """The keys that have not been deleted."""
        marks = os.pread(self.file, self.count, self.marks)
        return [key for key, entry in self.entries.items() if marks[entry.number : entry.number + 1] == b"\1"]

    def gap(self, marks: bytes, start: int, end: int) -> tuple[int, int]:
        """The bytes around [start, end) that belong to no key, so that keys which share a block free it together."""
        held = [
            (at, at + length) for number, at, length in self.entries.values() if marks[number : number + 1] == b"\1"
        ]
        before, after = [stop for _, stop in held if stop <= start], [at for at, _ in held if at >= end]
        return max(before, default=0), min(after, default=self.end)

    def read(self, entry: _Entry) -> bytes:
        """The bytes of a key, fewer if the file ends before."""
        room = memoryview(bytearray(entry.length))
        return bytes(room[: self.read_into(entry, room)])

    def read_into(self, entry: _Entry, room: memoryview) -> int:
        """Read the bytes of a key into `room`, if they fit; returns how many there are."""
        if entry.length > len(room):
            return entry.length
        done = 0
        while done < entry.length and (n := os.preadv(self.file, [room[done : entry.length]], entry.at + done)):
            done += n
        return done


def _parse_index(data: bytes, end: int, count: int) -> dict[str, _Entry]:
    entries, at, number = dict[str, _Entry](), 0, 0
    try:
        for key, length in msgpack.unpackb(data):
            if type(key) is not str or type(length) is not int or length < 0:
                raise TornPack(f"{length!r} bytes of {key!r}")
            entries[key] = _Entry(number, at, length)
            number, at = number + 1, at + length
    except (TypeError, ValueError) as error:
        raise TornPack(f"no index: {error}") from error
    if (number, at) != (count, end):
        raise TornPack(f"an index of {number} keys and {at} bytes, not {count} and {end}")
    return entries


def _ending(sizes: Sequence[tuple[str, int]]) -> bytes:
    """The index, marks and tail for keys of these lengths; of two equal keys the latter is present; raises OSError."""
    last = {key: number for number, (key, _) in enumerate(sizes)}
    marks = bytes(last[key] == number for number, (key, _) in enumerate(sizes))
    index = msgpack.packb(sizes)
    if len(index) > min(len(sizes) * _LONGEST_KEY, _LONGEST_INDEX) and sizes:
        raise OSError(errno.EFBIG, f"{len(sizes)} keys in {len(index)} bytes")
    end = sum(length for _, length in sizes)
    return b"".join((index, marks, _TAIL.pack(end, len(sizes), time.time(), _MAGIC)))


class PackStore(BatchStore, IntoStore):
    """A folder of packs, for any number of processes of one machine.

    With `durable`, `put_all` syncs the pack and then the folder before it returns. Without it, the death of a process
    loses nothing, and a loss of power may lose or damage the latest pages, which their digests reveal.
    """

    batch = 64
    """Pages of a pack: the system reads a file in requests that grow, so that long ones are read faster."""

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self._packs, self._drafts = os.fspath(root / "p"), os.fspath(root / "t")
        make_folders(root, ("p", "t"), durable)
        self.forget()
        _stores.add(self)

    def forget(self) -> None:
        """Start empty: after a fork, other threads' locks and caches are gone."""
        self._lock = RLock()
        self._latest: dict[int, str] = {}
        """Name of the latest pack with a key, by the key's hash: the keys of a million pages are a gigabyte."""
        self._older: dict[int, set[str]] = {}
        """Other packs with the key, left by a writer that died or by two that wrote at once."""
        self._known: dict[str, array[int]] = {}
        """Hashes of the keys of each pack; none for a pack that cannot be read."""
        self._last = 0
        """The greatest number of any pack."""
        self._open: OrderedDict[str, PackFile] = OrderedDict()
        self._modified, self._listed = 0, -math.inf
        """Modification time of the folder when it was listed, and when that was by our clock."""

    def put_all(self, pairs: Iterable[tuple[str, Data]]) -> None:
        """See `BatchStore`; keeps all of them or none."""
        draft, sizes, size = f"{self._drafts}/{secrets.token_hex(12)}", list[tuple[str, int]](), 0
        file = self._retrying(os.open, draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for key, data in pairs:
                    length = write_whole(file, data)
                    sizes.append((key, length))
                    if self.durable and length >= _LONG:  # the disk begins with it while the next is made
                        os.posix_fadvise(file, size, length, os.POSIX_FADV_DONTNEED)
                    size += length
                write_whole(file, _ending(sizes))
                if self.durable:
                    os.fsync(file)
            finally:
                os.close(file)
            if not sizes:
                os.unlink(draft)
                return
            former = self._rename(draft, [*dict(sizes)])
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        if self.durable:
            self._retrying(sync_folder, self._packs)
        for name, key in former:
            with suppress(OSError):  # an older pack is not read any more, and costs only space
                self._delete_from(name, key)

    def _rename(self, draft: str, keys: list[str]) -> list[tuple[str, str]]:
        """Give a pack a name after all known ones, by the time; returns the (pack, key) pairs that it replaces."""
        with self._lock:
            number = min(max(self._last + 1, time.time_ns()), _GREATEST)
            name = f"{number:016x}.{secrets.token_hex(4)}"
            os.replace(draft, f"{self._packs}/{name}")
            former = [(other, key) for key in keys for other in self._packs_with(key)]
            for key in keys:
                self._older.pop(hash(key), None)
            self._latest.update(dict.fromkeys(map(hash, keys), name))
            self._add(name, keys)
        return former

    def get(self, key: str) -> bytes | None:
        return self._with_entry(key, lambda pack, entry: pack.read(entry))

    def get_into(self, key: str, room: memoryview) -> int | None:
        return self._with_entry(key, lambda pack, entry: pack.read_into(entry, room))

    def delete(self, key: str) -> None:
        """See `Store`; a copy that others have written since we last saw the key stays, as it may mend what we saw."""
        if key.startswith("t/"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._drafts}/{key[2:]}")
            return
        for relist in (False, True):
            with self._lock:
                if relist:
                    self._list()
                names = self._packs_with(key)
            deleted = [self._delete_from(name, key) for name in sorted(names)]  # the latest last: it hides the others
            if any(deleted):
                break
        with self._lock:
            self._older.get(hash(key), set()).difference_update(names)

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; lists packs that come meanwhile, which may have taken keys, and as kind `t` unfinished ones."""
        if kind == "t":
            with self._retrying(os.scandir, self._drafts) as drafts:
                names = [draft.name for draft in drafts if draft.is_file(follow_symlinks=False)]
            yield from (f"t/{name}" for name in names)
            return
        listed, visited = set[int](), set[str]()
        for _ in range(_TRIES):
            with self._lock:
                self._list(always=True)
                new = {name for name, keys in self._known.items() if keys} - visited
            for name in sorted(new, reverse=True):
                pack = self._pack(name)
                for key in pack.present_keys() if pack else ():
                    if key.startswith(f"{kind}/") and hash(key) not in listed:
                        listed.add(hash(key))
                        yield key
            visited |= new

    def age(self, key: str) -> float:
        if key.startswith("t/"):
            draft = self._draft(key)
            return 0.0 if draft is None else time.time() - draft.st_mtime
        return self._with_entry(key, lambda pack, entry: time.time() - pack.stamp) or 0.0

    def size(self, key: str) -> int | None:
        if key.startswith("t/"):
            draft = self._draft(key)
            return None if draft is None else draft.st_size
        return self._with_entry(key, lambda pack, entry: entry.length)

    def _draft(self, key: str) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return os.stat(f"{self._drafts}/{key[2:]}", follow_symlinks=False)
        return None

    def _with_entry(self, key: str, use: Callable[[PackFile, _Entry], _Result]) -> _Result | None:
        """The result of `use` on the latest entry of a key that is present before and after."""
        tried: set[str] = set()
        for _ in range(_TRIES):
            with self._lock:
                names, came = self._packs_with(key) - tried, False
                if not names:
                    came = self._list()
                    names = self._packs_with(key) - tried
            if not names and not came:
                return None
            for name in sorted(names, reverse=True):
                pack = self._pack(name)
                entry = pack.entries.get(key) if pack else None
                if pack and entry and pack.present(entry.number):
                    result = use(pack, entry)
                    if pack.present(entry.number):
                        return result
            tried |= names
        return None

    def _packs_with(self, key: str) -> set[str]:
        """The known packs that may have a key; the latest counts. The caller holds the lock."""
        return {self._latest.get(hash(key), ""), *self._older.get(hash(key), ())} - {""}

    def _pack(self, name: str) -> PackFile | None:
        """Open a known pack; returns None if it is gone or no longer a pack."""
        with self._lock:
            if name in self._open:
                self._open.move_to_end(name)
                return self._open[name]
        try:
            pack = self._retrying(PackFile, f"{self._packs}/{name}")
        except (FileNotFoundError, ValueError):
            return None
        with self._lock:
            if name in self._known:
                self._open[name] = pack
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return pack

    def _retrying(self, call: Callable[_Params, _Result], *args: _Params.args, **named: _Params.kwargs) -> _Result:
        """Call this; if it lacks a descriptor, close the packs that are held open and call it again."""
        try:
            return call(*args, **named)
        except OSError as error:
            if error.errno not in _SHORT:
                raise
        with self._lock:
            self._open.clear()
        return call(*args, **named)

    def _list(self, always: bool = False) -> bool:
        """Add others' packs and drop deleted ones, with the lock held; returns whether any was added."""
        modified = os.stat(self._packs).st_mtime_ns
        if not always and modified == self._modified and time.monotonic() < self._listed + _RELIST:
            return False
        came = self._retrying(self._list_folder)
        self._listed = time.monotonic()
        self._modified = modified if abs(time.time_ns() - modified) > _TICK else 0
        return came

    def _list_folder(self) -> bool:
        """List the folder; returns whether any pack was added. The caller holds the lock."""
        came = False
        for _ in range(_TRIES):
            names = {name for name in os.listdir(self._packs) if _NAME.fullmatch(name)}
            for name in self._known.keys() - names:
                self._forget_pack(name)
            new = sorted(names - self._known.keys())
            present = [self._open_new(name) for name in new]
            came = came or not self._known.keys().isdisjoint(new)
            if all(present):
                break  # else another pack may have taken the place of one that has gone meanwhile
        return came

    def _open_new(self, name: str) -> bool:
        """Add the keys of a pack that we can read, or delete it if it has none; returns whether it is still there."""
        path = f"{self._packs}/{name}"
        try:
            pack = PackFile(path)
            keys = pack.present_keys()
        except TornPack:
            with suppress(OSError):  # to the drafts, which are swept in time
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
            if not keys:  # the process that deleted the last of them was killed
                with suppress(OSError):
                    os.unlink(path)
                return False
        self._add(name, keys)
        for key in keys:
            other = self._latest.setdefault(hash(key), name)
            if other != name:
                self._latest[hash(key)] = max(name, other)
                self._older.setdefault(hash(key), set()).add(min(name, other))
        return True

    def _add(self, name: str, keys: list[str]) -> None:
        self._known[name] = array("q", map(hash, keys))
        self._last = max(self._last, int(name.partition(".")[0], 16))

    def _forget_pack(self, name: str) -> None:
        """Forget a pack and its keys; the caller holds the lock."""
        for key in self._known.pop(name, ()):
            if self._latest.get(key) == name:
                del self._latest[key]
            others = self._older.get(key, set())
            others.discard(name)
            if not others:
                self._older.pop(key, None)
            elif key not in self._latest:
                self._latest[key] = max(others)
                others.discard(max(others))
        self._open.pop(name, None)

    def _delete_from(self, name: str, key: str) -> bool:
        """Mark a key as deleted and free its space, or the pack with its last key; returns whether it was there."""
        path, pack = f"{self._packs}/{name}", self._pack(name)
        if pack is None or key not in pack.entries:
            return False
        try:
            file = self._retrying(os.open, path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(file)
            if (status.st_dev, status.st_ino) != pack.inode:  # another file has taken its place
                with self._lock:
                    self._forget_pack(name)
                return False
            entry = pack.entries[key]
            if not pack.present(entry.number):
                return False
            os.pwrite(file, b"\0", pack.marks + entry.number)
            marks = os.pread(file, pack.count, pack.marks)
            start, end = pack.gap(marks, entry.at, entry.at + entry.length)
            if start < end:
                _libc.fallocate(file, _HOLE, start, end - start)  # if it fails, the space is freed with the pack
        finally:
            os.close(file)
        if b"\1" not in marks:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with self._lock:
                self._forget_pack(name)
        return True


os.register_at_fork(after_in_child=lambda: [*map(PackStore.forget, [*_stores])])
