"""Feeds of Sources and Sinks, followed at their sockets or read from a saved file."""

from __future__ import annotations

import os
import selectors
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvproto.observability.names import BASE, BUCKETS
from kvproto.wire.plain import read_json

__all__ = ["FeedReader", "Line", "line_text", "lines_of", "plain"]

Line = dict[str, Any]
_LONGEST = 1 << 20
"""The most bytes in a line."""


@attrs.define(eq=False)
class FeedReader:
    """A feed that is followed, or read from a file."""

    path: str
    file: Any
    live: bool
    rest: bytes = b""
    ended: bool = False

    @classmethod
    def open(cls, path: str, selector: selectors.BaseSelector) -> FeedReader:
        """Open a socket, which is registered with the selector, or a file; raises OSError."""
        path = path.removeprefix("ipc://")
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return cls(path, open(path, "rb"), False)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise OSError(f"{path}: {error.strerror}: it has no writer, or eight followers already") from error
        feed = cls(path, connection, True)
        selector.register(connection, selectors.EVENT_READ, feed)
        return feed

    def take(self) -> Iterator[Line]:
        """The lines that have come; raises ValueError if this is not a feed."""
        try:
            data = self.file.recv(1 << 16) if self.live else self.file.read(1 << 16)
        except ConnectionResetError:
            data = b""
        self.ended = not data
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST:
            raise ValueError(f"{self.path}: a line is longer than {_LONGEST} bytes: this is no feed of kvproto")
        for text in filter(None, lines):
            line = read_json(text, self.path)
            if not _is_line(line):
                raise ValueError(f"{self.path}: this is no feed of kvproto")
            yield line


def _is_line(line: Any) -> bool:
    """Whether an object has the form of a line in a feed."""
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind == "metrics":
        samples = line.get("samples")
        return _is_number(line.get("time")) and isinstance(samples, list) and all(map(_is_sample, samples))
    return kind == "lost" or (kind == "event" and _is_number(line.get("time")))


def _is_sample(sample: Any) -> bool:
    if not isinstance(sample, dict) or not isinstance(sample.get("name"), str):
        return False
    labels, value = sample.get("labels"), sample.get("value")
    numbers = value if isinstance(value, list) and len(value) == len(BUCKETS) + 2 else [value]
    return isinstance(labels, dict) and set(BASE) <= labels.keys() and all(map(_is_number, numbers))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


def lines_of(
    feeds: Sequence[FeedReader], selector: selectors.BaseSelector, until: float | None
) -> Iterator[tuple[FeedReader, Line]]:
    """The lines of all feeds as they come, until a time of `time.monotonic`, if given, or until all have ended."""
    for feed in feeds:
        while not (feed.live or feed.ended):
            yield from ((feed, line) for line in feed.take())
    while not all(feed.ended for feed in feeds):
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            return
        for key, _ in selector.select(left):
            yield from ((key.data, line) for line in key.data.take())
            if key.data.ended:
                selector.unregister(key.fileobj)


def line_text(line: Line) -> str:
    """A line as text: time, level, event, then its other fields."""
    if line["kind"] == "lost":
        return plain(f"... {line.get('lines')} lines were lost, as this was too slow")
    clock = time.strftime("%H:%M:%S", time.localtime(float(line.get("time", 0))))
    who = f"{line.get('engine')}/{line.get('replica')}/{line.get('rank')}"
    rest = {k: v for k, v in line.items() if k not in ("kind", "time", "level", "event", *BASE)}
    fields = " ".join(f"{k}={v:.6f}" if isinstance(v, float) else f"{k}={v}" for k, v in rest.items())
    return plain(f"{clock} {line.get('level'):<7} {who} {line.get('role')} {line.get('event')} {fields}".rstrip())


def plain(text: str) -> str:
    """Text on one line, with escapes in place of terminal control characters (KVP-SEE-TEXT)."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
