"""Pages in an object store: S3 and what speaks as it does, Google's, Azure's; `pip install 'kvproto[objects]'`.

By obstore, the Python face of Apache Arrow's `object_store`: one wheel without dependencies, calls without the GIL, and
limits of time of its own, so that no call hangs for longer than TIMEOUT and its retries. A store puts an object whole
or not at all, and shows it to whoever asks after that.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from kvproto.tiers.manifest import Data

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

__all__ = ["ObjectStore"]

TIMEOUT, CONNECT = timedelta(seconds=10), timedelta(seconds=3)
RETRIES = 2
_CLOCK = 60.0
"""Seconds for which a look at the store's clock is good."""


class ObjectStore:
    """A bucket, or what lies below a prefix of one."""

    def __init__(self, store: Bucket) -> None:
        """`store` is obstore's; `at` makes one that gives up in time."""
        self._store = store
        self._lock = Lock()
        self._seen = -_CLOCK
        self._ahead = 0.0
        """Seconds by which the store's clock is ahead of the monotonic one."""

    @classmethod
    def at(cls, url: str, timeout: timedelta = TIMEOUT, retries: int = RETRIES, **config: Any) -> ObjectStore:
        """As `s3://bucket/prefix`, with a limit for each try; raises OSError.

        `config` is obstore's; keys, region and endpoint that it lacks are those of the environment.
        """
        client: ClientConfig = {"timeout": timeout, "connect_timeout": min(CONNECT, timeout), "allow_http": True}
        retry: RetryConfig = {"max_retries": retries, "retry_timeout": timeout}
        with _failing():
            return cls(from_url(url, client_options=client, retry_config=retry, **config))

    def put(self, key: str, data: Data) -> None:
        """See `Store`."""
        with _failing():
            obstore.put(self._store, key, data, use_multipart=False)

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        with _failing():
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def delete(self, key: str) -> None:
        """See `Store`."""
        with _failing():
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    def keys(self, kind: str) -> Iterator[str]:
        """See `Store`."""
        with _failing():
            for some in obstore.list(self._store, kind):
                yield from (each["path"] for each in some)

    def age(self, key: str) -> float:
        """See `Store`; the store's clock is asked by an object, once in a while."""
        with _failing():
            try:
                written = obstore.head(self._store, key)["last_modified"].timestamp()
            except FileNotFoundError:
                return 0.0
            return time.monotonic() + self._clock() - written

    def size(self, key: str) -> int | None:
        """See `Store`."""
        with _failing():
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                return None

    def _clock(self) -> float:
        with self._lock:
            if time.monotonic() - self._seen > _CLOCK:
                mark = f"t/now{token_hex(8)}"
                obstore.put(self._store, mark, b"")
                try:
                    self._ahead = obstore.head(self._store, mark)["last_modified"].timestamp() - time.monotonic()
                finally:
                    obstore.delete(self._store, mark)
                self._seen = time.monotonic()
            return self._ahead


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except BaseError as error:
        raise OSError(errno.EIO, str(error).partition("\n")[0]) from error
