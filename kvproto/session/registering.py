"""What both roles check of Register and Registered, whoever owns the memory (spec/v1/registration.md)."""

from __future__ import annotations

from kvproto.copying.aliasing import Overlaps
from kvproto.copying.columns import check_columns
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry
from kvproto.session.phases import Described
from kvproto.wire.enums import Access, ErrorCode
from kvproto.wire.messages import Register, Registered

__all__ = ["agrees", "check_register"]


def check_register(message: Register, access: Access, described: Described, owner: Geometry) -> Overlaps:
    """Raise what speaks against a Register, whose memory is that of a rank of `owner`; which of its columns overlap.

    Clauses KVP-REG-DIGESTS, KVP-REG-ACCESS, KVP-REG-ROUTES, KVP-REG-COLUMNS.
    """
    for field, ours, theirs in zip(("source", "sink"), described.digests, (message.source, message.sink), strict=True):
        if ours != theirs:
            raise RemoteError(ErrorCode.DESCRIPTION_MISMATCH, field, ours.hex(), bytes(theirs).hex(), "describe again")
    if message.access != access:
        raise RemoteError(
            ErrorCode.NO_TRANSPORT, "access", access.name, Access(message.access).name, "register the other access"
        )
    for i, ref in enumerate(described.refs):
        their = message.routes[i] if i < len(message.routes) else None
        if their != ref:
            got = f"group {their.group} {bytes(their.digest).hex()}" if their else "(absent)"
            raise RemoteError(ErrorCode.ROUTE_MISMATCH, f"routes[{i}]", f"group {ref.group} {ref.digest.hex()}", got)
    digest = described.plan.digest
    if len(message.routes) != len(described.refs) or message.plan != digest:
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", digest.hex(), bytes(message.plan).hex())
    regions = {r.id: r for r in message.regions}
    if len(regions) != len(message.regions):
        raise RemoteError(ErrorCode.BAD_COLUMNS, "regions", "each id once", str([r.id for r in message.regions][:8]))
    rank = described.ranks[1] if access == Access.WRITE else described.ranks[0]
    check_columns(owner, rank, regions, message.columns)
    return Overlaps.of(owner, rank, {c.group: c for c in message.columns})


def agrees(message: Registered, described: Described) -> None:
    """Raise ROUTE_MISMATCH where the holder states other routes than the owner (KVP-REG-CHECK)."""
    digest = described.plan.digest
    if message.routes != described.refs or message.plan != digest:
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", digest.hex(), bytes(message.plan).hex())
