"""Checks that the columns of a Register match its Description, lie inside their regions, and do not overlap."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvproto.copying.aliasing import Overlaps
from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry, Group, Owns
from kvproto.planning.kinds import KINDS
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns, Region

__all__ = ["check_columns"]

_ARRAYS = ("region", "offset", "item_stride", "row_stride", "lane_stride")
_STRIDES = _ARRAYS[2:]
_ORDER = "state the groups in the order of the Description, and for each layer one entry for each part"


def check_columns(
    geometry: Geometry, rank: int, regions: Mapping[int, Region], columns: tuple[Columns, ...]
) -> Overlaps:
    """Check the columns of a rank against its Description, group by group and entry by entry; return their overlaps.

    Raises BAD_COLUMNS (KVP-REG-COLUMNS, KVP-REG-OVERLAP) or OUT_OF_REGION (KVP-REG-REGION) at the first wrong entry.
    """
    groups = {g.id: g for g in geometry.groups}
    shares = [o for r in geometry.ranks if r.rank == rank for o in r.owns if KINDS[groups[o.group].kind].has_memory]
    if [o.group for o in shares] != [c.group for c in columns]:
        mine, yours = (f"groups {[x.group for x in sequence]}" for sequence in (shares, columns))
        raise RemoteError(ErrorCode.BAD_COLUMNS, "columns", mine, yours, _ORDER)
    for i, (share, own) in enumerate(zip(shares, columns, strict=True)):
        _check_group(f"columns[{i}]", groups[share.group], share, regions, own)
    return Overlaps.of(geometry, rank, {c.group: c for c in columns})


def _check_group(at: str, group: Group, share: Owns, regions: Mapping[int, Region], own: Columns) -> None:
    number = share.layers.size * len(group.parts)
    for name in _ARRAYS:
        if getattr(own, name).size != number:
            mine, yours = f"{number} entries", f"{getattr(own, name).size} entries"
            raise RemoteError(ErrorCode.BAD_COLUMNS, f"{at}.{name}", mine, yours, _ORDER)
    known = np.isin(own.region, np.array(sorted(regions), np.uint64))
    if not known.all():
        k = int(np.flatnonzero(~known)[0])
        mine = f"a region of the Register, of {sorted(regions)[:8]}"
        raise RemoteError(ErrorCode.BAD_COLUMNS, f"{at}.region[{k}]", mine, str(int(own.region[k])), "list the region")
    lanes = np.array([sum(s.hi - s.lo for s in share.lanes if s.part == p) for p in range(len(group.parts))])
    sizes = np.array([p.lane_bytes for p in group.parts])
    for k in np.flatnonzero(_doubtful(group, lanes, sizes, regions, own)).tolist():
        part = k % len(group.parts)
        _check_entry(at, k, own, group.rows, int(lanes[part]), int(sizes[part]), regions[int(own.region[k])])


def _doubtful(
    group: Group,
    lanes: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    regions: Mapping[int, Region],
    own: Columns,
) -> npt.NDArray[np.bool_]:
    """The entries, as bool [entries], that `_check_entry` must look at: all that it refuses, and few others."""
    part = np.arange(own.region.size) % len(group.parts)
    ids, where = np.unique(own.region, return_inverse=True)
    # float64 holds sums beyond 64 bits too; what it may round is checked exactly
    length = np.array([regions[int(i)].length for i in ids], np.float64)[where.reshape(-1)]
    extents = np.stack([np.full(part.size, own.items), np.full(part.size, group.rows), lanes[part]]).astype(np.float64)
    strides = np.where(extents > 1, np.stack([getattr(own, n) for n in _STRIDES]).astype(np.float64), 0)
    order = np.argsort(strides, axis=0, kind="stable")
    strides, extents = np.take_along_axis(strides, order, 0), np.take_along_axis(extents, order, 0)
    reach, bad = sizes[part].astype(np.float64), np.zeros(part.size, bool)
    for stride, extent in zip(strides, extents, strict=True):
        bad |= (extent > 1) & (stride < reach)
        reach = reach + stride * (extent - 1)
    return bad | (own.offset.astype(np.float64) + reach > length) | (length >= 1 << 53)


def _check_entry(at: str, k: int, own: Columns, rows: int, lanes: int, size: int, region: Region) -> None:
    """One layer and part, in exact numbers: strides from the innermost axis outwards, then the end of the last item."""
    values = {name: int(getattr(own, name)[k]) for name in _STRIDES}
    counted = zip(values, (own.items, rows, lanes), strict=True)
    axes = sorted((values[name], extent, name) for name, extent in counted if extent > 1)
    reach, name = size, "offset"
    for stride, extent, name in axes:
        path = f"{at}.{name}[{k}]"
        if stride > region.length:
            mine, yours = f"at most {region.length} bytes", f"{stride} bytes"
            raise RemoteError(ErrorCode.OUT_OF_REGION, path, mine, yours, "a stride is the distance between neighbours")
        if stride < reach:
            mine, yours = f"at least {reach} bytes, or neighbours overlap", f"{stride} bytes"
            raise RemoteError(ErrorCode.BAD_COLUMNS, path, mine, yours, f"give each element its own {reach} bytes")
        reach += stride * (extent - 1)
    end, offset = int(own.offset[k]) + reach, int(own.offset[k])
    if end > region.length:
        inner = reach - axes[-1][0] * (axes[-1][1] - 1) if axes else reach
        path = f"{at}.offset[{k}]" if offset + inner > region.length or not axes else f"{at}.{name}[{k}]"
        terms = "".join(f" + {extent - 1} x {n} {stride}" for stride, extent, n in reversed(axes))
        yours = f"{end}: offset {offset}{terms} + {size}"
        advice = "check offset, strides and the number of items; the region must hold the last item whole"
        mine = f"an end of at most {region.length}"
        raise RemoteError(ErrorCode.OUT_OF_REGION, path, mine, yours, advice)
