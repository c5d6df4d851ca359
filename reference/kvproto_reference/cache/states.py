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


@attrs.frozen
class Stops:
    """After which of a step's tokens of a sequence its states are wanted, as counts of tokens."""

    source: int | None
    """The item of the state with which the tokens go on; None: they begin the sequence."""
    sure: tuple[int, ...]
    """Up to the end of each page, and up to the last token that is no proposal; these are stored."""
    proposed: tuple[int, ...]
    """With the proposals, one by one; these are kept in mind until it is known which are accepted."""


@attrs.frozen(eq=False)
class StateRecord:
    """The item of a state pool that has the state after so many tokens of a sequence; the same on all ranks.

    The state after n tokens of a sequence is in the item of the page that its last token belongs to. So an item is
    the sequence's own as long as that page is, and a page that is full keeps the state after its last token.
    """

    span: int
    """Tokens that belong to a page."""
    after: dict[int, int] = attrs.field(factory=dict, init=False)
    """By item: the number of tokens. Items without a state are missing."""

    def item(self, pages: Sequence[int], tokens: int) -> int:
        """The item of the state after so many tokens, at least one, of the sequence with this page table."""
        return pages[(tokens - 1) // self.span]

    def begin(self, pages: Sequence[int], shared: int) -> None:
        """Forget the states in the pages of a new sequence, but those of its first `shared` tokens."""
        for item in pages[shared // self.span :]:
            self.after.pop(item, None)

    def arrived(self, pages: Sequence[int], tokens: int) -> None:
        """Note that the state after so many tokens of a sequence is in its item now."""
        if tokens:
            self.after[self.item(pages, tokens)] = tokens

    def kept(self, pages: Sequence[int], tokens: int) -> set[int]:
        """The ends of pages, in tokens up to `tokens`, after which the pages of a sequence hold the state."""
        ends = range(self.span, tokens + 1, self.span)
        return {end for end in ends if self.after.get(self.item(pages, end)) == end}

    def step(self, pages: Sequence[int], start: int, count: int, proposed: int) -> Stops:
        """Begin a step of `count` tokens from position `start` on, the last `proposed` of which are proposals.

        Raises EngineError if the state there is another one: a state cannot be rolled back. What the step stores is no
        state before `arrived` says so.
        """
        source = self.item(pages, start) if start else None
        if source is not None and (after := self.after.get(source)) != start:
            has = "no state" if after is None else f"the state after {after} tokens"
            raise EngineError(f"position {start} needs the state after {start} tokens, and item {source} has {has}")
        sure = count - proposed
        stops = Stops(source, self.stops(start, 0, sure), tuple(range(sure + 1, count + 1)))
        for stop in stops.sure:
            self.after.pop(self.item(pages, start + stop), None)
        return stops

    def stops(self, start: int, before: int, count: int) -> tuple[int, ...]:
        """The counts of tokens above `before`, up to `count`, that end a page, or are `count` itself."""
        ends = [stop for stop in range(before + 1, count) if (start + stop) % self.span == 0]
        return (*ends, *([count] if count > before else []))

    def settled(self, start: int, count: int, proposed: int, kept: int) -> tuple[int, ...]:
        """The counts of proposals to store the states after, if `kept` of a step's tokens stay; raises EngineError."""
        if not count - proposed <= kept <= count:
            raise EngineError(f"{kept} of {count} tokens cannot stay, {proposed} of them proposals")
        return self.stops(start, count - proposed, kept)


@attrs.frozen(eq=False)
class StatePool:
    """Tensors by (layer, part): conv [pages, kernel - 1, channels], ssm [pages, value heads, key_dim, value_dim].

    A `StateRecord` says which state is where.
    """

    record: StateRecord
    device: torch.device
    tensors: dict[Key, Tensor] = attrs.field(factory=dict, init=False)

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
        made = cls(StateRecord(span), torch.device(device))
        here = tp.stages(config.layers).layers
        for layer in (layer for layer in config.delta_sizes.layers if layer in here):
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
        self.record.after.clear()

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
