"""Prefill: computes prompts into the caches of target and draft, several at a time, up to the first token of each."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import attrs
from torch import Tensor

from ..errors import EngineError
from .runner import Chunk, Logits, Runner
from .sampling import penalized, sample
from .sequence import TokenSequence


class OnLayer(Protocol):
    """Called for each sequence of a step when a layer of a model (0 the target, 1 the draft) has its rows [0, stop)."""

    def __call__(self, sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
        """On a GPU the rows are ready in stream order."""


Piece = tuple[TokenSequence, int, int]
"""A sequence, and the positions [lo, hi) of it that a step computes."""


def _nobody(sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
    pass


@attrs.define(eq=False)
class Prefiller:
    """Computes prompts in the order in which they came, `budget` tokens in a step, which may have pieces of several."""

    target: Runner
    draft: Runner | None
    budget: int
    on_layer: OnLayer = _nobody
    _done: dict[TokenSequence, int] = attrs.field(factory=dict, init=False)
    """Tokens computed of each prompt under way, in order."""

    def __attrs_post_init__(self) -> None:
        if self.budget < 1:
            raise EngineError(f"the prefill chunk must be at least 1 token, not {self.budget}")

    @property
    def busy(self) -> bool:
        """Whether a prompt is under way."""
        return bool(self._done)

    def add(self, sequence: TokenSequence, done: int = 0) -> None:
        """Add a prompt that has its pages, and the rows of its first `done` tokens."""
        self.target.begin(sequence.tables[0], done)
        self._done[sequence] = done

    def drop(self, sequence: TokenSequence) -> int:
        """Stop computing a prompt, if it is under way; returns how many of its tokens are computed."""
        return self._done.pop(sequence, len(sequence.prompt))

    def step(self) -> list[TokenSequence]:
        """Run one step of both models; returns the sequences whose prompts are done, each with its first token."""
        some = list(self._pieces())
        if not some:
            return []
        logits = self._run(0, self.target, some)
        if self.draft is not None and not self.draft.ahead:
            self._run(1, self.draft, some)
        over = self._sampled(some, logits)
        if self.draft is not None and self.draft.ahead:  # the last row of a prompt needs its first token
            self._run(1, self.draft, some, logits.hidden)
        return over

    def _run(self, model: int, runner: Runner, some: Sequence[Piece], hidden: Tensor | None = None) -> Logits:
        """Run the pieces through one model, whose rows run ahead by as many tokens as the runner says."""
        chunks, at = [], 0
        for s, lo, hi in some:
            own = None if hidden is None else hidden[at : at + hi - lo]
            window = s.tables[-1] if runner.windowed else ()
            text = s.text(lo + runner.ahead, hi + runner.ahead)
            chunks.append(Chunk(text, lo, s.tables[model], window=window, hidden=own))
            at += hi - lo
        return runner.run(chunks, partial(self._tell, [(s, hi) for s, _, hi in some], model))

    def _sampled(self, some: Sequence[Piece], logits: Logits) -> list[TokenSequence]:
        """The sequences whose prompts are done, each with its first token and what a head reads to go on."""
        over, best, at = [], logits.best(), 0
        for i, (sequence, start, stop) in enumerate(some):
            self._done[sequence] = stop
            at += stop - start
            if stop == len(sequence.prompt):
                del self._done[sequence]
                how, first = sequence.sampling, int(best[i])
                if not how.plain:
                    first = sample(penalized(logits.row(i), how, sequence.prompt, ()), how, stop)
                sequence.append([first])
                sequence.hidden = None if logits.hidden is None else logits.hidden[at - 1 : at].clone()
                over.append(sequence)
        return over

    def _pieces(self) -> Iterable[Piece]:
        """Pieces of the next step."""
        left = self.budget
        for sequence, done in self._done.items():
            if left:
                count = min(left, len(sequence.prompt) - done)
                left -= count
                yield sequence, done, done + count

    def _tell(self, some: Iterable[tuple[TokenSequence, int]], model: int, layer: int) -> None:
        for sequence, stop in some:
            self.on_layer(sequence, model, stop, layer)
