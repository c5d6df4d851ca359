"""Attention of a model over its paged pool, whole or dealt over a DCP group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..cache.pool import KVPool
from ..cache.states import StateRecord
from ..models import Attention, Rows
from .base import Exchange, Kernel
from .batch import Batch
from .exchange import Alone
from .lse import Found

__all__ = ["PagedAttention"]


class PagedAttention(Attention):
    """Stores new rows in the pool, attends over the pool and over the new tokens, and merges over ranks."""

    def __init__(self, pool: KVPool, kernel: Kernel, exchange: Exchange, by_token: bool = False) -> None:
        """With `by_token` the pool is read once for each token, with its own bound; see `Kernel.pool_by_token`."""
        self.pool, self._kernel, self._exchange, self._by_token = pool, kernel, exchange, by_token
        self._alone = isinstance(exchange, Alone) and not by_token

    def begin(self, batch: Batch, places: Tensor | None = None) -> None:
        """Set the arrays of the step that the next layers belong to; raises EngineError for pages outside the pool.

        `places` int64 [tokens] is where a captured step reads the slots of new rows.
        """
        self._batch = batch
        self.pool.check(batch.pages)
        slots = self.pool.places(batch.slots)
        self._slots = slots if places is None else places.copy_(slots)
        self._kernel.plan(batch)

    def repeats(self, batch: Batch) -> Hashable | None:
        """The key that captured steps share, as in `Kernel.repeats`."""
        return self._kernel.repeats(batch)

    @property
    def record(self) -> StateRecord | None:
        """The record of states of recurrent layers, if the model has such."""
        return None

    def end(self) -> None:
        """End the step, after all layers."""
        return

    def settle(self, kept: Sequence[int]) -> None:
        """Keep so many tokens of each span of the last step; nothing to do for rows, which are written again."""
        return

    def check(self) -> None:
        """Raise EngineError, once a step is over, if it failed on any rank."""
        self._exchange.check()

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        batch = self._batch
        rows = self.pool.write(layer, self._slots, rows)
        if self._alone and (out := self._kernel.alone(layer, q)) is not None:
            return out
        parts: list[Found] = []
        if batch.prefix or self._by_token:
            over_pool = self._kernel.pool_by_token if self._by_token else self._kernel.pool
            parts.append(self._exchange.merge(over_pool(layer, self._exchange.queries(q))))
        if not (batch.whole or self._by_token):
            parts.append(self._kernel.new(self._exchange.own(q), rows))
        return (self._kernel.merge(parts) if len(parts) > 1 else parts[0]).out
