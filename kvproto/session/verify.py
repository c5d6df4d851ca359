"""Checksums of what Done and Offer state (feature VERIFY): that they are there, before anybody compares them."""

from __future__ import annotations

from collections.abc import Collection

from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry
from kvproto.session.phases import Described
from kvproto.wire.enums import ErrorCode, Feature, ItemKind
from kvproto.wire.messages import Done, Offer

__all__ = ["check_outcome"]


def check_outcome(described: Described, features: Collection[int], message: Done | Offer) -> None:
    """Raise where Done or Offer is not what the routes of the pair promise.

    WRONG_PEER for another writer or other groups (KVP-TRN-WRITER) and for other hand-off groups than the routed ones
    (KVP-HND-GROUPS), OUT_OF_RANGE for hand-off data of another length (KVP-HND-BYTES), MISSING_FIELD in a session with
    VERIFY for no checksums.
    """
    if message.writer != described.ranks[0]:
        raise RemoteError(
            ErrorCode.WRONG_PEER, "writer", f"rank {described.ranks[0]}", f"rank {message.writer}", "state your rank"
        )
    if isinstance(message, Done) and tuple(message.groups.tolist()) != described.groups:
        mine, yours = f"groups {described.groups}", f"groups {tuple(message.groups.tolist())}"
        raise RemoteError(ErrorCode.WRONG_PEER, "groups", mine, yours, "state every group that is routed")
    _check_handoff(described, message)
    if Feature.VERIFY in features:
        _check_checksums(described, message)


def _check_handoff(described: Described, message: Done | Offer) -> None:
    sizes = _handoff_bytes(described)
    came = {h.group: len(h.data) for h in message.handoff}
    groups = [h.group for h in message.handoff]
    if groups != sorted(sizes):
        advice = "state each routed hand-off group once, in ascending order"
        raise RemoteError(ErrorCode.WRONG_PEER, "handoff", f"groups {sorted(sizes)}", f"groups {groups}", advice)
    for group, size in sizes.items():
        if came[group] != size:
            raise RemoteError(
                ErrorCode.OUT_OF_RANGE, "handoff.data", f"{size} bytes of group {group}", f"{came[group]} bytes",
                "state the routed parts in ascending order, without padding",
            )  # fmt: skip


def _handoff_bytes(described: Described) -> dict[int, int]:
    """Bytes of each routed hand-off group, by the sink's group id."""
    found = {}
    groups = {g.id: g for g in described.sink.groups}
    for route in described.routes:
        group = groups[route.group]
        if group.kind == ItemKind.HANDOFF:
            found[group.id] = sum(group.parts[p].lane_bytes for p in {box.part for box in route.boxes})
    return found


def _check_checksums(described: Described, message: Done | Offer) -> None:
    routed = set(described.groups) - _handoffs(described.sink)
    if message.checksums is None:
        raise RemoteError(ErrorCode.MISSING_FIELD, "checksums", "a session with VERIFY", "none", "state checksums")
    came = [c.group for c in message.checksums]
    if not routed.issuperset(came):
        raise RemoteError(ErrorCode.WRONG_PEER, "checksums", f"of groups {sorted(routed)}", f"of groups {came}")


def _handoffs(geometry: Geometry) -> set[int]:
    return {g.id for g in geometry.groups if g.kind == ItemKind.HANDOFF}
