"""Groups that hold the scales of others, and the check that a transfer requests both from the same token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvproto.errors import RemoteError
from kvproto.planning.compare import name_of, scaled_by
from kvproto.planning.geometry import Group, Owns
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = ["Scaling", "check_scales", "scaling"]

Scaling = tuple[tuple[Group, Group], ...]
"""Groups whose rows are scales of several tokens, each with a group of values that they scale."""


def scaling(groups: Iterable[Group], shares: Mapping[int, Owns]) -> Scaling:
    """The pairs among groups that a rank owns, with its shares by group id; a pair is of one model and has a layer."""
    groups = tuple(groups)
    if not any(group.partial for group in groups):
        return ()
    values = {
        (group.model, name_of(part.name), layer): group
        for group in groups
        if not group.partial
        for part in group.parts
        for layer in shares[group.id].layers.tolist()
    }
    pairs = {}
    for group in groups:
        for scaled in {scaled_by(part.name) for part in group.parts} if group.partial else ():
            for layer in shares[group.id].layers.tolist():
                other = values.get((group.model, scaled, layer)) if scaled else None
                if other is not None:
                    pairs[group.id, other.id] = group, other
    return tuple(pairs.values())


def check_scales(pairs: Scaling, grants: tuple[Grants, ...]) -> None:
    """Raise BAD_GRANT if windows of pages and of their scales begin apart (KVP-GRANT-SCALES)."""
    asked = {grant.group: (i, grant) for i, grant in enumerate(grants)}
    for scales, values in pairs:
        if not (scales.id in asked and values.id in asked and KINDS[scales.kind].paged and KINDS[values.kind].paged):
            continue
        (i, ours), (_, theirs) = asked[scales.id], asked[values.id]
        origin = max(scales.origin, values.origin)
        if (ours.count or theirs.count) and max(ours.first, origin) != max(theirs.first, origin):
            mine = f"{theirs.first}, as of {values.name!r}, whose rows these scale"
            advice = "request both from where a row of the scales begins"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].first", mine, str(ours.first), advice)
