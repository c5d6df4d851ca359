"""An event as a record of plain fields, for logs and feeds, without secrets or terminal control characters.

Every record names the engine, replica, rank and role that it comes from. Events of a request identify it by `transfer`
(KVP-SEE-ID), which is the same on all ranks of both sides.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import attrs

from kvproto import events as e
from kvproto.errors import KvprotoError
from kvproto.events import Connected, Event
from kvproto.observability.counts import Counts, MetricSample
from kvproto.observability.feed import FeedServer

if TYPE_CHECKING:
    from kvproto.sink import Fetch
    from kvproto.source import Request

__all__ = ["RECORDS", "Observer", "Record", "level_of", "of_peers", "record_of", "shown", "transfer_name"]

Record = dict[str, Any]
_LONGEST = 300
_WORDS = re.compile(r"(?<!^)(?=[A-Z])")
_ADDRESS = re.compile(r"\b(ipc|tcp)://[^\s,;)\"']*[^\s,;:)\"']")  # without the colon of the sentence behind it


def level_of(event: e.Event) -> int:
    """The level of an event's record: that of its class, and WARNING for a peer whose model may be another."""
    doubtful = isinstance(event, e.Connected) and (event.warnings or event.unstated)
    return logging.WARNING if doubtful else RECORDS[type(event)][0]


of_peers = (e.Connected, e.Disconnected, e.Suspected, e.Recovered, e.Refused, e.ProtocolError, e.Declined)
"""Events that a peer can cause as often as it likes."""


def transfer_name(key: bytes) -> str:
    """The name in logs of the transfer of a ticket's key (KVP-SEE-ID)."""
    return sha256(key).digest()[:8].hex()


def record_of(event: e.Event) -> Record:
    """The fields of an event's record."""
    return {"event": _WORDS.sub("_", type(event).__name__).lower(), **RECORDS[type(event)][1](event)}


def shown(text: object) -> str:
    """Text of a peer or an error for display: one short line without addresses (KVP-SEE-TEXT, KVP-SECRET-LOG)."""
    said = _ADDRESS.sub(r"\1://(hidden)", str(text))
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
    return said if said.isprintable() else said.encode("unicode_escape").decode()


def _fetch(fetch: Fetch) -> Record:
    ticket = fetch.ticket
    peer = f"{ticket.engine} replica {ticket.replica}" if ticket.replica else ticket.engine
    return {"transfer": transfer_name(bytes(ticket.key)), "peer": shown(peer), "epoch": fetch.epoch}


def _request(request: Request) -> Record:
    return {"transfer": transfer_name(bytes(request.ticket.key))}


def _error(error: KvprotoError) -> Record:
    return {"code": error.code.name, "path": shown(error.path), "error": shown(error)}


def _arrived(event: e.Arrived) -> Record:
    return {**_fetch(event.fetch), "bytes": sum(event.bytes.values()), "seconds": event.seconds}


def _sent(event: e.Sent) -> Record:
    about = {"peer": shown(event.peer), "epoch": event.epoch}
    return {**_request(event.request), **about, "bytes": sum(event.bytes.values()), "seconds": event.seconds}


def _lost(event: e.Lost) -> Record:
    return {**_fetch(event.fetch), **_error(event.error), "pages_free": event.pages_free}


def _undelivered(event: e.Undelivered) -> Record:
    rank, error = next(iter(event.lost.items()))
    return {**_request(event.request), "ranks": sorted(event.lost), "rank_of_error": rank, **_error(error)}


def _connected(event: e.Connected) -> Record:
    record = {"peer": shown(event.peer)}
    if event.warnings:
        record["differ"] = shown(", ".join(f"{name} {a} / {b}" for name, a, b in event.warnings))
    if event.unstated:
        record["not_compared"] = shown(", ".join(event.unstated))
    return record


def _closed(event: e.Disconnected) -> Record:
    return {"peer": shown(event.peer), "reason": shown(event.reason)}


def _refused(event: e.Refused) -> Record:
    return {"peer": shown(event.peer), "by": "us" if event.by_us else "peer", **_error(event.error)}


def _declined(event: e.Declined) -> Record:
    return {**_request(event.request), "peer": shown(event.peer), **_error(event.error)}


RECORDS: dict[type, tuple[int, Callable[[Any], Record]]] = {
    e.Arrived: (logging.DEBUG, _arrived),
    e.PagesFree: (logging.INFO, lambda event: _fetch(event.fetch)),
    e.PoolFree: (logging.INFO, lambda event: {"epoch": event.withdrawal.epoch}),
    e.PagesWanted: (logging.DEBUG, lambda event: {**_fetch(event.fetch), "tokens": event.tokens}),
    e.Lost: (logging.WARNING, _lost),
    e.Sent: (logging.DEBUG, _sent),
    e.Unwanted: (logging.INFO, lambda event: _request(event.request)),
    e.Declined: (logging.WARNING, _declined),
    e.Freed: (logging.DEBUG, lambda event: _request(event.request)),
    e.Undelivered: (logging.WARNING, _undelivered),
    e.Expired: (logging.WARNING, lambda event: _request(event.request)),
    e.Connected: (logging.INFO, _connected),
    e.Disconnected: (logging.INFO, _closed),
    e.Suspected: (logging.WARNING, lambda event: {"peer": shown(event.peer)}),
    e.Recovered: (logging.INFO, lambda event: {"peer": shown(event.peer)}),
    e.Refused: (logging.WARNING, _refused),
    e.ProtocolError: (logging.WARNING, lambda event: {"peer": shown(event.peer), **_error(event.error)}),
}
"""The level and the fields of each event's record; the normal course of a request is DEBUG."""


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
