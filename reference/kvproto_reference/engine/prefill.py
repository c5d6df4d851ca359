"""Prefill: computes prompts into the caches of target and draft, several at a time, up to the first token of each.

Decode uses it for requests that gave way: their prompts and answers are computed again, up to the newest token.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import attrs
import torch
from torch import Tensor

from ..errors import EngineError
from .runner import Chunk, Computed, Logits, Runner
from .sampling import Scores, penalized, sample
from .sequence import IMAGE, TokenSequence


class OnLayer(Protocol):
    """Called for each sequence of a step when a layer of a model (0 the target, 1 the draft) has its rows [0, stop)."""

    def __call__(self, sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
        """On a GPU the rows are ready in stream order."""


Piece = tuple[TokenSequence, int, int]
"""A sequence, and the positions [lo, hi) of it that a step computes."""


def _nobody(sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
    pass


def _row(logits: Logits, first: int, index: int) -> Scores:
    return logits.row(first + index)


@attrs.define(eq=False)
class Prefiller:
    """Computes sequences in the order in which they came, `budget` tokens in a step, maybe pieces of several."""

    target: Runner
    draft: Runner | None
    budget: int
    on_layer: OnLayer = _nobody
    cold: bool = False
    """Whether the draft's rows of prompts stay zero, as does what a head reads of them."""
    _done: dict[TokenSequence, int] = attrs.field(factory=dict, init=False)
    """Tokens computed of each sequence under way, in order."""

    def __attrs_post_init__(self) -> None:
        if self.budget < 1:
            raise EngineError(f"the prefill chunk must be at least 1 token, not {self.budget}")

    @property
    def busy(self) -> bool:
        """Whether a sequence is under way."""
        return bool(self._done)

    def __contains__(self, sequence: object) -> bool:
        """Whether this one is."""
        return sequence in self._done

    def add(self, sequence: TokenSequence, done: int = 0) -> None:
        """Add a sequence that has its pages, and the rows of its first `done` tokens."""
        self.target.begin(sequence.tables[0], done)
        self._done[sequence] = done

    def drop(self, sequence: TokenSequence) -> int:
        """Stop computing a sequence, if it is under way; returns how many of its tokens are computed."""
        return self._done.pop(sequence, sequence.due)

    def step(self) -> list[TokenSequence]:
        """Run one step of both models; returns the sequences that are done, each with its first token at least."""
        some = list(self._pieces())
        if not some:
            return []
        logits = self.target.run([self._chunk(*piece) for piece in some], self._told(some, 0))
        if self.draft is not None and not self.draft.ahead:
            self._follow(self.draft, some)
        over = self._sampled(some, logits)
        if self.draft is not None and self.draft.ahead:  # the last row of a prompt needs its first token
            self._follow(self.draft, some, logits.hidden)
        return over

    def _chunk(self, sequence: TokenSequence, start: int, stop: int) -> Chunk:
        """A piece as the target runs it."""
        window = sequence.tables[-1] if self.target.windowed else ()
        unread = not self._draws(sequence, stop)
        seen = None
        if sequence.seen is not None:
            before, until = (sequence.prompt[:end].count(IMAGE) for end in (start, stop))
            seen = sequence.seen[before:until]
        text, pages, adapter = sequence.text(start, stop), sequence.tables[0], sequence.adapter_name
        return Chunk(text, start, pages, unread=unread, window=window, seen=seen, adapter=adapter)

    def _follow(self, draft: Runner, some: Sequence[Piece], hidden: Tensor | None = None) -> None:
        """Run the pieces through the draft, whose rows run ahead by as many tokens as it says."""
        chunks, at = [], 0
        for s, lo, hi in some:
            first = max(lo, self._warm(s)) if self.cold else lo
            if first < hi:
                own = None if hidden is None else self._seen(s, first, hidden[at + first - lo : at + hi - lo])
                text = s.text(first + draft.ahead, hi + draft.ahead)
                chunks.append(Chunk(text, first, s.tables[1], unread=True, hidden=own))
            at += hi - lo
        if chunks:
            draft.run(chunks, self._told(some, 1))

    def _warm(self, sequence: TokenSequence) -> int:
        """The first row that a cold draft computes."""
        return len(sequence.prompt) - (self.draft.ahead if self.draft is not None else 0)

    def _seen(self, sequence: TokenSequence, start: int, hidden: Tensor) -> Tensor:
        """Hidden states for a head from position `start` on; a cold head has none of the prompt."""
        lacks = max(len(sequence.prompt) - start, 0) if self.cold else 0
        return torch.cat((torch.zeros_like(hidden[:lacks]), hidden[lacks:])) if lacks else hidden

    def _sampled(self, some: Sequence[Piece], logits: Logits) -> list[TokenSequence]:
        """The sequences that are done, each with its first token at least, and what a head reads to go on."""
        over, best, at, nth = [], logits.best(), 0, 0
        for sequence, start, stop in some:
            self._done[sequence] = stop
            at += stop - start
            if stop == sequence.due:
                del self._done[sequence]
                if self._draws(sequence, stop):
                    how, first = sequence.sampling, int(best[nth])
                    if not how.plain:
                        first = sample(penalized(logits.row(nth), how, sequence.prompt, ()), how, stop)
                    sequence.append([first], partial(_row, logits, nth))
                    nth += 1
                if logits.hidden is not None:
                    sequence.hidden = self._seen(sequence, stop - 1, logits.hidden[at - 1 : at].clone())
                over.append(sequence)
        return over

    def _draws(self, sequence: TokenSequence, stop: int) -> bool:
        """Whether a piece that ends at `stop` gives a sequence its first token."""
        return not sequence.generated and stop == sequence.due

    def _pieces(self) -> Iterable[Piece]:
        """Pieces of the next step."""
        left = self.budget
        for sequence, done in self._done.items():
            if left:
                count = min(left, sequence.due - done)
                left -= count
                yield sequence, done, done + count

    def _told(self, some: Sequence[Piece], model: int) -> Computed:
        """The callback of a model after each layer of a step."""
        return partial(self._tell, [(s, hi) for s, _, hi in some], model)

    def _tell(self, some: Iterable[tuple[TokenSequence, int]], model: int, layer: int) -> None:
        for sequence, stop in some:
            self.on_layer(sequence, model, stop, layer)
