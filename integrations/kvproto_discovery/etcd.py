"""Sources by their rows in etcd, over its JSON gateway: no client library is needed."""

from __future__ import annotations

import base64
import http.client
import json
import logging
import ssl
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvproto import LocalError
from kvproto.errors import ErrorCode, bad
from kvproto_discovery.rows import Replica, Row, by_replica, read_rows

__all__ = ["PREFIX", "Etcd"]

_log = logging.getLogger("kvproto.discovery")
PREFIX = "/kvproto/sources/"
"""The beginning of the keys of rows; engine, replica and rank follow, with slashes between."""
_PATIENCE = 3.0
"""Seconds that one member of etcd may take to answer."""
_SILENCE = 5.0
"""Seconds without a change after which all rows are read again, as a dead connection says nothing either."""
_PACE = 0.5
"""The least seconds between two reads of all rows."""
_LARGEST = 64 << 20
"""The most bytes of an answer."""
NONSENSE = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of whoever reads an answer that is none of etcd's."""
_MOST = 16384
"""The most rows that are read."""


class Etcd:
    """A directory in etcd, each row of which lives as long as the lease of the source that wrote it."""

    def __init__(
        self,
        urls: list[str],
        prefix: str = PREFIX,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
    ) -> None:
        """`urls` are those of any members; for https `ca`, `cert` and `key` are PEM files (ca: None for the system's).

        Raises LocalError(OUT_OF_RANGE) for a URL or a file that cannot be used.
        """
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
                raise bad("etcd", "http://HOST:PORT or https://HOST:PORT", url, "correct it")
        if not urls:
            raise bad("etcd", "the URL of a member", "none", "such as http://etcd:2379")
        self.prefix = prefix if prefix.endswith("/") else f"{prefix}/"
        self._urls = [url.rstrip("/") for url in urls]
        self._context: ssl.SSLContext | None = None
        if any(url.startswith("https") for url in urls):
            try:
                self._context = ssl.create_default_context(cafile=ca)
                if cert is not None:
                    self._context.load_cert_chain(cert, key)
            except (OSError, ssl.SSLError) as error:
                raise bad(
                    "etcd", "PEM files of ca, cert and key", f"{ca}, {cert}, {key}: {error}", "correct it"
                ) from None
        self._wrong: frozenset[str] = frozenset()

    def watch(self, stop: threading.Event) -> Iterator[Mapping[Replica, Row]]:
        """All sources, at first and after each change; raises LocalError while no member answers."""
        told: Mapping[Replica, Row] | None = None
        while not stop.is_set():
            found, revision = self.rows()
            if found != told:
                told = found
                yield found
            self._wait(revision + 1)
            stop.wait(_PACE)

    def rows(self) -> tuple[Mapping[Replica, Row], int]:
        """The row of the lowest rank of each replica, and etcd's revision; wrong ones are logged and left out."""
        answer = self.call("kv/range", key=text(self.prefix), range_end=text(end_of(self.prefix)), limit=_MOST)
        try:
            found = {
                plain(kv["key"]).decode(errors="replace"): plain(kv.get("value", "")) for kv in answer.get("kvs", [])
            }
            revision = int(answer["header"]["revision"])
        except NONSENSE as error:
            raise silent("kv/range", error) from error
        rows, wrong = read_rows(found, self.prefix)
        for name in wrong.keys() - self._wrong:
            _log.warning("a row of the directory is not used: %s", wrong[name])
        self._wrong = frozenset(wrong)
        return by_replica(rows), revision

    def call(self, what: str, **body: Any) -> dict[str, Any]:
        """The answer of the first member that gives one; raises LocalError if none does."""
        with self._open(what, body, _PATIENCE) as answer:
            try:
                said = json.loads(answer.read(_LARGEST))
                if isinstance(said, dict):
                    return said
                raise ValueError("no object")
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise silent(what, error) from error

    def _open(self, what: str, body: Mapping[str, Any], patience: float) -> http.client.HTTPResponse:
        last: Exception | None = None
        for _ in range(len(self._urls)):
            made = urllib.request.Request(
                f"{self._urls[0]}/v3/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                opened: http.client.HTTPResponse = self._opener.open(made, timeout=patience)
                return opened
            except (OSError, http.client.HTTPException) as error:
                last = error
                self._urls = [*self._urls[1:], self._urls[0]]  # ask another member first from now on
        raise silent(what, last) from last

    @property
    def _opener(self) -> urllib.request.OpenerDirector:
        """An opener that uses no proxy."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self._context))
        return urllib.request.build_opener(*handlers)

    def _wait(self, revision: int) -> None:
        """Wait for a change since a revision, or for 5 seconds; a watch that fails only ends the wait."""
        create = {"key": text(self.prefix), "range_end": text(end_of(self.prefix)), "start_revision": str(revision)}
        try:
            with self._open("watch", {"create_request": create}, _SILENCE) as changes:
                changes.readline(_LARGEST)  # it says that it watches
                json.loads(changes.readline(_LARGEST))
        except (OSError, ValueError, http.client.HTTPException):
            return


def text(value: str | bytes) -> str:
    """The form of keys and values in etcd's JSON."""
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def plain(value: str) -> bytes:
    """The bytes of a key or a value in etcd's JSON."""
    return base64.b64decode(value)


def end_of(prefix: str) -> bytes:
    """The end of the range of all keys with a prefix."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])


def silent(what: str, error: Exception | None) -> LocalError:
    """The error of a call that etcd has not answered, or with nonsense."""
    mine, advice = f"an answer to {what}", "see whether etcd runs; the sources known so far stay"
    return LocalError(
        ErrorCode.ABORTED, "etcd", mine, repr(error) if isinstance(error, NONSENSE) else str(error), advice
    )
