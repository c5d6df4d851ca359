"""State of one request inside an engine."""

import attrs

from ..errors import EngineError
from ..tokenizer import BYTES
from .sampling import SamplingParams


@attrs.define(kw_only=True)
class SpeculationStats:
    """Counts over the decode of one sequence, without the first token, which prefill samples."""

    steps: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def mean_acceptance(self) -> float:
        """Tokens per target step (1.0 without a draft); 0.0 before any step."""
        return self.tokens / self.steps if self.steps else 0.0


@attrs.define(kw_only=True, eq=False)
class TokenSequence:
    """A prompt, what was generated for it, and its page tables in the pools of target and draft.

    All caches hold the rows of positions [0, valid); the newest token has no row yet. Raises EngineError for an empty
    prompt.
    """

    prompt: list[int]
    max_new: int
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    eos: frozenset[int] = BYTES.eos
    """Tokens that end it."""
    tables: list[list[int]] = attrs.field(factory=list)
    """The page table in the pool of each model: of the target, then of the draft, if there is one."""
    generated: list[int] = attrs.field(factory=list)
    stats: SpeculationStats = attrs.field(factory=SpeculationStats)

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise EngineError("the prompt is empty")
        if self.max_new < 1:
            raise EngineError(f"max_new must be at least 1 token, not {self.max_new}")

    @property
    def length(self) -> int:
        """Tokens so far, prompt and generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def valid(self) -> int:
        """Rows valid in all caches between decode steps."""
        return self.length - 1

    @property
    def newest(self) -> int:
        """The last token, whose row the next step writes."""
        return self.generated[-1] if self.generated else self.prompt[-1]

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new - len(self.generated)

    @property
    def finished(self) -> bool:
        """Whether EOS or max_new was reached."""
        return self.remaining <= 0 or (bool(self.generated) and self.generated[-1] in self.eos)

    def append(self, tokens: list[int]) -> list[int]:
        """Add generated tokens up to EOS or max_new; returns those that were kept."""
        kept = tokens[: max(self.remaining, 0)]
        ends = next((i for i, token in enumerate(kept) if token in self.eos), len(kept))
        kept = kept[: ends + 1]
        self.generated.extend(kept)
        return kept


def rows_needed(prompt: int, max_new: int) -> int:
    """The most rows that a generation writes: the last token gets none, and speculation never passes it."""
    return prompt + max_new - 1
