"""Whether host names of addresses are known here. ZeroMQ looks them up itself, again and again, and does not tell."""

from __future__ import annotations

import socket
import threading

__all__ = ["Names"]

_MOST = 8
"""Names that are looked up at once; what is more is left out."""


class Names:
    """What became of each name when it was last dialled."""

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._unknown: dict[str, str] = {}

    def look_up(self, address: str) -> None:
        """Begin, in a thread of its own: a name server may be silent for long."""
        host = _host(address)
        if host[:1] == "[" or host.replace(".", "").isdigit() or host in self._asking or len(self._asking) >= _MOST:
            return
        self._asking.add(host)
        try:
            threading.Thread(target=self._ask, args=(host,), name="kvproto names", daemon=True).start()
        except RuntimeError:  # no memory for a thread: ZeroMQ looks it up all the same
            self._asking.discard(host)

    def _ask(self, host: str) -> None:
        try:
            socket.getaddrinfo(host, None)
            self._unknown.pop(host, None)
        except (OSError, UnicodeError) as error:
            self._unknown[host] = getattr(error, "strerror", None) or str(error)
        self._asking.discard(host)

    def advice(self, address: str) -> str:
        """What to do about the silence of an address."""
        if why := self._unknown.get(_host(address)):
            return f"its host name is not known here: {why}; correct the address, or see to the name service"
        return "see whether it runs, and its address"


def _host(address: str) -> str:
    return address.partition("://")[2].rpartition(":")[0]
