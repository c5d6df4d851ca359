"""What a transport is to a node: memory with a region, mappings of peers' regions, and copies that are under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvproto.copying.program import CopyProgram
from kvproto.wire.enums import Proof, Transport
from kvproto.wire.messages import Region

__all__ = ["Copying", "Layer", "Mapped", "Memory", "Move", "Mover"]

Layer = tuple[int, int]
"""Model, and layer of it."""


class Memory(Protocol):
    """A region of this process."""

    id: int
    length: int

    @property
    def region(self) -> Region:
        """What Register says of it."""

    def __dlpack__(self, **options: Any) -> Any:
        """The bytes, for frameworks."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where they are."""


class Mapped(Protocol):
    """A peer's region in this process."""

    def close(self) -> None:
        """Unmap; no copy may be under way that uses it."""


class Copying(Protocol):
    """A copy that was started."""

    @property
    def bytes(self) -> int:
        """That it writes."""

    @property
    def done(self) -> bool:
        """Whether every byte is at its destination; raises KvprotoError where that can no longer happen."""

    def stop(self) -> Proof | None:
        """Begin nothing more; None while writes are under way, then whether none can arrive any more."""


@attrs.frozen
class Move:
    """One program and its two sides: memory or mappings by region id."""

    program: CopyProgram
    sources: Mapping[int, Memory | Mapped]
    sinks: Mapping[int, Memory | Mapped]
    after: tuple[int, ...] = ()
    """Handles of the device events after which the source's rows are there."""
    layers: tuple[int, int] | None = None
    """Only layers [lo, hi), where given; apart from the program, so that its table of operations stays known."""
    grows: bool = False
    """Whether no row is there yet, and what `start` returns is told of layers; only through staging slots."""
    beside: bool = False
    """Whether what comes after it is being computed: nobody waits for it, and it should take little from that."""


class Mover(Protocol):
    """Runs copy programs between memory of this process and mappings of peers'."""

    transport: Transport
    together: bool
    """Whether several moves are better started at once: then they end at once."""
    in_parts: bool
    """Whether a program may be moved in several parts, the first of them while others still compute."""
    late: float
    """The first part goes when it is so many times what is still to be computed; 0: as soon as it is there."""

    def connect(self, region: Region, path: str) -> Mapped:
        """Map a peer's region; raises RemoteError, NO_TRANSPORT or TRANSPORT_FAILED, and the path of what is wrong."""

    def prepare(self, move: Move) -> None:
        """What a first hand-over of this pair would wait for otherwise; the move has no rows."""

    def start(self, moves: Sequence[Move]) -> Copying:
        """Start all of them at once, or none; BUSY where too many copies are under way."""

    def checksums(self, program: CopyProgram, memory: Mapping[int, Memory], sink: bool) -> dict[int, int]:
        """As `kvproto.copying.execute.checksums`, of memory of this process."""

    def close(self) -> None:
        """Let go of everything; nothing may be under way."""
