"""A pack: the bytes of many keys in one file, then an index, a mark for each key (1: it is there), and a tail."""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
import time
from collections.abc import Sequence

import msgpack

__all__ = ["PackFile", "TornPack", "ending"]

_TAIL = struct.Struct("<QId8s")
"""Where the index begins, how many keys there are, when they were written by the system's clock, and the magic."""
_MAGIC, _FAMILY = b"kvpack1\n", b"kvpack"
_LONGEST_KEY, _LONGEST_INDEX = 1 << 12, 1 << 26


def ending(listed: Sequence[tuple[str, int]]) -> bytes:
    """What follows the bytes of these keys, of these lengths; of two that are the same, the latter counts.

    Raises OSError for more than a reader would take for an index.
    """
    last = {key: number for number, (key, _) in enumerate(listed)}
    marks = bytes(last[key] == number for number, (key, _) in enumerate(listed))
    size = sum(length for _, length in listed)
    index = msgpack.packb(listed)
    if len(index) > min(len(listed) * _LONGEST_KEY, _LONGEST_INDEX) and listed:
        raise OSError(errno.EFBIG, f"{len(listed)} keys in {len(index)} bytes")
    return b"".join((index, marks, _TAIL.pack(size, len(listed), time.time(), _MAGIC)))


class TornPack(ValueError):
    """A pack that was cut short by a loss of power, or changed."""


class PackFile:
    """One that is open, until nobody uses it."""

    def __init__(self, path: str) -> None:
        """Raises OSError, Torn, and ValueError for what is another's."""
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        about = os.fstat(self.file)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is no file")
        self.place = about.st_dev, about.st_ino
        tail = os.pread(self.file, _TAIL.size, max(about.st_size - _TAIL.size, 0))
        if len(tail) == _TAIL.size and tail[-len(_MAGIC) :].startswith(_FAMILY) and not tail.endswith(_MAGIC):
            raise ValueError(f"{path} is of another version")
        if len(tail) != _TAIL.size or not tail.endswith(_MAGIC):
            raise TornPack(f"{path} has no tail")
        self.end, self.count, self.stamp, _ = _TAIL.unpack(tail)
        """Where the bytes of keys end; how many keys there are; when they were written."""
        self.marks = about.st_size - _TAIL.size - self.count
        """Where the marks begin."""
        length = self.marks - self.end
        if not 0 < length <= min(self.count * _LONGEST_KEY, _LONGEST_INDEX) or not math.isfinite(self.stamp):
            raise TornPack(f"{path} has {self.count} keys in {length} bytes, written at {self.stamp}")
        self.entries = _read_index(os.pread(self.file, length, self.end), self.end, self.count)
        """Number, place and length, by key."""

    def __del__(self) -> None:
        if hasattr(self, "file"):
            os.close(self.file)

    def there(self, number: int) -> bool:
        """Whether nobody has deleted it."""
        return os.pread(self.file, 1, self.marks + number) == b"\1"

    def kept(self) -> list[str]:
        """Keys that nobody has deleted."""
        marks = os.pread(self.file, self.count, self.marks)
        return [key for key, (number, *_) in self.entries.items() if marks[number : number + 1] == b"\1"]

    def free(self, marks: bytes, start: int, end: int) -> tuple[int, int]:
        """The bytes around these that belong to no key, so that keys which share a block give it back together."""
        held = [
            (at, at + length) for number, at, length in self.entries.values() if marks[number : number + 1] == b"\1"
        ]
        before, after = [stop for _, stop in held if stop <= start], [at for at, _ in held if at >= end]
        return max(before, default=0), min(after, default=self.end)

    def read(self, room: memoryview, at: int) -> int:
        """Fill the room, as far as there are bytes; how many."""
        done = 0
        while done < len(room) and (got := os.preadv(self.file, [room[done:]], at + done)):
            done += got
        return done


def _read_index(data: bytes, end: int, count: int) -> dict[str, tuple[int, int, int]]:
    entries, at, number = dict[str, tuple[int, int, int]](), 0, 0
    try:
        for key, length in msgpack.unpackb(data):
            if type(key) is not str or type(length) is not int or length < 0:
                raise TornPack(f"{length!r} bytes of {key!r}")
            entries[key] = number, at, length
            number, at = number + 1, at + length
    except (TypeError, ValueError) as error:
        raise TornPack(f"no index: {error}") from error
    if (number, at) != (count, end):
        raise TornPack(f"an index of {number} keys and {at} bytes, not {count} and {end}")
    return entries
