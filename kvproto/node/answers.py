"""What a source says: ids of sessions, and of the bytes that it has moved."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Collection

from kvproto.copying.page_sums import PageSums, page_sums
from kvproto.copying.program import CopyProgram
from kvproto.node.registrar import PeerMapping
from kvproto.transport.base import Regions, Transport
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Checksum

__all__ = ["BEGUN", "LOOK", "Checksums", "Sums", "bytes_by_name", "session_id"]

BEGUN = 8
"""Requests whose checksums are started before the first of them is waited for."""
LOOK = 0.02
"""Seconds of one turn in which checksums are taken."""


def session_id() -> int:
    """A session id that nobody can guess: 64 random bits, and not 0 (KVP-SES-GUESS)."""
    return secrets.randbelow((1 << 64) - 1) + 1


class Sums:
    """Checksums by group of a program, taken part after part: those of a long prompt take seconds, and no turn may."""

    def __init__(self, program: CopyProgram, transport: Transport, memories: Regions, sink: bool) -> None:
        """`memories`: of the source's side, or the `sink`'s."""
        self.program, self._parts = program, deque(program.parts(transport.capabilities.summed_at_once))
        self._transport, self._memories, self._sink = transport, memories, sink
        self.found: dict[int, int] = {}
        self._begun: Callable[[], dict[int, int]] | None = None
        """The first of the parts that are left, once it has been started."""

    def advance(self, until: float) -> bool:
        """Start on the next part, which a device takes alone, and go on until then: whether all are taken."""
        while self._parts:
            if self._begun is None:
                self._begun = self._transport.begin_checksums(self._parts[0], self._memories, self._sink)
            if time.monotonic() >= until:
                return False
            for group, value in self._begun().items():
                self.found[group] = self.found.get(group, 0) + value & (1 << 64) - 1
            self._begun = None
            self._parts.popleft()
        return True

    def of(self, some: CopyProgram) -> dict[int, int]:
        """Those of a part of the program, at once."""
        return self._transport.checksums(some, self._memories, self._sink)


class Checksums:
    """The checksums of Done or Offer, where the features ask for some (KVP-VERIFY-SOURCE, KVP-VERIFY-PAGES)."""

    def __init__(
        self, peer: PeerMapping, program: CopyProgram, memories: Regions, features: Collection[int]
    ) -> None:  # fmt: skip
        self._peer, self._features = peer, features
        self._sums = Sums(program, peer.transport, memories, sink=False) if Feature.VERIFY in features else None

    def advance(self, until: float) -> bool:
        """As `Sums.advance`."""
        return self._sums is None or self._sums.advance(until)

    def said(self) -> tuple[Checksum, ...] | None:
        """What the message says, once all are taken."""
        if self._sums is None:
            return None
        pages: dict[int, PageSums] = {}
        if Feature.VERIFY_PAGES in self._features:
            pages = page_sums(
                self._sums.program, {g.id: g for g in self._peer.pair.sink.geometry.groups}, self._sums.of
            )
        return tuple(
            Checksum(group=group, value=value, pages=pages[group].values if group in pages else None)
            for group, value in sorted(self._sums.found.items())
        )


def bytes_by_name(peer: PeerMapping, program: CopyProgram) -> dict[str, int]:
    """Bytes by the name of the sink's group."""
    return {peer.pair.sink.group(group).name: count for group, count in program.bytes_by_group().items()}
