"""Runs one model over one paged pool."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from ..errors import EngineError
from ..models import Model
from .pool import KVPool, PagedCache

Computed = Callable[[int, int], None]
"""Called with (stop, layer) when the layer's rows of positions [0, stop) are written, on a GPU in stream order."""


@attrs.frozen(kw_only=True)
class PrefillChunk:
    """Rows of positions [start, stop) are in the pool; logits [vocab] are those of position stop - 1."""

    start: int
    stop: int
    logits: Tensor


class ModelRunner:
    """A model bound to the pool that holds its KV rows."""

    def __init__(self, model: Model, pool: KVPool, page_size: int) -> None:
        if pool.page_size != page_size:
            raise EngineError(f"the pool has pages of {pool.page_size} slots, not {page_size}")
        if pool.config != model.config:
            raise EngineError("the pool was made for another model config")
        self.model, self.pool, self.page_size = model, pool, page_size

    def run(
        self, tokens: Sequence[int], start: int, pages: Sequence[int], computed: Callable[[int], None] | None = None
    ) -> Tensor:
        """Logits [n, vocab] of n tokens from position `start` on; their rows are written to the page table's slots.

        `computed` is called with each layer once its rows are written, on a GPU in stream order.
        """
        if not tokens:
            raise EngineError("no tokens to run")
        stop = start + len(tokens)
        cache = PagedCache(self.pool, pages, start, stop)
        with torch.no_grad():
            ids = torch.tensor(tokens, dtype=torch.int64, device=self.pool.device)
            return self.model.forward(ids, torch.arange(start, stop, device=self.pool.device), cache, computed)

    def prefill_chunks(
        self, tokens: Sequence[int], pages: Sequence[int], chunk: int, start: int = 0, computed: Computed | None = None
    ) -> Iterator[PrefillChunk]:
        """Run a prompt from position `start` (rows before it are valid), yielding after every `chunk` tokens."""
        if chunk < 1:
            raise EngineError(f"the prefill chunk must be at least 1 token, not {chunk}")
        if not 0 <= start < len(tokens):
            raise EngineError(f"prefill from position {start} of {len(tokens)} tokens leaves nothing to run")
        for lo in range(start, len(tokens), chunk):
            piece = tokens[lo : lo + chunk]
            logits = self.run(piece, lo, pages, partial(computed, lo + len(piece)) if computed else None)
            yield PrefillChunk(start=lo, stop=lo + len(piece), logits=logits[-1])

    def prefill(self, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> Tensor:
        """Run a whole prompt; logits [vocab] of its last token."""
        *_, last = self.prefill_chunks(tokens, pages, chunk)
        return last.logits
