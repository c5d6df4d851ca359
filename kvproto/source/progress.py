"""The rows of a request that were handed to a transport for one sink, and the parts that are next.

Prefill computes each layer from the first token on. So the rows of a layer that are available, and those that were
handed to a transport, are one number of tokens each; a part is the rows between the two, for adjacent layers with the
same two numbers.

The cost of its link decides when a part is sent. A link between GPUs that is in use draws power even when little
crosses it, and compute that holds its GPU at the power limit slows down (benchmarks/overlap.py). If a link is many
times faster than rows are computed, nearly all of them can be sent shortly before the last is computed without ending
later: each part then halves the remainder.
"""

from collections.abc import Mapping
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.transport.staging.packed import Layer

_NO_MODEL = -1


@attrs.frozen
class Available:
    """The rows of a layer that are computed: positions [0, tokens), once these device events have happened."""

    tokens: int
    after: tuple[int, ...] = ()


@attrs.frozen
class CopyStep:
    """Some rows of some layers, to be copied next."""

    program: CopyProgram
    """A program of this part's rows alone, in all layers."""
    layers: tuple[int, int] | None
    """The layers [lo, hi) to copy; None: all."""
    after: tuple[int, ...]
    """Handles of the device events after which the rows are computed."""
    bytes: int
    grows: bool = False
    """Whether no row is computed yet; see `Move.grows`."""


class SendProgress:
    """The rows that were handed to a transport for one sink."""

    def __init__(self, program: CopyProgram) -> None:
        """`program` is any program of the rank pair."""
        self._program = program
        self.begun = False
        """Whether any part was handed over."""

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers that a program of the rank pair copies, ascending."""
        return sorted(layers_of(self._program.ops))

    @cached_property
    def _tokens(self) -> dict[Layer, int]:
        """The number of tokens that were handed over, by layer."""
        return dict.fromkeys(self.layers, 0)

    @cached_property
    def _early(self) -> set[Layer]:
        """Layers with rows that may be sent before prefill is over."""
        return layers_of(self._program.ops[np.isin(self._program.ops["map"], list(self._program.early))])

    def due(
        self, available: Mapping[Layer, Available], ranges: Mapping[int, tuple[int, int]], first_part_ratio: float
    ) -> bool:
        """Whether to send a part now: as many rows wait, in tokens times layers, as are still to be computed.

        The first part waits until there are `first_part_ratio` times as many; a ratio below 1 applies to later parts
        too. Models without any available layer do not count, as the engine may report them only at the end. `ranges`
        are the positions [first, end) that the sink asks for, by model.
        """
        waiting = coming = 0
        models = {model for model, _ in available}
        for layer in self._early:
            if layer[0] not in models:
                continue
            handed = self._tokens[layer]
            first, end = ranges.get(layer[0], (0, 0))
            computed = max(min(available[layer].tokens, end), first) if layer in available else first
            waiting += max(computed - max(handed, first), 0)
            coming += end - computed
        return waiting >= coming * (min(first_part_ratio, 1) if self.begun else first_part_ratio)

    def next(self, program: CopyProgram, available: Mapping[Layer, Available]) -> list[CopyStep]:
        """The parts that are available and were not handed over; between calls, `program` may only gain rows."""
        return self._parts(program, {layer: (rows.tokens, rows.after) for layer, rows in available.items()})

    def last(self, program: CopyProgram, after: tuple[int, ...]) -> list[CopyStep]:
        """The parts that are left when prefill is over: at least one, which may be empty."""
        steps = self._parts(program, dict.fromkeys(self.layers, (None, after)))
        return steps or [CopyStep(program.since(_NO_MODEL, 0, None), None, after, 0)]

    def advance(self, available: Mapping[Layer, Available]) -> None:
        """Record that the parts which `next` returned were handed over."""
        self.begun = True
        for layer in self.layers:
            if layer in available:
                self._tokens[layer] = max(self._tokens[layer], available[layer].tokens)

    def _parts(
        self, program: CopyProgram, available: Mapping[Layer, tuple[int | None, tuple[int, ...]]]
    ) -> list[CopyStep]:
        runs: list[tuple[tuple[int, int, int | None], list[int], set[int]]] = []
        adjacent = False
        for model, layer in self.layers:
            handed, (tokens, after) = self._tokens[model, layer], available.get((model, layer), (0, ()))
            if tokens is not None and tokens <= handed:
                adjacent = False
                continue
            key = (model, handed, tokens)
            if not adjacent or runs[-1][0] != key:
                runs.append((key, [], set()))
            runs[-1][1].append(layer)
            runs[-1][2].update(after)
            adjacent = True
        steps = []
        for (model, handed, tokens), layers, events in runs:
            rows, span = program.since(model, handed, tokens), (layers[0], layers[-1] + 1)
            length = rows.select(layers=range(*span)).bytes
            if length:
                steps.append(CopyStep(rows, span, tuple(sorted(events)), length))
        return steps


def layers_of(ops: npt.NDArray[np.void]) -> set[Layer]:
    """The model and layer of each operation of a program."""
    return set(zip(ops["model"].tolist(), ops["layer"].tolist(), strict=True))
