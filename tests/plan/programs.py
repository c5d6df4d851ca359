"""Random rank pairs with layouts, windows and the programs that follow: what a transport may be asked to run."""

import random
from functools import cached_property

import attrs
import numpy as np

from kvproto.copying.columns import check_columns
from kvproto.copying.grants import items_needed
from kvproto.copying.program import CopyProgram, RankLayout, Window
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.wire.enums import ItemKind
from kvproto.wire.messages import Columns
from tests.plan import oracle
from tests.plan.oracle import Request
from tests.plan.worlds import Cache, caches, layout, regions, side
from tests.pools import lower

ITEMS = 40


@attrs.frozen
class Held:
    """A rank's memory and what is asked of it."""

    geometry: Geometry
    rank: int
    columns: dict[int, Columns]
    lengths: dict[int, int]
    asked: dict[int, Request]

    @cached_property
    def targets(self) -> dict[tuple[int, int], oracle.Coordinate]:
        """What belongs at each place."""
        return dict(oracle.walk(self.geometry, self.rank, self.columns, self.asked))

    @property
    def windows(self) -> dict[int, Window]:
        return {g: Window(r.first, r.count, np.array(r.items, np.int64)) for g, r in self.asked.items()}


Spans = dict[int, tuple[int, int]]
"""First token and count by group."""


def span(rng: random.Random, cache: Cache, geometries: tuple[Geometry, ...]) -> tuple[int, int]:
    """Tokens that both sides can name: from the later origin, and no more than the smaller ring."""
    groups = [
        g for x in geometries for g in x.groups if g.model == cache.model and g.parts[0].name == cache.parts[0][0]
    ]
    first = max([g.origin for g in groups if g.cp_size > 1], default=0) + rng.randint(0, 14)
    most = min([g.rows * g.tokens_per_row for g in groups if g.kind == ItemKind.RING], default=14)
    return first, rng.randint(0, min(most, 14))


def spans(rng: random.Random, cached: list[Cache], source: Geometry, sink: Geometry) -> tuple[Spans, Spans]:
    """What the source holds and what the sink asks for; the source may have computed more."""
    whole: Spans = {}
    wanted: Spans = {}
    early = rng.random() < 0.5
    for cache in cached:
        first, count = span(rng, cache, (source, sink))
        for geometry, found in ((sink, wanted), (source, whole)):
            for g in geometry.groups:
                if g.model == cache.model and g.parts[0].name == cache.parts[0][0]:
                    from_zero = early and g.kind == ItemKind.PAGE and geometry is source
                    found[g.id] = (0, first + count + 3) if from_zero else (first, count)
    return whole, wanted


def hold(rng: random.Random, geometry: Geometry, rank: int, spans: Spans) -> Held:
    groups = {g.id: g for g in geometry.groups}
    columns, lengths = layout(rng, geometry, rank, ITEMS)
    asked = {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        needed = oracle.need(group, share.cp_rank, *spans[group.id])
        assert items_needed(group, share.cp_rank, *spans[group.id]) == needed
        asked[group.id] = Request(*spans[group.id], rng.sample(range(ITEMS), needed))
    check_columns(geometry, rank, regions(lengths), tuple(columns[g] for g in sorted(columns)))
    return Held(geometry, rank, columns, lengths, asked)


def random_pairs(rng: random.Random) -> list[tuple[CopyProgram, dict[int, int], dict[int, int]]]:
    """Programs of some pairs of one world, each with the lengths of its source's regions and of its sink's."""
    cached = caches(rng)
    source = side(rng, cached, rng.randint(0, 3), complete=True)
    sink = side(rng, cached, rng.randint(0, 3), complete=False)
    whole: Spans = {}
    wanted: Spans = {}
    for cache in cached:
        both = span(rng, cache, (source, sink))
        for geometry, of in ((source, whole), (sink, wanted)):
            of |= {
                g.id: both for g in geometry.groups if (g.model, g.parts[0].name) == (cache.model, cache.parts[0][0])
            }
    made = plan(source, sink)
    have = {r.rank: hold(rng, source, r.rank, whole) for r in source.ranks}
    want = {r.rank: hold(rng, sink, r.rank, wanted) for r in sink.ranks}
    found = []
    for a, b in sorted({(r.source, r.sink) for r in made.routes})[:4]:
        sides = RankLayout(source, a, have[a].columns), RankLayout(sink, b, want[b].columns)
        program = lower(made.between(a, b), *sides, have[a].windows, want[b].windows)
        found.append((program, have[a].lengths, want[b].lengths))
    return found
