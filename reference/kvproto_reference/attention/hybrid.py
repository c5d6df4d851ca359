"""Attention of a hybrid model: full attention and sliding windows over paged pools, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ..cache.pool import KVPool
from ..cache.sharding import Shard
from ..cache.states import StatePool
from ..cache.windows import check_window, window_table
from ..errors import EngineError
from ..models import Recurrence, Rows, State
from .base import Kernel
from .batch import Batch, Span, batch_of
from .exchange import Alone
from .paged import PagedAttention

__all__ = ["HybridAttention"]


@attrs.frozen
class _Steps:
    """After which of a span's tokens states are wanted, and where they are stored."""

    source: int | None
    """The item of the state with which the span goes on; None: it begins the sequence."""
    sure: tuple[int, ...]
    """Counts of tokens: up to the end of each page, and up to the last one that is no proposal."""
    proposed: tuple[int, ...]
    """Counts of tokens with those that are proposals, one by one."""


class HybridAttention(PagedAttention):
    """Stores rows as `PagedAttention` does, and the states of recurrent layers where their `StatePool` says.

    A step stores the states after its tokens, up to its first proposal. Those after each proposal are only kept in
    mind, until `settle` says how many stay. A step that does not begin where the states are is refused.
    """

    def __init__(
        self, pool: KVPool, kernel: Kernel, window: PagedAttention | None, states: StatePool | None, shard: Shard
    ) -> None:
        """`window` is of the layers with a sliding window, pool and kernel of those that attend to all tokens."""
        super().__init__(pool, kernel, Alone())
        self._window, self._states, self._config, self._shard = window, states, pool.config, shard
        self._steps: list[_Steps] = []
        self._tried: list[dict[int, dict[int, State]]] = []
        """By span, layer and count of tokens: the states after proposals of the last step."""

    @property
    def states(self) -> StatePool | None:
        return self._states

    def begin(self, batch: Batch, places: Tensor | None = None) -> None:
        super().begin(batch, places)
        if self._window is not None:
            self._window.begin(batch_of([self._windowed(span) for span in batch.spans], self._shard), places)
        if self._states is not None:
            self._steps = [_steps(span, self._states) for span in batch.spans]
            self._tried = [{} for _ in batch.spans]
            for span, steps in zip(batch.spans, self._steps, strict=True):
                for count in steps.sure:  # nothing may go on from them before the step is over
                    self._states.after.pop(self._states.item(span.pages, span.start + count), None)

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
        for i, (span, steps) in enumerate(zip(self._batch.spans, self._steps, strict=True)):
            own = inputs[starts[i] : starts[i + 1]]
            state = rule.begin(own) if steps.source is None else self._states.read(layer, steps.source)
            out, states = rule.run(state, own, steps.sure + steps.proposed)
            outs.append(out)
            sure = len(steps.sure)
            for count, found in zip(steps.sure, states[:sure], strict=True):
                self._states.write(layer, self._states.item(span.pages, span.start + count), found)
            self._tried[i][layer] = dict(zip(steps.proposed, states[sure:], strict=True))
        return torch.cat(outs)

    def end(self) -> None:
        if self._states is not None:
            for span, steps in zip(self._batch.spans, self._steps, strict=True):
                for count in steps.sure:
                    self._states.after[self._states.item(span.pages, span.start + count)] = span.start + count

    def settle(self, kept: Sequence[int]) -> None:
        if self._states is None:
            return
        for span, count, tried in zip(self._batch.spans, kept, self._tried, strict=True):
            if not span.count - span.proposed <= count <= span.count:
                raise EngineError(f"{count} of {span.count} tokens cannot stay, {span.proposed} of them proposals")
            for stop in _stops(span, span.count - span.proposed, count, self._states.span):
                item = self._states.item(span.pages, span.start + stop)
                for layer, states in tried.items():
                    self._states.write(layer, item, states[stop])
                self._states.after[item] = span.start + stop
        self._tried = []


def _steps(span: Span, states: StatePool) -> _Steps:
    sure = span.count - span.proposed
    return _Steps(
        states.before(span.pages, span.start),
        _stops(span, 0, sure, states.span),
        tuple(range(sure + 1, span.count + 1)),
    )


def _stops(span: Span, before: int, count: int, each: int) -> tuple[int, ...]:
    """The counts of tokens above `before`, up to `count`, that end a page of `each` tokens, or are `count` itself."""
    ends = [stop for stop in range(before + 1, count) if (span.start + stop) % each == 0]
    return (*ends, *([count] if count > before else []))
