"""Copies between a pool and memory of the host within one process, by which pages are kept (`kvproto.tiers`)."""

from __future__ import annotations

from typing import Protocol

from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Memory, Regions

__all__ = ["Pager", "Paging"]


class Paging(Protocol):
    """A copy that has been started."""

    @property
    def bytes(self) -> int:
        """Bytes that it writes."""

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises KvprotoError if that can no longer happen."""

    def hold(self, layer: int | None = None) -> None:
        """Make later work on the engine's stream wait for layers 0 to `layer` of this copy, or for all of it."""

    def wait(self) -> None:
        """Return when it is done; raises what `done` raises."""


class Pager(Protocol):
    """Runs copy programs between one pool and memory that it allocates.

    A copy begins when all earlier work on the engine's stream is done. Methods raise LocalError, and then leave no
    write under way.
    """

    def allocate(self, length: int) -> Memory:
        """`length` zeroed bytes of the host, which its copies reach fast; raises LocalError(TRANSPORT_FAILED)."""

    def save(self, program: CopyProgram, pool: Regions, host: Regions) -> Paging:
        """Start a copy to the host."""

    def load(self, program: CopyProgram, host: Regions, pool: Regions) -> Paging:
        """Start a copy to the pool, its layers in ascending order."""

    def close(self) -> None:
        """Wait for what is under way, and release the memory that was allocated."""
