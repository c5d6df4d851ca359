"""A feed of metrics and events for people on the same host: `kvproto top` and `kvproto tail` follow it.

A Unix socket in a directory that only this user may enter. Each line is a JSON object: `kind` is "metrics", with
`samples`, once a second, or "event", with the fields of the record. It is written and never read: what a follower
sends ends its connection, so nothing can be changed here. A follower that is slow loses lines, and is told how many;
it holds nobody up.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import LocalError
from kvproto.net import check_address
from kvproto.seeing.counts import Sample
from kvproto.wire.enums import ErrorCode

__all__ = ["Feed"]

_FOLLOWERS = 8
_KEPT = 1 << 20
"""Bytes that wait for one follower, at most."""
_EVENTS = 4096
_EVERY = 1.0


@attrs.define(eq=False)
class _Follower:
    conn: socket.socket
    waiting: bytearray = attrs.Factory(bytearray)
    lost: int = 0
    """Lines that it was too slow for."""

    def add(self, line: bytes) -> None:
        if len(self.waiting) + len(line) > _KEPT:
            self.lost += 1
            return
        if self.lost:
            self.waiting += _line({"kind": "lost", "lines": self.lost})
            self.lost = 0
        self.waiting += line


class Feed:
    """One rank's feed, written by a thread of its own."""

    def __init__(self, path: str | Path, ask: Callable[[], list[Sample]]) -> None:
        """Listen at `path`; raises LocalError where that cannot be. `ask` gives the metrics."""
        self._path, self._ask, self._pid = str(path), ask, os.getpid()
        self._listener = _listen(self._path)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._followers: dict[int, _Follower] = {}
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._due = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvproto feed {self._path}", daemon=True)

    def start(self) -> None:
        """Begin to write; `ask` may be called from now on."""
        self._thread.start()

    @property
    def followed(self) -> bool:
        """Whether anybody follows."""
        return bool(self._followers)

    def tell(self, event: dict[str, Any]) -> None:
        """Pass an event on; never waits."""
        self._events.append(event)
        self._ring()

    def close(self) -> None:
        """End all connections and remove the socket; in a fork, which shares it, nothing happens."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join()
        for follower in self._followers.values():
            follower.conn.close()
        self._listener.close()
        os.close(self._bell)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    # its thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            while True:
                wait = max(self._due - time.monotonic(), 0.0) if self._followers else None
                for key, ready in selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fd == self._bell:
                        os.eventfd_read(self._bell)
                    elif ready & selectors.EVENT_READ:  # it has closed, or says what nobody asked for
                        self._drop(selector, key.fd)
                self._tell_all()
                for fd, follower in list(self._followers.items()):
                    self._write(selector, fd, follower)
                if self._closed:
                    return

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            conn, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # no descriptors are left: others may end
            time.sleep(_EVERY / 10)
            return
        if len(self._followers) >= _FOLLOWERS:
            conn.close()
            return
        conn.setblocking(False)
        self._followers[conn.fileno()] = _Follower(conn)
        selector.register(conn, selectors.EVENT_READ)
        self._due = 0.0

    def _tell_all(self) -> None:
        lines = []
        while self._events:
            lines.append(_line(self._events.popleft()))
        if self._followers and (self._closed or time.monotonic() >= self._due):
            self._due = time.monotonic() + _EVERY
            lines.append(_line({"kind": "metrics", "time": time.time(), "samples": self._ask()}))
        for follower in self._followers.values():
            for line in lines:
                follower.add(line)

    def _write(self, selector: selectors.BaseSelector, fd: int, follower: _Follower) -> None:
        try:
            while follower.waiting:
                del follower.waiting[: follower.conn.send(follower.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(selector, fd)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if follower.waiting else 0)
        if selector.get_key(fd).events != wanted:
            selector.modify(fd, wanted)

    def _drop(self, selector: selectors.BaseSelector, fd: int) -> None:
        selector.unregister(fd)
        self._followers.pop(fd).conn.close()


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _listen(path: str) -> socket.socket:
    """A socket there, in place of one that a process left behind; raises LocalError."""
    try:
        check_address(f"ipc://{path}", keyed=False, insecure=False)
    except LocalError as error:
        raise LocalError(
            error.code, "Options.feed", error.mine.replace("ipc:// and ", ""), error.yours, error.advice
        ) from error
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if os.path.lexists(path):
            _clear(path)
        made.bind(path)
        os.chmod(path, 0o600)
        made.listen(_FOLLOWERS)
    except OSError as error:
        made.close()
        raise _bad("a path at which to listen", f"{path}: {error.strerror}") from error
    except LocalError:
        made.close()
        raise
    return made


def _clear(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise _bad("a path that is free", f"{path}, a file that is no socket")
    with socket.socket(socket.AF_UNIX) as other:
        if other.connect_ex(path) == 0:
            raise _bad("a path that is free", f"{path}, the feed of another process or rank")
    os.unlink(path)


def _bad(mine: str, yours: str) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, "Options.feed", mine, yours, "name another, such as feed-{rank}")
