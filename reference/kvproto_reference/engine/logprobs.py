"""Log probabilities of generated tokens, and how those of the first one are handed over."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvproto import DType

from .sampling import Scores

__all__ = ["LogProbs", "from_parts", "of", "parts", "to_parts"]

LogProbs = list[tuple[int, float]]
"""A token that was drawn, then the likeliest in order, each with its log probability."""
OWN, TOKENS, LIKELIEST = "logprob", "reference.top_tokens", "reference.top_logprobs"
"""Parts of the hand-off data: of the first token, and the likeliest in its place with theirs."""


def of(scores: Scores, token: int, count: int) -> LogProbs:
    """Log probabilities of a token and of the `count` likeliest by logits [vocab], before penalties and temperature."""
    scale = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    best = np.argsort(-scores, kind="stable")[:count].tolist()
    return [(each, float(scores[each] - scale)) for each in (token, *best)]


def parts(most: int) -> dict[str, tuple[DType, int]]:
    """Element type and bytes of each part, where a request may ask for the `most` likeliest tokens."""
    top = {TOKENS: (DType.U32, 4 * most), LIKELIEST: (DType.F32, 4 * most)} if most else {}
    return {OWN: (DType.F32, 4), **top}


def to_parts(found: LogProbs, most: int) -> dict[str, bytes]:
    """The hand-off data of the first token; zeros where fewer were asked for, or none."""
    padded = (found + (most + 1) * [(0, 0.0)])[: most + 1]
    tokens, values = np.array([t for t, _ in padded], "<u4"), np.array([p for _, p in padded], "<f4")
    data = {OWN: values[:1], TOKENS: tokens[1:], LIKELIEST: values[1:]}
    return {name: data[name].tobytes() for name in parts(most)}


def from_parts(data: Mapping[str, bytes], token: int, count: int) -> LogProbs:
    """The log probabilities of the first token, of which `count` likeliest were asked for."""
    tokens, values = np.frombuffer(data.get(TOKENS, b""), "<u4"), np.frombuffer(data.get(LIKELIEST, b""), "<f4")
    own = float(np.frombuffer(data[OWN], "<f4")[0])
    return [(token, own), *zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)]
