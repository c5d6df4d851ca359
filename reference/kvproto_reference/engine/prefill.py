"""Prefill of a sequence into the target's and the draft's cache, up to the first token."""

from collections.abc import Iterator

import attrs
from torch import Tensor

from .runner import ModelRunner, PrefillChunk
from .sampling import sample
from .sequence import Sequence


@attrs.frozen(kw_only=True)
class PrefillStep:
    """Rows [start, stop) are in both caches; `first` is the first token, after the last chunk only."""

    start: int
    stop: int
    first: int | None


def prefill_steps(
    sequence: Sequence, target: ModelRunner, draft: ModelRunner | None, chunk: int
) -> Iterator[PrefillStep]:
    """Prefill a prompt chunk by chunk; before the last step is yielded the sequence gets its first token."""
    pieces = target.prefill_chunks(sequence.prompt, sequence.target_pages, chunk)
    drafts = draft.prefill_chunks(sequence.prompt, sequence.draft_pages, chunk) if draft else None
    for piece in pieces:
        if drafts is not None:
            next(drafts)
        yield _step(sequence, piece)


def first_token(sequence: Sequence, logits: Tensor) -> int:
    """The token that follows the prompt, from the target's logits [vocab] of its last token."""
    return sample(logits, sequence.sampling, len(sequence.prompt))


def prefill(sequence: Sequence, target: ModelRunner, draft: ModelRunner | None, chunk: int) -> int:
    """Prefill a whole prompt; the first token, which is also added to the sequence."""
    for _ in prefill_steps(sequence, target, draft, chunk):
        pass
    return sequence.generated[0]


def _step(sequence: Sequence, piece: PrefillChunk) -> PrefillStep:
    if piece.stop < len(sequence.prompt):
        return PrefillStep(start=piece.start, stop=piece.stop, first=None)
    first = first_token(sequence, piece.logits)
    sequence.append([first])
    return PrefillStep(start=piece.start, stop=piece.stop, first=first)
