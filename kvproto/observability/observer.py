"""The observer of one Source or Sink, which passes its events to counts, the logger `kvproto.events`, and a feed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import attrs

from kvproto.errors import KvprotoError
from kvproto.events import Connected, Event
from kvproto.observability.counts import Counts, MetricSample
from kvproto.observability.feed import FeedServer
from kvproto.observability.records import RECORDS, Record, level_of, of_peers, record_of, shown

__all__ = ["Observer"]

_log = logging.getLogger("kvproto.events")
_log.addHandler(logging.NullHandler())  # silent until the engine configures logging

_MOST = 20
"""The most records per second about what peers do, so that no peer can fill a disk."""


@attrs.define
class Observer:
    """Receives each event once, under the node's lock."""

    base: dict[str, str]
    """The labels of every metric, which are also fields of every record."""
    gauges: Callable[[], Iterable[MetricSample]]
    """Returns the values of gauges now; to be called under the node's lock."""
    counts: Counts | None = None
    feed: FeedServer | None = None
    _second: int = 0
    _written: int = 0
    _left_out: int = 0

    def hear(self, event: Event) -> None:
        """Count an event, log it, and pass it on to the feed."""
        if self.counts is not None:
            self.counts.hear(event)
        level, followed = RECORDS[type(event)][0], self.feed is not None and self.feed.followed
        if isinstance(event, Connected):
            level = level_of(event)
        if not (_log.isEnabledFor(level) or followed) or (isinstance(event, of_peers) and self._too_many()):
            return
        record: Record = {**self.base, **record_of(event)}
        if self._left_out:
            record["left_out"], self._left_out = self._left_out, 0
        self._write(level, record)

    def failed(self, error: BaseException) -> None:
        """Log the error after which no further turn is possible."""
        said = repr(error) if not isinstance(error, KvprotoError) else error
        self._write(logging.CRITICAL, {**self.base, "event": "failed", "error": shown(said)})

    def draining(self) -> None:
        """Log that the Source or Sink is draining."""
        self._write(logging.INFO, {**self.base, "event": "draining"})

    def samples(self) -> list[MetricSample]:
        """All metrics; to be called under the node's lock."""
        counted = [] if self.counts is None else self.counts.samples(self.base)
        return [*counted, *self.gauges()]

    def start(self) -> None:
        """Start the feed, if there is one."""
        if self.feed is not None:
            self.feed.start()

    def close(self) -> None:
        """Close the feed, if there is one."""
        if self.feed is not None:
            self.feed.close()

    def _write(self, level: int, record: Record) -> None:
        if _log.isEnabledFor(level):
            _log.log(level, "%s", _LogLine(record), extra=record)
        if self.feed is not None and self.feed.followed:
            self.feed.publish({"kind": "event", "time": time.time(), "level": logging.getLevelName(level), **record})

    def _too_many(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._written = second, 0
        self._written += 1
        self._left_out += self._written > _MOST
        return self._written > _MOST


@attrs.frozen
class _LogLine:
    """A record that is formatted as text only if a handler needs it."""

    record: Record

    def __str__(self) -> str:
        event, rest = self.record["event"], {k: v for k, v in self.record.items() if k != "event"}
        return f"{event} {' '.join(f'{name}={_quoted(value)}' for name, value in rest.items())}"


def _quoted(value: object) -> str:
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    return repr(text) if not text or set(text) & set(" ='\"") else text
