"""Checks of the columns of a rank, and of the items of one transfer, which must not overlap (KVP-GRANT-ALIAS).

Engines let columns share memory: a joint page interleaves layers and parts, and the groups of a unified pool take turns
in the same bytes. The items that a transfer names must still be disjoint. The work is split so that a transfer costs
nothing if the layout alone rules out an overlap:

* Once, at registration, the columns are cut into clusters whose ranges of bytes overlap. A cluster is apart if any
  two columns lie at different places modulo one of its strides, as the layers of a joint page do modulo the page, and K
  and V modulo a row. Clusters of the same shape (the same columns of another layer) are judged once.
* For each transfer, the bytes of the named items are compared in the shapes that are not apart, by sorting.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import RemoteError
from kvproto.planning.arrays import IntArray
from kvproto.planning.conversion import name_of, scaled_by
from kvproto.planning.geometry import Geometry, Group, Owns
from kvproto.planning.kinds import KINDS
from kvproto.planning.limits import MAX_SPANS
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Columns, Grants, Region, UIntArray

_MOST_SHAPES = 64
"""Shapes of clusters that a registration may have; real pools have one or two."""
_FEWEST = 1 << 10
"""The fewest spans that the columns of a group count as, or each column if they are not apart."""
_MOST_STRIDES = 16
"""A cluster with more different strides than this is not tried, and counts as not apart."""

_EXTENT = np.dtype(
    [(n, np.int64) for n in ("group", "offset", "items", "item_stride", "rows", "row_stride", "lanes", "lane_stride")]
    + [("lane_bytes", np.int64), ("item_bytes", np.int64), ("column", np.int64)]
)
"""A column: its place, extents and strides (0 for an axis of one element), and the bytes that an item spans."""
_Extents = npt.NDArray[np.void]
_AXES = (("items", "item_stride"), ("rows", "row_stride"), ("lanes", "lane_stride"))


@attrs.frozen(eq=False)
class Overlaps:
    """The clusters of a rank's columns that may overlap, one of each shape; none for most layouts."""

    clusters: tuple[_Extents, ...]
    scales: "Scaling" = ()
    """The rank's groups of scales, which a transfer's grants are checked by too."""

    @classmethod
    def of(cls, geometry: Geometry, rank: int, columns: Mapping[int, Columns]) -> "Overlaps":
        """Find the overlaps of columns, by group id, that passed `check_columns`; raises BAD_COLUMNS."""
        region, extents = _extents(geometry, rank, columns)
        shapes: dict[bytes, _Extents] = {}
        for cluster in _clusters(region, extents):
            shape = cluster.copy()
            shape["column"] = 0
            shapes.setdefault(shape.tobytes(), cluster)
            if len(shapes) > _MOST_SHAPES:
                mine, yours = f"at most {_MOST_SHAPES} kinds of overlap between columns", "more"
                raise RemoteError(ErrorCode.BAD_COLUMNS, "columns", mine, yours, "lay columns out in regular pools")
        owns = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
        pairs = scaling((g for g in geometry.groups if g.id in owns), owns)
        return cls(tuple(c for c in shapes.values() if not _apart(c)), pairs)

    def check(self, grants: tuple[Grants, ...]) -> None:
        """Raise ITEM_ALIAS if items of the grants overlap; each column's own items are known to be disjoint."""
        named = {g.group: (i, g.items) for i, g in enumerate(grants) if g.items is not None and g.items.size}
        left = MAX_SPANS
        for cluster in self.clusters:
            columns = cluster[np.isin(cluster["group"], list(named))]
            if len(columns) < 2:
                continue
            if (groups := np.unique(columns["group"])).size * _FEWEST > left:
                raise _too_many(f"grants[{named[int(groups[left // _FEWEST])][0]}].items")
            spans = []
            for of_items in _item_spans(columns, named):
                spans.append(of_items)
                left -= max(of_items.number, _FEWEST)
                if left < 0:
                    raise _too_many(of_items.path)
            clash = _clash(spans)
            if clash is not None and (fine := list(_lane_spans(columns, named, left))):
                left -= sum(of_items.number for of_items in fine)
                clash = _clash(fine)
            if clash is not None:
                raise clash


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
        origin = max(group.origin if group.cp_size > 1 else 0 for group in (scales, values))  # (KVP-DCP-ONE)
        if (ours.count or theirs.count) and max(ours.first, origin) != max(theirs.first, origin):
            mine = f"{theirs.first}, as of {values.name!r}, whose rows these scale"
            advice = "request both from where a row of the scales begins"
            raise RemoteError(ErrorCode.BAD_GRANT, f"grants[{i}].first", mine, str(ours.first), advice)


