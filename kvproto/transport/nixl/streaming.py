"""Copies that NIXL has under way: descriptors into the peer's pages, or a packed stream into its staging slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import attrs

from kvproto.transport.base import Copying, Layer, Stream
from kvproto.transport.nixl.direct import Direct
from kvproto.transport.nixl.regions import Write
from kvproto.transport.staging.staged import Piece, StagedSender
from kvproto.wire.enums import Proof

__all__ = ["Streaming", "Writing"]


@attrs.define
class Writing(Copying):
    """Direct writes that are under way, or that wait for device events."""

    _direct: Direct
    _ready: Callable[[], bool]
    """Whether the rows are there."""
    _write: Write | None = None
    stream: None = None

    @property
    def bytes(self) -> int:
        return self._direct.bytes

    @property
    def done(self) -> bool:
        """As `Copying.done`; raises PEER_LOST, TRANSPORT_FAILED."""
        if self._write is None:
            if not self._ready():
                return False
            self._write = self._direct.post()
        return self._write.ready()

    def stop(self) -> Proof | None:
        """The write's proof once it is over; PROVEN if it was never posted."""
        return Proof.PROVEN if self._write is None else self._write.proof


class Streaming(Stream):
    """A packed stream that is under way; a `Copying` and its own `Stream`."""

    def __init__(self, sender: StagedSender, bytes_: int, happened: Callable[[Sequence[int]], bool]) -> None:
        self._sender, self.bytes, self._happened = sender, bytes_, happened
        self._pieces: list[Piece] = []
        self._coming: deque[tuple[Collection[Layer] | None, Sequence[int]]] = deque()
        """Layers, and the device events after which their rows are there."""

    @property
    def stream(self) -> Streaming:
        return self

    @property
    def done(self) -> bool:
        """Whether every byte is in a slot of the sink, after advancing it; raises PEER_LOST, TRANSPORT_FAILED."""
        # the host polls events: if the device awaited them, chunks of other streams would queue behind them
        while self._coming and self._happened(self._coming[0][1]):
            self._sender.mark_ready(self._coming.popleft()[0])
        while True:
            before = self._sender.under_way
            found = self._sender.step()
            self._pieces += found
            if not found and self._sender.under_way == before:
                return self._sender.done

    @property
    def left(self) -> int:
        return self._sender.left

    def mark_ready(self, layers: Collection[Layer] | None, after: Sequence[int]) -> None:
        self._coming.append((layers, after))

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def stop(self) -> Proof | None:
        return self._sender.abort()
