"""Pools of tests, whose geometries are spoken of by group id."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproto import Pool
from kvproto.copying.lowering import Pair
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import Route
from kvproto.transport.base import Memory
from kvproto.wire.enums import ItemKind


def allocate(geometry: Geometry, rank: int, items: Mapping[int, int], device: int | None = None) -> Pool:
    """A pool of one region; `items` of each group by its id, those of other ranks passed over."""
    owned = {share.group for r in geometry.ranks if r.rank == rank for share in r.owns}
    groups = [g for g in geometry.groups if g.id in owned and g.kind != ItemKind.HANDOFF]
    return Pool.allocate(geometry, {g.name: items[g.id] for g in groups}, rank=rank, device=device)


def lower(
    routes: tuple[Route, ...],
    source: RankLayout,
    sink: RankLayout,
    sources: Mapping[int, Window],
    sinks: Mapping[int, Window],
) -> CopyProgram:
    """The copy program of one rank pair for one request."""
    return Pair(routes, source, sink).lower(sources, sinks)


def memory(pool: Pool) -> Memory:
    """The one region of an allocated pool."""
    (found,) = pool.memories.values()
    return found


def contents(pool: Pool) -> npt.NDArray[np.uint8]:
    """All bytes of an allocated pool in host memory, as a view."""
    return np.from_dlpack(memory(pool)).view(np.uint8)


def column(pool: Pool, group: int, layer: int, part: str) -> Any:
    """A layer and part of a pool in host memory, as a view: uint8 [items, rows, lanes of this rank, bytes]."""
    return pool.array(pool.layout.groups[group].name, layer, part)
