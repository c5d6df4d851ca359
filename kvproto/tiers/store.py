"""Where pages are stored: the interface of a back end, and files.

A back end keeps bytes under keys and knows nothing of pages. What it promises is little: what `put` has written may be
torn or gone by the time it is read, since whoever reads checks it. Failures are OSError.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from kvproto.tiers.manifest import Data

__all__ = ["Files", "Grouped", "Store"]

GROUP = 16
"""Pages that are worth writing together: more of them do not make a page any cheaper."""
_OPEN = 128
"""Files that a call of `put_all` has open at once."""


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


@runtime_checkable
class Grouped(Store, Protocol):
    """A back end that keeps many keys for little more than the price of one, as one sync serves them all."""

    group: int
    """How many pages are best written together; 1: each by itself."""

    def put_all(self, pairs: Sequence[tuple[str, Data]]) -> None:
        """As `put`, for each key in turn; raises OSError, when any number of them may have been kept.

        Whatever ends the writer, a manifest is not found before the objects that precede it here have been written.
        """


class Files:
    """A folder with a file for each key, written under another name and then renamed, so no process sees half of one.

    With `durable`, files and folders are synced before `put` returns, so that what it kept survives a loss of power.
    Files that are written together share these syncs: one for each file, one for each folder of objects, then one for
    each folder of manifests. Without it, the death of a process loses nothing, and a loss of power may lose or damage
    the latest pages, which their digests reveal.
    """

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Makes the folder; raises OSError."""
        self.root, self.durable = root, durable
        self.group = GROUP if durable else 1
        self._made: set[Path] = set()
        for kind in ("m", "o", "g", "t"):
            (root / kind).mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        self.put_all([(key, data)])

    def put_all(self, pairs: Sequence[tuple[str, Data]]) -> None:
        """See `Grouped`."""
        for at in range(0, len(pairs), _OPEN):
            some = pairs[at : at + _OPEN]
            drafts = [(self.root / "t" / secrets.token_hex(12), self._path(key)) for key, _ in some]
            try:
                self._write(drafts, [data for _, data in some])
                for _, each in groupby(drafts, lambda one: one[1].parents[1]):
                    self._name([*each])
            except OSError:
                for draft, path in drafts:
                    self._made.discard(path.parent)
                    with suppress(OSError):
                        draft.unlink(missing_ok=True)
                raise

    def _write(self, drafts: Sequence[tuple[Path, Path]], contents: Sequence[Data]) -> None:
        """Write files under their first names, and wait for the disk once all of them are on their way to it."""
        with ExitStack() as stack:
            files = []
            for (draft, path), data in zip(drafts, contents, strict=True):
                if path.parent not in self._made:
                    path.parent.mkdir(exist_ok=True)
                    if self.durable:
                        _sync(path.parents[1])
                    self._made.add(path.parent)
                files.append(stack.enter_context(draft.open("xb", buffering=0)))
                self._fill(files[-1], data)
            if self.durable:
                for file in files:
                    os.fsync(file.fileno())

    def _fill(self, file: BinaryIO, data: Data) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def _name(self, drafts: Sequence[tuple[Path, Path]]) -> None:
        """Give files their names, for good with `durable`."""
        for draft, path in drafts:
            draft.replace(path)
        if self.durable:
            for folder in dict.fromkeys(path.parent for _, path in drafts):
                _sync(folder)

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
