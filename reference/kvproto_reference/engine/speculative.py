"""Decode steps: a draft model proposes tokens, the target verifies them in one forward."""

import numpy as np
from torch import Tensor

from ..errors import EngineError
from ..tokenizer import BYTES
from .runner import ModelRunner
from .sampling import Probabilities, SamplingParams, pick, probabilities, sample, uniform
from .sequence import Sequence


class SpeculativeDecoder:
    """Decodes sequences whose rows [0, valid) are in both caches, and leaves them so after each step."""

    def __init__(self, target: ModelRunner, draft: ModelRunner | None = None, k: int = 4) -> None:
        if draft is not None and k < 1:
            raise EngineError(f"a draft must propose at least 1 token, not {k}")
        if draft is not None and draft.model.config.vocab != target.model.config.vocab:
            sizes = [
                f"the {n} a vocabulary of {r.model.config.vocab}" for n, r in (("draft", draft), ("target", target))
            ]
            raise EngineError(f"{' and '.join(sizes)}: they must be equal")
        self.target, self.draft, self.k = target, draft, k

    def step(self, sequence: Sequence) -> list[int]:
        """One target forward: the tokens it added to the sequence, none when it was finished already."""
        if sequence.finished:
            return []
        if not sequence.generated:
            raise EngineError("decode needs the first token, which prefill samples")
        # The newest token has no row yet; its position is where this step starts.
        start = sequence.valid
        proposed, beliefs = self._propose(sequence, start)
        logits = self.target.run([sequence.newest, *proposed], start, sequence.target_pages)
        accepted, extra = verify(logits, proposed, beliefs, sequence.sampling, start + 1, sequence.eos)
        if self.draft is not None and proposed and accepted == len(proposed) and extra is not None:
            # The draft never ran its last proposal, whose row is valid now.
            self.draft.run(proposed[-1:], start + accepted, sequence.draft_pages)
        kept = sequence.append(proposed[:accepted] + ([] if extra is None else [extra]))
        sequence.stats.steps += 1
        sequence.stats.tokens += len(kept)
        sequence.stats.proposed += len(proposed)
        sequence.stats.accepted += accepted
        return kept

    def _propose(self, sequence: Sequence, start: int) -> tuple[list[int], list[Probabilities]]:
        proposed: list[int] = []
        beliefs: list[Probabilities] = []
        if self.draft is None:
            return proposed, beliefs
        token = sequence.newest
        # The target adds one token of its own, so proposing all that remain would overshoot max_new and the pages.
        count = min(self.k, sequence.remaining - 1)
        if count <= 0:
            # The row is still due: `valid` counts for both caches.
            self.draft.run([token], start, sequence.draft_pages)
        for i in range(count):
            logits = self.draft.run([token], start + i, sequence.draft_pages)[-1]
            token = sample(logits, sequence.sampling, start + i + 1, "draft")
            proposed.append(token)
            beliefs.append(probabilities(logits, sequence.sampling))
            if token in sequence.eos:
                break
        return proposed, beliefs


def verify(
    logits: Tensor,
    proposed: list[int],
    beliefs: list[Probabilities],
    params: SamplingParams,
    position: int,
    eos: frozenset[int] = BYTES.eos,
) -> tuple[int, int | None]:
    """Number of accepted proposals and the target's own next token, None after an accepted EOS.

    Shapes: logits [len(proposed) + 1, vocab], beliefs the draft's distributions [vocab] of each proposal;
    proposal i stands at `position + i`.
    """
    for i, token in enumerate(proposed):
        own = sample(logits[i], params, position + i) if params.greedy else None
        if own is not None:
            if own != token:
                return i, own
        else:
            wanted = probabilities(logits[i], params)
            if uniform(params.seed, position + i, "accept") * beliefs[i][token] >= wanted[token]:
                residual = np.maximum(wanted - beliefs[i], 0.0)
                # Equal distributions leave no residual but rounding; the target's own is then right.
                residual = residual if residual.sum() > 0.0 else wanted
                return i, pick(residual, uniform(params.seed, position + i, "residual"))
        if token in eos:
            return i + 1, None
    return len(proposed), sample(logits[-1], params, position + len(proposed))
