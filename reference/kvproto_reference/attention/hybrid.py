"""Attention of a hybrid model: full attention and sliding windows over paged pools, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ..cache.pool import KVPool
from ..cache.sharding import Shard
from ..cache.states import StatePool, StateRecord, Stops
from ..cache.windows import check_window, window_table
from ..models import Recurrence, Rows, State
from .base import Exchange, Kernel
from .batch import Batch, Span, batch_of
from .paged import PagedAttention

__all__ = ["HybridAttention"]


class HybridAttention(PagedAttention):
    """Stores rows as `PagedAttention` does, and the states of recurrent layers where their `StatePool` says.

    A step stores the states after its tokens, up to its first proposal. Those after each proposal are only kept in
    mind, until `settle` says how many stay. A step that does not begin where the states are is refused.
    """

    def __init__(
        self,
        pool: KVPool,
        kernel: Kernel,
        exchange: Exchange,
        window: PagedAttention | None,
        states: StatePool | None,
        shard: Shard,
    ) -> None:
        """`window` is of the layers with a sliding window, what comes before it of those that attend to all tokens."""
        super().__init__(pool, kernel, exchange)
        self._window, self._states, self._config, self._shard = window, states, pool.config, shard.whole
        self._stops: list[Stops] = []
        self._tried: list[dict[int, dict[int, State]]] = []
        """By span, layer and count of tokens: the states after proposals of the last step."""

    @property
    def record(self) -> StateRecord | None:
        return None if self._states is None else self._states.record

    def begin(self, batch: Batch, places: Tensor | None = None) -> None:
        super().begin(batch, places)
        if self._window is not None:
            self._window.begin(batch_of([self._windowed(span) for span in batch.spans], self._shard), places)
        if self._states is not None:
            record = self._states.record
            self._stops = [record.step(span.pages, span.start, span.count, span.proposed) for span in batch.spans]
            self._tried = [{} for _ in batch.spans]

    def _windowed(self, span: Span) -> Span:
        """The same tokens, with the page table of layers with a sliding window."""
        stop, reach = span.start + span.count, self._config.window.tokens if self._config.window else 0
        check_window(span.window, reach, self.pool.page_size, span.start, stop)
        return attrs.evolve(span, pages=window_table(span.window, self._shard.pages(stop)))

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        if self._window is not None and self._config.reach(layer) is not None:
            return self._window.attend(layer, q, rows)
        return super().attend(layer, q, rows)

    def recur(self, layer: int, rule: Recurrence, inputs: Tensor) -> Tensor:
        if self._states is None:
            return super().recur(layer, rule, inputs)
        outs, starts = [], self._batch.starts.tolist()
        for i, (span, stops) in enumerate(zip(self._batch.spans, self._stops, strict=True)):
            own = inputs[starts[i] : starts[i + 1]]
            state = rule.begin(own) if stops.source is None else self._states.read(layer, stops.source)
            out, states = rule.run(state, own, stops.sure + stops.proposed)
            outs.append(out)
            sure = len(stops.sure)
            for count, found in zip(stops.sure, states[:sure], strict=True):
                self._states.write(layer, self._item(span, count), found)
            self._tried[i][layer] = dict(zip(stops.proposed, states[sure:], strict=True))
        return torch.cat(outs)

    def _item(self, span: Span, count: int) -> int:
        assert self._states is not None
        return self._states.record.item(span.pages, span.start + count)

    def end(self) -> None:
        if self._states is not None:
            for span, stops in zip(self._batch.spans, self._stops, strict=True):
                for count in stops.sure:
                    self._states.record.arrived(span.pages, span.start + count)

    def settle(self, kept: Sequence[int]) -> None:
        if self._states is None:
            return
        record = self._states.record
        for span, count, tried in zip(self._batch.spans, kept, self._tried, strict=True):
            for stop in record.settled(span.start, span.count, span.proposed, count):
                for layer, states in tried.items():
                    self._states.write(layer, self._item(span, stop), states[stop])
                record.arrived(span.pages, span.start + stop)
        self._tried = []
