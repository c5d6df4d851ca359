"""Pools of a rank that peers may touch, from when they are registered until it is proven that nobody does any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import attrs

from kvproto.node.pool import RankPool
from kvproto.node.quarantine import Quarantine
from kvproto.node.scheduler import Attempt
from kvproto.transport.base import Transport

__all__ = ["Filled", "Lent", "Read", "returned"]


@attrs.define(eq=False)
class Lent:
    """One pool."""

    number: int
    """Epoch of its first registrations."""
    pool: RankPool
    holders: tuple[str, ...] = ()
    """Who may still touch it once it is taken back, for people; replaced, never changed: any thread may look."""


L = TypeVar("L", bound=Lent)


def returned(
    leaving: list[L], holders: Callable[[L], Iterable[str]], transports: Iterable[Transport], pool: RankPool
) -> list[L]:  # fmt: skip
    """Take out the pools that nobody can touch any more; transports keep nothing of them, unless one is `pool`."""
    over = []
    for lent in leaving:
        lent.holders = tuple(holders(lent))
        if not lent.holders:
            over.append(lent)
            for transport in transports if lent.pool is not pool else ():
                transport.forget(lent.pool.memories)
    leaving[:] = [lent for lent in leaving if lent.holders]
    return over


@attrs.define(eq=False)
class Filled(Lent):
    """A sink's, which sources write."""

    quarantine: Quarantine = attrs.field(kw_only=True)


@attrs.define(eq=False)
class Read(Lent):
    """A source's, which its own copies read, and sinks."""

    attempts: tuple[Attempt, ...] = ()
    """Whose copies were under way when it was taken back, and have not ended since."""

    @property
    def copied(self) -> bool:
        """Whether a copy of it is under way."""
        self.attempts = tuple(attempt for attempt in self.attempts if attempt.copies)
        return bool(self.attempts)
