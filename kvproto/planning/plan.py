"""The plan of who sends what to whom: the intersection of what the source's ranks and the sink's ranks own.

The space is model x layer x part x lane x token class; a lane bound is in bytes along the part's lane axis, so that the
two sides may cut lanes differently. Nothing here knows a parallel size, an attention kind or an address.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.planning.arrays import IntArray, distinct_rows, repeated_index, stretch_bounds
from kvproto.planning.compare import check_facts, check_scales, differences, left_behind, missing
from kvproto.planning.conversion import converted, name_of
from kvproto.planning.cutting import (
    Cutter,
    OwnedInterval,
    OwnedIntervals,
    common_layers,
    opaque_families,
    owned_intervals,
)
from kvproto.planning.election import PieceTable, ShareTable
from kvproto.planning.geometry import Geometry, validate
from kvproto.planning.kinds import KINDS
from kvproto.planning.parts import OPTIONAL
from kvproto.wire.enums import Feature
from kvproto.wire.messages import RouteRef

__all__ = ["LAYER_BITS", "Box", "BoxTable", "Plan", "Route", "boxes_of", "differences", "plan"]


class Box(NamedTuple):
    """Layers [layer_lo, layer_hi) of one part, bytes [lo, hi) of its lane axis, and the rows of one token class."""

    model: int
    layer_lo: int
    layer_hi: int
    part: int
    """Index into the parts of the sink's group; for a part in sections, the first one's."""
    lo: int
    hi: int
    source_class: int
    """cp rank of these rows at the source."""
    sink_class: int
    """cp rank of these rows at the sink."""
    source_group: int
    """The source's group id, which the digest leaves out."""


@attrs.frozen
class Route:
    """All boxes that one source rank sends to one sink rank of one group."""

    source: int
    sink: int
    group: int
    """The sink's group id."""
    boxes: tuple[Box, ...]
    digest: bytes
    """SHA-256, 32 bytes."""

    @property
    def ref(self) -> RouteRef:
        """The form that Register carries."""
        return RouteRef(group=self.group, digest=self.digest)


@attrs.frozen
class Plan:
    """Routes from one source replica to one sink replica, ordered by source, sink, group."""

    routes: tuple[Route, ...]
    digest: bytes
    cold: tuple[int, ...] = ()
    """Draft models that start without their cache, as both sides agreed by feature COLD_DRAFT."""

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], tuple[Route, ...]]:
        pairs: dict[tuple[int, int], list[Route]] = defaultdict(list)
        for route in self.routes:
            pairs[route.source, route.sink].append(route)
        return {key: tuple(routes) for key, routes in pairs.items()}

    @cached_property
    def _ranks(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Sources by sink, and sinks by source."""
        sources: dict[int, tuple[int, ...]] = {}
        sinks: dict[int, tuple[int, ...]] = {}
        for source, sink in sorted(self._pairs):
            sources[sink] = (*sources.get(sink, ()), source)
            sinks[source] = (*sinks.get(source, ()), sink)
        return sources, sinks

    def between(self, source: int, sink: int) -> tuple[Route, ...]:
        """Routes of one rank pair, by ascending group; none if the two exchange nothing."""
        return self._pairs.get((source, sink), ())

    def send_flags(self, source: int, sink: int) -> tuple[int, ...]:
        """Ids of the sink's groups that `source` sends to `sink`, ascending."""
        return tuple(r.group for r in self.between(source, sink))

    def required(self, sink: int) -> tuple[int, ...]:
        """Source ranks from which `sink` awaits an answer, ascending: the required responses."""
        return self._ranks[0].get(sink, ())

    def served(self, source: int) -> tuple[int, ...]:
        """Sink ranks that `source` answers, ascending; a request is free when all of them have acknowledged."""
        return self._ranks[1].get(source, ())


Bytes = npt.NDArray[Any]
"""Places on lane axes, u64."""


@attrs.frozen(eq=False)
class BoxTable:
    """Boxes in ascending order, without what all boxes of a sink group share: columns [n]."""

    source: IntArray
    sink: IntArray
    group: IntArray
    layer_lo: IntArray
    layer_hi: IntArray
    part: IntArray
    lo: Bytes
    hi: Bytes
    source_class: IntArray
    sink_class: IntArray


def boxes_of(pieces: PieceTable, shares: ShareTable) -> BoxTable:
    """Join each layer's pieces into the longest lane intervals, then equal ones of consecutive layers into boxes."""
    p = shares.piece
    cells = shares.source, shares.sink, pieces.group[p], pieces.part[p], pieces.source_class[p], pieces.sink_class[p]
    first, cell = distinct_rows(*cells)
    lo, hi, x, y = pieces.lo[p], pieces.hi[p], shares.layer_lo, shares.layer_hi
    if first.size < cell.size:
        cell, lo, hi, x, y = _joined(*_by_layers(cell, lo, hi, x, y))
    source, sink, group, part, c, d = (column[first[cell]] for column in cells)
    columns: tuple[npt.NDArray[Any], ...] = source, sink, group, x, y, part, lo, hi, c, d
    order = np.lexsort(columns[::-1])
    return BoxTable(*(column[order] for column in columns))


LAYER_BITS = 33
"""Bits of the layer in a key that orders places by cell and layer."""
_Cut = tuple[IntArray, Bytes, Bytes, IntArray, IntArray]
"""Cell, bytes [lo, hi) and layers [x, y) of each row."""


def _by_layers(cell: IntArray, lo: Bytes, hi: Bytes, x: IntArray, y: IntArray) -> _Cut:
    """The same rows, cut at each layer where another row of the cell begins or ends; layers are then equal or apart."""
    from_, to = ((cell << LAYER_BITS) + layer for layer in (x, y))
    places = np.sort(np.concatenate([from_, to]))
    places = places[stretch_bounds(places[1:] == places[:-1])[0]]
    first = np.searchsorted(places, from_)
    row, nth = repeated_index(np.searchsorted(places, to) - first)
    if row.size == cell.size:
        return cell, lo, hi, x, y
    x, y = (places[first[row] + nth + end] - (cell[row] << LAYER_BITS) for end in (0, 1))
    return cell[row], lo[row], hi[row], x, y


def _joined(cell: IntArray, lo: Bytes, hi: Bytes, x: IntArray, y: IntArray) -> _Cut:
    cell, lo, hi, x, y = _sorted((cell, lo, hi, x, y), by=(lo, x, cell))
    begin, end = stretch_bounds((cell[1:] == cell[:-1]) & (x[1:] == x[:-1]) & (lo[1:] == hi[:-1]))
    cell, lo, hi, x, y = cell[begin], lo[begin], hi[end], x[begin], y[begin]
    cell, lo, hi, x, y = _sorted((cell, lo, hi, x, y), by=(x, hi, lo, cell))
    same = (cell[1:] == cell[:-1]) & (lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1])
    begin, end = stretch_bounds(same & (x[1:] == y[:-1]))
    return cell[begin], lo[begin], hi[begin], x[begin], y[end]


