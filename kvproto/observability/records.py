"""The observer of a Source or Sink: counts, the logger `kvproto.events`, and a feed (KVP-SEE-ID, KVP-SEE-TEXT)."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import attrs

from kvproto import events as e
from kvproto.errors import KvprotoError, printable
from kvproto.observability.counts import Counts, MetricSample
from kvproto.observability.feed import FeedServer

if TYPE_CHECKING:
    from kvproto.sink import Fetch

Record = dict[str, Any]
_LONGEST = 300
_WORDS = re.compile(r"(?<!^)(?=[A-Z])")
_ADDRESS = re.compile(r"\b(ipc|tcp)://[^\s,;)\"']*[^\s,;:)\"']")  # without the colon of the sentence behind it


_OF_PEERS = (e.Connected, e.Disconnected, e.Suspected, e.Recovered, e.Refused, e.ProtocolError, e.Declined)
"""Events that a peer can cause as often as it likes."""


def transfer_name(key: bytes) -> str:
    """The name in logs of the transfer of a ticket's key (KVP-SEE-ID)."""
    return sha256(key).digest()[:8].hex()


def record_of(event: e.Event) -> Record:
    """The fields of an event's record."""
    record: Record = {"event": _WORDS.sub("_", type(event).__name__).lower()}
    for name in RECORDS[type(event)][1]:
        value = getattr(event, name)
        record |= _FIELDS[name](value) if name in _FIELDS else {name: value}
    return record


def shown(text: object) -> str:
    """Text of a peer or an error for display: one short line without addresses (KVP-SEE-TEXT, KVP-SECRET-LOG)."""
    said = _ADDRESS.sub(r"\1://(hidden)", str(text))
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
    return printable(said)


def _fetch(fetch: Fetch) -> Record:
    ticket = fetch.ticket
    peer = f"{ticket.engine} replica {ticket.replica}" if ticket.replica else ticket.engine
    return {"transfer": transfer_name(bytes(ticket.key)), "peer": shown(peer), "epoch": fetch.epoch}


def _error(error: KvprotoError) -> Record:
    return {"code": error.code.name, "path": shown(error.path), "error": shown(error)}


def _lost(lost: Mapping[int, KvprotoError]) -> Record:
    rank, error = next(iter(lost.items()))
    return {"ranks": sorted(lost), "rank_of_error": rank, **_error(error)}


_FIELDS: dict[str, Callable[[Any], Record]] = {
    "fetch": _fetch,
    "request": lambda request: {"transfer": transfer_name(bytes(request.ticket.key))},
    "withdrawal": lambda withdrawal: {"epoch": withdrawal.epoch},
    "error": _error,
    "lost": _lost,
    "bytes": lambda sizes: {"bytes": sum(sizes.values())},
    "peer": lambda peer: {"peer": shown(peer)},
    "reason": lambda reason: {"reason": shown(reason)},
    "by_us": lambda by_us: {"by": "us" if by_us else "peer"},
    "features": lambda names: {"features": shown(",".join(names))},
    "transports": lambda names: {"transports": ",".join(names)} if names else {},
    "warnings": lambda facts: {"differ": shown(", ".join(f"{n} {a} / {b}" for n, a, b in facts))} if facts else {},
    "unstated": lambda facts: {"not_compared": shown(", ".join(facts))} if facts else {},
}
"""The fields of a record that show an attribute of an event; others are shown as they are."""
RECORDS: dict[type, tuple[int, tuple[str, ...]]] = {
    e.Arrived: (logging.DEBUG, ("fetch", "bytes", "seconds")),
    e.PagesFree: (logging.INFO, ("fetch",)),
    e.PoolFree: (logging.INFO, ("withdrawal",)),
    e.PagesWanted: (logging.DEBUG, ("fetch", "tokens")),
    e.Lost: (logging.WARNING, ("fetch", "error", "pages_free")),
    e.Sent: (logging.DEBUG, ("request", "peer", "epoch", "bytes", "seconds")),
    e.Unwanted: (logging.INFO, ("request",)),
    e.Declined: (logging.WARNING, ("request", "peer", "error")),
    e.Freed: (logging.DEBUG, ("request",)),
    e.Undelivered: (logging.WARNING, ("request", "lost")),
    e.Expired: (logging.WARNING, ("request",)),
    e.Connected: (logging.INFO, ("peer", "version", "features", "transports", "warnings", "unstated")),
    e.Disconnected: (logging.INFO, ("peer", "reason")),
    e.Suspected: (logging.WARNING, ("peer",)),
    e.Recovered: (logging.INFO, ("peer",)),
    e.Refused: (logging.WARNING, ("peer", "by_us", "error")),
    e.ProtocolError: (logging.WARNING, ("peer", "error")),
}
"""The level of each event's record, and the attributes that it shows; the normal course of a request is DEBUG."""
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
    sessions: dict[str, Record] = attrs.Factory(dict)
    """The record of each peer that is connected."""
    _second: int = 0
    _written: int = 0
    _left_out: int = 0

    def hear(self, event: e.Event) -> None:
        """Count an event, log it, and pass it on to the feed."""
        if self.counts is not None:
            self.counts.hear(event)
        if isinstance(event, e.Connected) and self.feed is not None:
            self.sessions[event.peer] = record_of(event)
        level, followed = RECORDS[type(event)][0], self.feed is not None and self.feed.followed
        if isinstance(event, e.Connected) and (event.warnings or event.unstated):
            level = logging.WARNING  # the peer's model may be another
        if not (_log.isEnabledFor(level) or followed) or (isinstance(event, _OF_PEERS) and self._too_many()):
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
        self._write(logging.INFO, {**self.base, "event": "draining"})

    def samples(self) -> list[MetricSample]:
        """All metrics; to be called under the node's lock."""
        counted = [] if self.counts is None else self.counts.samples(self.base)
        return [*counted, *self.gauges()]

    def keep(self, names: Container[str]) -> None:
        self.sessions = {peer: record for peer, record in self.sessions.items() if peer in names}

    def start(self) -> None:
        if self.feed is not None:
            self.feed.start()

    def close(self) -> None:
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
