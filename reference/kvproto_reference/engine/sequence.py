"""State of one request inside an engine."""

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from kvproto import Prompt, tenant_digest

from ..adapters import Adapter
from ..errors import EngineError
from ..tokenizer import BYTES, Tokenizer
from . import logprobs
from .logprobs import LogProbs
from .sampling import SamplingParams, Scores

IMAGE = 0
"""The token in whose place a row of an image stands, in a prompt that has images."""


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

    The caches hold the rows of positions [0, valid), a head's those of [0, shared); the newest token has no
    row yet. Raises EngineError for an empty prompt.
    """

    prompt: list[int]
    max_new: int
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    tokenizer: Tokenizer = BYTES
    tables: list[list[int]] = attrs.field(factory=list)
    """The page table in the pool of each model: of the target, then of the draft, if there is one.

    For a target with sliding windows, the pages in which they move come last (`cache/windows.py`).
    """
    generated: list[int] = attrs.field(factory=list)
    stats: SpeculationStats = attrs.field(factory=SpeculationStats)
    hidden: Tensor | None = None
    """For a head: the target's hidden states at the last positions [n, taps * width] whose rows it lacks."""
    adapter: Adapter | None = None
    """The adapter with which the target computes it."""
    images: Sequence[bytes] = ()
    """The digests of the images that the prompt shows."""
    cache_salt: str = ""
    """The tenant, whose pages no other one finds; empty if it shares them."""
    seen: Tensor | None = None
    """Rows of an encoder [IMAGE tokens, width], for the rank that embeds tokens, until the prompt is over."""
    logprobs: list[LogProbs] = attrs.field(factory=list)
    """Of each generated token, if `sampling.logprobs` asks for them."""
    stopped: bool = False
    """Whether a token that ends a text came, or one of the words of `sampling.stop`."""

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            raise EngineError("the prompt is empty")
        if self.max_new < 1:
            raise EngineError(f"max_new must be at least 1 token, not {self.max_new}")

    @property
    def adapter_name(self) -> str:
        """Empty without an adapter."""
        return "" if self.adapter is None else self.adapter.name

    @property
    def salts(self) -> tuple[bytes, ...]:
        """Digests of adapter, images and tenant: rows of equal tokens are shared where these are equal, too."""
        adapter = () if self.adapter is None else (self.adapter.digest,)
        return (*adapter, *self.images, *([tenant_digest(self.cache_salt)] if self.cache_salt else ()))

    @property
    def names(self) -> dict[str, str]:
        """The same for tiers: what the namespace of its pages has beside the models (KVP-TIER-NAMESPACE)."""
        adapter = {} if self.adapter is None else {"adapter": self.adapter.digest.hex()}
        return adapter | ({"salt": self.cache_salt} if self.cache_salt else {})

    @property
    def asked(self) -> Prompt:
        """The prompt that both engines have to agree on."""
        return Prompt(self.prompt, self.adapter_name, self.salts)

    @property
    def length(self) -> int:
        """Tokens so far, prompt and generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def valid(self) -> int:
        """Rows valid in the target's cache between decode steps, and in that of a draft that is no head."""
        return self.length - 1

    @property
    def shared(self) -> int:
        """Rows valid in all caches between decode steps."""
        return self.valid - (0 if self.hidden is None else len(self.hidden))

    @property
    def due(self) -> int:
        """Rows that the caches have to hold before decode can begin, or go on."""
        return len(self.prompt) + max(len(self.generated) - 1, 0)

    def rows(self, proposed: int | None = None) -> int:
        """The most rows that a next step writes, with so many proposals, or that all steps write."""
        whole = rows_needed(len(self.prompt), self.max_new)
        return whole if proposed is None else min(whole, self.due + 1 + proposed)

    def text(self, start: int, stop: int) -> list[int]:
        """The tokens at positions [start, stop), of the prompt or generated."""
        prompt = len(self.prompt)
        return self.prompt[start:stop] + self.generated[max(start - prompt, 0) : max(stop - prompt, 0)]

    @property
    def newest(self) -> int:
        """The last token, whose row the next step writes."""
        return self.generated[-1] if self.generated else self.prompt[-1]

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new - len(self.generated)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset() if self.sampling.ignore_eos else self.tokenizer.eos

    @property
    def finished(self) -> bool:
        """Whether the text has ended or max_new was reached."""
        return self.remaining <= 0 or self.stopped

    def append(self, tokens: Sequence[int], scores: Callable[[int], Scores] | None = None) -> list[int]:
        """Add generated tokens up to the end of the text or max_new; returns those that were kept.

        `scores` gives the model's logits [vocab] from which each was to be chosen.
        """
        kept: list[int] = []
        for token in tokens:
            if self.finished:
                break
            if scores is not None and self.sampling.logprobs is not None:
                self.logprobs.append(logprobs.of(scores(len(kept)), token, self.sampling.logprobs))
            kept.append(token)
            self.generated.append(token)
            self.stopped = token in self.ends or self._says_stop()
        return kept

    def _says_stop(self) -> bool:
        if not self.sampling.stop:
            return False
        text = self.tokenizer.decode(self.generated)
        return any(words.encode() in text for words in self.sampling.stop)


def rows_needed(prompt: int, max_new: int) -> int:
    """The most rows that a generation writes: the last token gets none, and speculation never passes it."""
    return prompt + max_new - 1
