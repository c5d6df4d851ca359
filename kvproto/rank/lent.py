"""Pools registered with peers, from their registration until it is proven that nothing uses them any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import attrs

from kvproto.rank.pool import RankPool
from kvproto.transport.base import Transport

__all__ = ["Lent", "returned"]


@attrs.define(eq=False)
class Lent:
    """A pool that is registered with peers."""

    number: int
    """The epoch of its first registrations."""
    pool: RankPool
    holders: tuple[str, ...] = ()
    """Peers that may still use it after it was taken back, for display; never modified in place, for other threads."""


L = TypeVar("L", bound=Lent)


def returned(
    leaving: list[L], holders: Callable[[L], Iterable[str]], transports: Iterable[Transport], pool: RankPool
) -> list[L]:
    """Remove and return the pools that have no holder left; transports forget them, except for `pool`."""
    proven = []
    for lent in leaving:
        lent.holders = tuple(holders(lent))
        if not lent.holders:
            proven.append(lent)
            for transport in transports if lent.pool is not pool else ():
                transport.forget(lent.pool.memories)
    leaving[:] = [lent for lent in leaving if lent.holders]
    return proven
