"""Distance of a vLLM's log probabilities after a hand-over from its own alone, next to that of two block sizes of it.

Two engines add the same numbers in different orders, so the pages that they compute may differ in the last bits, as may
those of one engine in two block sizes. Tokens seldom show that. Log probabilities do, and they show more: pages that
lost bits on the way, but left the tokens as they were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.engines.vllm_engine import ASK, ROUNDED, Engine, Values, new_name, prompts

_MOST, _HIGHEST = 16, 5
"""Tokens of an answer, and how many log probabilities come with each."""
_LOW, _HIGH, _SEED = 40, 200, 20
"""Tokens of a prompt, and where its random numbers begin: no other case has these prompts."""
_SUMMED = ("hidden_size",) * 3 + ("intermediate_size", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")
"""Numbers that a layer adds up, one sum after the other, besides those of the tokens that it attends to."""
_DEVIATIONS = 8
"""No rounding error is so many times the usual one."""
_PLACE = 2**-24
"""The largest change of a number by rounding to float32, in proportion to it."""

Answer = tuple[list[int], Values]
HandOver = Callable[[list[list[int]]], list[Any]]
"""Has another engine read prompts; the parameters of a request that decodes each."""


def handed_over(prefill: Engine) -> HandOver:
    """By an engine that answers with a ticket."""

    def read(asked: list[list[int]]) -> list[Any]:
        names = [new_name() for _ in asked]
        for name, prompt in zip(names, asked, strict=True):
            prefill.add(name, prompt, 1, ASK)
        return [prefill.result(name)[2] for name in names]

    return read


def apart(decode: Engine, hand_over: HandOver, other: Engine, differs: str, seed: int = 0) -> tuple[str, list[str]]:
    """The distances of several prompts in words, and what is wrong.

    `other` is `decode` but for what the words `differs` say. Wrong is a distance that rounding in float32 does not
    explain, and one that does not grow when all pages are rounded to bfloat16 on arrival.
    """
    asked, wrong = prompts(4, _LOW, _HIGH, _SEED + seed), []
    after: dict[str, list[Answer]] = {}
    for word in ("", ROUNDED):
        decode.forget()
        names = [word + new_name() for _ in asked]
        after[word] = _answers(decode, names, asked, hand_over(asked))
        if not decode.fetched.keys() >= {*names}:
            wrong.append(f"not all of {names} were fetched")
    own, others = _alone(decode, asked), _alone(other, asked)
    handed, rounded, itself = _distance(after[""], own), _distance(after[ROUNDED], own), _distance(others, own)
    most = farthest(Path(decode.settings["model"]), own)
    if handed > most:
        wrong.append("the distance is above its bound")
    if rounded <= most:
        wrong.append("pages that were rounded to bfloat16 are below the bound")
    said = f"log probabilities {handed:.2g} from those of vLLM alone, which are {itself:.2g} apart {differs}; "
    return said + f"bound {most:.2g}, with pages rounded to bfloat16 {rounded:.2g}", wrong


def farthest(model: Path, answers: list[Answer]) -> float:
    """The difference that rounding in float32 explains, for a model and the size of its log probabilities.

    Each addition on the way from a token to a log probability rounds, up or down as it happens. After n of them the
    error is about the root of n roundings, in proportion to what is added up.
    """
    config = json.loads((model / "config.json").read_text())
    layer = sum(config.get(name) or 0 for name in _SUMMED) + _HIGH
    additions = config["num_hidden_layers"] * layer + config["hidden_size"] + config["vocab_size"]
    size = max(abs(value) for _, values in answers for place in values for value in place.values())
    return _DEVIATIONS * math.sqrt(additions) * _PLACE * size


def _answers(engine: Engine, names: list[str], asked: list[list[int]], params: list[Any]) -> list[Answer]:
    for name, prompt, given in zip(names, asked, params, strict=True):
        engine.add(name, prompt, _MOST, given, _HIGHEST)
    tokens = [engine.result(name)[0] for name in names]
    return [(each, engine.values.pop(name, [])) for name, each in zip(names, tokens, strict=True)]


def _alone(engine: Engine, asked: list[list[int]]) -> list[Answer]:
    """Answers of an engine to these prompts, none of which is in its prefix cache."""
    engine.forget()
    return _answers(engine, [new_name() for _ in asked], asked, [None] * len(asked))


def _distance(some: list[Answer], others: list[Answer]) -> float:
    """The largest between log probabilities of a token at a place before which the answers are the same."""
    found = [0.0]
    for (tokens, values), (other_tokens, other_values) in zip(some, others, strict=True):
        if not len(values) == len(other_values) == _MOST:
            return math.inf  # a request that failed
        same = next((n for n in range(_MOST) if tokens[n] != other_tokens[n]), _MOST)
        for mine, theirs in zip(values[: same + 1], other_values[: same + 1], strict=True):
            found += [abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()]
    return max(found)