def _sorted(rows: _Cut, by: tuple[npt.NDArray[Any], ...]) -> _Cut:
    order = np.lexsort(by)
    cell, lo, hi, x, y = rows
    return cell[order], lo[order], hi[order], x[order], y[order]


def plan(source: Geometry, sink: Geometry, features: Collection[int] = ()) -> Plan:
    """Make the plan from two Descriptions that `validate` accepts; both sides get the same one, byte for byte.

    `features` are those of the session; SPREAD_ONE, FEW_SOURCES, COLD_DRAFT and CONVERT change the plan. Raises
    PlanError of class incompatible, with the source's value as `mine` and the sink's as `yours` (KVP-GEO-FACT,
    KVP-PLAN-*); what CONVERT converts, it compares in the sink's form.
    """
    check_facts(source, sink)
    if Feature.CONVERT in features:
        source = converted(source, sink)
    try:
        have, want = owned_intervals(source), owned_intervals(sink)
    except LookupError:
        for geometry in (source, sink):
            validate(geometry)  # says what is wrong, but is too slow to be done each time
        raise
    lacking = {model for model, _ in want if model} - {model for model, _ in have}
    cold = tuple(sorted(lacking)) if Feature.COLD_DRAFT in features else ()
    boxes = boxes_of(*_cut(sink, have, want, cold).elect(sink.replica, features))
    models = np.array([g.model for g in sink.groups])[np.searchsorted([g.id for g in sink.groups], boxes.group)]
    ranks_and_group = [boxes.source, boxes.sink, boxes.group, models]
    bounds = [boxes.layer_lo, boxes.layer_hi, boxes.part, boxes.lo, boxes.hi, boxes.source_class, boxes.sink_class]
    rows = np.empty((boxes.group.size, _COLUMNS), "<u8")
    for place, column in enumerate([*ranks_and_group, *bounds, sink.replica]):
        rows[:, place] = column
    data = rows.reshape(-1).view(np.uint8).data
    return Plan(tuple(_routes(sink, have, boxes, models, data)), hashlib.sha256(data).digest(), cold)


