"""Token choice whose randomness depends only on (seed, position, purpose).

So an undivided engine and a prefill/decode pair draw the same tokens, whatever happened in between.
"""

import hashlib
import struct
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

Purpose = Literal["sample", "draft", "accept", "residual"]
Probabilities = NDArray[np.float64]
Scores = NDArray[np.float64]
"""Logits [vocab] of one token."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn: temperature 0 is greedy, and `seed` is any integer of 64 bits. Raises EngineError."""

    temperature: float = 0.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise EngineError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if not -(2**63) <= self.seed < 2**64:
            raise EngineError(f"seed {self.seed} does not fit 64 bits")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0


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
