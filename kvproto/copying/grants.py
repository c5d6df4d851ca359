"""What a registration and a request must be: columns that fit their Description, grants that fit the routes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvproto.errors import RemoteError
from kvproto.planning.geometry import Geometry, Group, IntArray, Owns, owned_before
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Columns, Grants, Region

__all__ = ["check_columns", "check_grants", "items_needed", "rows_of"]


def items_needed(group: Group, cp_rank: int, first: int, count: int) -> int:
    """Items that a rank needs for tokens [first, first + count)."""
    if group.kind != ItemKind.PAGE:
        return 0 if group.kind == ItemKind.HANDOFF else 1
    lo, hi = (owned_before(group, cp_rank, row) for row in rows_of(group, first, count))
    return (hi - 1) // group.rows - lo // group.rows + 1 if hi > lo else 0


def rows_of(group: Group, first: int, count: int) -> tuple[int, int]:
    """Rows that the tokens cover wholly; of opaque groups, whose items move whole, the last may be covered in part."""
    step = group.tokens_per_row
    lo, hi = -(-first // step), (first + count) // step
    if any(part.encoding for part in group.parts):
        hi = -(-(first + count) // step)
    return lo, max(lo, hi)


def check_columns(geometry: Geometry, rank: int, regions: Mapping[int, Region], columns: tuple[Columns, ...]) -> None:
    """Raise BAD_COLUMNS or OUT_OF_REGION where a Register does not fit its Description."""
    groups = {g.id: g for g in geometry.groups}
    shares = [o for r in geometry.ranks if r.rank == rank for o in r.owns if groups[o.group].kind != ItemKind.HANDOFF]
    if [o.group for o in shares] != [c.group for c in columns]:
        raise _bad("columns", f"groups {[o.group for o in shares]}", f"groups {[c.group for c in columns]}")
    for i, (share, own) in enumerate(zip(shares, columns, strict=True)):
        group = groups[share.group]
        number = share.layers.size * len(group.parts)
        arrays = {}
        for name in ("region", "offset", "item_stride", "row_stride", "lane_stride"):
            if getattr(own, name).size != number:
                raise _bad(f"columns[{i}].{name}", f"{number} entries", f"{getattr(own, name).size} entries")
            arrays[name] = getattr(own, name).astype(object)
        for k in range(number):
            p = k % len(group.parts)
            lanes = sum(s.hi - s.lo for s in share.lanes if s.part == p)
            region = regions.get(arrays["region"][k])
            if region is None:
                raise _bad(f"columns[{i}].region[{k}]", "a region of the Register", str(arrays["region"][k]))
            size = group.parts[p].lane_bytes
            axes = [
                (arrays[n][k], c)
                for n, c in (("item_stride", own.items), ("row_stride", group.rows), ("lane_stride", lanes))
            ]
            if any(stride > region.length for stride, _ in axes):
                raise _bad(f"columns[{i}]", f"strides of at most {region.length}", f"column {k}: {max(axes)[0]}")
            reach = size
            for stride, extent in sorted(a for a in axes if a[1] > 1):
                if stride < reach:
                    raise _bad(f"columns[{i}]", "strides without overlap", f"column {k}: {stride} < {reach}")
                reach += stride * (extent - 1)
            if arrays["offset"][k] + reach > region.length:
                code = ErrorCode.OUT_OF_REGION
                raise RemoteError(
                    code, f"columns[{i}].offset[{k}]", f"end at most {region.length}", str(arrays["offset"][k] + reach)
                )


def check_grants(
    geometry: Geometry, rank: int, columns: Mapping[int, Columns], wanted: tuple[int, ...], grants: tuple[Grants, ...]
) -> None:
    """Raise BAD_GRANT, OUT_OF_REGION or ITEM_ALIAS where a Transfer's grants do not fit the routes of the pair."""
    groups = {g.id: g for g in geometry.groups}
    shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
    if tuple(g.group for g in grants) != wanted:
        raise RemoteError(ErrorCode.BAD_GRANT, "grants", f"groups {wanted}", f"groups {tuple(g.group for g in grants)}")
    for i, grant in enumerate(grants):
        group = groups[grant.group]
        if group.kind == ItemKind.RING:
            lo, hi = rows_of(group, grant.first, grant.count)
            if hi - lo > group.rows:
                raise RemoteError(
                    ErrorCode.BAD_GRANT, f"grants[{i}].count", f"at most {group.rows} rows", f"{hi - lo} rows"
                )
        if group.cp_size > 1 and grant.count and grant.first < group.origin:
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].first", f"at least {group.origin}", str(grant.first))
        need = items_needed(group, shares[grant.group].cp_rank, grant.first, grant.count)
        items = grant.items
        if items is None or items.size != need:
            came = "no items" if items is None else f"{items.size} items"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].items", f"{need} items", came)
        if need and int(items.max()) >= columns[grant.group].items:
            raise RemoteError(
                ErrorCode.OUT_OF_REGION,
                f"grants[{i}].items",
                f"below {columns[grant.group].items}",
                str(int(items.max())),
            )
        if np.unique(items).size != items.size:
            raise RemoteError(ErrorCode.ITEM_ALIAS, f"grants[{i}].items", "each item once", "an item twice")
        own = columns.get(grant.group)
        if need and own and len(set(zip(own.region.tolist(), own.offset.tolist(), strict=True))) < own.region.size:
            mine = "layers and parts that begin each at a place of its own"
            raise RemoteError(ErrorCode.ITEM_ALIAS, f"grants[{i}].items", mine, "two at one place")
    _check_alias(groups, shares, columns, grants)


