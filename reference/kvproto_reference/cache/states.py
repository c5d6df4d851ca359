"""Recurrent states of one model on one rank: an item for each page of the sequence's page table."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from ..errors import EngineError
from ..models import ModelConfig, State, TensorParallel, delta_heads
from .memory import Allocate, private
from .pool import Key

CONV, SSM = "conv", "ssm"
"""Parts of a state: the last inputs of the convolution, and the state of the delta rule."""


@attrs.frozen(eq=False)
class StatePool:
    """Tensors by (layer, part): conv [pages, kernel - 1, channels], ssm [pages, value heads, key_dim, value_dim].

    The state after n tokens of a sequence is in the item of the page that its last token belongs to. So an item is
    the sequence's own as long as that page is, and a page that is full keeps the state after its last token.
    """

    span: int
    """Tokens that belong to a page."""
    device: torch.device
    tensors: dict[Key, Tensor] = attrs.field(factory=dict, init=False)
    after: dict[int, int] = attrs.field(factory=dict, init=False)
    """By item: after how many tokens of its sequence its state is. Items without a state are missing."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        pages: int,
        span: int,
        tp: TensorParallel,
        device: torch.device | str = "cpu",
        memory: Allocate = private,
    ) -> "StatePool":
        """A zeroed pool of the heads of one rank, in one allocation, with an item for each of `pages` pages."""
        types, shapes = {CONV: getattr(torch, config.dtype), SSM: torch.float32}, shapes_of(config, tp)
        made = cls(span, torch.device(device))
        for layer in config.delta_sizes.layers:
            for part, shape in shapes.items():
                made.tensors[layer, part] = torch.empty(pages, *shape, dtype=types[part], device="meta")
        made.move(memory)
        return made

    def move(self, memory: Allocate) -> None:
        """Put the tensors into other memory, zeroed; what they held is gone."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.tensors.values()]
        pieces = memory(sum(sizes), self.device).split_with_sizes(sizes)
        for (key, old), piece in zip([*self.tensors.items()], pieces, strict=True):
            self.tensors[key] = piece.view(old.dtype).view(old.shape)
        self.after.clear()

    def item(self, pages: Sequence[int], tokens: int) -> int:
        """The item of the state after so many tokens, at least one, of the sequence with this page table."""
        return pages[(tokens - 1) // self.span]

    def before(self, pages: Sequence[int], start: int) -> int | None:
        """The item of the state with which position `start` goes on, None for the first one.

        Raises EngineError if its state is another one: a state cannot be rolled back.
        """
        if not start:
            return None
        item = self.item(pages, start)
        if (after := self.after.get(item)) != start:
            has = "no state" if after is None else f"the state after {after} tokens"
            raise EngineError(f"position {start} needs the state after {start} tokens, and item {item} has {has}")
        return item

    def begin(self, pages: Sequence[int], shared: int) -> None:
        """Forget the states in the pages of a new sequence, but those of its first `shared` tokens."""
        for item in pages[shared // self.span :]:
            self.after.pop(item, None)

    def kept(self, pages: Sequence[int], tokens: int) -> set[int]:
        """The ends of pages, in tokens up to `tokens`, after which the pages of a sequence hold the state."""
        ends = range(self.span, tokens + 1, self.span)
        return {end for end in ends if self.after.get(self.item(pages, end)) == end}

    def read(self, layer: int, item: int) -> State:
        """The state of a layer in an item; it changes with the item."""
        return {part: self.tensors[layer, part][item] for part in (CONV, SSM)}

    def write(self, layer: int, item: int, state: State) -> None:
        """Store the state of a layer in an item."""
        for part, value in state.items():
            self.tensors[layer, part][item] = value


def shapes_of(config: ModelConfig, tp: TensorParallel) -> dict[str, tuple[int, ...]]:
    """The shape of an item of each part on this rank."""
    sizes, (keys, values) = config.delta_sizes, delta_heads(config, tp)
    heads = values.stop - values.start
    channels = 2 * (keys.stop - keys.start) * sizes.key_dim + heads * sizes.value_dim
    return {CONV: (sizes.kernel - 1, channels), SSM: (heads, sizes.key_dim, sizes.value_dim)}
