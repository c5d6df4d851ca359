"""Parties, Descriptions and epochs: the facts of a session, one class for each phase in which it learns them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import attrs

from kvproto.copying.columns import Overlaps
from kvproto.errors import PlanError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, decode_geometry, digest, encode_geometry
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Plan, Route
from kvproto.wire import messages as m
from kvproto.wire.enums import ErrorCode, Proof

_RANDOM_BITS = 20


def new_incarnation(seconds: float, random: int) -> int:
    """An incarnation: milliseconds << 20 | 20 random bits, so that a later run's is greater (KVP-SES-SUPERSEDE)."""
    return int(seconds * 1000) << _RANDOM_BITS | random & (1 << _RANDOM_BITS) - 1


@attrs.frozen
class Party:
    """One rank of one run of an engine."""

    engine: str
    replica: int
    rank: int
    incarnation: int

    def __str__(self) -> str:
        replica = f" replica {self.replica}" if self.replica else ""
        return f"{self.engine}{replica} rank {self.rank}"

    @property
    def place(self) -> tuple[str, int, int]:
        """Engine, replica and rank, which all incarnations of a rank have in common."""
        return self.engine, self.replica, self.rank


@attrs.frozen(eq=False)
class Stated:
    """The Description of one replica."""

    geometry: Geometry
    encoded: bytes
    digest: bytes
    version: int

    @classmethod
    def of(cls, geometry: Geometry, version: int = 1) -> "Stated":
        """This side's Description of a geometry; its version rises with every change (KVP-DSC-VERSION)."""
        encoded = encode_geometry(geometry)
        return cls(geometry, encoded, digest(encoded), version)

    @classmethod
    def read(cls, message: m.Describe | m.Description) -> "Stated":
        """Read a peer's Description; raises WireError or PlanError, its path in `geometry` (KVP-DSC-PATH)."""
        encoded = bytes(message.geometry)
        try:
            return cls(decode_geometry(encoded), encoded, bytes(message.digest), message.version)
        except (WireError, PlanError) as e:
            raise e.at(f"geometry.{e.path}") from None

    @property
    def fields(self) -> dict[str, object]:
        """The fields of Describe and Description that state it."""
        return {"version": self.version, "geometry": self.encoded, "digest": self.digest}


def check_digest(message: m.Describe | m.Description) -> None:
    """Raise BAD_DIGEST if a message's digest is not that of its geometry (KVP-DSC-DIGEST)."""
    own = digest(bytes(message.geometry))
    if own != message.digest:
        raise RemoteError(ErrorCode.BAD_DIGEST, "digest", own.hex(), bytes(message.digest).hex(), "hash the geometry")


@attrs.frozen(eq=False)
class Described:
    """Both Descriptions and the plan that follows from them; `ranks` are the source's and the sink's."""

    of_source: Stated
    of_sink: Stated
    plan: Plan
    ranks: tuple[int, int]

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """The digests of both Descriptions, the source's first."""
        return self.of_source.digest, self.of_sink.digest

    @cached_property
    def source(self) -> Geometry:
        """The geometry of the source's replica."""
        return self.of_source.geometry

    @cached_property
    def sink(self) -> Geometry:
        """The geometry of the sink's replica."""
        return self.of_sink.geometry

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """The routes of this rank pair."""
        return self.plan.between(*self.ranks)

    @cached_property
    def refs(self) -> tuple[m.RouteRef, ...]:
        """The routes of this rank pair as Register and Registered state them."""
        return tuple(route.ref for route in self.routes)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The sink's groups that are routed between the two ranks, ascending."""
        return self.plan.send_flags(*self.ranks)

    @cached_property
    def drawn(self) -> tuple[int, ...]:
        """The source's groups that the routes of this rank pair draw from, ascending."""
        return tuple(sorted({box.source_group for route in self.routes for box in route.boxes}))

    @cached_property
    def handoff_bytes(self) -> dict[int, int]:
        """The number of bytes of each routed hand-off group, by the sink's group id."""
        groups = {g.id: g for g in self.sink.groups}
        return {
            route.group: sum(groups[route.group].parts[p].lane_bytes for p in {box.part for box in route.boxes})
            for route in self.routes
            if not KINDS[groups[route.group].kind].has_memory
        }

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """Source ranks with a route to the sink rank."""
        return self.plan.required(self.ranks[1])


@attrs.define(eq=False)
class Epoch:
    """Memory that the peer has registered and this side has mapped."""

    number: int
    described: Described
    """The Descriptions and the plan of its transfers."""
    columns: dict[int, m.Columns]
    """Columns by the owner's group id."""
    overlaps: Overlaps
    """The columns that share bytes."""
    answer: m.Registered
    mapping: Any = None
    """The rank's own record of how it is mapped."""
    stream: Any = None
    """The source's half of its streams, if bytes are packed."""
    back: m.Unregister | None = None
    """The Unregister that takes it back, if one came."""
    unmapping: bool = False
    proof: Proof = Proof.PROVEN
    """Whether it is proven that nothing writes it once it is unmapped."""


@attrs.define(eq=False)
class Owned:
    """An epoch of this side's own memory that the peer may hold."""

    number: int
    described: Described
    request: int
    """The request id of the Register."""
    take: "Callable[[Owned, m.Registered], Any] | None"
    """Makes the delivery to the memory that the holder has mapped; raises RemoteError."""
    memory: object
    """The caller's name for the memory that was registered."""
    delivery: Any = None
    """The way in which bytes reach it, at a sink."""
    mapped: bool = False
    back: bool | None = None
    """Whether it is taken back at once, or once its transfers have ended; None: it is not taken back."""
    asking: int = 0
    """The request id of the Unregister."""
    unprovable: bool = False
    """Whether the peer could not prove that it writes the memory no more."""
