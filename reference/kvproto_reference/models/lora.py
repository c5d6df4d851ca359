"""Low-rank adapters of projections (LoRA, arXiv 2106.09685): each token of a step has one of them, or none."""

from collections.abc import Mapping, Sequence

import attrs
import torch.nn.functional as F
from torch import Tensor

PROJECTIONS = {"gqa": ("q", "k", "v"), "mla": ("q_a", "q", "kv_a")}
"""By kind of attention: the weights that an adapter may change."""


@attrs.frozen(eq=False)
class Lora:
    """The weights of an adapter on one rank."""

    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = attrs.field(repr=False)
    """By layer and projection: down [rank, in], and up [out, rank] with the adapter's scale in it."""


@attrs.frozen(eq=False)
class Adapted:
    """The adapters of a step."""

    some: Sequence[tuple[Lora, Tensor]] = ()
    """Each with the tokens that have it, ascending [k]."""

    def add(self, layer: int, name: str, x: Tensor, out: Tensor) -> None:
        """Add what adapters make of x [tokens, in] to a layer's projection of it, out [tokens, out], in place."""
        for lora, tokens in self.some:
            if (pair := lora.pairs.get((layer, name))) is not None:
                down, up = pair
                out.index_add_(0, tokens, F.linear(F.linear(x[tokens], down), up))


NONE = Adapted()
"""A step without adapters."""
