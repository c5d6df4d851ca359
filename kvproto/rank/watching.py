"""A node that watches which cached pages each rank of source replicas has, driven by `kvproto.rank.driver`."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from kvproto.errors import KvprotoError
from kvproto.net import Dialer
from kvproto.session import Party
from kvproto.session.watching import WatchEndpoint

__all__ = ["WatchNode"]

_TURN = 0.001
"""Seconds after which a turn stops receiving."""


class WatchNode:
    """Sessions with any number of source replicas."""

    def __init__(self, party: Party, dialer: Dialer) -> None:
        self._party, self._dialer = party, dialer
        self.endpoints: dict[str, WatchEndpoint] = {}
        """Endpoints by the address that `watch` was given."""
        self._servers: dict[str, bytes | None] = {}

    def watch(self, address: str, server: bytes | None = None) -> None:
        """Watch the replica with a rank that listens at `address`; `server` is its public key."""
        if address not in self.endpoints:
            made = self.endpoints[address] = WatchEndpoint(self._party, address)
            made.advice, self._servers[address] = self._dialer.names.advice, server
            made.dial(time.monotonic())

    def turn(self, ready: Collection[int] = ()) -> list[Any]:
        """Receive and send; return the events."""
        self._flush()
        now = time.monotonic()
        for conn, frame in self._dialer.receive():
            self.endpoints[conn[0]].receive(conn[1], frame, now)
            if time.monotonic() - now > _TURN:
                break
        for conn, error in self._dialer.refusals():
            self.endpoints[conn[0]].refused = error
        for conn in self._dialer.returned(ready):
            self.endpoints[conn[0]].returned(conn[1], now)
        found: list[Any] = []
        for endpoint in self.endpoints.values():
            endpoint.on_time(now)
            found += endpoint.take_events()
        self._flush()
        return found

    def filenos(self) -> list[int]:
        """Descriptors that are readable when a turn has something to do."""
        return list(self._dialer.filenos())

    def timeout(self) -> float | None:
        """Seconds until a turn is due even if no descriptor is readable; None if no timer is set."""
        if self._dialer.pending:
            return 0.0
        due = [at for endpoint in self.endpoints.values() if (at := endpoint.next_deadline()) is not None]
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _flush(self) -> None:
        now = time.monotonic()
        for name, endpoint in self.endpoints.items():
            for address, frame in endpoint.to_send(now):
                try:
                    self._dialer.send((name, address), frame, self._servers[name])
                except KvprotoError as error:  # an address in Welcome that cannot be used
                    endpoint.refused = error

    def close(self, reason: str) -> None:
        """Say Goodbye to all replicas."""
        for endpoint in self.endpoints.values():
            endpoint.goodbye(reason)
        self._flush()
        self._dialer.close()
