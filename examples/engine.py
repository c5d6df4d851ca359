"""A paged engine as small as can be, in numpy: it stands for your own in these examples and knows nothing of kvproto.

One tensor a layer holds K and V, [2, page, token, head, dim]. What "attention" computes is a function of the tokens so
far, so that a decode engine can tell whether the cache that it was handed is the one of its prompt.
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
    """Pages, who has them, and what is in them."""

    def __init__(self, memory: Any) -> None:
        """`memory` holds BYTES bytes; anything that DLPack exports."""
        self.layers = list(np.from_dlpack(memory).view(np.float32).reshape(LAYERS, *SHAPE))
        """A tensor a layer, float32 [2, page, token, head, dim]."""
        self._free = list(range(PAGES))

    def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens."""
        return [self._free.pop() for _ in range(-(-tokens // PAGE))]

    def release(self, pages: Sequence[int]) -> None:
        """Nobody needs them any more."""
        self._free += pages

    def prefill(self, tokens: Sequence[int]) -> list[int]:
        """The page table of a prompt whose K and V are computed."""
        pages = self.take(len(tokens))
        self.compute(tokens, pages, 0, len(tokens))
        return pages

    def compute(self, tokens: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """K and V of some of a prompt's tokens, into its pages."""
        for layer, rows in zip(self.layers, _attention(tokens), strict=True):
            for token in range(start, stop):
                layer[:, pages[token // PAGE], token % PAGE] = rows[:, token]

    @property
    def free(self) -> int:
        """Pages that nobody has."""
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
