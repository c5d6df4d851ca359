"""Which rows of a request go to a sink next: every row of every layer once, as soon as it is there.

Prefill computes each layer from the first token on, so what is there of a layer is one number of tokens, and
what was handed to a transport is another. A part is what lies between the two, for layers next to each other that are
alike in both.

When a part goes is a matter of what its link costs. A link between GPUs that is in use draws power even where little
crosses it, and compute that holds its GPU at the power limit slows down for it (benchmarks/overlap.py). Where a link is
many times faster than rows are computed, nearly all of them may go shortly before the last is there, and the end is as
early: what is left then is halved, and halved again.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.copying.program import CopyProgram
from kvproto.transport.base import Layer

__all__ = ["Handed", "Part", "There"]

_NONE = -1
"""No model."""


@attrs.frozen
class There:
    """What is there of a layer: positions [0, tokens), after the device events."""

    tokens: int
    after: tuple[int, ...] = ()


@attrs.frozen
class Part:
    """Rows of some layers."""

    program: CopyProgram
    """With the rows of this part alone, of all layers."""
    layers: tuple[int, int] | None
    """Those that are meant: [lo, hi)."""
    after: tuple[int, ...]
    bytes: int
    grows: bool = False
    """As of `Move`."""


class Handed:
    """What was handed to a transport for one sink."""

    def __init__(self, program: CopyProgram) -> None:
        self._layers = sorted(_layers(program.ops))
        self._tokens = dict.fromkeys(self._layers, 0)
        self._early = _layers(program.ops[np.isin(program.ops["map"], list(program.early))])
        """Layers that have rows which may go before the end."""
        self.begun = False
        """Whether anything was."""

    def due(self, there: Mapping[Layer, There], asked: Mapping[int, tuple[int, int]], late: float) -> bool:
        """Whether what is there and was not handed over is as much as what is to come, in tokens of a layer.

        Where nothing was handed over it has to be `late` times as much, and if that is less than 1, later too. Models
        none of whose layers is there do not count: they may be told of by the end alone. asked: by model, positions
        [first, end).
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
        return waiting >= coming * (min(late, 1) if self.begun else late)

    def next(self, program: CopyProgram, there: Mapping[Layer, There]) -> list[Part]:
        """What is there and was not handed over; `program` may grow from call to call, by rows alone."""
        return self._parts(program, {layer: (t.tokens, t.after) for layer, t in there.items()})

    def last(self, program: CopyProgram, after: tuple[int, ...]) -> list[Part]:
        """All that was not handed over, once everything is there; at least one part, be it empty."""
        found = self._parts(program, dict.fromkeys(self._layers, (None, after)))
        return found or [Part(program.since(_NONE, 0, None), None, after, 0)]

    def advance(self, there: Mapping[Layer, There]) -> None:
        """The parts of `next` are handed over."""
        self.begun = True
        for layer in self._layers:
            if layer in there:
                self._tokens[layer] = max(self._tokens[layer], there[layer].tokens)

    def _parts(self, program: CopyProgram, there: Mapping[Layer, tuple[int | None, tuple[int, ...]]]) -> list[Part]:
        runs: list[tuple[tuple[int, int, int | None], list[int], set[int]]] = []
        adjacent = False
        for model, layer in self._layers:
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


def _layers(ops: npt.NDArray[np.void]) -> set[Layer]:
    return set(zip(ops["model"].tolist(), ops["layer"].tolist(), strict=True))
