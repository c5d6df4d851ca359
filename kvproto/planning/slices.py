"""A plan as slices: for each cache, which range of the global cache a rank gets, and where it lies on both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import attrs
import numpy as np

from kvproto.planning.arrays import Intervals, merged_intervals
from kvproto.planning.geometry import Geometry, LaneSpan, Owns, Part, column_names, lane_bytes
from kvproto.planning.plan import Box, Plan

__all__ = ["PartLanes", "Range", "Slice", "slices"]


@attrs.frozen
class PartLanes:
    """Lanes of a part, or of one of its sections."""

    name: str
    """The part's name; for a section with its bytes, such as `latent[0:1024]`."""
    lanes: Intervals
    """In bytes along the column's lane axis; on a rank, along its own lanes in the order in which it states them."""
    lane_bytes: int
    """Bytes of one lane on the side that the range belongs to."""


@attrs.frozen
class Range:
    """Intervals, lanes and tokens; layers and lanes as intervals [lo, hi)."""

    layers: Intervals
    columns: tuple[PartLanes, ...]
    """One; several if sections of a part hold the bytes."""
    cp_rank: int = 0
    """Which share of the tokens it is."""
    cp_size: int = 1
    """The number of shares."""
    interleave: int = 1
    """Tokens of each run of the deal."""
    origin: int = 0
    """First token that is dealt."""
    order: tuple[int, ...] | None = None
    """The cp rank of each run until they repeat; None: in turn."""


@attrs.frozen
class Slice:
    """A range of one part that a sink rank gets from a source rank, with the same lanes in all of its layers."""

    sink: int
    source: int
    cache: str
    """The sink's group and the part, such as `target.latent`."""
    whole: Range
    """The range in the cache of all ranks, in lanes of the sink; of its tokens, those in both sides' shares move."""
    local: Range
    """The range at the sink."""
    remote: Range
    """The range at the source."""


def slices(source: Geometry, sink: Geometry, plan: Plan) -> Iterator[Slice]:
    """The slices of a plan between two Descriptions, by sink rank, cache and source rank."""
    by_range: dict[tuple[int, int, int, int, tuple[int, ...]], list[Box]] = defaultdict(list)
    for route in plan.routes:
        for box in route.boxes:
            alike = box.lo, box.hi, box.source_class, box.sink_class, box.source_group
            by_range[route.sink, route.group, box.part, route.source, alike].append(box)
    sides = [_Side(source), _Side(sink)]
    for (to, group, part, from_, (lo, hi, c, d, home)), boxes in sorted(by_range.items()):
        dst = sides[1].groups[group]
        name = dst.parts[part].name
        layers = tuple(merged_intervals(sorted((box.layer_lo, box.layer_hi) for box in boxes)))
        whole = Range(layers, (PartLanes(name, ((lo, hi),), lane_bytes(dst.parts[part])),))
        local = sides[1].local(to, group, name, layers, lo, hi, d)
        remote = sides[0].local(from_, home, name, layers, lo, hi, c)
        yield Slice(to, from_, f"{dst.name}.{name}", whole, local, remote)


class _Side:
    """A Description, looked up by rank and group."""

    def __init__(self, geometry: Geometry) -> None:
        self.groups = {g.id: g for g in geometry.groups}
        self._shares: dict[tuple[int, int], Owns] = {(r.rank, o.group): o for r in geometry.ranks for o in r.owns}

    def local(self, rank: int, group: int, part: str, layers: Intervals, lo: int, hi: int, cp_rank: int) -> Range:
        """Where a rank holds bytes [lo, hi) of global layers, by its own layers and lanes, counted from 0."""
        share, stated = self._shares[rank, group], self.groups[group]
        names = column_names(stated)
        columns = [
            PartLanes(names[i], lanes, p.lane_bytes)
            for i, p in enumerate(stated.parts)
            if p.name == part and (lanes := _own(p, [s for s in share.lanes if s.part == i], lo, hi))
        ]
        ends = ((int(np.searchsorted(share.layers, a)), b - a) for a, b in layers)
        order = None if stated.order is None else tuple(stated.order.tolist())
        local = tuple(merged_intervals((a, a + n) for a, n in ends))
        return Range(local, tuple(columns), cp_rank, stated.cp_size, stated.interleave, stated.origin, order)


def _own(part: Part, spans: Iterable[LaneSpan], lo: int, hi: int) -> Intervals:
    """The part of bytes [lo, hi) of a lane axis that a column holds, in bytes along the rank's own lanes of it."""
    whole, size, at = lane_bytes(part), part.lane_bytes, part.at or 0
    before, held = 0, []
    for span in spans:
        first, last = max(span.lo, lo // whole), min(span.hi, -(-hi // whole))
        # adjacent lanes of a whole part are one interval; those of a section are not
        pieces = [(first, last)] if size == whole else [(lane, lane + 1) for lane in range(first, last)]
        for a, b in pieces:
            x, y = max(lo, a * whole + at), min(hi, (b - 1) * whole + at + size)
            if x < y:
                skip = (before + a - span.lo) * size - a * whole - at
                held.append((x + skip, y + skip))
        before += span.hi - span.lo
    return tuple(merged_intervals(sorted(held)))
