"""Who sends what to whom: the intersection of what the source's ranks and the sink's ranks own.

The space is model x layer x part x lane x token class; a lane bound is in bytes along the part's lane axis, so that the
two sides may cut lanes differently. Nothing here knows a parallel size, an attention kind or an address.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import attrs
import numpy as np

from kvproto.planning.arrays import IntArray, distinct_rows, repeated_index, stretch_bounds
from kvproto.planning.boxes import LAYER_BITS, BoxTable, boxes_of
from kvproto.planning.compare import check_facts, check_pair, differences, missing, name_of, scaled_by, unscaled
from kvproto.planning.cutting import (
    Cutter,
    OwnedInterval,
    OwnedIntervals,
    common_layers,
    opaque_families,
    owned_intervals,
    share_unit,
)
from kvproto.planning.election import Layers
from kvproto.planning.geometry import Geometry, validate
from kvproto.wire.enums import Feature
from kvproto.wire.messages import RouteRef

__all__ = ["Box", "Plan", "Route", "differences", "plan"]


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
    """What one source rank sends to one sink rank of one group."""

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
        found: dict[tuple[int, int], list[Route]] = defaultdict(list)
        for route in self.routes:
            found[route.source, route.sink].append(route)
        return {key: tuple(routes) for key, routes in found.items()}

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


def plan(source: Geometry, sink: Geometry, features: Collection[int] = ()) -> Plan:
    """Make the plan from two Descriptions that `validate` accepts; both sides get the same one, byte for byte.

    `features` are those of the session; SPREAD_ONE and COLD_DRAFT change the plan. Raises PlanError of class
    incompatible, with the source's value as `mine` and the sink's as `yours` (KVP-GEO-FACT, KVP-PLAN-*).
    """
    check_facts(source, sink)
    try:
        have, want = owned_intervals(source), owned_intervals(sink)
    except LookupError:
        for geometry in (source, sink):
            validate(geometry)  # says what is wrong, but is too slow to be done each time
        raise
    cold = _cold(have, want) if Feature.COLD_DRAFT in features else ()
    found = boxes_of(*_cut(sink, have, want, cold).elect(sink.replica, features))
    models = np.array([g.model for g in sink.groups])[np.searchsorted([g.id for g in sink.groups], found.group)]
    columns = (
        found.source, found.sink, found.group, models, found.layer_lo, found.layer_hi, found.part, found.lo, found.hi,
        found.source_class, found.sink_class, np.full(found.group.size, sink.replica),
    )  # fmt: skip
    data = np.stack([column.astype("<u8") for column in columns], axis=1).tobytes()
    return Plan(tuple(_routes(sink, have, found, models, data)), hashlib.sha256(data).digest(), cold)


def _routes(sink: Geometry, have: OwnedIntervals, found: BoxTable, models: IntArray, data: bytes) -> Iterator[Route]:
    """The routes of all boxes, cut where the source's group changes; `data` holds the boxes as rows of the digest."""
    if not data:
        return
    names = {(g.id, i): (g.model, p.name) for g in sink.groups for i, p in enumerate(g.parts)}
    parts, part = distinct_rows(found.group, found.part)
    keys = [names[key] for key in zip(found.group[parts].tolist(), found.part[parts].tolist(), strict=True)]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    part = np.array([number[key] for key in keys])[part]
    homes = [_homes(have[key]) for key in number]
    row, x, y, id = _within(homes, part, found.layer_lo, found.layer_hi)
    same = [column[1:] == column[:-1] for column in (found.source, found.sink, found.group)]
    begin, _ = stretch_bounds(np.logical_and.reduce(same))
    inner = [column[row] for column in (found.part, found.lo, found.hi, found.source_class, found.sink_class)]
    columns = [models[row], x, y, *inner, id]
    if row.size > part.size:
        order = np.lexsort((*inner[::-1], y, x, np.searchsorted(begin, row, "right")))
        row, columns = row[order], [column[order] for column in columns]
    boxes = list(starmap(Box, zip(*(column.tolist() for column in columns), strict=True)))
    ends = [*begin[1:].tolist(), part.size]
    cuts = np.searchsorted(row, ends).tolist()
    ranks = (column[begin].tolist() for column in (found.source, found.sink, found.group))
    start = first = 0
    for a, b, group, end, last in zip(*ranks, ends, cuts, strict=True):
        digest = hashlib.sha256(data[start * _ROW : end * _ROW]).digest()
        yield Route(a, b, group, tuple(boxes[first:last]), digest)
        start, first = end, last


