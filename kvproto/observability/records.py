"""An event as a record of plain fields, for logs and feeds, without secrets or terminal control characters.

Every record names the engine, replica, rank and role that it comes from. Events of a request identify it by `transfer`
(KVP-SEE-ID), which is the same on all ranks of both sides.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kvproto import events as e
from kvproto.errors import KvprotoError

if TYPE_CHECKING:
    from kvproto.sink import Fetch
    from kvproto.source import Request

__all__ = ["RECORDS", "Record", "level_of", "of_peers", "record_of", "shown", "transfer_name"]

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
