"""Decode steps of a batch: a draft model proposes tokens, the target verifies them in one forward."""

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
from torch import Tensor

from ..errors import EngineError
from ..tokenizer import BYTES
from .runner import Chunk, Logits, Runner
from .sampling import Probabilities, SamplingParams, Scores, penalized, pick, probabilities, sample, uniform
from .sequence import TokenSequence


@attrs.define(eq=False)
class _Proposal:
    """The tokens that the draft proposes for one sequence."""

    sequence: TokenSequence
    start: int
    """Position of the newest token, which has no row yet."""
    most: int
    tokens: list[int] = attrs.Factory(list)
    beliefs: list[Probabilities] = attrs.Factory(list)
    """The draft's distribution [vocab] for each token, if sampling needs them."""
    made: Tensor | None = None
    """A head's output [1, hidden] with the last token."""

    @property
    def newest(self) -> int:
        """The last token, whether proposed or not."""
        return self.tokens[-1] if self.tokens else self.sequence.newest

    @property
    def open(self) -> bool:
        """Whether the draft may propose another token."""
        return len(self.tokens) < self.most and self.newest not in self.sequence.ends

    def chunk(self, ahead: int) -> Chunk:
        """The draft's rows for the next token: one row, but first all rows that a head lacks."""
        sequence, table = self.sequence, self.sequence.tables[1]
        at = self.start + len(self.tokens) - ahead
        return Chunk([self.newest], at, table, made=self.made) if not ahead or self.tokens else _lacking(sequence)

    def scores(self, row: Callable[[int], Scores], index: int, after: int) -> Scores:
        """The logits [vocab] in a row, penalized for the tokens before: so many of the proposed ones among them."""
        before = [*self.sequence.generated, *self.tokens[:after]] if self.sequence.sampling.penalizes else ()
        return penalized(row(index), self.sequence.sampling, self.sequence.prompt, before)