def _routes(
    sink: Geometry, have: OwnedIntervals, boxes: BoxTable, models: IntArray, data: memoryview
) -> Iterator[Route]:
    """The routes of all boxes, cut where the source's group changes; `data` holds the boxes as rows of the digest."""
    if not data:
        return
    names = {(g.id, i): (g.model, p.name) for g in sink.groups for i, p in enumerate(g.parts)}
    parts, part = distinct_rows(boxes.group, boxes.part)
    keys = [names[key] for key in zip(boxes.group[parts].tolist(), boxes.part[parts].tolist(), strict=True)]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    part = np.array([number[key] for key in keys])[part]
    homes = [_homes(have[key]) for key in number]
    row, layer_lo, layer_hi, home = _within(homes, part, boxes.layer_lo, boxes.layer_hi)
    same = [column[1:] == column[:-1] for column in (boxes.source, boxes.sink, boxes.group)]
    begin, _ = stretch_bounds(np.logical_and.reduce(same))
    inner = [column[row] for column in (boxes.part, boxes.lo, boxes.hi, boxes.source_class, boxes.sink_class)]
    columns = [models[row], layer_lo, layer_hi, *inner, home]
    if row.size > part.size:
        order = np.lexsort((*inner[::-1], layer_hi, layer_lo, np.searchsorted(begin, row, "right")))
        row, columns = row[order], [column[order] for column in columns]
    whole = list(starmap(Box, zip(*(column.tolist() for column in columns), strict=True)))
    ends = [*begin[1:].tolist(), part.size]
    cuts = np.searchsorted(row, ends).tolist()
    ranks = (column[begin].tolist() for column in (boxes.source, boxes.sink, boxes.group))
    start = first = 0
    for a, b, group, end, last in zip(*ranks, ends, cuts, strict=True):
        digest = hashlib.sha256(data[start * _ROW : end * _ROW]).digest()
        yield Route(a, b, group, tuple(whole[first:last]), digest)
        start, first = end, last


_COLUMNS = 12
"""Numbers of a box in the digest."""
_ROW = _COLUMNS * 8
"""Their bytes."""


def _cut(sink: Geometry, have: OwnedIntervals, want: OwnedIntervals, cold: Collection[int]) -> Cutter:
    """All that the sink's ranks need, cut by owners; raises the first mismatch, in the order of the sink's groups."""
    shared = {key: common_layers(have.get(key, []), needed) for key, needed in want.items()}
    names: dict[int, list[str]] = defaultdict(list)
    for model, name in have:
        names[model].append(name)
    cutter = Cutter()
    for dst, index, part in [(g, i, p.name) for g in sink.groups for i, p in enumerate(g.parts) if not p.at]:
        key = dst.model, part
        families = []
        for sources, sinks, layers in () if dst.model in cold else shared.get(key, {}).get(dst.id, ()):
            if not sources:
                raise missing(dst, part, layers[0][0], names[dst.model])
            cutter.pair(sources[0].group, dst, index)
            check_scales(sources[0].group, dst, index, layers)
            opaque = dst.parts[index].encoding
            alike = opaque_families(sources, sinks, part) if opaque else [(sources, sinks)]
            families += [(family, layers) for family in alike]
        cutter.cut(index, families)
    _check_left(sink, have, want)
    return cutter


def _check_left(sink: Geometry, have: OwnedIntervals, want: OwnedIntervals) -> None:
    """Raise PART_MISSING if the sink leaves parts of a layer behind of which it takes others (KVP-PLAN-LEFT)."""
    left = {
        (model, name): layers
        for (model, name), intervals in have.items()
        if name_of(name) not in OPTIONAL
        and name not in (sink.without or ())
        and (layers := _in_memory(intervals) - _in_memory(want.get((model, name), ())))
    }
    for dst in sink.groups if left else ():
        for part in (part.name for part in dst.parts if name_of(part.name) not in OPTIONAL):
            taken = _in_memory(i for i in want.get((dst.model, part), ()) if i.group.id == dst.id)
            both = {name: taken & layers for (model, name), layers in left.items() if model == dst.model}
            if lost := {name: min(layers) for name, layers in both.items() if layers}:
                raise left_behind(dst, part, lost, [name for model, name in want if model == dst.model])


def _in_memory(owned: Iterable[OwnedInterval]) -> set[int]:
    """The layers of these intervals, other than those of hand-off data."""
    layers = {i.layers for i in owned if KINDS[i.group.kind].has_memory}
    return {layer for intervals in layers for lo, hi in intervals for layer in range(lo, hi)}


Homes = list[tuple[int, int, int]]
"""(first layer, layer after the last, group id), ascending; each layer of a part is in one group."""


def _homes(owned: Iterable[OwnedInterval]) -> Homes:
    groups = {(interval.group.id, interval.layers) for interval in owned}
    homes: Homes = []
    for lo, hi, group in sorted({(lo, hi, group) for group, layers in groups for lo, hi in layers}):
        if homes and homes[-1][2] == group and lo <= homes[-1][1]:
            lo, hi = homes[-1][0], max(hi, homes.pop()[1])
        homes.append((lo, hi, group))
    return homes


def _within(
    homes: list[Homes], part: IntArray, lo: IntArray, hi: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Layers [lo, hi) of boxes of a part, cut where the source's group changes: box, first, after the last, group."""
    starts, ends, ids = np.array([home for of_part in homes for home in of_part]).reshape(-1, 3).T
    key = np.repeat(np.arange(len(homes)), [len(of_part) for of_part in homes]) << LAYER_BITS
    first = np.searchsorted(key + starts, (part << LAYER_BITS) + lo, "right") - 1
    last = np.searchsorted(key + starts, (part << LAYER_BITS) + hi)
    row, nth = repeated_index(last - first)
    home = first[row] + nth
    return row, np.maximum(starts[home], lo[row]), np.minimum(ends[home], hi[row]), ids[home]