def _too_many(path: str) -> RemoteError:
    mine, yours = "columns that lie apart", f"more than {MAX_SPANS} spans to compare"
    return RemoteError(ErrorCode.ITEM_ALIAS, path, mine, yours, "register pools that do not overlap")


def _extents(geometry: Geometry, rank: int, columns: Mapping[int, Columns]) -> tuple[IntArray, _Extents]:
    """Region [columns] and extents [columns] of all columns of a rank."""
    groups = {g.id: g for g in geometry.groups}
    regions, tables = [], []
    for share in (o for r in geometry.ranks if r.rank == rank for o in r.owns if o.group in columns):
        group, own = groups[share.group], columns[share.group]
        table = np.zeros(own.region.size, _EXTENT)
        part = np.arange(own.region.size) % len(group.parts)
        lanes = [sum(s.hi - s.lo for s in share.lanes if s.part == p) for p in range(len(group.parts))]
        table["group"], table["column"], table["offset"] = group.id, np.arange(own.region.size), own.offset
        table["items"], table["rows"], table["lanes"] = own.items, group.rows, np.array(lanes)[part]
        table["lane_bytes"] = np.array([p.lane_bytes for p in group.parts])[part]
        for extent, stride in _AXES:
            table[stride] = np.where(table[extent] > 1, getattr(own, stride), 0)
        table["item_bytes"] = table["lane_bytes"]
        for extent, stride in _AXES[1:]:
            table["item_bytes"] += (table[extent] - 1) * table[stride]
        regions.append(own.region.astype(np.int64))
        tables.append(table)
    if not tables:
        return np.empty(0, np.int64), np.empty(0, _EXTENT)
    return np.concatenate(regions), np.concatenate(tables)


def _clusters(region: IntArray, extents: _Extents) -> Iterator[_Extents]:
    """Runs of columns of one region whose ranges overlap, two columns or more, with offsets from the first of them."""
    order = np.lexsort((extents["offset"], region))
    region, extents = region[order], extents[order]
    ends = extents["offset"] + (extents["items"] - 1) * extents["item_stride"] + extents["item_bytes"]
    # small numbers of the same order in place of offsets, region above region: one running maximum serves all
    order = np.unique(np.concatenate([extents["offset"], ends]), return_inverse=True)[1].reshape(2, -1)
    begin, end = order + np.unique(region, return_inverse=True)[1].reshape(-1) * (2 * len(region) + 1)
    bounds = np.flatnonzero(begin[1:] >= np.maximum.accumulate(end)[:-1]) + 1
    starts, stops = np.r_[0, bounds], np.r_[bounds, len(region)]
    for a, b in zip(starts[stops - starts > 1].tolist(), stops[stops - starts > 1].tolist(), strict=True):
        cluster = extents[a:b].copy()
        cluster["offset"] -= cluster["offset"][0]
        yield cluster


def _apart(cluster: _Extents) -> bool:
    """Whether no items of two columns can overlap, because any two columns differ modulo a stride."""
    cluster = _one_of_all(cluster)
    whole = (cluster["offset"] + (cluster["items"] - 1) * cluster["item_stride"] + cluster["item_bytes"]).max()
    strides = np.unique(np.concatenate([[whole], *(cluster[stride] for _, stride in _AXES)]))
    strides = strides[strides > 0]
    pieces = np.zeros(len(cluster), np.int64)
    for modulus in strides[::-1].tolist() if strides.size <= _MOST_STRIDES else []:
        pieces = np.unique(pieces * len(cluster) + _pieces(cluster, modulus), return_inverse=True)[1].reshape(-1)
        if pieces.max() + 1 == len(cluster):
            return True
    return False


