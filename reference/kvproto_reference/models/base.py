"""What the engine asks of a model, and what a model asks of its cache."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from .config import ModelConfig
from .parallel import TensorParallel


class LayerCaches(Protocol):
    """Cached rows of one sequence, seen by the forward of one chunk."""

    def write(self, layer: int, part: str, rows: Tensor) -> None:
        """Store the chunk's rows: [n, local KV heads, row_dim]."""

    def read(self, layer: int, part: str) -> Tensor:
        """Rows of positions 0..last of the chunk: [last + 1, local KV heads, row_dim]."""
        ...


class Model(Protocol):
    """A causal language model whose KV rows live outside of it."""

    @property
    def config(self) -> ModelConfig:
        """Full sizes, before any TP cut."""
        ...

    @property
    def tp(self) -> TensorParallel:
        """Place of this model in its TP group."""
        ...

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: LayerCaches, computed: Callable[[int], None] | None = None
    ) -> Tensor:
        """Float32 logits [n, vocab] of consecutive tokens [n] int64 at positions [n] int64.

        `computed` is called with each layer once its rows are written, on a GPU in stream order.
        """
        ...


class DenseCache:
    """Cache of one forward that starts at position 0: reads give back what was written (batch dims allowed)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], Tensor] = {}

    def write(self, layer: int, part: str, rows: Tensor) -> None:
        """Keep the rows: [..., n, local KV heads, row_dim]."""
        self._rows[layer, part] = rows

    def read(self, layer: int, part: str) -> Tensor:
        """The rows of the last write."""
        return self._rows[layer, part]
