"""Sources that sinks follow: a directory says where to look, and sessions say who lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Protocol

import attrs

from kvproto import KvprotoError, Seed, Sink
from kvproto.net import encrypted
from kvproto.observability.records import shown
from kvproto_discovery.rows import Replica, Row

__all__ = ["Directory", "FoundSources"]

_log = logging.getLogger("kvproto.discovery")
_TURN = 0.25
"""Seconds between looks at the sinks."""
_AGAIN, _LONGEST = 1.0, 15.0
"""Seconds before a source that has moved is dialled elsewhere once more: at first, doubled each time, and at most."""
_MOST = 4096
"""The most source replicas that are followed."""


class Directory(Protocol):
    """A place in which sources can be looked up."""

    def watch(self, stop: threading.Event) -> Iterator[Mapping[Replica, Row]]:
        """All sources, at first and after each change, until `stop` is set; raises KvprotoError if it cannot tell."""


@attrs.define
class _Dialled:
    """The source replica that a sink was last told to dial."""

    seed: Seed | None = None
    """None: it was disconnected."""
    next: float = 0.0
    """The earliest time of another dial, by time.monotonic."""
    pause: float = _AGAIN


class FoundSources(Mapping[Replica, Seed]):
    """The sources that a directory names, by engine and replica; empty until `follow`.

    A row that is new is dialled. A row that has changed or gone is not acted upon while the sink has a live session
    with that source, so that a directory which fails or lies ends nothing that works. A source that has gone from the
    directory, and whose session has ended, is disconnected once its fetches are over.
    """

    def __init__(self, directory: Directory, keys: Collection[str] | None = None) -> None:
        """Rows in the clear, or with a key other than `keys`, are never dialled (None: the directory is believed)."""
        self._directory, self._keys = directory, keys
        self._rows: Mapping[Replica, Row] = {}
        self._stop, self._changed = threading.Event(), threading.Event()
        self._dialled: dict[tuple[Sink, Replica], _Dialled] = {}
        self._believed = False
        """Whether it was said that keys are believed."""
        self._told: dict[Replica, str] = {}
        """The last warning about each row."""
        self.why = "the directory has not answered yet"
        """The reason that the directory cannot tell; empty if it can."""

    def __getitem__(self, replica: Replica) -> Seed:
        return self._rows[replica].seed

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def replicas(self, engine: str) -> int:
        """The number of replicas that an engine has, as its rows state it; 1 if none is known."""
        rows = [row for row in self._rows.values() if row.engine == engine]
        return max((max(row.replicas, row.replica + 1) for row in rows), default=1)

    def follow(self, *sinks: Sink) -> None:
        """Connect these sinks to what the directory names from now on, in threads of its own, until `close`."""
        for call, name in ((self._watch, "watch"), (lambda: self._run(sinks), "follow")):
            threading.Thread(target=call, name=f"kvproto {name} sources", daemon=True).start()

    def close(self) -> None:
        """Follow no longer; sinks stay connected."""
        self._stop.set()
        self._changed.set()

    def _watch(self) -> None:
        pause = _AGAIN
        while not self._stop.is_set():
            try:
                for rows in self._directory.watch(self._stop):
                    self._take(rows)
                    pause = _AGAIN
            except KvprotoError as error:
                if (why := shown(error)) != self.why:
                    self.why = why
                    _log.warning("the directory does not answer, and %d sources stay: %s", len(self._rows), why)
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST)

    def _take(self, rows: Mapping[Replica, Row]) -> None:
        if len(rows) > _MOST:
            _log.warning("the directory has %d sources, of which %d are followed", len(rows), _MOST)
        known = dict(sorted(rows.items())[:_MOST])
        if self._keys is not None:
            for replica, row in list(known.items()):
                if row.key not in self._keys or not encrypted(row.address):
                    what = "address is not encrypted" if row.key in self._keys else "key is not one of source_keys"
                    self._warn(replica, f"its {what}, so it is not dialled")
                    del known[replica]
        elif not self._believed and any(row.key for row in known.values()):
            self._believed = True
            _log.warning("whoever writes into the directory says which keys sources have: state them (source_keys)")
        if self.why and self._rows:
            _log.info("the directory answers again")
        self._rows, self.why = known, ""
        self._changed.set()

    def _run(self, sinks: tuple[Sink, ...]) -> None:
        while not self._stop.is_set():
            rows, now = self._rows, time.monotonic()
            for sink in sinks:
                if sink.failure is None:
                    self._settle(sink, rows, now)
            self._changed.wait(_TURN)
            self._changed.clear()

    def _settle(self, sink: Sink, rows: Mapping[Replica, Row], now: float) -> None:
        """Have a sink dial and leave what it should."""
        ready = sink.ready
        for replica in ready:
            if (dialled := self._dialled.get((sink, replica))) is not None:
                dialled.pause = _AGAIN
        for replica, row in rows.items():
            dialled = self._dialled.setdefault((sink, replica), _Dialled())
            if dialled.seed != row.seed and replica not in ready and now >= dialled.next:
                self._dial(sink, replica, row.seed, dialled, now)
        for (other, replica), dialled in list(self._dialled.items()):
            if other is not sink or replica in rows or replica in ready:
                continue
            if dialled.seed is not None:
                dialled.seed = None
                _log.info("%s/%d has left the directory", *replica)
                self._told.pop(replica, None)
                self._call(replica, partial(sink.disconnect, *replica, idle=True))
            elif now >= dialled.next:  # nothing is left to remember
                del self._dialled[sink, replica]

    def _dial(self, sink: Sink, replica: Replica, seed: Seed, dialled: _Dialled, now: float) -> None:
        _log.info("%s/%d %s", *replica, "is in the directory" if dialled.seed is None else "has moved")
        dialled.seed, dialled.next = seed, now + dialled.pause
        dialled.pause = min(2 * dialled.pause, _LONGEST)
        if not self._call(replica, partial(sink.connect, *replica, address=seed.address, key=seed.key)):
            dialled.seed = None

    def _call(self, replica: Replica, call: Callable[[], None]) -> bool:
        """Whether a sink has taken a call; the error is logged otherwise."""
        try:
            call()
        except KvprotoError as error:
            self._warn(replica, shown(error))
            return False
        return True

    def _warn(self, replica: Replica, why: str) -> None:
        if self._told.get(replica) != why:
            self._told[replica] = why
            _log.warning("the row of %s/%d is not used: %s", *replica, why)
