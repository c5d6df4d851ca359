"""A feed of metrics and events for users on the same host, which `kvproto top` and `kvproto tail` follow.

It is a Unix socket in a directory that only this user can enter. Each line is a JSON object whose `kind` is "metrics",
with `samples` and the `sessions` that are open, once a second, or "event", with the fields of the record. The feed is
only written: a follower that sends anything is disconnected, so that nothing can be changed through it. A slow follower
loses lines, and is told how many, but holds nothing up.
"""

import contextlib
import json
import os
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from kvproto.errors import LocalError, bad
from kvproto.net import check_address
from kvproto.observability.counts import MetricSample

_FOLLOWERS = 8
_KEPT = 1 << 20
"""The most bytes that wait for one follower."""
_EVENTS = 4096
_SESSIONS = 256
"""The most sessions in a line."""
_EVERY = 1.0


@attrs.define(eq=False)
class _Follower:
    conn: socket.socket
    waiting: bytearray = attrs.Factory(bytearray)
    lost: int = 0
    """The number of lines that it was too slow for."""

    def add(self, line: bytes) -> None:
        if len(self.waiting) + len(line) > _KEPT:
            self.lost += 1
            return
        if self.lost:
            self.waiting += _line({"kind": "lost", "lines": self.lost})
            self.lost = 0
        self.waiting += line


class FeedServer:
    """The feed of one rank, written by a separate thread."""

    def __init__(
        self, path: str | Path, ask: Callable[[], list[MetricSample]], sessions: Callable[[], Iterable[Any]] = list
    ) -> None:
        """Listen at `path`; `ask` returns metrics, then `sessions` records of peers. Raises LocalError."""
        self._path, self._ask, self._sessions, self._pid = str(path), ask, sessions, os.getpid()
        self._listener = _listen(self._path)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._followers: dict[int, _Follower] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._due = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kvproto feed {self._path}", daemon=True)

    def start(self) -> None:
        """Start to write; from now on, `ask` may be called."""
        self._thread.start()

    @property
    def followed(self) -> bool:
        return bool(self._followers)

    def publish(self, event: dict[str, Any]) -> None:
        """Pass on an event, without waiting."""
        self._events.append(event)
        self._wake()

    def close(self) -> None:
        """End all connections and remove the socket; does nothing in a forked process, which shares it."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        for follower in self._followers.values():
            follower.conn.close()
        self._listener.close()
        os.close(self._wakeup)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    # in the thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while True:
                wait = max(self._due - time.monotonic(), 0.0) if self._followers else None
                for key, ready in selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fd == self._wakeup:
                        os.eventfd_read(self._wakeup)
                    elif ready & selectors.EVENT_READ:  # the follower has closed, or sent something
                        self._drop(selector, key.fd)
                last = self._closed  # as it is now: what came before the end is published in the round that is the last
                self._publish_all(last)
                for fd, follower in list(self._followers.items()):
                    self._write(selector, fd, follower)
                if last:
                    return

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            conn, _ = self._listener.accept()
        except BlockingIOError:  # the follower is gone again
            return
        except OSError:  # no descriptor is free: wait until one is
            time.sleep(_EVERY / 10)
            return
        if len(self._followers) >= _FOLLOWERS:
            conn.close()
            return
        conn.setblocking(False)
        self._followers[conn.fileno()] = _Follower(conn)
        selector.register(conn, selectors.EVENT_READ)
        self._due = 0.0

    def _publish_all(self, last: bool) -> None:
        lines = []
        while self._events:
            lines.append(_line(self._events.popleft()))
        if self._followers and (last or time.monotonic() >= self._due):
            self._due = time.monotonic() + _EVERY
            told = {"samples": self._ask(), "sessions": list(self._sessions())[:_SESSIONS]}
            lines.append(_line({"kind": "metrics", "time": time.time(), **told}))
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
    """A socket at `path`, replacing one that an earlier process left behind; raises LocalError."""
    try:
        check_address(f"ipc://{path}", keyed=False, insecure=False)
    except LocalError as error:
        mine = error.mine.replace("ipc:// and ", "")
        raise LocalError(error.code, "Options.feed", mine, error.yours, error.advice) from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if os.path.lexists(path):
            _clear(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_FOLLOWERS)
    except OSError as error:
        listener.close()
        raise _bad("a path at which to listen", f"{path}: {error.strerror}") from error
    except LocalError:
        listener.close()
        raise
    return listener


def _clear(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise _bad("a path that is free", f"{path}, a file that is no socket")
    with socket.socket(socket.AF_UNIX) as other:
        if other.connect_ex(path) == 0:
            raise _bad("a path that is free", f"{path}, the feed of another process or rank")
    os.unlink(path)


def _bad(mine: str, yours: str) -> LocalError:
    return bad("Options.feed", mine, yours, "name another, such as feed-{rank}")
