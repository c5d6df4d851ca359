"""A log record for the operator about a client that takes most of a source's time."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict

from kvproto.net.allowed import AllowList

__all__ = ["Load"]

_log = logging.getLogger("kvproto")
_SPAN = 1.0
"""Seconds over which time is added up."""
_QUIET = 10.0
"""Seconds between two records."""
_MOST = 0.4
"""The share of the time, 0 to 1, that a client may take without a record."""


class Load:
    """The time and frames that each client of a Listener takes, by its key."""

    def __init__(self, allow: AllowList) -> None:
        self._allow = allow
        self._since = self._quiet_until = 0.0
        self._seconds, self._frames = defaultdict[bytes, float](float), Counter[bytes]()

    def add(self, key: bytes, began: float, now: float) -> None:
        """Add a frame of a client that was handled from `began` to `now`, in seconds of `time.monotonic`."""
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
