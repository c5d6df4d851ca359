"""An offer holds what a transfer asks for, and no more than that needs."""

import random

import numpy as np
import pytest

from kvproto.copying.execute import execute
from kvproto.copying.grants import check_grants, items_needed
from kvproto.copying.program import Window, windows
from kvproto.planning.plan import plan
from kvproto.source.prefill import offered
from kvproto.wire.messages import Grants
from tests.node.any_two import FEW, ROOM, small_world, window, world
from tests.pools import allocate, contents, lower
from tests.session.driver import geometry


@pytest.mark.parametrize("number", range(60))
def test_what_is_offered_suffices(number: int) -> None:
    seed = small_world(number)
    rng = random.Random(seed)
    from_, to = world(seed)
    routes = plan(from_, to)
    for source in (r.rank for r in from_.ranks):
        for sink in (r.rank for r in to.ranks if routes.between(source, r.rank)):
            here, there = (
                allocate(g, rank, dict.fromkeys([x.id for x in g.groups], ROOM))
                for g, rank in ((from_, source), (to, sink))
            )
            contents(here)[:] = np.random.default_rng(seed).integers(1, 256, contents(here).size, np.uint8)
            order = {g.id: rng.sample(range(ROOM), ROOM) for g in (*from_.groups, *to.groups)}
            items, pair = window(from_, source, order), routes.between(source, sink)
            asked = []
            for route in pair:
                group = there.layout.groups[route.group]
                first = rng.randrange(0, FEW, group.tokens_per_row)
                need = items_needed(group, there.layout.shares[group.id].cp_rank, first, FEW - first)
                found = np.array(order[group.id][:need], np.uint32)
                asked.append(Grants(group=group.id, first=first, count=FEW - first, valid=FEW, items=found))
            made = offered(pair, here.layout, asked, {g: np.array(i, np.int64) for g, i in items.items()})
            drawn = tuple(sorted({box.source_group for route in pair for box in route.boxes}))
            check_grants(from_, source, here.layout.columns, drawn, made)
            all_ = {g: Window(0, FEW, np.array(i, np.int64)) for g, i in items.items()}
            results = []
            for sources in (all_, windows(made)):
                memory = memoryview(bytearray(contents(there).size))
                program = lower(pair, here.layout, there.layout, sources, windows(asked))
                execute(program, {0: memoryview(contents(here))}, {0: memory})
                results.append(bytes(memory))
            assert results[0] == results[1]


def test_a_prefix_that_the_sink_has_is_not_offered() -> None:
    source, sink = geometry(1), geometry(1)
    here = allocate(source, 0, {0: 8, 1: 8})
    routes = plan(source, sink).between(0, 0)
    asked = [
        Grants(group=g, first=6, count=5, valid=11, items=np.array([3, 4][: 2 if g < 2 else 0])) for g in (0, 1, 2)
    ]
    made = offered(routes, here.layout, asked, {0: np.array([5, 6, 7]), 1: np.array([1, 2, 3])})
    assert [(g.group, g.first, g.count, list(g.items)) for g in made] == [
        (0, 6, 5, [6, 7]),
        (1, 6, 5, [2, 3]),
        (2, 6, 5, []),
    ]
