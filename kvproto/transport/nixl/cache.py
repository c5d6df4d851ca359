"""NIXL's transfers from slot to slot that are posted again: to make one costs more than to post it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from kvproto.transport.nixl.agent import Peer, Registered

__all__ = ["SlotPair", "TransferCache"]


@attrs.frozen(cache_hash=True)
class SlotPair:
    """From the first bytes of a slot to those of a peer's slot."""

    source: Registered
    at: int
    """Address."""
    peer: Peer
    to: int
    """Address."""
    length: int

    @property
    def usable(self) -> bool:
        """Whether the memory of both sides is still there."""
        return not self.source.closed and not self.peer.lost


class TransferCache:
    """Handles of transfers that are not under way, `most` at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._handles: dict[SlotPair, int] = {}
        """Those that served last come last."""

    def __len__(self) -> int:
        return len(self._handles)

    def lengths(self) -> list[int]:
        """Of what they move, that which served longest ago first."""
        return [slots.length for slots in self._handles]

    def take(self, slots: SlotPair | None) -> int | None:
        """The handle to post, if there is one; it is the caller's now."""
        return None if slots is None else self._handles.pop(slots, None)

    def keep(self, slots: SlotPair, handle: int) -> int | None:
        """Keep it; what is to be released for it: the one that served longest ago, or itself where there is one."""
        if slots in self._handles:
            return handle
        oldest = self._handles.pop(next(iter(self._handles))) if len(self._handles) == self._most else None
        self._handles[slots] = handle
        return oldest

    def let_go(self, which: Callable[[SlotPair], bool]) -> list[int]:
        """Keep some no more: they are to be released."""
        return [self._handles.pop(slots) for slots in list(self._handles) if which(slots)]
