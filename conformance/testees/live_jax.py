"""The adapter of live engines in JAX: the registered pools and the attention of the reference engine, in both roles."""

from __future__ import annotations

import jax
import numpy as np
from engine_cache import Bytes, Ints, Key
from live_either import Either
from live_torch import TorchCache, configs
from toy_engine import serve

from kvproto_reference.cache import Shard
from kvproto_reference.jax_engine.attention import Paged, rows_of
from kvproto_reference.jax_engine.mesh import RANKS, mesh_of, placed
from kvproto_reference.jax_engine.pool import RankPools


class JaxCache(TorchCache):
    """Pools of the reference engine in JAX: XLA reads them where they lie, and rows that XLA gives are scattered."""

    def __init__(self, world: str, heads_first: bool) -> None:
        super().__init__(world, heads_first)
        self._mesh = mesh_of(1)
        names = [name for name in self.groups if name in self.pools]
        self._ranks = {
            name: RankPools([self.pool], name, config, self._mesh, range(config.layers))
            for name, config in zip(names, configs(world), strict=True)
        }

    def put(self, key: Key, table: list[int], rows: Ints, data: Bytes) -> None:
        group, layer, part = key
        slots = Shard(self.groups[group], 0).slots(np.array(table), rows)
        new = placed(self._mesh, data.copy().view(np.float32)[None, None, None], RANKS)
        self._ranks[group].write([layer], {part: new}, [(np.arange(len(rows)), slots)])

    def get(self, key: Key, table: list[int], rows: Ints) -> Bytes:
        group, layer, part = key
        pools = self._ranks[group]
        (at,), firsts = pools.at([layer])
        which = [name for name, _ in at].index(part)
        paged = Paged(pools.read([layer])[at[which][1]], int(firsts[0, which]))
        found = rows_of({part: paged}, jax.numpy.asarray([table]))[part][0, rows]
        return np.asarray(found).view(np.uint8)


if __name__ == "__main__":
    serve(Either(JaxCache))
