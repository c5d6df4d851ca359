"""A minimal paged engine in numpy: it stands for your own engine in these examples, and knows nothing of kvproto.

One tensor per layer holds K and V, [2, page, token, head, dim]. "Attention" computes a function of the tokens so far,
so a decode engine can tell whether the cache that it received belongs to its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LAYERS, PAGES, PAGE, HEADS, DIM = 2, 32, 16, 2, 8
SHAPE = (2, PAGES, PAGE, HEADS, DIM)
BYTES = LAYERS * int(np.prod(SHAPE)) * 4
"""Bytes of the whole cache."""


class Engine:
    """Pages, which of them are free, and what is in them."""

    def __init__(self, memory: Any) -> None:
        """`memory` is any object that exports BYTES bytes by DLPack."""
        self.layers = list(np.from_dlpack(memory).view(np.float32).reshape(LAYERS, *SHAPE))
        """One tensor per layer, float32 [2, page, token, head, dim]."""
        self._free = list(range(PAGES))

    def take(self, tokens: int) -> list[int]:
        """Allocate pages for this many tokens."""
        return [self._free.pop() for _ in range(-(-tokens // PAGE))]

    def release(self, pages: Sequence[int]) -> None:
        """Free pages that nobody needs any more."""
        self._free += pages

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        """Compute K and V of a prompt; return its page table."""
        pages = self.take(len(tokens))
        self.compute(tokens, pages, 0, len(tokens))
        return pages

    def compute(self, tokens: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Compute K and V of tokens [start, stop) of a prompt into its pages."""
        for layer, rows in zip(self.layers, _attention(tokens), strict=True):
            for token in range(start, stop):
                layer[:, pages[token // PAGE], token % PAGE] = rows[:, token]

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def holds(self, tokens: Sequence[int], pages: Sequence[int]) -> bool:
        """Whether these pages hold what this engine itself would have computed for the prompt."""
        at = np.arange(len(tokens))
        held = [layer[:, np.array(pages)[at // PAGE], at % PAGE] for layer in self.layers]
        return np.array_equal(np.stack(held), _attention(tokens))


def _attention(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """K and V of all layers, [layer, 2, token, head, dim]."""
    text = np.cumsum(np.asarray(tokens, np.float32))
    weights = np.random.default_rng(0).normal(size=(LAYERS, 2, 1, HEADS, DIM)).astype(np.float32)
    return np.tanh(weights * text[:, None, None] / 64)
