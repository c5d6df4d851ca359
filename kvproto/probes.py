"""Probes over HTTP, for Kubernetes and the like: whether Sources and Sinks are alive and ready, and their metrics.

    with Probes("0.0.0.0:9400", sink): ...

| request | answer |
|---|---|
| `GET /live` | 200, or 503 once an I/O thread has ended by an error, so that only a restart helps |
| `GET /ready` | 200 if every rank may be sent requests, else 503; why not is in JSON, by rank and by source |
| `GET /metrics` | Prometheus's text, of ranks with Options(metrics=True); needs `pip install 'kvproto[metrics]'` |
| `POST /drain` | from this host alone: `drain`, then 200 when all is finished, or 504 after `?seconds=` (25) |

What peers have said appears as one line of bounded length.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvproto.closing import Closing
from kvproto.errors import bad
from kvproto.observability.records import shown
from kvproto.rank.base import EngineRank
from kvproto.sink import Sink

__all__ = ["Probes"]

_MOST = 16
"""The most requests that are answered at once; others are closed."""
_PATIENCE = 5.0
"""Seconds that a client may be silent."""
_DRAIN = 25.0
"""Seconds that a client waits for the end of what is under way, unless it says otherwise: Kubernetes grants 30."""


class Probes(Closing):
    """An HTTP server for the probes of Sources and Sinks of one process, in threads of its own, until `close`."""

    def __init__(self, address: str, *ranks: EngineRank) -> None:
        """Listen at "HOST:PORT"; raises LocalError(OUT_OF_RANGE) for an address that cannot be used."""
        host, _, port = address.rpartition(":")
        try:
            self._server = _ProbeServer((host.strip("[]"), int(port)), ranks)
        except (OSError, OverflowError, ValueError) as error:
            raise bad("probes", "HOST:PORT, free on this machine", f"{address}: {error}", "correct it") from error
        self.address = f"{host}:{self._server.server_port}"
        """The address, with the port that the system chose if it was 0."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="kvproto probes", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _ProbeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], ranks: tuple[EngineRank, ...]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.ranks, self._slots = ranks, threading.BoundedSemaphore(_MOST)
        super().__init__(address, _ProbeHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless too many are answered already."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let another be answered."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of this process."""


class _ProbeHandler(BaseHTTPRequestHandler):
    server: _ProbeServer
    timeout = _PATIENCE
    server_version, sys_version = "kvproto", ""

    def do_GET(self) -> None:
        match urlsplit(self.path).path:
            case "/live":
                dead = [
                    _of(rank) | {"why": shown(rank.failure)} for rank in self.server.ranks if rank.failure is not None
                ]
                self._json({"live": not dead, "dead": dead}, not dead)
            case "/ready":
                ranks = [_readiness(rank) for rank in self.server.ranks]
                ready = all(each["ready"] for each in ranks)
                self._json({"ready": ready, "ranks": ranks}, ready)
            case "/metrics":
                self._metrics()
            case _:
                self._json({"error": "ask for /live, /ready or /metrics"}, False, 404)

    def do_POST(self) -> None:
        """Drain, if it is this host that asks."""
        asked = urlsplit(self.path)
        if asked.path != "/drain":
            self._json({"error": "POST /drain"}, False, 404)
        elif not _is_here(self.client_address[0]):
            self._json({"error": "only this host may ask for it: use 127.0.0.1"}, False, 403)
        else:
            try:
                seconds = min(max(float(parse_qs(asked.query).get("seconds", [str(_DRAIN)])[0]), 0.0), 1e6)
            except ValueError:
                self._json({"error": "seconds is a number"}, False, 400)
                return
            drained = self._drained(seconds)
            self._json({"drained": drained}, drained, 504)

    def _drained(self, seconds: float) -> bool:
        until, pause = time.monotonic() + seconds, threading.Event()
        for rank in self.server.ranks:
            rank.drain()
        while not all(rank.drained for rank in self.server.ranks):
            if time.monotonic() >= until:
                return False
            pause.wait(0.05)
        return True

    def _metrics(self) -> None:
        counted = [rank for rank in self.server.ranks if rank.options.metrics or rank.options.feed is not None]
        if importlib.util.find_spec("prometheus_client") is None or not counted:
            self._json({"error": "needs pip install 'kvproto[metrics]', and Options(metrics=True)"}, False, 404)
            return
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        from kvproto.metrics import Collector

        registry = CollectorRegistry()
        registry.register(Collector(*counted))
        self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))

    def _json(self, said: dict[str, Any], good: bool, other: int = 503) -> None:
        self._answer(200 if good else other, "application/json", json.dumps(said).encode() + b"\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Probes come every few seconds: they are not logged."""


def _is_here(host: str) -> bool:
    """Whether a client is on this host."""
    client = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(client, "ipv4_mapped", None) or client).is_loopback


def _of(rank: EngineRank) -> dict[str, Any]:
    role = type(rank).__name__.lower()
    return {"engine": rank.name, "replica": rank.geometry.replica, "rank": rank.pool.rank, "role": role}


def _readiness(rank: EngineRank) -> dict[str, Any]:
    said = _of(rank) | {"ready": not rank.unready, "why": shown(rank.unready)}
    if isinstance(rank, Sink):
        said["sources"] = {f"{engine}/{n}": shown(why) for (engine, n), why in sorted(rank.sources.items())}
    return said
