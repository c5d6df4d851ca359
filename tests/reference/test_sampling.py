"""How tokens are drawn: against rules written a second time, one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproto_reference.checkpoint import CHECKPOINTS
from kvproto_reference.data import load_text, paragraphs
from kvproto_reference.engine import logprobs
from kvproto_reference.engine.sampling import SamplingParams, penalized, probabilities, sample
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12, unique=True)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 99),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    repetition=st.sampled_from([0.5, 1.0, 1.5]),
    presence=st.sampled_from([-1.0, 0.0, 2.0]),
    frequency=st.sampled_from([0.0, 0.75]),
)


@given(LOGITS, PARAMS, st.data())
def test_each_step_by_its_definition(logits: list[float], params: SamplingParams, data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, len(logits) - 1), max_size=6)
    prompt, generated = data.draw(tokens), data.draw(tokens)
    wanted = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in generated:
            wanted[token] = wanted[token] * (1 / params.repetition if wanted[token] > 0 else params.repetition)
        if token in generated:
            wanted[token] -= params.presence + params.frequency * generated.count(token)
    found = penalized(np.array(logits), params, prompt, generated)
    np.testing.assert_allclose(found, wanted)
    if params.greedy:
        assert probabilities(found, params)[int(found.argmax())] == 1
        return
    shares = [math.exp(value / params.temperature) for value in wanted]
    likeliest = sorted(range(len(shares)), key=lambda token: (-found[token], token))
    kept, mass = [], 0.0
    for token in likeliest[: params.top_k or len(shares)]:
        if kept and mass >= params.top_p - 1e-12:
            break
        kept.append(token)
        mass += shares[token] / sum(shares)
    total = sum(shares[token] for token in kept)
    right = [shares[token] / total if token in kept else 0.0 for token in range(len(shares))]
    np.testing.assert_allclose(probabilities(found, params), right, atol=1e-9)
    assert sample(found, params, 3) in kept


ENGINE = Undivided(CHECKPOINTS / "target-gqa", CHECKPOINTS / "draft-gqa", pages=64)
PROMPT = paragraphs(load_text())[2].encode()[:120]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition=1.3),
        SamplingParams(presence=0.5, frequency=0.5),
        SamplingParams(presence=2.0, stop=("e",), ignore_eos=True),
    ],
)
def test_a_draft_changes_no_token(params: SamplingParams) -> None:
    """Penalties depend on what was generated, and so on proposals that were accepted in the same step."""
    alone = Undivided(CHECKPOINTS / "target-gqa", pages=64).generate(PROMPT, params, 40)
    found = ENGINE.generate(PROMPT, params, 40)
    assert found.tokens == alone.tokens
    assert found.stats.accepted > 0


def test_words_that_end_the_text() -> None:
    whole = ENGINE.generate(PROMPT, max_new=60).text.decode()
    stop = whole[20:24]
    assert ENGINE.generate(PROMPT, SamplingParams(stop=(stop, "never said")), 60).text.decode() == whole[:24]
    assert ENGINE.generate(PROMPT, SamplingParams(stop=whole[:1]), 60).text.decode() == whole[:1]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 1e.06, not -1"),
        ({"temperature": "warm"}, "temperature must be a number"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1, not 1.5"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"seed": 2**64}, "seed must be a whole number"),
        ({"repetition": 0}, "repetition must be a number from 0.01"),
        ({"stop": [""]}, "stop must be texts that are not empty"),
        ({"stop": [7]}, "stop must be texts"),
        ({"topk": 2}, "sampling has no 'topk', only"),
    ],
)
def test_what_is_out_of_range(said: dict[str, object], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        SamplingParams.of(said)


@given(st.lists(st.floats(-30, 30), min_size=4, max_size=12), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
def test_log_probabilities_and_their_bytes(values: list[float], token: int, count: int, more: int) -> None:
    """Of the drawn token and the likeliest; an engine that has room for more hands zeros over in their place."""
    scores = np.array(values)
    found = logprobs.of(scores, token, count)
    wanted = torch.log_softmax(torch.tensor(values, dtype=torch.float64), -1)
    np.testing.assert_allclose([p for _, p in found], [float(wanted[t]) for t, _ in found], atol=1e-9)
    assert found[0][0] == token
    np.testing.assert_allclose([p for _, p in found[1:]], wanted.sort(descending=True).values[:count], atol=1e-9)
    data = logprobs.to_parts(found, count + more)
    assert {name: len(each) for name, each in data.items()} == {
        n: s for n, (_, s) in logprobs.parts(count + more).items()
    }
    again = logprobs.from_parts(data, token, count)
    assert [t for t, _ in again] == [t for t, _ in found]
    np.testing.assert_allclose([p for _, p in again], [p for _, p in found], atol=1e-5)
