"""What both roles do with the other side's Description."""

from __future__ import annotations

from kvproto.errors import PlanError, RemoteError, WireError
from kvproto.planning.geometry import Geometry, decode_geometry, digest
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Describe, Description

__all__ = ["read_geometry"]


def read_geometry(message: Describe | Description) -> tuple[Geometry, bytes]:
    """The peer's geometry and its digest; raises BAD_DIGEST, or what is wrong below `geometry` (KVP-DSC-PATH)."""
    data = bytes(message.geometry)
    own = digest(data)
    if own != message.digest:
        raise RemoteError(ErrorCode.BAD_DIGEST, "digest", own.hex(), bytes(message.digest).hex(), "hash the geometry")
    try:
        return decode_geometry(data), own
    except (WireError, PlanError) as e:
        raise type(e)(e.code, f"geometry.{e.path}", e.mine, e.yours, e.advice) from None