def _one_of_all(cluster: _Extents) -> _Extents:
    """One item, or row, of each column, if those of all columns together lie apart from the next ones: as in pages."""
    cluster = cluster.copy()
    for extent, stride in _AXES:
        reach = cluster["lane_bytes"] + sum((cluster[e] - 1) * cluster[s] for e, s in _AXES if e != extent)
        if (cluster[extent] == 1).all():
            continue
        step = int(cluster[stride][0])
        if (cluster[stride] != step).any() or (cluster["offset"] + reach).max() - cluster["offset"].min() > step:
            break
        cluster[extent], cluster[stride] = 1, 0
    return cluster


def _pieces(cluster: _Extents, modulus: int) -> IntArray:
    """A number for each column; columns with different numbers lie apart modulo `modulus`, for all items."""
    width = cluster["lane_bytes"].copy()
    for extent, stride in _AXES:
        # an axis keeps the place modulo the modulus, or else widens it
        width += np.where(cluster[stride] % modulus == 0, 0, (cluster[extent] - 1) * cluster[stride])
    order = np.argsort(cluster["offset"] % modulus, kind="stable")
    begin = (cluster["offset"] % modulus)[order]
    end = np.maximum.accumulate(begin + width[order])
    pieces = np.empty_like(begin)
    pieces[order] = np.cumsum(np.r_[0, begin[1:] >= end[:-1]])
    round_ = pieces[cluster["offset"] % modulus < end[-1] - modulus]  # where the last piece wraps around to
    return np.where(pieces <= round_.max(initial=-1), pieces.max(), pieces)


def overlapping(geometry: Geometry, rank: int, columns: Columns) -> tuple[int, int] | None:
    """Two columns of a group that share some bytes but not all, for any items; None if there are none."""
    seen: set[bytes] = set()
    for cluster in _clusters(*_extents(geometry, rank, {columns.group: columns})):
        shape = cluster[[name for name in _EXTENT.names or () if name != "column"]].tobytes()
        if shape in seen or _apart(cluster):
            continue
        seen.add(shape)
        rows = [(int(c["offset"]), int(c["lane_bytes"]), _axes(c), int(c["column"])) for c in cluster]
        known: dict[tuple[object, ...], bool] = {}
        for (at, size, axes, one), (begin, width, others, other) in combinations(rows, 2):
            pair = begin - at, size, axes, width, others
            if pair not in known:
                known[pair] = pair != (0, size, axes, size, axes) and _meet(*pair)
            if known[pair]:
                return one, other
    return None


_Axes = tuple[tuple[int, int], ...]


def _axes(column: np.void) -> _Axes:
    """Stride and extent of the axes of more than one element, the longest stride first."""
    axes = ((int(column[stride]), int(column[extent])) for extent, stride in _AXES)
    return tuple(sorted((axis for axis in axes if axis[1] > 1), reverse=True))


