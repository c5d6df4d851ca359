"""Items that are granted after their Transfer: at once (feature INTENT), or piece by piece (feature SPANS).

The grants so far have windows that begin with the Transfer's and end where the last Grant said. They are complete when
they end with the Transfer's and no item is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvproto.copying.grants import items_by_now, size_of
from kvproto.copying.program import RankLayout
from kvproto.errors import RemoteError
from kvproto.planning.axes import TOKENS, axis_of
from kvproto.planning.geometry import Group
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Grants

__all__ = [
    "all_granted",
    "granted_below",
    "granted_until",
    "lacks_items",
    "newly_granted",
    "no_items",
    "placeholder_items",
    "with_grant",
]

_NO_ITEMS = np.empty(0, np.uint32)


def lacks_items(side: RankLayout, grants: Sequence[Grants]) -> bool:
    """Whether grants of a rank leave out all the items that they need, and need some (KVP-INT-ITEMS)."""
    lacking = [g.items is None for g in grants if _need(side, g, g)]
    return bool(lacking) and all(lacking)


def no_items(side: RankLayout, asked: Sequence[Grants]) -> tuple[Grants, ...]:
    """The grants of a Transfer's windows before its first Grant: no tokens and no items."""
    return tuple(
        attrs.evolve(g, count=0, items=_NO_ITEMS) if KINDS[side.groups[g.group].kind].has_memory else g for g in asked
    )


def placeholder_items(side: RankLayout, grants: Sequence[Grants]) -> tuple[Grants, ...]:
    """The grants with placeholder items, for callers that need only their number."""
    return tuple(attrs.evolve(g, items=np.arange(_need(side, g, g), dtype=np.uint32)) for g in grants)


def all_granted(side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants]) -> bool:
    """Whether everything that was requested is granted."""
    return all(g.count == a.count and size_of(g) == _need(side, a, a) for g, a in zip(granted, asked, strict=True))


def with_grant(
    side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants], more: Sequence[Grants], spans: bool
) -> tuple[Grants, ...]:
    """The grants of `asked` after a Grant with `more`, whose items are checked elsewhere.

    Raises BAD_GRANT for other groups or windows (KVP-INT-WINDOW, KVP-SPN-GROW).
    """
    if tuple(g.group for g in more) != tuple(g.group for g in asked):
        mine, yours = (f"groups {tuple(g.group for g in grants)}" for grants in (asked, more))
        advice = "name the groups of the Transfer, by ascending id"
        raise RemoteError(ErrorCode.BAD_GRANT, "grants", mine, yours, advice)
    granted_now = []
    for i, (before, all_, new) in enumerate(zip(granted, asked, more, strict=True)):
        if not KINDS[side.groups[all_.group].kind].has_memory:  # its window says nothing (KVP-HND-WINDOW)
            granted_now.append(all_)
            continue
        least = before.count if spans else all_.count
        same = all(getattr(new, name) == getattr(all_, name) for name in ("first", "valid", "state_after"))
        if not (same and bool(new.late) == bool(all_.late) and least <= new.count <= all_.count):
            ends = f"{least} to {all_.count}" if least < all_.count else str(all_.count)
            mine = f"first {all_.first}, count {ends}, valid {all_.valid}"
            yours = f"first {new.first}, count {new.count}, valid {new.valid}"
            advice = "keep the windows of the Transfer" + ", each as long as before at least" * spans
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}]", mine, yours, advice)
        items = [grant.items for grant in (before, new) if grant.items is not None and grant.items.size]
        joined = np.concatenate(items) if items else _NO_ITEMS
        granted_now.append(attrs.evolve(all_, count=new.count, items=joined))
    return tuple(granted_now)


def newly_granted(before: Sequence[Grants], now: Sequence[Grants]) -> tuple[Grants, ...]:
    """The contents of a Grant after `before`: the windows of `now`, and the items that are new."""
    return tuple(
        attrs.evolve(g, items=None if g.items is None else g.items[size_of(old) :])
        for old, g in zip(before, now, strict=True)
    )


def granted_below(side: RankLayout, asked: Sequence[Grants], tokens: int, end: int) -> tuple[Grants, ...]:
    """The part of these grants that tokens below `tokens` need; all of them if `tokens` reaches `end`.

    Slots, opaque pages and pages of other axes move when prefill is over, and so are granted last.
    """
    if tokens >= end:
        return tuple(asked)
    below = []
    for grant in asked:
        group = side.groups[grant.group]
        if KINDS[group.kind].has_memory:
            count = min(max(tokens - grant.first, 0), grant.count) if _moves_early(group) else 0
            part = attrs.evolve(grant, count=count)
            items = None if grant.items is None else grant.items[: _need(side, part, grant)]
            grant = attrs.evolve(part, items=items)
        below.append(grant)
    return tuple(below)


def granted_until(side: RankLayout, granted: Sequence[Grants], asked: Sequence[Grants]) -> int | None:
    """The token below which every row that may move before prefill is over has its item; None if all of them do."""
    ends = [
        g.first + g.count
        for g, a in zip(granted, asked, strict=True)
        if g.count < a.count and _moves_early(side.groups[g.group])
    ]
    return min(ends, default=None)


def _moves_early(group: Group) -> bool:
    """Whether rows of a group may move before prefill is over."""
    kind, whole = KINDS[group.kind], any(part.encoding for part in group.parts)
    return kind.has_memory and not kind.is_state and not whole and axis_of(group) == TOKENS


def _need(side: RankLayout, grant: Grants, asked: Grants) -> int:
    return items_by_now(side.groups[grant.group], side.shares[grant.group].cp_rank, grant, asked)
