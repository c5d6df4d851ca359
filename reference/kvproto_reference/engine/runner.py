"""Runs one model over one paged pool: a step is any number of spans of any sequences."""

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention.batch import Batch, Span, batch_of
from ..attention.paged import PagedAttention
from ..cache import KVPool, Shard
from ..errors import EngineError
from ..models import Model, Pipeline

Computed = Callable[[int], None]
"""Called with each layer once its rows of a step are written, on a GPU in stream order."""


@attrs.frozen
class Chunk:
    """Tokens of one sequence from position `start` on, its page table, and whether logits of `every` token are wanted.

    Otherwise only those of the last token are.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    every: bool = False

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class Logits(Protocol):
    """Logits [n, vocab] of the tokens of a step for which they are wanted, on any device; the same on all ranks."""

    def best(self) -> npt.NDArray[np.int64]:
        """The most likely next token for each [n]."""
        ...

    def row(self, index: int) -> npt.NDArray[np.float64]:
        """The logits of one token [vocab]."""
        ...


class Runner(Protocol):
    """A model and its pool, which the scheduler steps, on one rank or on several ranks of one process."""

    @property
    def shard(self) -> Shard:
        """Which tokens of a sequence the pool stores."""
        ...

    @property
    def vocab(self) -> int:
        """Number of tokens that logits cover."""
        ...

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> Logits:
        """Run one step, whose rows are written to the slots of the page tables."""
        ...

    def clear(self, pages: Sequence[int]) -> None:
        """Set all rows of these pages to zero."""
        ...


class TorchLogits(Logits):
    """Logits in a tensor [n, vocab]."""

    def __init__(self, values: Tensor, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called once the step is over, and raises if it failed on another rank."""
        self.values, self._check = values, check

    def best(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.values.argmax(-1).cpu().numpy()
        self._check()
        return found

    def row(self, index: int) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self.values[index].double().cpu().numpy()
        self._check()
        return found


class TorchModel(Runner):
    """A torch model and its pool on one rank."""

    def __init__(self, model: Model, pool: KVPool, shard: Shard) -> None:
        if pool.page_size != shard.group.rows:
            raise EngineError(f"the pool has pages of {pool.page_size} rows, not {shard.group.rows}")
        if pool.config != model.config:
            raise EngineError("the pool was made for another model config")
        self.model, self.pool, self._shard = model, pool, shard

    def clear(self, pages: Sequence[int]) -> None:
        for tensor in self.pool.tensors.values():
            tensor[list(pages)] = 0

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def vocab(self) -> int:
        return self.model.config.vocab


class TorchRunner(TorchModel):
    """A torch model whose steps attend over the pool, whole or dealt over a DCP group."""

    def __init__(self, model: Model, attention: PagedAttention, shard: Shard) -> None:
        super().__init__(model, attention.pool, shard)
        self.attention = attention

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        batch, tokens, wanted = assemble(chunks, self._shard)
        device = self.attention.pool.device
        with torch.no_grad():
            self.attention.begin(batch)
            ids, positions, rows = (torch.from_numpy(a).to(device) for a in (tokens, batch.positions, wanted))
            logits = self.model.forward(ids, positions, self.attention, computed, rows)
            return TorchLogits(logits, self.attention.check)


@attrs.frozen
class Elsewhere(Runner):
    """A model on other ranks, whose logits this rank receives."""

    stages: Pipeline
    vocab: int
    shard: Shard
    """The shard of a rank that has the model."""
    device: torch.device

    def run(self, chunks: Sequence[Chunk], computed: Computed | None = None) -> TorchLogits:
        count = sum(len(chunk.tokens) if chunk.every else 1 for chunk in chunks)
        return TorchLogits(self.stages.everywhere(torch.empty(count, self.vocab, device=self.device)))

    def clear(self, pages: Sequence[int]) -> None:
        """Nothing to do: the rows are on other ranks."""


def assemble(
    chunks: Sequence[Chunk], shard: Shard, whole: bool = True
) -> tuple[Batch, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The arrays of a step, its tokens [tokens], and those whose logits are wanted [n]; `whole` is as in `batch_of`."""
    batch = batch_of([Span(chunk.start, len(chunk.tokens), chunk.pages) for chunk in chunks], shard, whole)
    tokens = np.concatenate([np.asarray(chunk.tokens, np.int64) for chunk in chunks])
    wanted = [
        np.arange(start if chunk.every else stop - 1, stop)
        for chunk, start, stop in zip(chunks, batch.starts[:-1], batch.starts[1:], strict=True)
    ]
    return batch, tokens, np.concatenate(wanted).astype(np.int64)
