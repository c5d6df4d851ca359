"""How much of a request was handed to a transport for one sink, and which parts of it are next.

Prefill computes each layer from the first token on. So what is available of a layer, and what was handed to a
transport, is one number of tokens each; a part is what lies between the two, for adjacent layers that are alike in
both.

When a part goes depends on what its link costs. A link between GPUs that is in use draws power even when little crosses
it, and compute that holds its GPU at the power limit slows down (benchmarks/overlap.py). Where a link is many times
faster than rows are computed, nearly all of them may go shortly before the last is computed and still end as early:
what is left then is halved, and halved again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Layer

__all__ = ["Available", "Part", "SendProgress", "layers_of"]

_NO_MODEL = -1


@attrs.frozen
class Available:
    """What is computed of a layer: positions [0, tokens), once these device events have happened."""

    tokens: int
    after: tuple[int, ...] = ()


@attrs.frozen
class Part:
    """Some rows of some layers, to be copied next."""

    program: CopyProgram
    """With the rows of this part alone, of all layers."""
    layers: tuple[int, int] | None
    """Layers [lo, hi) that are meant; None: all."""
    after: tuple[int, ...]
    """Handles of the device events after which the rows are there."""
    bytes: int
    grows: bool = False
    """Whether no row is there yet; see `Move.grows`."""


class SendProgress:
    """What was handed to a transport for one sink."""

    def __init__(self, program: CopyProgram) -> None:
        """`program` is any of the rank pair's."""
        self._program = program
        self.begun = False
        """Whether anything was handed over."""

    @cached_property
    def layers(self) -> list[Layer]:
        """Those that a program of the rank pair copies, ascending."""
        return sorted(layers_of(self._program.ops))

    @cached_property
    def _tokens(self) -> dict[Layer, int]:
        """That were handed over, of each layer."""
        return dict.fromkeys(self.layers, 0)

    @cached_property
    def _early(self) -> set[Layer]:
        """Layers with rows that may go before prefill is over."""
        return layers_of(self._program.ops[np.isin(self._program.ops["map"], list(self._program.early))])

    def due(
        self, there: Mapping[Layer, Available], asked: Mapping[int, tuple[int, int]], first_part_ratio: float
    ) -> bool:
        """Whether a part should go now: what waits, in tokens of a layer, is as much as what is still to be computed.

        The first part waits until it is `first_part_ratio` times as much; a ratio below 1 holds for later parts too.
        Models of which no layer is available do not count, as the engine may speak of them at the end alone. `asked`:
        positions [first, end) by model.
        """
        waiting = coming = 0
        known = {model for model, _ in there}
        for layer in self._early:
            if layer[0] not in known:
                continue
            handed = self._tokens[layer]
            first, end = asked.get(layer[0], (0, 0))
            computed = max(min(there[layer].tokens, end), first) if layer in there else first
            waiting += max(computed - max(handed, first), 0)
            coming += end - computed
        return waiting >= coming * (min(first_part_ratio, 1) if self.begun else first_part_ratio)

    def next(self, program: CopyProgram, there: Mapping[Layer, Available]) -> list[Part]:
        """What is available and was not handed over; `program` may gain rows from call to call, nothing else."""
        return self._parts(program, {layer: (t.tokens, t.after) for layer, t in there.items()})

    def last(self, program: CopyProgram, after: tuple[int, ...]) -> list[Part]:
        """All that was not handed over, once prefill is over: one part at least, which may be empty."""
        found = self._parts(program, dict.fromkeys(self.layers, (None, after)))
        return found or [Part(program.since(_NO_MODEL, 0, None), None, after, 0)]

    def advance(self, there: Mapping[Layer, Available]) -> None:
        """The parts that `next` gave have been handed over."""
        self.begun = True
        for layer in self.layers:
            if layer in there:
                self._tokens[layer] = max(self._tokens[layer], there[layer].tokens)

    def _parts(self, program: CopyProgram, there: Mapping[Layer, tuple[int | None, tuple[int, ...]]]) -> list[Part]:
        runs: list[tuple[tuple[int, int, int | None], list[int], set[int]]] = []
        adjacent = False
        for model, layer in self.layers:
            handed, (tokens, after) = self._tokens[model, layer], there.get((model, layer), (0, ()))
            if tokens is not None and tokens <= handed:
                adjacent = False
                continue
            key = (model, handed, tokens)
            if not adjacent or runs[-1][0] != key:
                runs.append((key, [], set()))
            runs[-1][1].append(layer)
            runs[-1][2].update(after)
            adjacent = True
        found = []
        for (model, handed, tokens), layers, events in runs:
            rows, span = program.since(model, handed, tokens), (layers[0], layers[-1] + 1)
            bytes_ = rows.select(layers=range(*span)).bytes
            if bytes_:
                found.append(Part(rows, span, tuple(sorted(events)), bytes_))
        return found


def layers_of(ops: npt.NDArray[np.void]) -> set[Layer]:
    return set(zip(ops["model"].tolist(), ops["layer"].tolist(), strict=True))
