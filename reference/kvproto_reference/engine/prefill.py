"""Prefill of a sequence into the target's and the draft's cache, up to the first token."""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

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


class OnLayer(Protocol):
    """Called when a layer of a model (0 the target, 1 the draft) has its rows of positions [0, stop)."""

    def __call__(self, model: int, stop: int, layer: int) -> None:
        """On a GPU the rows are there in stream order."""


def _nobody(model: int, stop: int, layer: int) -> None:
    pass


def prefill_steps(
    sequence: Sequence, target: ModelRunner, draft: ModelRunner | None, chunk: int, on_layer: OnLayer = _nobody
) -> Iterator[PrefillStep]:
    """Prefill a prompt chunk by chunk; before the last step is yielded the sequence gets its first token."""
    pieces, drafts = (
        runner.prefill_chunks(sequence.prompt, pages, chunk, computed=partial(on_layer, model)) if runner else None
        for model, (runner, pages) in enumerate(((target, sequence.target_pages), (draft, sequence.draft_pages)))
    )
    assert pieces is not None
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
