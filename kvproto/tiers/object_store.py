"""Pages in an object store, by obstore: whole objects, calls without the GIL, and time limits (`kvproto[objects]`)."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from kvproto.tiers.manifest import Data
from kvproto.tiers.store import IntoStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

TIMEOUT, CONNECT = timedelta(seconds=10), timedelta(seconds=3)
RETRIES = 2
_CLOCK = 60.0
"""Seconds after which the store's clock is read again."""


class ObjectStore(IntoStore):
    """A bucket, or the objects below a prefix of one."""

    def __init__(self, store: Bucket) -> None:
        """`store` is obstore's; `at` makes one with time limits."""
        self._store = store
        self._lock = Lock()
        self._read_at = -_CLOCK
        self._ahead = 0.0
        """Seconds by which the store's clock is ahead of the monotonic one."""

    @classmethod
    def at(cls, url: str, timeout: timedelta = TIMEOUT, retries: int = RETRIES, **config: Any) -> ObjectStore:
        """Open a URL with obstore's `config`, and what it lacks from the environment; raises OSError."""
        client: ClientConfig = {"timeout": timeout, "connect_timeout": min(CONNECT, timeout), "allow_http": True}
        retry: RetryConfig = {"max_retries": retries, "retry_timeout": timeout}
        with _os_errors():
            return cls(from_url(url, client_options=client, retry_config=retry, **config))

    def put(self, key: str, data: Data) -> None:
        with _os_errors():
            obstore.put(self._store, key, data, use_multipart=False)

    def get(self, key: str) -> bytes | None:
        with _os_errors(), suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, key).bytes())
        return None

    def get_into(self, key: str, room: memoryview) -> int | None:
        with _os_errors(), suppress(FileNotFoundError):
            result = obstore.get(self._store, key)
            length = result.meta["size"]
            if length <= len(room):
                room[:length] = result.bytes()
            return length
        return None

    def delete(self, key: str) -> None:
        with _os_errors(), suppress(FileNotFoundError):
            obstore.delete(self._store, key)

    def keys(self, kind: str) -> Iterator[str]:
        with _os_errors():
            for listed in obstore.list(self._store, kind):
                yield from (entry["path"] for entry in listed)

    def age(self, key: str) -> float:
        """See `Store`; an object that is written now and then tells the time of the store's clock."""
        with _os_errors(), suppress(FileNotFoundError):
            written = obstore.head(self._store, key)["last_modified"].timestamp()
            return time.monotonic() + self._clock() - written
        return 0.0

    def size(self, key: str) -> int | None:
        with _os_errors(), suppress(FileNotFoundError):
            return obstore.head(self._store, key)["size"]
        return None

    def _clock(self) -> float:
        with self._lock:
            if time.monotonic() - self._read_at > _CLOCK:
                mark = f"t/now{token_hex(8)}"
                obstore.put(self._store, mark, b"")
                try:
                    self._ahead = obstore.head(self._store, mark)["last_modified"].timestamp() - time.monotonic()
                finally:
                    obstore.delete(self._store, mark)
                self._read_at = time.monotonic()
            return self._ahead


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise errors of obstore as OSError."""
    try:
        yield
    except BaseError as error:
        raise OSError(errno.EIO, str(error).partition("\n")[0]) from error
