"""What a source offers for a sink to read, instead of copying it (feature PULL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvproto.copying.grants import items_needed, rows_of
from kvproto.copying.program import RankLayout
from kvproto.planning.geometry import Group, owned_before
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Route
from kvproto.wire.messages import Grants

__all__ = ["offered"]

_NO_ITEMS = np.empty(0, np.int64)


def offered(
    routes: Sequence[Route], side: RankLayout, asked: Sequence[Grants], items: Mapping[int, npt.NDArray[np.int64]]
) -> tuple[Grants, ...]:
    """A rank's items that hold the tokens a sink rank asks for, by each group of the source that the routes draw from.

    `items` are the page tables by group id, beginning with the item that holds the first owned row from token 0 on.
    """
    by_group = {g.group: g for g in asked}
    drawn: dict[int, list[Grants]] = {}
    for route in routes:
        for id in {box.source_group for box in route.boxes}:
            drawn.setdefault(id, []).append(by_group[route.group])
    return tuple(
        _window(side.group(id), side.owns(id).cp_rank, drawn[id], items.get(id, _NO_ITEMS)) for id in sorted(drawn)
    )


def _window(group: Group, cp_rank: int, asked: Sequence[Grants], items: npt.NDArray[np.int64]) -> Grants:
    """One window that covers everything asked from a group."""
    first = min(g.first for g in asked)
    end = max(g.first + g.count for g in asked)
    if group.cp_size > 1:
        first = min(max(first, group.origin), end)
    if kind_of(group).wraps:  # a ring holds no earlier rows
        first = max(first, (rows_of(group, 0, end)[1] - group.rows) * group.tokens_per_row)
    skip = 0
    if kind_of(group).paged:
        skip = owned_before(group, cp_rank, rows_of(group, first, end - first)[0]) // group.rows
    held = items[skip : skip + items_needed(group, cp_rank, first, end - first)]
    return Grants(group=group.id, first=first, count=end - first, valid=end, items=held.astype(np.uint32))
