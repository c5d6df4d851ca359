"""What a hybrid model stores on a rank beside the rows of layers that attend to all tokens."""

import attrs
import torch

from ..models import SOLO, ModelConfig, TensorParallel
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
        if config.window is not None:
            own = window_pages or pages
            windows = KVPool.allocate(config, own, shard.group.rows, tp.whole, device, memory, windowed=True)
        if config.delta is not None:
            states = StatePool.allocate(config, pages, shard.span, tp, device, memory)
        return cls(windows, states)

    def fit(self, config: ModelConfig) -> bool:
        """Whether they are what this model needs."""
        return (config.window is None, config.delta is None) == (self.windows is None, self.states is None)

    def move(self, memory: Allocate) -> None:
        """Put them into other memory, zeroed; what they held is gone."""
        for pool in (self.windows, self.states):
            if pool is not None:
                pool.move(memory)


NOTHING = HybridPools()
"""Of a model that is no hybrid."""
