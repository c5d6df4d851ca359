"""What all ranks of an engine can use of the prompts of one step: one MIN over one vector of each rank.

Each rank finds other pages, and has other slots to spare. The vector says which prompts the rank was asked for, how
many slots it has, and for each prompt with which lengths it could go on; its MIN over ranks is what all of them can do.
Every rank decides by that alone, so all decide the same, and whatever a rank lacks makes a hit shorter on all.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvproto.errors import LocalError
from kvproto.tiers.index import Hit
from kvproto.tiers.lease import PageLease
from kvproto.tiers.lengths import allowed
from kvproto.tiers.page_ids import Chain
from kvproto.wire.enums import ErrorCode

if TYPE_CHECKING:
    from kvproto.tiers.page_cache import PageCache

__all__ = ["LENGTHS", "Agreement"]

LENGTHS = 8192
"""Lengths that one vector has room for: 16 prompts of 32K tokens in pages of 64. What is beyond is computed."""
_DIGEST, _SLOTS, _HEAD = slice(0, 16), 16, 17


class Agreement:
    """The prompts of one step on one rank; what it found of them is pinned until they are opened."""

    def __init__(self, cache: PageCache, prompts: Sequence[tuple[Chain, int]], lengths: int = LENGTHS) -> None:
        """`prompts`: each with the room that it needs, in pages; the same on all ranks, in the same order."""
        self._cache, self._prompts = cache, list(prompts)
        slots = cache.device.slots
        self.vector: npt.NDArray[np.int32] = np.zeros(_HEAD + lengths, np.int32)
        """To be joined by MIN over all ranks, in place."""
        said = hashlib.sha256(b"".join(_said(*each) for each in self._prompts)).digest()
        mine = np.frombuffer(said, "<u4").astype(np.int64) >> 1
        self._digest = np.concatenate([mine, -mine]).astype(np.int32)
        self.vector[_DIGEST], self.vector[_SLOTS] = self._digest, slots.free + slots.idle
        self._hits: list[tuple[Hit, Hit]] = []
        at = _HEAD
        for chain, room in self._prompts:
            near, far = cache.device.find(chain, room), cache.host.find(chain, room)
            self._hits.append((near, far))
            flags = self.vector[at : at + len(chain.own)]
            bits = allowed(near.found) | allowed(far.found)
            flags[:] = [bits >> n & 1 for n in range(1, len(flags) + 1)]
            at += len(chain.own)

    def open(self) -> list[PageLease | None]:
        """A lease of each prompt, or None for those that do not fit on some rank; the same lengths on all ranks.

        Raises LocalError(CONTENT_MISMATCH), on every rank, where ranks were asked for other prompts.
        """
        with self:
            if (self.vector[_DIGEST] != self._digest).any():
                advice = "let every rank ask for the same prompts and room, in the same order"
                raise LocalError(ErrorCode.CONTENT_MISMATCH, "prompts", "those of all ranks", "others", advice)
            left, at, found = int(self.vector[_SLOTS]), _HEAD, []
            for chain, _ in self._prompts:
                flags = np.flatnonzero(self.vector[at : at + len(chain.own)])
                found.append(int(flags[-1]) + 1 if flags.size else 0)
                at += len(chain.own)
            fits = []
            for _, room in self._prompts:
                fits.append(room <= left)
                left -= room if fits[-1] else 0
            for hits, length, one in zip(self._hits, found, fits, strict=True):
                for hit in hits:
                    hit.cut(length if one else 0)
            return [self._opened(*each) for each in zip(self._prompts, self._hits, found, fits, strict=True)]

    def _opened(self, prompt: tuple[Chain, int], hits: tuple[Hit, Hit], length: int, fits: bool) -> PageLease | None:
        lease = self._cache.open(*prompt, most=length) if fits else None
        assert (lease is not None) == fits
        for hit in hits:
            hit.close()
        return lease

    def close(self) -> None:
        """Let go of what was found."""
        for near, far in self._hits:
            near.close()
            far.close()
        self._hits = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _said(chain: Chain, room: int) -> bytes:
    """What a rank was asked for, of which ranks must not differ."""
    return chain.space + struct.pack("<III", chain.page, len(chain.own), room) + b"".join(chain.own[-1:])