_ROW = 12 * 8
"""Bytes of a box in the digest."""


def _cut(sink: Geometry, have: OwnedIntervals, want: OwnedIntervals, cold: Collection[int]) -> Cutter:
    """All that the sink's ranks need, cut by owners; raises the first mismatch, in the order of the sink's groups."""
    shared = {key: common_layers(have.get(key, []), claims) for key, claims in want.items()}
    names: dict[int, list[str]] = defaultdict(list)
    for model, name in have:
        names[model].append(name)
    units: dict[tuple[int, int, int], int | None] = {}
    cutter = Cutter()
    for dst, index, part in [(g, i, p.name) for g in sink.groups for i, p in enumerate(g.parts) if not p.at]:
        key = dst.model, part
        for sources, sinks, layers in () if dst.model in cold else shared.get(key, {}).get(dst.id, ()):
            if not sources:
                raise missing(dst, part, layers[0][0], names[dst.model])
            src = sources[0].group
            if (src.id, dst.id, index) not in units:
                check_pair(src, dst, part)
                units[src.id, dst.id, index] = share_unit(src, dst, part)
            cutter.meet(src, dst, index)
            for some, needy in (
                opaque_families(sources, sinks, part) if dst.parts[index].encoding else [(sources, sinks)]
            ):
                cutter.cut(some, needy, layers, index, units[src.id, dst.id, index])
    _check_scales(sink, have, want)
    return cutter


def _check_scales(sink: Geometry, have: OwnedIntervals, want: OwnedIntervals) -> None:
    """Raise PART_MISSING where the source has scales of what the sink takes without any (KVP-PLAN-SCALES)."""
    given, taken = _scaled(have), _scaled(want)
    if not given:
        return
    owned: dict[tuple[int, str], set[Layers]] = defaultdict(set)
    for (_, name), claims in want.items():
        for claim in claims:
            owned[claim.group.id, name].add(claim.layers)
    for dst in sink.groups:
        for part in dst.parts:
            scaled = dst.model, name_of(part.name)
            layers = _numbers(owned[dst.id, part.name])
            if lost := layers & given.get(scaled, set()) - taken.get(scaled, set()):
                raise unscaled(dst, part.name, min(lost))


def _scaled(claims: OwnedIntervals) -> dict[tuple[int, str], set[int]]:
    """The layers that have scales, by model and the registered name of what is scaled."""
    found: dict[tuple[int, str], set[int]] = defaultdict(set)
    for (model, name), some in claims.items():
        if scaled := scaled_by(name):
            found[model, scaled] |= _numbers({claim.layers for claim in some})
    return found


def _numbers(layers: Iterable[Layers]) -> set[int]:
    return {n for some in layers for lo, hi in some for n in range(lo, hi)}


Homes = list[tuple[int, int, int]]
"""(first layer, layer after the last, group id), ascending; each layer of a part is in one group."""


def _homes(claims: Iterable[OwnedInterval]) -> Homes:
    layers = sorted({(lo, hi, group) for group, some in {(c.group.id, c.layers) for c in claims} for lo, hi in some})
    made: Homes = []
    for lo, hi, group in layers:
        if made and made[-1][2] == group and lo <= made[-1][1]:
            lo, hi = made[-1][0], max(hi, made.pop()[1])
        made.append((lo, hi, group))
    return made


def _within(
    homes: list[Homes], part: IntArray, lo: IntArray, hi: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Layers [lo, hi) of boxes of a part, cut where the source's group changes: box, first, after the last, group."""
    starts, ends, ids = np.array([home for some in homes for home in some]).reshape(-1, 3).T
    key = np.repeat(np.arange(len(homes)), [len(some) for some in homes]) << LAYER_BITS
    first = np.searchsorted(key + starts, (part << LAYER_BITS) + lo, "right") - 1
    last = np.searchsorted(key + starts, (part << LAYER_BITS) + hi)
    row, nth = repeated_index(last - first)
    home = first[row] + nth
    return row, np.maximum(starts[home], lo[row]), np.minimum(ends[home], hi[row]), ids[home]


def _cold(have: OwnedIntervals, want: OwnedIntervals) -> tuple[int, ...]:
    """The sink's draft models that no source rank owns anything of."""
    return tuple(sorted({model for model, _ in want if model} - {model for model, _ in have}))
