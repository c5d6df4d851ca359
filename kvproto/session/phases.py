"""What a session knows in each of its phases: one object a phase, so that nothing in it is ever absent."""

from __future__ import annotations

from functools import cached_property

import attrs

from kvproto.copying.aliasing import Overlaps
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan, Route
from kvproto.session.staging import SlotReader
from kvproto.wire.messages import Columns, Region, RouteRef

__all__ = ["Described", "Epoch", "Party", "Registration", "new_incarnation"]

_RANDOM_BITS = 20


def new_incarnation(seconds: float, random: int) -> int:
    """Incarnation of a run that starts `seconds` after the epoch; `random` tells runs of one millisecond apart.

    A later run of a rank has the greater number (KVP-SES-SUPERSEDE): milliseconds << 20 | 20 random bits.
    """
    return int(seconds * 1000) << _RANDOM_BITS | random & (1 << _RANDOM_BITS) - 1


@attrs.frozen
class Party:
    """One rank of one run of an engine."""

    engine: str
    replica: int
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.engine} rank {self.rank}"

    @property
    def place(self) -> tuple[str, int, int]:
        """Engine, replica and rank: what one incarnation takes over from another."""
        return self.engine, self.replica, self.rank


@attrs.frozen(eq=False)
class Described:
    """Both Descriptions are known, and the plan that follows from them."""

    source: Geometry
    sink: Geometry
    digests: tuple[bytes, bytes]
    """Of the source's and the sink's Description."""
    versions: tuple[int, int]
    """Of the source's and the sink's Description."""
    plan: Plan
    ranks: tuple[int, int]
    """The source's and the sink's."""
    request: int
    """Of the Describe."""

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Of this rank pair."""
        return self.plan.between(*self.ranks)

    @cached_property
    def refs(self) -> tuple[RouteRef, ...]:
        """The routes of this rank pair as Register and Registered state them."""
        return tuple(route.ref for route in self.routes)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The sink's groups that are routed between the two ranks, ascending."""
        return self.plan.send_flags(*self.ranks)

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The source's groups from which these routes draw, ascending."""
        return tuple(sorted({box.source_group for route in self.routes for box in route.boxes}))

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """Source ranks with a route to the sink rank."""
        return self.plan.required(self.ranks[1])


@attrs.frozen(eq=False)
class Epoch:
    """Memory that one side has registered and the other has mapped."""

    number: int
    columns: dict[int, Columns]
    """By group id of the owner."""
    transport: int
    request: int
    """Of the Register."""
    overlaps: Overlaps
    """Which of the columns share bytes."""


@attrs.frozen
class Registration:
    """What a sink registers with one source rank."""

    regions: tuple[Region, ...] = attrs.field(repr=False)
    slots: SlotReader | None = None
    """Unpacks what the source writes into staging slots."""
    staged_by: int | None = None
    """The transport by which the source writes slots and not pages."""
