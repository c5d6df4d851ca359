"""What both roles check of a Register, whoever owns the memory (spec/v1/registration.md)."""

from __future__ import annotations

from kvproto.copying.columns import check_columns
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Plan
from kvproto.wire.enums import Access, ErrorCode, Transport
from kvproto.wire.messages import Register, Registered

__all__ = ["DYING", "agrees", "check_register"]

DYING = (Transport.SHM, Transport.CUDA)
"""Transports whose writes end with the writer's process."""


def check_register(
    message: Register, access: Access, digests: tuple[bytes, bytes], plan: Plan, pair: tuple[int, int], owner: Geometry
) -> None:
    """Raise what speaks against a Register of the rank pair (source, sink), whose memory is that of a rank of `owner`.

    `digests` are of the source's and the sink's Description. KVP-REG-DIGESTS, -ROUTES, -COLUMNS, -ACCESS.
    """
    for field, ours, theirs in (("source", digests[0], message.source), ("sink", digests[1], message.sink)):
        if ours != theirs:
            raise RemoteError(ErrorCode.DESCRIPTION_MISMATCH, field, ours.hex(), bytes(theirs).hex(), "describe again")
    if message.access != access:
        raise RemoteError(ErrorCode.NO_TRANSPORT, "access", access.name, Access(message.access).name)
    refs = tuple(r.ref for r in plan.between(*pair))
    for i, ref in enumerate(refs):
        their = message.routes[i] if i < len(message.routes) else None
        if their != ref:
            got = f"group {their.group} {bytes(their.digest).hex()}" if their else "(absent)"
            raise RemoteError(ErrorCode.ROUTE_MISMATCH, f"routes[{i}]", f"group {ref.group} {ref.digest.hex()}", got)
    if len(message.routes) != len(refs) or message.plan != plan.digest:
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", plan.digest.hex(), bytes(message.plan).hex())
    regions = {r.id: r for r in message.regions}
    if len(regions) != len(message.regions):
        raise RemoteError(ErrorCode.BAD_COLUMNS, "regions", "each id once", str([r.id for r in message.regions][:8]))
    check_columns(owner, pair[1] if access == Access.WRITE else pair[0], regions, message.columns)


def agrees(message: Registered, plan: Plan, pair: tuple[int, int]) -> None:
    """Raise ROUTE_MISMATCH where the holder states other routes than the owner (KVP-REG-CHECK)."""
    if message.routes != tuple(r.ref for r in plan.between(*pair)) or message.plan != plan.digest:
        raise RemoteError(ErrorCode.ROUTE_MISMATCH, "plan", plan.digest.hex(), bytes(message.plan).hex())
