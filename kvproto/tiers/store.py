"""Where pages are stored: the interface of a back end, and files.

A back end keeps bytes under keys and knows nothing of pages. What it promises is little: what `put` has written may be
torn or gone by the time it is read, since whoever reads checks it. Failures are OSError.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvproto.tiers.manifest import Data

__all__ = ["Files", "Store"]


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


class Files:
    """A folder, a file for each key: written under another name, then renamed, so no process sees half of one.

    With `durable` a file and its folder are synced before `put` returns, so that manifests outlive a loss of power too.
    Without, the death of a process costs nothing, and a loss of power may cost pages: their digests tell.
    """

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self._made: set[Path] = set()
        for kind in ("m", "o", "g", "t"):
            (root / kind).mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        path, draft = self._path(key), self.root / "t" / secrets.token_hex(12)
        try:
            if path.parent not in self._made:
                path.parent.mkdir(exist_ok=True)
                self._made.add(path.parent)
            with draft.open("xb", buffering=0) as file:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
                if self.durable:
                    os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            self._made.discard(path.parent)
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        if self.durable:
            _sync(path.parent)

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._path(key).unlink(missing_ok=True)

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`; of kind `t` are files that a writer had not finished."""
        for folder, _, names in os.walk(self.root / kind, onerror=_raise):
            yield from (f"{kind}/{name}" for name in names if kind == "t" or Path(folder).name == name[:2])

    def age(self, key: str) -> float:
        """See `Store`; the file system's clock is asked by a file."""
        now = self.root / "t" / f"now{secrets.token_hex(8)}"
        try:
            now.touch()
            return now.stat().st_mtime - self._path(key).stat().st_mtime
        except FileNotFoundError:
            return 0.0
        finally:
            now.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        """See `Store`; of plain files."""
        try:
            found = self._path(key).lstat()
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _path(self, key: str) -> Path:
        kind, _, name = key.partition("/")
        return self.root / kind / name if kind == "t" else self.root / kind / name[:2] / name


def _raise(error: OSError) -> None:
    """A folder that cannot be read is not an empty one, or its objects would be taken for nobody's."""
    raise error


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
