"""Token choice whose randomness depends only on (seed, position, purpose).

So an undivided engine and a prefill/decode pair draw the same tokens, whatever happened in between.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

Purpose = Literal["sample", "draft", "accept", "residual"]
Probabilities = NDArray[np.float64]
Scores = NDArray[np.float64]
"""Logits [vocab] of one token."""


def _between(low: float, high: float) -> Any:
    """A validator: the value is a number from `low` to `high`."""

    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise EngineError(f"{field.name} must be a number from {low:g} to {high:g}, not {value!r}")

    return check


def _whole(low: int, high: int) -> Any:
    """A validator: the value is an integer from `low` to `high`."""

    def check(_: object, field: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or not low <= value <= high:
            raise EngineError(f"{field.name} must be a whole number from {low} to {high}, not {value!r}")

    return check


def _as_tuple(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The way in which tokens are drawn, and the words that end them; raises EngineError for values out of range.

    Penalties come first, then the temperature, then the choice of the likeliest tokens by `top_k` and by `top_p`.
    """

    temperature: float = attrs.field(default=0.0, validator=_between(0.0, 1e6))
    """0: the most likely token."""
    seed: int = attrs.field(default=0, validator=_whole(-(2**63), 2**64 - 1))
    top_k: int = attrs.field(default=0, validator=_whole(0, 2**31))
    """The number of likeliest tokens that may be drawn; 0: all."""
    top_p: float = attrs.field(default=1.0, validator=_between(0.0, 1.0))
    """The likeliest tokens are drawn from, until their probabilities add up to this."""
    repetition: float = attrs.field(default=1.0, validator=_between(0.01, 100.0))
    """The logit of a token that came before, in the prompt or since, is divided by it, or multiplied if negative."""
    presence: float = attrs.field(default=0.0, validator=_between(-100.0, 100.0))
    """Subtracted from the logit of each token that was generated."""
    frequency: float = attrs.field(default=0.0, validator=_between(-100.0, 100.0))
    """The same, as often as the token was generated."""
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    """Words after which the text ends; they are part of it."""
    ignore_eos: bool = False
    """Whether the text goes on after a token that ends it."""
    logprobs: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole(0, 2**31)))
    """The number of likeliest tokens that are told at each place, with log probabilities, beside the drawn one."""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a request in JSON; raises EngineError for names that are not known too."""
        known = {field.name for field in attrs.fields(cls)}
        if unknown := said.keys() - known:
            raise EngineError(f"sampling has no {min(unknown)!r}, only {', '.join(sorted(known))}")
        return cls(**said)

    def __attrs_post_init__(self) -> None:
        if not all(isinstance(words, str) and words for words in self.stop):
            raise EngineError(f"stop must be texts that are not empty, not {self.stop!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    @property
    def plain(self) -> bool:
        """Whether the token with the greatest logit of the model is always chosen."""
        return self.greedy and not self.penalizes


def penalized(scores: Scores, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int]) -> Scores:
    """Logits [vocab] after the penalties for the tokens before, which are in order."""
    if not params.penalizes:
        return scores
    out = scores.copy()
    before = np.unique(np.array([*prompt, *generated], np.int64))
    out[before] = np.where(out[before] > 0, out[before] / params.repetition, out[before] * params.repetition)
    tokens, counts = np.unique(np.array(generated, np.int64), return_counts=True)
    out[tokens] -= params.presence + params.frequency * counts
    return out


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) fixed by its arguments."""
    key = struct.pack("<QQ", seed % 2**64, position) + purpose.encode()
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return float((bits >> 11) * 2.0**-53)


def probabilities(scores: Scores, params: SamplingParams) -> Probabilities:
    """Float64 distribution [vocab] of logits [vocab]; all mass on the argmax when greedy."""
    if params.greedy:
        out = np.zeros_like(scores)
        out[int(scores.argmax())] = 1.0
        return out
    exps: Probabilities = np.exp((scores - scores.max()) / params.temperature)
    exps /= exps.sum()
    if params.top_k or params.top_p < 1.0:
        order = np.argsort(-exps, kind="stable")
        before = exps[order].cumsum() - exps[order]
        least = min(params.top_k or len(order), max(int(np.searchsorted(before, params.top_p)), 1))
        exps[order[least:]] = 0.0
        exps /= exps.sum()
    return exps


def pick(probs: Probabilities, number: float) -> int:
    """The token at which the running sum of `probs` [vocab] passes `number` in [0, 1)."""
    sums = probs.cumsum()
    token = int(np.searchsorted(sums, number * sums[-1], side="right"))
    # Rounding may carry past the end, or to a token without mass.
    return min(token, int(np.flatnonzero(probs)[-1]))


def sample(scores: Scores, params: SamplingParams, position: int, purpose: Purpose = "sample") -> int:
    """The token for `position`, drawn from logits [vocab] of the position before."""
    if params.greedy:
        return int(scores.argmax())
    return pick(probabilities(scores, params), uniform(params.seed, position, purpose))
