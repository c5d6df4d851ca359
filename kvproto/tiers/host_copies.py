"""Copies between an engine's pool and host memory: one copy program for all components of all pages.

In the pool, component c of slot s is the items [s * k, (s + 1) * k) of its group, where k items hold a page; of a
recurrent state it is item s, the state after the page's last token. On the host it is one run of bytes, in the order in
which it is stored (tiers.md, Components).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

import attrs
import numpy as np

from kvproto.copying.columns import columns_at
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.errors import LocalError
from kvproto.planning.geometry import Geometry, Group, lane_bytes
from kvproto.planning.kinds import KINDS
from kvproto.planning.plan import Box, Route
from kvproto.tiers.page_layout import PageLayout, row_bytes
from kvproto.transport.base import Pager, Paging, Regions
from kvproto.wire.enums import ErrorCode, ItemKind
from kvproto.wire.messages import Owns


class HostCopies:
    """The pool of one rank, host memory for `slots` pages, and the copies between them."""

    def __init__(self, layout: PageLayout, pool: RankLayout, regions: Regions, slots: int, pager: Pager) -> None:
        """`regions` are the pool's memory, by region id; raises LocalError for pages that are not whole items."""
        self.layout, self.pool, self.pager, self._regions = layout, pool, pager, regions
        lengths = layout.lengths
        states = {group for group in lengths if KINDS[pool.groups[group].kind].is_state}
        pool = _states_as_pages(pool, states)
        self.programs = self.bytes = 0
        """Copy programs that were started, and the bytes that they move."""
        rows = {group: _rows(pool.groups[group], pool.shares[group], length) for group, length in lengths.items()}
        self._items = {group: count // pool.groups[group].rows for group, count in rows.items()}
        """Items of the pool in a page, by group."""
        self._tokens = {group: count if group in states else layout.page for group, count in rows.items()}
        """Tokens in a page, as windows count them, by group."""
        self.slots = slots
        self.pages = min(pool.columns[group].items // count for group, count in self._items.items())
        """Pages that the pool has room for."""
        self.memory = {group: pager.allocate(max(length * slots, 1)) for group, length in lengths.items()}
        """Host memory by group, one page after the other."""
        self._bytes = {group: np.from_dlpack(memory).view(np.uint8).data for group, memory in self.memory.items()}
        host = as_pool(pool, lengths, slots)
        boxes = {group: tuple(_boxes(pool.groups[group], pool.shares[group])) for group in rows}
        routes = tuple(Route(0, 0, group, of_group, bytes(32)) for group, of_group in boxes.items())
        self._out, self._in = Pair(routes, pool, host), Pair(routes, host, pool)

    def page(self, slot: int) -> dict[int, memoryview]:
        """The bytes of a host slot, by group."""
        return {
            group: self._bytes[group][slot * length : (slot + 1) * length]
            for group, length in self.layout.lengths.items()
        }

    def to_host(self, pool: Sequence[int], host: Sequence[int]) -> Paging:
        """Start to copy slots of the pool into slots of the host."""
        program = self._out.lower(self._pool_windows(pool), self._host_windows(host))
        return self._count(program, self.pager.save(program, self._regions, self.memory))

    def to_pool(self, host: Sequence[int], pool: Sequence[int]) -> Paging:
        """Start to copy slots of the host into slots of the pool."""
        program = self._in.lower(self._host_windows(host), self._pool_windows(pool))
        return self._count(program, self.pager.load(program, self.memory, self._regions))

    def close(self) -> None:
        """Free the host memory, once all copies are over; memory with live views is freed with the last of them."""
        self.pager.close()
        self._bytes.clear()
        while self.memory:
            with suppress(BufferError):
                self.memory.popitem()[1].close()

    def _count(self, program: CopyProgram, copy: Paging) -> Paging:
        self.programs += 1
        self.bytes += program.bytes
        return copy

    def _pool_windows(self, slots: Sequence[int]) -> dict[int, Window]:
        """The pages as if they were pages of one prompt: each is whole turns, so the deal of none changes by that."""
        at = np.asarray(slots, np.int64)[:, None]
        items = {group: (at * count + np.arange(count)).reshape(-1) for group, count in self._items.items()}
        return {group: Window(0, len(slots) * self._tokens[group], held) for group, held in items.items()}

    def _host_windows(self, slots: Sequence[int]) -> dict[int, Window]:
        at = np.asarray(slots, np.int64)
        return {group: Window(0, len(slots) * count, at) for group, count in self._tokens.items()}


def _states_as_pages(side: RankLayout, states: Collection[int]) -> RankLayout:
    """A pool whose states are pages with as many tokens as rows, so that one program copies many of them."""
    groups = tuple(
        attrs.evolve(g, kind=ItemKind.PAGE, rows=g.live_rows or g.rows, live_rows=None, tokens_per_row=1)
        if g.id in states
        else g
        for g in side.geometry.groups
    )
    return RankLayout(attrs.evolve(side.geometry, groups=groups), side.rank, side.columns)


def _rows(group: Group, share: Owns, length: int) -> int:
    """The rows of a page that the rank has; raises LocalError for a ring, and for pages that cut an item."""
    if not KINDS[group.kind].paged:
        raise LocalError(ErrorCode.LAYOUT_OPAQUE, f"groups[{group.name}]", "rows of tokens, or states", "a ring")
    rows = length // _width(group, share)
    if rows % group.rows:
        wants = f"a multiple of {group.rows} rows"
        raise LocalError(ErrorCode.ROW_MISMATCH, f"groups[{group.name}]", wants, f"{rows} rows a page")
    return rows


def _width(group: Group, share: Owns) -> int:
    """The bytes of a row over all layers that the rank has."""
    return row_bytes(group, share) * len(share.layers)


def as_pool(side: RankLayout, lengths: Mapping[int, int], slots: int) -> RankLayout:
    """Stored pages as a pool whose items are pages of `lengths` bytes by group; region g is the memory of group g."""
    rows = {group: length // _width(side.groups[group], side.shares[group]) for group, length in lengths.items()}
    groups = tuple(attrs.evolve(g, rows=rows[g.id]) if g.id in rows else g for g in side.geometry.groups)
    geometry: Geometry = attrs.evolve(side.geometry, groups=groups)
    columns = {}
    for group, count in rows.items():
        spec, share = side.groups[group], side.shares[group]
        places, at = [], 0
        for _ in share.layers:
            for number, part in enumerate(spec.parts):
                width = part.lane_bytes * sum(span.hi - span.lo for span in share.lanes if span.part == number)
                places.append((group, at, lengths[group], width, part.lane_bytes))
                at += width * count
        columns[group] = columns_at(group, slots, places)
    return RankLayout(geometry, side.rank, columns)


def _boxes(group: Group, share: Owns) -> Iterator[Box]:
    """The boxes of a route from a rank to itself, with everything that it owns of a group."""
    layers, names = share.layers.astype(np.int64), [part.name for part in group.parts]
    for run in np.split(layers, np.flatnonzero(np.diff(layers) != 1) + 1):
        begin, end = int(run[0]), int(run[-1]) + 1
        for span in share.lanes:
            if names.index(names[span.part]) == span.part:  # the first section stands for all
                size, rank = lane_bytes(group.parts[span.part]), share.cp_rank
                lo, hi = span.lo * size, span.hi * size
                yield Box(group.model, begin, end, span.part, lo, hi, rank, rank, group.id)