def _check_alias(
    groups: Mapping[int, Group], shares: Mapping[int, Owns], columns: Mapping[int, Columns], grants: tuple[Grants, ...]
) -> None:
    """Raise ITEM_ALIAS where items of two groups that share memory overlap; groups apart cost one comparison."""
    named = [(i, g) for i, g in enumerate(grants) if g.items is not None and g.items.size and g.group in columns]
    for n, (i, grant) in enumerate(named):
        for _, other in named[:n]:
            ours, theirs = (_extents(groups[g.group], shares[g.group], columns[g.group]) for g in (grant, other))
            for region in np.intersect1d(ours[0], theirs[0]).tolist():
                held = [_intervals(e, columns[g.group], g, region) for e, g in ((ours, grant), (theirs, other))]
                (a, a_end), (b, b_end) = held
                if a.min() >= b_end.max() or b.min() >= a_end.max():
                    continue
                if _rows_apart(ours, theirs, columns[grant.group], columns[other.group], region):
                    continue
                starts, ends = np.concatenate([a, b]), np.concatenate([a_end, b_end])
                whose = np.repeat([0, 1], [a.size, b.size])
                order = np.argsort(starts, kind="stable")
                starts, ends, whose = starts[order], np.maximum.accumulate(ends[order]), whose[order]
                if bool(((starts[1:] < ends[:-1]) & (whose[1:] != whose[:-1])).any()):
                    yours = f"items of groups {other.group} and {grant.group} overlap"
                    raise RemoteError(ErrorCode.ITEM_ALIAS, f"grants[{i}].items", "items of disjoint memory", yours)


_Extents = tuple[IntArray, IntArray, IntArray]


def _extents(group: Group, share: Owns, own: Columns) -> _Extents:
    """Region of each column, and the bytes that one item reaches over, and one row."""
    lanes = np.array([sum(s.hi - s.lo for s in share.lanes if s.part == p) for p in range(len(group.parts))])
    size = np.array([p.lane_bytes for p in group.parts])
    part = np.arange(own.region.size) % len(group.parts)
    rows, lane = own.row_stride.astype(np.int64), own.lane_stride.astype(np.int64)
    width = (lanes[part] - 1) * lane + size[part]
    return own.region.astype(np.int64), (group.rows - 1) * rows + width, width


def _rows_apart(ours: _Extents, theirs: _Extents, mine: Columns, yours: Columns, region: int) -> bool:
    """Whether the groups share records, a row of each in every one, at places of their own."""
    strides, begins, ends = set(), [], []
    for (regions, _, width), own in ((ours, mine), (theirs, yours)):
        some = np.flatnonzero(regions == region)
        strides |= set(own.row_stride[some].tolist())
        record = max(int(own.row_stride[some[0]]), 1)
        if len(strides) > 1 or (own.item_stride[some] % record).any():
            return False
        begins.append(own.offset[some].astype(np.int64) % record)
        ends.append(begins[-1] + width[some])
        if ends[-1].max() > record:
            return False
    return not ((begins[0][:, None] < ends[1]) & (begins[1] < ends[0][:, None])).any()


def _intervals(extents: _Extents, own: Columns, grant: Grants, region: int) -> tuple[IntArray, IntArray]:
    """Where the granted items begin and end in a region, column by column."""
    some = np.flatnonzero(extents[0] == region)
    items = np.empty(0) if grant.items is None else grant.items
    offset, stride = own.offset[some].astype(np.int64), own.item_stride[some].astype(np.int64)
    starts = (offset[:, None] + items.astype(np.int64) * stride[:, None]).ravel()
    return starts, starts + np.repeat(extents[1][some], items.size)


def _bad(path: str, mine: str, yours: str) -> RemoteError:
    return RemoteError(ErrorCode.BAD_COLUMNS, path, mine, yours, "state columns in the order of the Description")