class SpeculativeDecoder:
    """Decodes sequences whose rows [0, valid) are in both caches, and leaves them so after each step.

    Of a head these are [0, shared). A step fills the rest first, from the target's hidden states; what it
    proposes next goes on from the head's own output, in rows that are filled again when the tokens are accepted.
    """

    def __init__(self, target: Runner, draft: Runner | None = None, k: int = 4) -> None:
        if draft is not None and k < 1:
            raise EngineError(f"a draft must propose at least 1 token, not {k}: leave it out")
        if draft is not None and draft.vocab != target.vocab:
            sizes = [f"the {n} a vocabulary of {r.vocab}" for n, r in (("draft", draft), ("target", target))]
            raise EngineError(f"{' and '.join(sizes)}: they must be equal")
        self.target, self.draft, self.k = target, draft, k

    def step(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        """Run one forward of the target over all of them; returns the tokens that each gained, none if finished."""
        if not all(sequence.generated for sequence in sequences):
            raise EngineError("decode needs the first token, which prefill samples")
        gained: dict[TokenSequence, list[int]] = {}
        ahead = self.draft.ahead if self.draft is not None else 0
        some = self._propose([s for s in sequences if not s.finished])
        if some:
            logits = self.target.run(
                [
                    Chunk(
                        [p.sequence.newest, *p.tokens],
                        p.start,
                        p.sequence.tables[0],
                        every=True,
                        proposed=len(p.tokens),
                        window=p.sequence.tables[-1] if self.target.windowed else (),
                        adapter=p.sequence.adapter_name,
                    )
                    for p in some
                ]
            )
            best, at, behind = logits.best(), 0, []
            for p in some:
                own = best[at : at + len(p.tokens) + 1].tolist()
                scores = partial(_scores, p, logits.row, at)
                ends = p.sequence.ends
                accepted, extra = verify(own, scores, p.tokens, p.beliefs, p.sequence.sampling, p.start + 1, ends)
                kept = gained[p.sequence] = self._take(p, accepted, extra, partial(_row, logits, at))
                if ahead and logits.hidden is not None:
                    p.sequence.hidden = logits.hidden[at : at + len(kept)].clone()
                    if p.sequence.finished:  # no step follows that would fill its rows
                        behind.append(attrs.evolve(_lacking(p.sequence), unread=True))
                        p.sequence.hidden = None
                at += len(own)
                if not ahead and p.tokens and accepted == len(p.tokens) and extra is not None:
                    last = Chunk(p.tokens[-1:], p.start + accepted, p.sequence.tables[1], unread=True)
                    behind.append(last)
            self.target.settle([len(gained[p.sequence]) for p in some])
            if self.draft is not None and behind:  # it has not run its last proposals, whose rows are needed now
                self.draft.run(behind)
        return [gained.get(sequence, []) for sequence in sequences]

    def fill(self, sequence: TokenSequence) -> None:
        """Fill the rows that a head lacks of a sequence, but for the last, which is filled with its next step."""
        if self.draft is None or sequence.hidden is None or len(sequence.hidden) < 2:
            return
        whole = _lacking(sequence)
        self.draft.run([attrs.evolve(whole, tokens=whole.tokens[:-1], hidden=sequence.hidden[:-1], unread=True)])
        sequence.hidden = sequence.hidden[-1:].clone()

    def _take(self, p: _Proposal, accepted: int, extra: int | None, scores: Callable[[int], Scores]) -> list[int]:
        kept = p.sequence.append(p.tokens[:accepted] + ([] if extra is None else [extra]), scores)
        stats = p.sequence.stats
        stats.steps += 1
        stats.tokens += len(kept)
        stats.proposed += len(p.tokens)
        stats.accepted += accepted
        return kept

    def _propose(self, sequences: Sequence[TokenSequence]) -> list[_Proposal]:
        # the target adds one token itself, so proposing all that remain would overshoot max_new and the pages
        most = self.k if self.draft is not None else 0
        made = [_Proposal(s, s.valid, min(most, s.remaining - 1)) for s in sequences]
        running = made if self.draft is not None else []  # all, as the row of the newest token is due in both caches
        while running and self.draft is not None:
            logits = self.draft.run([p.chunk(self.draft.ahead) for p in running])
            best, out = logits.best(), logits.hidden
            for i, p in enumerate(running):
                p.made = None if out is None else out[i : i + 1]
                if not p.open:
                    continue
                sampling = p.sequence.sampling
                if sampling.plain:
                    p.tokens.append(int(best[i]))
                else:
                    scores = p.scores(logits.row, i, len(p.tokens))
                    p.beliefs.append(probabilities(scores, sampling))
                    p.tokens.append(sample(scores, sampling, p.start + len(p.tokens) + 1, "draft"))
            running = [p for p in running if p.open]
        return made


def _lacking(sequence: TokenSequence) -> Chunk:
    """The rows that a head lacks, up to that of the newest token."""
    start, tokens = sequence.shared, sequence.text(sequence.shared + 1, sequence.length)
    return Chunk(tokens, start, sequence.tables[1], hidden=sequence.hidden)


def _row(logits: Logits, first: int, index: int) -> Scores:
    """The target's logits [vocab] after `index` proposals of those whose rows begin at `first`, without penalties."""
    return logits.row(first + index)


def _scores(proposal: _Proposal, row: Callable[[int], Scores], first: int, index: int) -> Scores:
    """The target's logits [vocab] after `index` proposals of those whose rows begin at `first`."""
    return proposal.scores(row, first + index, index)


def verify(
    own: Sequence[int],
    scores: Callable[[int], Scores],
    proposed: Sequence[int],
    beliefs: Sequence[Probabilities],
    params: SamplingParams,
    position: int,
    eos: frozenset[int] = BYTES.eos,
) -> tuple[int, int | None]:
    """The number of accepted proposals, and the target's own next token, or None after an accepted EOS.

    `own` are the target's most likely tokens [len(proposed) + 1], and `scores(i)` its logits [vocab] there after
    penalties, which are needed unless sampling is plain. `beliefs` are the draft's distributions [vocab] for each
    proposal; proposal i is at `position + i`. Speculative sampling is that of arXiv 2211.17192.
    """
    for i, token in enumerate(proposed):
        if params.greedy:
            best = own[i] if params.plain else int(scores(i).argmax())
            if best != token:
                return i, best
        else:
            wanted = probabilities(scores(i), params)
            if uniform(params.seed, position + i, "accept") * beliefs[i][token] >= wanted[token]:
                residual = np.maximum(wanted - beliefs[i], 0.0)
                # Equal distributions leave no residual but rounding errors; the target's own is then right.
                residual = residual if residual.sum() > 0.0 else wanted
                return i, pick(residual, uniform(params.seed, position + i, "residual"))
        if token in eos:
            return i + 1, None
    last = len(proposed)
    return last, own[last] if params.plain else sample(scores(last), params, position + last)
