"""Memory for pages that come from storage, which is used again: the first use of new memory costs more than a read."""

from __future__ import annotations

from threading import Lock

from kvproto.tiers.page_layout import PageLayout

__all__ = ["BufferPool", "PageBuffers"]

PageBuffers = dict[int, memoryview]
"""Memory for one page, by group."""
SPARE = 256 << 20
"""Bytes that are held for later at most."""


class BufferPool:
    """Any thread may take a room, and give it back once nobody uses it; one that is not given back is freed."""

    def __init__(self, layout: PageLayout) -> None:
        self._lengths = {part.group: part.length for part in layout.parts}
        self._most = SPARE // max(sum(self._lengths.values()), 1)
        self._lock = Lock()
        self._spare: list[PageBuffers] = []

    def take(self) -> PageBuffers:
        """A room, whose bytes are undefined."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return {group: memoryview(bytearray(length)) for group, length in self._lengths.items()}

    def give(self, room: PageBuffers) -> None:
        """Nobody uses it any more."""
        with self._lock:
            if len(self._spare) < self._most:
                self._spare.append(room)
