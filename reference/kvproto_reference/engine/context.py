"""Prefill with context parallelism: the ranks of a CP group compute and store the tokens that they own.

Keys and values of a step's tokens are gathered, so that each rank attends with its own queries to all of them; to
earlier tokens each rank attends with all ranks' queries over its own rows, and the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.batch import Batch
from ..attention.lse import Partial, merge
from ..attention.torch_kernel import TorchKernel
from ..cache import KVPool, Shard
from ..cache.sharding import Ints
from ..gather import gather
from ..models import Attention, Lora, Model, Rows, Taps
from .runner import NO_LORAS, Chunk, Computed, TorchLogits, TorchModel, adapted_in, assemble, seen_in

__all__ = ["ContextRunner"]


class _Context(Attention):
    """Attention of one rank's tokens in a step."""

    def __init__(
        self,
        pool: KVPool,
        kernel: TorchKernel,
        everywhere: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor, Ints], Tensor],
    ) -> None:
        """`everywhere`, [...] of a rank -> [ranks, ...], and `gather`, as in `ContextRunner`, are collectives."""
        self.pool, self._kernel, self._everywhere, self._gather = pool, kernel, everywhere, gather

    def begin(self, batch: Batch, own: Tensor, owners: Ints) -> None:
        """Set the step: `own` [n] are the indices of this rank's tokens, `owners` [tokens] the rank of each token."""
        self._batch, self._own, self._owners = batch, own, owners
        self.pool.check(batch.pages)
        self._places = self.pool.places(batch.slots[own.cpu().numpy()])
        self._kernel.plan(batch)

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        rows = self.pool.write(layer, self._places, rows)
        among = {part: self._gather(new, self._owners) for part, new in rows.items()}
        parts = [self._kernel.new(q, among, self._own)]
        if self._batch.prefix:  # the same on all ranks
            over_own_rows = self._kernel.pool(layer, self._gather(q, self._owners))
            out, lse = self._everywhere(over_own_rows.out), self._everywhere(over_own_rows.lse)
            parts += [Partial(o[self._own], s[self._own]) for o, s in zip(out, lse, strict=True)]
        return merge(parts).out


class ContextRunner(TorchModel):
    """A torch model on one rank of a CP group."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        kernel: TorchKernel,
        shard: Shard,
        group: dist.ProcessGroup,
        taps: Sequence[int] = (),
        loras: Mapping[str, Lora] = NO_LORAS,
    ) -> None:
        super().__init__(model, pool, shard)
        self.model, self._group, self._taps, self._loras = model, group, taps, loras
        self._attention = _Context(pool, kernel, self._everywhere, self._gather)

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        batch, tokens, wanted = assemble(chunks, self._shard, whole=False)
        device = self._attention.pool.device
        owners = self._shard.owners(batch.positions)
        own = np.flatnonzero(owners == self._shard.cp_rank)
        rows = np.flatnonzero(np.isin(own, wanted))  # those of this rank's tokens whose logits are wanted
        with torch.no_grad():
            ids, positions, mine, said = (
                torch.from_numpy(a).to(device) for a in (tokens[own], batch.positions[own], own, rows)
            )
            self._attention.begin(batch, mine, owners)
            taps = Taps(self._taps) if self._taps else None
            seen, adapted = seen_in(chunks, own), adapted_in(chunks, self._loras, device, own)
            logits = self.model.forward(ids, positions, self._attention, computed, said, taps, seen, adapted)
            hidden = self._gather(taps.hidden, owners) if taps else None
            return TorchLogits(self._gather(logits, owners[wanted]), hidden=hidden)

    def idle(self) -> None:
        with torch.no_grad():
            self.model.idle()

    def _gather(self, mine: Tensor, owners: Ints) -> Tensor:
        """[own tokens, ...] -> [tokens, ...], in the order of `owners` [tokens]."""
        counts = np.bincount(owners, minlength=self._shard.count)
        padded = mine.new_zeros((int(counts.max()), *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        order = np.zeros(len(owners), np.int64)
        for rank in range(self._shard.count):
            order[owners == rank] = rank * len(padded) + np.arange(counts[rank])
        return self._everywhere(padded).flatten(0, 1)[torch.from_numpy(order).to(mine.device)]

    def _everywhere(self, mine: Tensor) -> Tensor:
        return gather(mine, self.shard.count, self._group)
