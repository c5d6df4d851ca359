"""Whether the host names in addresses can be resolved here, which ZeroMQ retries forever without reporting it."""

from __future__ import annotations

import socket
import threading

__all__ = ["Names"]

_MOST = 8
"""The most names that are looked up at once; further ones are skipped."""


class Names:
    """The result of looking up each name that was dialled."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._unknown: dict[str, str] = {}

    def look_up(self, address: str) -> None:
        """Look up the host name of an address in a new thread, as a name server may take long to answer."""
        host = _host(address)
        if host[:1] == "[" or host.replace(".", "").isdigit() or host in self._asking or len(self._asking) >= _MOST:
            return
        self._asking.add(host)
        try:
            threading.Thread(target=self._ask, args=(host,), name="kvproto names", daemon=True).start()
        except RuntimeError:  # no memory for a thread; ZeroMQ still looks the name up
            self._asking.discard(host)

    def _ask(self, host: str) -> None:
        try:
            socket.getaddrinfo(host, None)
            self._unknown.pop(host, None)
        except (OSError, UnicodeError) as error:
            self._unknown[host] = getattr(error, "strerror", None) or str(error)
        self._asking.discard(host)

    def advice(self, address: str) -> str:
        """What to do about an address that does not answer."""
        if why := self._unknown.get(_host(address)):
            return f"its host name cannot be resolved here: {why}; correct the address, or the name service"
        return "check that it runs at this address"


def _host(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0]
