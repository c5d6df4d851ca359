"""Which client takes most of a source's time, for the log of its operator."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

from kvproto.net.allowed import AllowList

__all__ = ["Load"]

_log = logging.getLogger("kvproto")
_SPAN = 1.0
"""Seconds that are looked at together."""
_QUIET = 10.0
"""Seconds without a further word."""
_MOST = 0.4
"""Share of the time that a client may take without a word."""


class Load:
    """Of the clients of one Listener, by their keys."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow
        self._since = self._quiet_until = 0.0
        self._seconds, self._frames = defaultdict[bytes, float](float), Counter[bytes]()

    def add(self, key: bytes, began: float, now: float) -> None:
        """A frame of this client was heard from `began` until `now`."""
        if now - self._since > _SPAN:
            self._tell(now - self._since, now)
            self._since = began
            self._seconds.clear()
            self._frames.clear()
        self._seconds[key] += now - began
        self._frames[key] += 1

    def _tell(self, span: float, now: float) -> None:
        for key, seconds in self._seconds.items():
            if seconds > _MOST * span and now >= self._quiet_until:
                self._quiet_until = now + _QUIET
                words = "client %s keeps this source busy: %d frames took %.0f%% of %.1f s"
                _log.warning(words, self._allow.name(key), self._frames[key], 100 * seconds / span, span)
