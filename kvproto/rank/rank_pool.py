"""A rank's cache as a node sees it, and the columns of a pool that is allocated without gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kvproto.copying.program import RankLayout
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.transport.base import Memory
from kvproto.wire.messages import Columns

__all__ = ["RankPool", "pack"]

_ALIGN = 256


class RankPool(Protocol):
    """The regions of one rank, and where each column lies in them; `kvproto.Pool` implements it."""

    @property
    def memories(self) -> Mapping[int, Memory]:
        """Memory by region id."""

    @property
    def layout(self) -> RankLayout:
        """The rank's geometry and columns."""


def pack(
    geometry: Geometry, rank: int, items: Mapping[int, int], heads_first: bool = False
) -> tuple[dict[int, Columns], int]:
    """Columns without gaps in region 0, and the region's length in bytes; `items` counts a group's items by its id.

    Hand-off groups have no columns. A page is [row, lane, byte] (NHD), or [lane, row, byte] with `heads_first` (HND).
    """
    groups = {g.id: g for g in geometry.groups}
    share_of = next(r for r in geometry.ranks if r.rank == rank)
    found: dict[int, Columns] = {}
    at = 0
    for share in share_of.owns:
        group = groups[share.group]
        if not kind_of(group).has_memory:
            continue
        rows: list[tuple[int, int, int, int]] = []
        for _ in share.layers:
            for p, part in enumerate(group.parts):
                row = part.lane_bytes * sum(s.hi - s.lo for s in share.lanes if s.part == p)
                strides = (part.lane_bytes, part.lane_bytes * group.rows) if heads_first else (row, part.lane_bytes)
                rows.append((at, row * group.rows, *strides))
                at += -(-row * group.rows * items[group.id] // _ALIGN) * _ALIGN
        offset, item, row_stride, lane = np.array(rows, np.uint64).T.copy()
        found[group.id] = Columns(
            group=group.id,
            items=items[group.id],
            region=np.zeros(len(rows), np.uint32),
            offset=offset,
            item_stride=item,
            row_stride=row_stride,
            lane_stride=lane,
        )
    return found, at
