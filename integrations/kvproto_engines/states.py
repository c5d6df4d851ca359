"""Recurrent states as a cache: a slot a request, in lanes that ranks divide among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvproto import Block, Cache
from kvproto_engines.elements import FLOATS

__all__ = ["convolved", "state_of"]


def state_of(
    title: str, layers: Sequence[int], part: str, first: torch.Tensor, blocks: Sequence[Block], model: int
) -> Cache:  # fmt: skip
    """The state `part` of some layers, the first of which is in the tensor [slot, lane, row, element].

    Ranks divide each of the blocks among them. Raises KeyError for an element type that is not one of `FLOATS`.
    """
    size, lanes = int(first.shape[3]) * first.itemsize, sum(block.lanes for block in blocks)
    parts = {part: (FLOATS[first.dtype], lanes, size)}
    return Cache.state(title, layers, parts=parts, rows=int(first.shape[2]), blocks={part: blocks}, model=model)


def convolved(names: Sequence[str], channels: int, heads: int = 1, dim: int = 1, width: int = 1) -> list[Block]:
    """The parts of a convolution of so many channels, one after another, of all ranks.

    Names: "heads", the inputs of the heads, `dim` each; "groups", twice, what these leave, as wide as a row of a head's
    matrix; "all", channels that no head has.
    """
    sizes = {"all": (channels, 1), "heads": (heads * dim, dim), "groups": ((channels - heads * dim) // 2, width)}
    return [Block(*sizes[name]) for name in names]
