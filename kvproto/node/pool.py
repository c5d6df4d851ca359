"""A rank's cache: its regions, and where each layer and part lies in them as [item, row, lane, byte]."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import Side
from kvproto.errors import LocalError
from kvproto.planning.geometry import Geometry
from kvproto.transport import memory
from kvproto.transport.base import Memory
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Columns

__all__ = ["Pool", "pack"]

_ALIGN = 256


@attrs.frozen
class Pool:
    """Memory and where each column lies in it."""

    memories: Mapping[int, Memory]
    """By region id."""
    side: Side

    @property
    def memory(self) -> Memory:
        """The region of a pool that has one; raises LocalError(OUT_OF_RANGE) for another number of them."""
        if len(self.memories) != 1:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "pool.memories", "one region", str(len(self.memories)))
        return next(iter(self.memories.values()))

    def place(self, group: int, layer: int, part: str) -> tuple[int, tuple[int, int, int, int]]:
        """Offset in its region and shape, [items, rows, lanes of this rank, lane bytes], of a column."""
        spec, share, columns = self.side.group(group), self.side.owns(group), self.side.columns[group]
        p = [x.name for x in spec.parts].index(part)
        k = self._column(group, layer, part)
        lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
        shape = (columns.items, spec.rows, lanes, spec.parts[p].lane_bytes)
        return int(columns.offset[k]), shape

    def array(self, group: int, layer: int, part: str) -> npt.NDArray[np.uint8]:
        """A column in host memory, a view."""
        offset, shape = self.place(group, layer, part)
        region = int(self.side.columns[group].region[self._column(group, layer, part)])
        return np.ndarray(shape, np.uint8, np.from_dlpack(self.memories[region]).data, offset)

    def _column(self, group: int, layer: int, part: str) -> int:
        names = [p.name for p in self.side.group(group).parts]
        at: int = self.side.owns(group).layers.tolist().index(layer)
        return at * len(names) + names.index(part)


def pack(
    geometry: Geometry, rank: int, items: Mapping[int, int], heads_first: bool = False
) -> tuple[dict[int, Columns], int]:
    """Columns without gaps in region 0, and the region's length; `items` by group id, hand-off groups left out.

    A page is [row, lane, byte] (NHD), or [lane, row, byte] with `heads_first` (HND).
    """
    groups = {g.id: g for g in geometry.groups}
    share_of = next(r for r in geometry.ranks if r.rank == rank)
    found: dict[int, Columns] = {}
    at = 0
    for share in share_of.owns:
        group = groups[share.group]
        if group.kind == ItemKind.HANDOFF:
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
            group=group.id, items=items[group.id], region=np.zeros(len(rows), np.uint32), offset=offset,
            item_stride=item, row_stride=row_stride, lane_stride=lane,
        )  # fmt: skip
    return found, at


def allocate(geometry: Geometry, rank: int, items: Mapping[int, int], device: int | None = None) -> Pool:
    """A packed pool in fresh memory, zeroed: of a GPU, or shared memory of the host."""
    columns, length = pack(geometry, rank, items)
    return Pool({0: memory.allocate(max(length, 1), device)}, Side(geometry, rank, columns))
