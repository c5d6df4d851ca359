"""A model over a pool of its own, stepped one sequence at a time."""

from collections.abc import Sequence

import attrs
import numpy as np
from torch import Tensor

from kvproto import lay_out
from kvproto_reference.cache import HybridPools, KVPool, Shard
from kvproto_reference.engine.build import torch_runner
from kvproto_reference.engine.description import Layout, cache
from kvproto_reference.engine.runner import Chunk, TorchRunner
from kvproto_reference.models import Model


@attrs.frozen
class Alone:
    """A model, its pool, and the runner of both."""

    model: Model
    pool: KVPool
    runner: TorchRunner

    @classmethod
    def of(cls, model: Model, pages: int, page_size: int, pool: KVPool | None = None, device: str = "cpu") -> "Alone":
        """A pool is made where none is given."""
        (group,) = lay_out([cache(0, model.config, Layout(), page_size)]).groups
        pool = pool or KVPool.allocate(model.config, pages, page_size, model.tp, device)
        beside = HybridPools.allocate(model.config, pages, Shard(group, 0), model.tp, device)
        return cls(model, pool, torch_runner(model, pool, Shard(group, 0), beside=beside))

    def run(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab] of one step."""
        return self.runner.run([Chunk(tokens, start, pages, every=True, window=pages)]).values

    def prefill(self, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> Tensor:
        """Logits [vocab] of the last token."""
        for lo in range(0, len(tokens), chunk):
            logits = self.run(tokens[lo : lo + chunk], lo, pages)
        return logits[-1]

    def rows(self, layer: int, part: str, pages: Sequence[int], count: int) -> Tensor:
        """The rows [count, heads, row_dim] of the first positions."""
        return self.pool.tensors[layer, part][list(pages)].flatten(0, 1)[:count]


def close(found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    """Equal in shape and type, and in each number to `atol`; torch's own would import all of DTensor and sympy first."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(found.detach().numpy(), wanted.detach().numpy(), 0, atol, equal_nan=False)
