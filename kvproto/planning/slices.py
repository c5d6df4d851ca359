"""A plan as slices: for each cache, which range of the global cache a rank gets, and where it lies on both sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry, Owns, lane_bytes
from kvproto.planning.plan import Box, Plan
from kvproto.planning.spreading import Layers, joined

__all__ = ["Range", "Slice", "slices"]

Intervals = tuple[tuple[int, int], ...]


@attrs.frozen
class Range:
    """Layers and lanes, as intervals [lo, hi)."""

    layers: Layers
    lanes: Intervals
    """In bytes of the part's lane axis; on a rank, of its own lanes, one after the other as it states them."""
    lane_bytes: int
    """Of one lane, on the side that the range is of."""
    cp_rank: int
    cp_size: int
    """Which share of the tokens it is, of how many."""


@attrs.frozen
class Slice:
    """What one sink rank gets of one part from one source rank, of equal lanes in all of its layers."""

    sink: int
    source: int
    cache: str
    """The sink's group and the part, as `target.latent`."""
    whole: Range
    """Within the cache of all ranks, in lanes of the sink; of the tokens, those that are in both sides' shares."""
    local: Range
    """At the sink."""
    remote: Range
    """At the source."""


def slices(source: Geometry, sink: Geometry, plan: Plan) -> Iterator[Slice]:
    """The slices of a plan between two Descriptions, by sink rank, cache and source rank."""
    found: dict[tuple[int, int, int, int, tuple[int, ...]], list[Box]] = defaultdict(list)
    for route in plan.routes:
        for box in route.boxes:
            alike = box.lo, box.hi, box.source_class, box.sink_class, box.source_group
            found[route.sink, route.group, box.part, route.source, alike].append(box)
    sides = [_Side(source), _Side(sink)]
    for (to, group, part, from_, (lo, hi, c, d, home)), boxes in sorted(found.items()):
        dst = sides[1].groups[group]
        name = dst.parts[part].name
        theirs = next(i for i, p in enumerate(sides[0].groups[home].parts) if p.name == name)
        layers = tuple(joined(sorted((box.layer_lo, box.layer_hi) for box in boxes)))
        whole = Range(layers, ((lo, hi),), lane_bytes(dst.parts[part]), 0, 1)
        local = sides[1].local(to, group, part, layers, lo, hi, d)
        yield Slice(
            to, from_, f"{dst.name}.{name}", whole, local, sides[0].local(from_, home, theirs, layers, lo, hi, c)
        )


class _Side:
    """A Description, looked up by rank and group."""

    def __init__(self, geometry: Geometry) -> None:
        self.groups = {g.id: g for g in geometry.groups}
        self._shares: dict[tuple[int, int], Owns] = {(r.rank, o.group): o for r in geometry.ranks for o in r.owns}

    def local(self, rank: int, group: int, part: int, layers: Layers, lo: int, hi: int, cp_rank: int) -> Range:
        """Where a rank has bytes [lo, hi) of global layers: by its own layers and lanes, counted from 0."""
        share, stated = self._shares[rank, group], self.groups[group]
        size, at, lanes = lane_bytes(stated.parts[part]), 0, []
        for span in share.lanes:
            if span.part == part:
                x, y = max(lo, span.lo * size), min(hi, span.hi * size)
                if x < y:
                    lanes.append((at + x - span.lo * size, at + y - span.lo * size))
                at += (span.hi - span.lo) * size
        ends = ((int(np.searchsorted(share.layers, a)), b - a) for a, b in layers)
        return Range(
            tuple(joined((a, a + n) for a, n in ends)), tuple(joined(sorted(lanes))), size, cp_rank, stated.cp_size
        )