def _meet(at: int, size: int, axes: _Axes, width: int, others: _Axes) -> bool:
    """Whether lanes of two columns share a byte, `others` beginning `at` later; their strides nest."""
    if not axes and not others:
        return -width < at < size
    stride = max(nested[0][0] for nested in (axes, others) if nested)
    # element j of the other's axis less element i of ours
    most = least = 0
    if axes and axes[0][0] == stride:
        least, axes = 1 - axes[0][1], axes[1:]
    if others and others[0][0] == stride:
        most, others = others[0][1] - 1, others[1:]
    reach, far = (n + sum(s * (e - 1) for s, e in nested) for n, nested in ((size, axes), (width, others)))
    # those j - i at which -far < at + (j - i) stride < reach
    first, last = max(least, (-far - at) // stride + 1), min(most, -((at - reach) // stride) - 1)
    return any(_meet(at + n * stride, size, axes, width, others) for n in range(first, last + 1))


@attrs.frozen(eq=False)
class _ItemSpans:
    """Columns of one group whose items share no bytes with each other, as merged spans [begin, end) of item 0."""

    path: str
    name: str
    items: IntArray
    stride: int
    begin: IntArray
    end: IntArray

    @property
    def number(self) -> int:
        return self.begin.size * self.items.size

    def bytes(self) -> tuple[IntArray, IntArray]:
        """Bytes [begin, end) of the named items, merged where they touch or interleave."""
        first = self.items * self.stride
        return _merged((self.begin[:, None] + first).ravel(), (self.end[:, None] + first).ravel())


def _item_spans(cluster: _Extents, named: Mapping[int, tuple[int, UIntArray]]) -> Iterator[_ItemSpans]:
    """A group's columns of one stride if they are apart, else each column by itself."""
    cluster = cluster[np.argsort(cluster["group"], kind="stable")]
    starts = [0, *(np.flatnonzero(np.diff(cluster["group"])) + 1).tolist(), len(cluster)]
    for columns in (cluster[a:b] for a, b in pairwise(starts)):
        group = int(columns["group"][0])
        index, items = named[group][0], named[group][1].astype(np.int64)
        alike = len(np.unique(columns["item_stride"])) == 1
        together = len(columns) == 1 or (alike and _apart(columns))
        for part in [columns] if together else [columns[k : k + 1] for k in range(len(columns))]:
            name = f"group {group}" if together else f"column {part['column'][0]} of group {group}"
            merged = _merged(part["offset"], part["offset"] + part["item_bytes"])
            yield _ItemSpans(f"grants[{index}].items", name, items, int(part["item_stride"][0]), *merged)


def _lane_spans(cluster: _Extents, named: Mapping[int, tuple[int, UIntArray]], most: int) -> Iterator[_ItemSpans]:
    """Each column by itself, without the gaps between rows and lanes; nothing if that makes more spans than `most`."""
    counts = [int(c["rows"] * c["lanes"]) * named[int(c["group"])][1].size for c in cluster]
    for column in cluster if sum(counts) <= most else ():
        index, items = named[int(column["group"])]
        rows, lanes = (np.arange(column[extent]) * column[stride] for extent, stride in _AXES[1:])
        begin = (column["offset"] + rows[:, None] + lanes).reshape(-1)
        name = f"column {column['column']} of group {column['group']}"
        merged = _merged(begin, begin + column["lane_bytes"])
        yield _ItemSpans(f"grants[{index}].items", name, items.astype(np.int64), int(column["item_stride"]), *merged)


def _clash(spans: list[_ItemSpans]) -> RemoteError | None:
    """The ITEM_ALIAS of spans of two groups that overlap, or of two columns that are not apart; None if none do."""
    begins, ends = zip(*(of_items.bytes() for of_items in spans), strict=True)
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = np.argsort(begin)
    # spans of the same items are disjoint: if any two overlap, then two neighbours do
    clash = np.flatnonzero(begin[order][1:] < end[order][:-1])
    if clash.size:
        whose = np.repeat(np.arange(len(spans)), [firsts.size for firsts in begins])[order]
        both = sorted((spans[whose[clash[0] + k]] for k in (0, 1)), key=lambda items: (items.path, items.name))
        yours = f"items of {both[0].name} and {both[1].name} overlap"
        advice = "name items that share no bytes; if no two items should, a stride or an offset of Register is wrong; "
        advice += "of layers that share a cache, state only the one that writes it"
        return RemoteError(ErrorCode.ITEM_ALIAS, both[1].path, "items of disjoint memory", yours, advice)
    return None


def _merged(begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Spans [begin, end) in ascending order, merged where they touch or overlap."""
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.r_[True, begin[1:] > end[:-1]])
    return begin[first], end[np.r_[first[1:] - 1, end.size - 1]]


_ARRAYS = ("region", "offset", "item_stride", "row_stride", "lane_stride")
Place = tuple[int, int, int, int, int]
"""The region, the offset in it, and the strides of items, rows and lanes."""


def columns_at(group: int, items: int, places: Sequence[Place]) -> Columns:
    """The columns of a group of so many items at these places, by layer, then part."""
    fields = dict(zip(_ARRAYS, np.array(places, np.uint64).reshape(-1, len(_ARRAYS)).T.copy(), strict=True))
    return Columns(group=group, items=items, **fields | {"region": fields["region"].astype(np.uint32)})


_STRIDES = _ARRAYS[2:]
_ORDER = "state the groups in the order of the Description, and for each layer one entry for each part"


def check_columns(
    geometry: Geometry, rank: int, regions: Mapping[int, Region], columns: tuple[Columns, ...]
) -> Overlaps:
    """Check the columns of a rank, entry by entry, and return their overlaps; raises BAD_COLUMNS or OUT_OF_REGION."""
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
    group: Group, lanes: IntArray, sizes: IntArray, regions: Mapping[int, Region], own: Columns
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
