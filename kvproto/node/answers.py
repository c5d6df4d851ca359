"""What a source says: ids of sessions, and of the bytes that it has moved."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from kvproto.copying.page_sums import PageSums, page_sums
from kvproto.copying.program import CopyProgram
from kvproto.node.registrar import PeerMapping
from kvproto.transport.base import Memory
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Checksum

__all__ = ["bytes_by_name", "checksums_of", "session_id"]


def session_id() -> int:
    """A session id that nobody can guess: 64 random bits, and not 0 (KVP-SES-GUESS)."""
    return secrets.randbelow((1 << 64) - 1) + 1


def checksums_of(
    peer: PeerMapping, program: CopyProgram, memories: Mapping[int, Memory], features: Collection[int]
) -> tuple[Checksum, ...] | None:
    """The checksums of Done or Offer, where the features ask for some (KVP-VERIFY-SOURCE, KVP-VERIFY-PAGES)."""
    if Feature.VERIFY not in features:
        return None

    def take(some: CopyProgram) -> Mapping[int, int]:
        return peer.transport.checksums(some, memories, sink=False)

    pages: dict[int, PageSums] = {}
    if Feature.VERIFY_PAGES in features:
        pages = page_sums(program, {g.id: g for g in peer.pair.sink.geometry.groups}, take)
    return tuple(
        Checksum(group=group, value=value, pages=pages[group].values if group in pages else None)
        for group, value in sorted(take(program).items())
    )


def bytes_by_name(peer: PeerMapping, program: CopyProgram) -> dict[str, int]:
    """Bytes by the name of the sink's group."""
    return {peer.pair.sink.group(group).name: count for group, count in program.bytes_by_group().items()}
