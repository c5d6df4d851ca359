"""A disk that loses power: what was synced is there, and of everything else any part, in any order."""

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

_CALLS = ("open", "write", "pwrite", "mkdir", "replace", "unlink", "fsync")
_SECTOR = 16
"""Bytes that are written as a whole: fewer than on a disk, as the pages of tests are small."""


class Disk:
    """Knows what the folder above had when each of its files and folders was last synced, by inode."""

    def __init__(self, top: Path) -> None:
        self.top, self._open = top, os.open
        self._synced: dict[int, bytes | dict[str, int]] = {}
        self._handles: dict[int, int] = {}
        """Of all inodes that have been seen, so that none is used again."""
        self._note()
        self._synced[os.stat(top).st_ino] = {}

    @contextmanager
    def watched(self, before: Callable[[], None]) -> Iterator[None]:
        """Call `before` before each call that changes something, and note what is synced."""
        real, one, inside = {name: getattr(os, name) for name in _CALLS}, RLock(), False

        def watch(name: str) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                nonlocal inside
                with one:
                    if inside or (name == "open" and not args[1] & os.O_CREAT):  # `before` itself, or a reader
                        return real[name](*args, **named)
                    inside = True
                    try:
                        self._note()
                        before()
                    finally:
                        inside = False
                    made = real[name](*args, **named)
                    self._note()
                    if name == "fsync":
                        ino = os.fstat(args[0]).st_ino
                        self._synced[ino] = self._now(ino)
                    return made

            return call

        for name in _CALLS:
            setattr(os, name, watch(name))
        try:
            yield
        finally:
            for name in _CALLS:
                setattr(os, name, real[name])

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def _note(self) -> None:
        for path in (self.top, *self.top.rglob("*")):
            ino = os.lstat(path).st_ino
            if ino not in self._handles:
                self._handles[ino] = self._open(path, os.O_RDONLY)

    def _now(self, ino: int) -> bytes | dict[str, int]:
        handle = self._handles[ino]
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            return os.pread(handle, os.fstat(handle).st_size, 0)
        try:
            return {each: os.stat(each, dir_fd=handle).st_ino for each in os.listdir(handle)}
        except FileNotFoundError:
            return {}

    def lost(self, rng: random.Random, into: Path) -> None:
        """What is on the disk if power is lost now; `rng` says what part of it that was not synced."""
        self._fill(os.stat(self.top).st_ino, rng, rng.choice([0.0, 0.2, 0.5, 0.9, 1.0]), into)

    def _fill(self, ino: int, rng: random.Random, rate: float, into: Path) -> None:
        now, then = self._now(ino), self._synced.get(ino)
        if isinstance(now, dict):
            into.mkdir()
            old = then if isinstance(then, dict) else {}
            for name in sorted(now.keys() | old.keys()):
                which = now if rng.random() < rate else old
                if name in which:
                    self._fill(which[name], rng, rate, into / name)
            return
        kept = then if isinstance(then, bytes) else b""
        size = len(now) if rng.random() < rate else len(kept)
        pieces = range(0, size, _SECTOR)
        parts = [(now if rng.random() < rate else kept)[at : at + _SECTOR].ljust(_SECTOR, b"\0") for at in pieces]
        into.write_bytes(b"".join(parts)[:size])
