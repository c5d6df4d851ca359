"""NIXL's transfers from slot to slot that are posted again: making one costs more than posting it."""

from __future__ import annotations

from collections.abc import Callable

from kvproto.transport.nixl.regions import SlotPair

__all__ = ["TransferCache"]


class TransferCache:
    """Handles of at most `most` transfers that are not under way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._handles: dict[SlotPair, int] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._handles)

    def lengths(self) -> list[int]:
        """Bytes of each transfer, the least recently used first."""
        return [slots.length for slots in self._handles]

    def take(self, slots: SlotPair | None) -> int | None:
        """Remove and return the handle to post, if there is one."""
        return None if slots is None else self._handles.pop(slots, None)

    def keep(self, slots: SlotPair, handle: int) -> int | None:
        """Keep it; returns the handle to release: the least recently used one, or this one where the pair has one."""
        if slots in self._handles:
            return handle
        oldest = self._handles.pop(next(iter(self._handles))) if len(self._handles) == self._most else None
        self._handles[slots] = handle
        return oldest

    def let_go(self, which: Callable[[SlotPair], bool]) -> list[int]:
        """Remove some; returns their handles, to be released."""
        return [self._handles.pop(slots) for slots in list(self._handles) if which(slots)]
