"""Any two engines of the planner's tests that are small enough for nodes of their own."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvproto.copying.execute import execute
from kvproto.copying.grants import items_needed
from kvproto.copying.program import Window
from kvproto.net import Listener, private_address
from kvproto.planning.geometry import Geometry
from kvproto.planning.plan import plan
from kvproto.rank.base import party_of
from tests.node.nodes import PREFILL, DrivenSource, Nodes, finished, sink_node
from tests.node.test_node import CONTENT
from tests.plan.worlds import caches, side
from tests.pools import allocate, contents, lower
from tests.session.driver import ticket

FEW, ROOM = 8, 40
"""Tokens that any ring holds, and items of a pool."""


@functools.cache
def small_world(number: int) -> int:
    """Seed of a pair of at most two ranks a side, with something to move."""
    seed = small_world(number - 1) + 1 if number else 0
    while not _small(seed):
        seed += 1
    return seed


def _small(seed: int) -> bool:
    rng = random.Random(seed)
    held = caches(rng)
    source = side(rng, held, 0, complete=True)
    if len(source.ranks) > 2:
        return False
    sink = side(rng, held, 0, complete=False)
    from_zero = all(g.cp_size == 1 or not g.origin for g in (*source.groups, *sink.groups))
    return len(sink.ranks) <= 2 and from_zero and bool(plan(source, sink).routes)


def world(seed: int) -> tuple[Geometry, Geometry]:
    rng = random.Random(seed)
    held = caches(rng)
    return side(rng, held, 0, complete=True), side(rng, held, 0, complete=False)


def window(geometry: Geometry, rank: int, order: dict[int, list[int]]) -> dict[int, list[int]]:
    """Items of a rank for the first tokens, by group id."""
    shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
    need = {g.id: items_needed(g, shares[g.id].cp_rank, 0, FEW) for g in geometry.groups if g.id in shares}
    return {g.id: order[g.id][: need.get(g.id, 0)] for g in geometry.groups}


class AnyTwo(Nodes):
    """All source ranks, their pools full of noise, and one sink rank; one request of FEW tokens."""

    def __init__(self, folder: Path, seed: int, give: Callable[[], dict[str, Any]] = dict, **take: Any) -> None:
        """`give` and `take` are further options of the sources and of the sink."""
        self.from_, to = world(seed)
        routes, rng = plan(self.from_, to), np.random.default_rng(seed)
        self.ticket = ticket()
        self.key = bytes(self.ticket.key)
        number = next(r.rank for r in to.ranks if routes.required(r.rank))
        addresses = {r.rank: private_address(folder, f"kv-{r.rank}") for r in self.from_.ranks}
        theirs, mine = (
            {g.id: rng.permutation(ROOM).tolist() for g in geometry.groups} for geometry in (self.from_, to)
        )
        self.items = window(to, number, mine)
        self.held = {rank: window(self.from_, rank, theirs) for rank in addresses}
        """Items of each source rank."""
        self.pool = allocate(to, number, dict.fromkeys(mine, ROOM))
        self.wanted = bytearray(contents(self.pool).size)
        sources = []
        for rank in addresses:
            pool = allocate(self.from_, rank, dict.fromkeys(theirs, ROOM))
            memory = contents(pool)
            memory[:] = rng.integers(1, 256, memory.size, np.uint8)
            sides = (
                {g: Window(0, FEW, np.array(i, np.int64)) for g, i in items.items()}
                for items in (self.held[rank], self.items)
            )
            program = lower(routes.between(rank, number), pool.layout, self.pool.layout, *sides)
            execute(program, {0: memoryview(memory)}, {0: memoryview(self.wanted)})
            sources.append(DrivenSource(party_of("p", pool), pool, Listener(addresses[rank]), addresses, **give()))
            sources[-1].expect(self.ticket, CONTENT, FEW)
        required = routes.required(number)
        self.required = [node for node in sources if node.pool.layout.rank in required]
        """Those that the sink asks."""
        sink = sink_node("d", self.pool, **take)
        sink.connect(PREFILL, addresses[required[0]])
        super().__init__(sources, [sink])

    def ask(self) -> None:
        self.ready()
        self.fetch(0, self.ticket, CONTENT, FEW, self.items)

    def finish(self) -> None:
        for rank, node in zip(self.held, self.sources, strict=True):
            node.finish(self.key, finished(self.held[rank], FEW))

    def check(self) -> None:
        """Every byte of the request is there, and no other has changed."""
        assert np.array_equal(contents(self.pool), np.frombuffer(self.wanted, np.uint8))
        assert any(self.wanted)
