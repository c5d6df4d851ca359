"""What a sink expects from each source rank: the rank pair's program, computed on the sink's side alone.

The sink does not know the source's layout, but what it needs from the program (the order of a packed stream, the rows
of a checksum, the number of runs) does not depend on it. So a packed layout stands in for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Runs, Window, windows
from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry
from kvproto.planning.kinds import kind_of
from kvproto.planning.plan import Plan
from kvproto.rank.rank_pool import pack
from kvproto.wire.messages import Done, Grants

__all__ = ["Expected"]


class Expected:
    """The programs of one source replica, by source rank."""

    def __init__(self, plan: Plan, source: Geometry, own: RankLayout) -> None:
        self._plan, self._source, self._own = plan, source, own
        self._pairs: dict[int, Pair] = {}

    def pair(self, writer: int) -> Pair:
        """The rank pair, cached, with a stand-in for the source's layout."""
        known = self._pairs.get(writer)
        if known is None:
            columns = pack(self._source, writer, {g.id: 1 for g in self._source.groups})[0]
            routes = self._plan.between(writer, self._own.rank)
            known = self._pairs[writer] = Pair(routes, RankLayout(self._source, writer, columns), self._own)
        return known

    @property
    def writers(self) -> tuple[int, ...]:
        """Source ranks with a route to this one."""
        return self._plan.required(self._own.rank)

    def program(self, writer: int, grants: Mapping[int, Grants]) -> CopyProgram:
        """What a source rank writes in a transfer; places on the source's side have no meaning. Raises BAD_GRANT."""
        rank = next(r for r in self._source.ranks if r.rank == writer)
        groups = {g.id: g for g in self._source.groups}
        drawn: dict[int, list[Grants]] = {}
        for route in self._plan.between(writer, self._own.rank):
            for id in {box.source_group for box in route.boxes}:
                drawn.setdefault(id, []).append(grants[route.group])
        sources = {}
        for share in rank.owns:
            some = drawn.get(share.group, [])
            first = min((g.first for g in some), default=0)
            count = max((g.first + g.count for g in some), default=0) - first
            items = max(items_needed(groups[share.group], share.cp_rank, first, count), 1)
            sources[share.group] = Window(first, count, np.arange(items))
        return self.pair(writer).lower(sources, windows(grants.values()))

    def runs(self, writer: int) -> Runs:
        """The runs that a source rank writes for two scattered pages of each group; none if that cannot be computed."""
        grants = {}
        shares = {s.group: s for r in self._own.geometry.ranks if r.rank == self._own.rank for s in r.owns}
        for group in self._own.geometry.groups:
            rows = 2 * group.rows * group.cp_size if kind_of(group).paged else 1
            first, count = group.origin if group.cp_size > 1 else 0, rows * group.tokens_per_row
            need = items_needed(group, shares[group.id].cp_rank, first, count) if group.id in shares else 0
            items = np.arange(need, dtype=np.uint32)[::-1] * 2
            grants[group.id] = Grants(group=group.id, first=first, count=count, valid=first + count, items=items)
        try:
            return self.program(writer, grants).runs()
        except KvprotoError:  # the source deals its tokens from a later one on
            return Runs(0, 0)

    def handoff(self, done: Done) -> dict[tuple[int, str], bytes]:
        """The hand-off bytes of a Done that `check_outcome` accepted, by this side's group id and part name."""
        found = {}
        routes = {r.group: r for r in self._plan.between(done.writer, self._own.rank)}
        for each in done.handoff:
            group = self._own.group(each.group)
            parts = [group.parts[p] for p in sorted({box.part for box in routes[each.group].boxes})]
            at = 0
            for p in parts:
                found[group.id, p.name] = bytes(each.data[at : at + p.lane_bytes])
                at += p.lane_bytes
        return found
