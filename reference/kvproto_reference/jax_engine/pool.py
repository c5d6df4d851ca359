"""The engine's registered pools: XLA reads them where they lie, and the host writes the rows that XLA gives back.

XLA takes its inputs to be constant and its outputs to be its own, while a pool stays at its address and changes under
transports. So a layer's program takes the pool as a plain input and never writes it. On the CPU the input is an alias
of the pool, which is made for one layer of one step and dropped: whatever was written between steps is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding

from kvproto import DType, Pool

from ..errors import EngineError
from ..models import ModelConfig
from .mesh import RANKS

__all__ = ["RankPools"]

ALIGNED = 64
"""Bytes; XLA would copy an input that starts elsewhere."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class RankPools:
    """One model's rows in the pools of all ranks, in rank order."""

    def __init__(self, pools: Sequence[Pool], group: str, config: ModelConfig, mesh: Mesh) -> None:
        self.pages = min(pool.pages(group) for pool in pools)
        self._sharding, self._devices = NamedSharding(mesh, RANKS), list(mesh.devices.flat)
        self._views = [
            {part: [_view(pool, group, layer, part) for pool in pools] for part in config.parts}
            for layer in range(config.layers)
        ]
        shapes = {view.shape for layer in self._views for views in layer.values() for view in views}
        if len(shapes) > 1:
            raise EngineError(f"JAX needs as many pages and KV heads on every rank, not {sorted(shapes)}")

    def check(self, pages: Sequence[int]) -> None:
        """Raise EngineError for pages that the pools have not."""
        for page in pages:
            if not 0 <= page < self.pages:
                raise EngineError(f"page {page} is outside a pool of {self.pages} pages")

    def read(self, layer: int) -> dict[str, jax.Array]:
        """What the pools hold now, by part: [ranks * pages, rows, KV heads, row_dim], each rank's on its device.

        Raises EngineError where XLA does not read the registered memory itself.
        """
        return {part: self._alias(views) for part, views in self._views[layer].items()}

    def write(self, layer: int, rows: Mapping[str, jax.Array], places: Sequence[tuple[Ints, Ints]]) -> None:
        """Scatter what a layer gave, [ranks, spans, n, KV heads, row_dim]; waits for it.

        `places` of each rank: tokens of the step, counted along the spans, and the slots of their rows.
        """
        for part, found in rows.items():
            for shard in found.addressable_shards:
                rank = shard.index[0].start or 0
                tokens, slots = places[rank]
                view, new = self._views[layer][part][rank], np.asarray(shard.data)
                view.reshape(-1, *view.shape[2:])[slots] = new.reshape(-1, *view.shape[2:])[tokens]

    def _alias(self, views: Sequence[Floats]) -> jax.Array:
        made = jax.device_put(list(views), self._devices)
        for view, array in zip(views, made, strict=True):
            if array.unsafe_buffer_pointer() != view.ctypes.data:
                raise EngineError("XLA would read a copy of the pool, not the memory that transports write")
        shape = (len(views) * len(views[0]), *views[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, made)


def _view(pool: Pool, group: str, layer: int, part: str) -> Floats:
    """float32 [pages, rows, KV heads, row_dim] of one rank."""
    if pool.group(group).parts[0].dtype != DType.F32:
        raise EngineError(f"the JAX engine computes in float32, and so must its pools be: {group!r} is not")
    found = pool.array(group, layer, part).view(np.float32)
    if not found.flags.c_contiguous or found.ctypes.data % ALIGNED:
        raise EngineError(
            f"pool {group!r}, layer {layer}, {part}: must be contiguous, at a multiple of {ALIGNED} bytes"
        )
    return found
