"""The kinds of states that a long run has to reach; one that it never reaches is not tested."""

from __future__ import annotations

from kvproto.wire import messages, tables
from tests.simulation.story import FAULTS, STORAGE

_LIES = (name for name in tables.FIELDS if hasattr(getattr(messages, name), "TYPE"))
KINDS = frozenset(
    (
        *(f"fault: {kind}" for kind in FAULTS | STORAGE),
        *(f"lie in {name}" for name in _LIES if name not in {"Chunk", "Released", "Watch"}),  # of staged memory; rare
        "Arrived", "Freed", "Expired", "Undelivered", "PagesFree", "quarantine", "pool given back",
        "Lost ABORTED", "Lost CONTENT_MISMATCH", "Lost DEADLINE", "Lost DRAINING", "Lost PEER_LOST", "Lost POOL_MOVED",
        "Lost SUPERSEDED", "Lost TICKET_BOUND", "Lost TICKET_USED", "Lost UNKNOWN_TICKET",
        "raises DRAINING", "raises POOL_MOVED", "raises TICKET_USED",
        "fault at its moment", "frame changed", "frame late", "frame repeated", "frame to nobody",
        "fetch aborted", "request failed", "request that has to arrive", "pages granted late",
        "decode out of pages", "prefill out of pages", "tiers out of pages",
        "memory of another refused", "write lands after a stop", "write of the dead", "write to the dead",
        "short of descriptors", "short of descriptors to accept with", "short of descriptors to dial with",
        "short of descriptors to watch with", "short of memory to allocate", "short of memory to map",
        "page found on the device", "page found on the host", "page from storage", "prompt found by a router",
        "storage fails", "storage full", "storage hangs", "storage lies", "storage slow", "storage torn",
        "change undone by a loss of power", "copy of tiers failed", "death while storage is written",
    )
)  # fmt: skip
