"""Pools of a hybrid model on one rank, beside those of layers with full attention."""

import attrs
import torch

from ..models import SOLO, DeltaConfig, ModelConfig, TensorParallel, WindowConfig
from .memory import Allocate, private
from .pool import KVPool
from .sharding import Shard
from .states import StatePool


@attrs.frozen
class HybridPools:
    """Rows of layers with a sliding window, and states of recurrent layers; None where the model has none of these."""

    windows: KVPool | None = None
    states: StatePool | None = None

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        shard: Shard,
        tp: TensorParallel = SOLO,
        device: torch.device | str = "cpu",
        memory: Allocate = private,
        window_pages: int | None = None,
    ) -> "HybridPools":
        """Zeroed pools beside one of `pages` pages with these tokens; windows have `window_pages` (None: as many)."""
        windows = states = None
        if _has(config.window, config, tp):
            own = window_pages or pages
            windows = KVPool.allocate(config, own, shard.group.rows, tp.whole, device, memory, windowed=True)
        if _has(config.delta, config, tp):
            states = StatePool.allocate(config, pages, shard.span, tp, device, memory)
        return cls(windows, states)

    def fit(self, config: ModelConfig, tp: TensorParallel) -> bool:
        """Whether they are what this rank needs."""
        need = tuple(_has(layers, config, tp) for layers in (config.window, config.delta))
        return need == (self.windows is not None, self.states is not None)

    def move(self, memory: Allocate) -> None:
        """Put them into other memory, zeroed; what they held is gone."""
        for pool in (self.windows, self.states):
            if pool is not None:
                pool.move(memory)


def _has(some: WindowConfig | DeltaConfig | None, config: ModelConfig, tp: TensorParallel) -> bool:
    """Whether a rank has layers of a kind."""
    return some is not None and not {*some.layers}.isdisjoint(tp.stages(config.layers).layers)


NOTHING = HybridPools()
"""Of a model that is no hybrid."""
