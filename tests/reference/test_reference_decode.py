"""Sampling, speculative decode and ends of a generation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvproto_reference import checkpoint
from kvproto_reference.cache import PageAllocator
from kvproto_reference.data import documents, load_text, paragraphs
from kvproto_reference.engine.prefill import Prefiller
from kvproto_reference.engine.sampling import SamplingParams, pick, probabilities, sample, uniform
from kvproto_reference.engine.sequence import TokenSequence
from kvproto_reference.engine.speculative import SpeculativeDecoder, verify
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, Dense
from kvproto_reference.tokenizer import EOS

from .engines import Alone, close

MIXES = [(t, d) for t in ("target-gqa", "target-mla") for d in ("draft-gqa", "draft-mla", "target-gqa")]
PROMPT = b"So she was considering in her own mind"


def plain_greedy(model: Decoder, prompt: bytes, count: int) -> list[int]:
    """Greedy continuation by whole forwards, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.forward(torch.tensor(ids), torch.arange(len(ids)), Dense(model.config))[-1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize(("target", "draft"), MIXES)
@pytest.mark.parametrize("max_new", [1, 2, 5, 30])
def test_greedy_speculation_changes_nothing(folders: dict[str, Path], target: str, draft: str, max_new: int) -> None:
    expected = plain_greedy(checkpoint.load(folders[target]), PROMPT, max_new)
    result = Undivided(folders[target], folders[draft], page_size=8, pages=16).generate(PROMPT, max_new=max_new)
    assert result.tokens == expected
    assert Undivided(folders[target], page_size=8, pages=16).generate(PROMPT, max_new=max_new).tokens == expected
    assert result.stats.tokens == len(expected) - 1
    if target == draft and max_new == 30 and len(expected) == 30:
        assert result.stats.accepted == result.stats.proposed


def alone(folder: Path) -> Alone:
    return Alone.of(checkpoint.load(folder), 16, 8)


def started(target: Alone, draft: Alone, sampling: SamplingParams, max_new: int = 24) -> TokenSequence:
    pages = PageAllocator(16, seed=1)
    sequence = TokenSequence(
        prompt=list(PROMPT),
        max_new=max_new,
        sampling=sampling,
        tables=[pages.allocate(8), pages.allocate(8)],
    )
    prefiller = Prefiller(target.runner, draft.runner, 16)
    prefiller.add(sequence)
    assert [prefiller.step() for _ in range(4)] == [[], [], [sequence], []]
    assert len(sequence.generated) == 1
    return sequence


def test_rows_are_final_when_their_layer_is_told(folders: dict[str, Path]) -> None:
    models = alone(folders["target-mla"]), alone(folders["draft-gqa"])
    pages = [5, 1, 3, 0, 7]
    request = TokenSequence(prompt=list(PROMPT), max_new=1, tables=[pages, pages])
    told = []

    def rows(model: int, stop: int, layer: int) -> list[torch.Tensor]:
        return [models[model].rows(layer, p, pages, stop).clone() for p in models[model].pool.config.parts]

    def on_layer(sequence: TokenSequence, model: int, stop: int, layer: int) -> None:
        assert sequence is request
        told.append(((model, stop, layer), rows(model, stop, layer)))

    prefiller = Prefiller(models[0].runner, models[1].runner, 20, on_layer)
    prefiller.add(request)
    assert [prefiller.step(), prefiller.step()] == [[], [request]]
    layers = [m.model.config.layers for m in models]
    wanted = [(m, stop, layer) for stop in (20, len(PROMPT)) for m in (0, 1) for layer in range(layers[m])]
    assert [place for place, _ in told] == wanted
    for place, then in told:
        assert all(torch.equal(a, b) for a, b in zip(then, rows(*place), strict=True))


@pytest.mark.parametrize("draft_name", ["target-gqa", "draft-gqa", "draft-mla"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_valid_rows_after_every_step(folders: dict[str, Path], draft_name: str, temperature: float) -> None:
    target, draft = alone(folders["target-gqa"]), alone(folders[draft_name])
    sequence = started(target, draft, SamplingParams(temperature=temperature, seed=5))
    decoder = SpeculativeDecoder(target.runner, draft.runner, k=3)
    while not sequence.finished:
        decoder.step([sequence])
        if sequence.generated[-1] == EOS:
            break
        ids = (sequence.prompt + sequence.generated)[: sequence.valid]
        for one, pages in zip((target, draft), sequence.tables, strict=True):
            fresh = Alone.of(one.model, 16, 8)
            fresh.prefill(ids, pages, 64)
            for layer, part in fresh.pool.tensors:
                rows, held = (each.rows(layer, part, pages, len(ids)) for each in (fresh, one))
                close(held, rows, 1e-4)
    assert len(sequence.generated) <= 24
    assert decoder.step([sequence]) == [[]]


def test_sampling_is_fixed_by_seed_and_position(folders: dict[str, Path]) -> None:
    engine = Undivided(folders["target-gqa"], folders["draft-mla"], page_size=8, pages=16)
    once = engine.generate(PROMPT, SamplingParams(temperature=0.9, seed=11), 24).tokens
    engine.generate(PROMPT, SamplingParams(temperature=0.9, seed=12), 9)
    assert engine.generate(PROMPT, SamplingParams(temperature=0.9, seed=11), 24).tokens == once
    assert engine.generate(PROMPT, SamplingParams(temperature=0.9, seed=12), 24).tokens != once
    other = Undivided(folders["target-gqa"], folders["draft-mla"], page_size=4, pages=32, chunk=5, seed=9)
    assert other.generate(PROMPT, SamplingParams(temperature=0.9, seed=11), 24).tokens == once


def test_uniform_numbers() -> None:
    numbers = [uniform(3, position, "sample") for position in range(2000)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(float(np.mean(numbers)) - 0.5) < 0.03
    assert len({uniform(3, 7, purpose) for purpose in ("sample", "draft", "accept", "residual")}) == 4
    assert uniform(3, 7, "draft") != uniform(4, 7, "draft")
    assert pick(np.array([0.5, 0.5, 0.0]), 0.999999999) == 1


def test_rejection_sampling_keeps_the_target_distribution() -> None:
    target, draft = np.array([0.5, 2.0, 1.0, -1.0]), np.array([2.0, 0.5, 1.0, 0.0])
    counts = np.zeros(4)
    for seed in range(6000):
        params = SamplingParams(temperature=1.0, seed=seed)
        token = sample(draft, params, 9, "draft")
        belief = probabilities(draft, params)
        accepted, extra = verify([1, 1], lambda _: target, [token], [belief], params, 9)
        counts[token if accepted else extra] += 1
    wanted = probabilities(target, SamplingParams(temperature=1.0))
    np.testing.assert_allclose(counts / 6000, wanted, atol=0.025)


def test_verify_stops_at_an_accepted_eos() -> None:
    def greedy(own: list[int], proposed: list[int]) -> tuple[int, int | None]:
        return verify(own, lambda _: np.zeros(0), proposed, [], SamplingParams(), 5)

    assert greedy([65, EOS, 66, 67], [65, EOS, 66]) == (2, None)
    assert greedy([65, EOS, 66, 67], [65, 66, 66]) == (1, EOS)
    assert greedy([65, EOS], [70]) == (0, 65)


def test_nothing_follows_eos(folders: dict[str, Path]) -> None:
    target, draft = alone(folders["target-gqa"]), alone(folders["draft-gqa"])
    sequence = started(target, draft, SamplingParams())
    assert sequence.append([65, EOS, 66]) == [65, EOS]
    assert sequence.finished
    assert SpeculativeDecoder(target.runner, draft.runner).step([sequence]) == [[]]


def test_refused_input(folders: dict[str, Path]) -> None:
    engine = Undivided(folders["target-gqa"], folders["draft-gqa"], page_size=8, pages=16)
    with pytest.raises(EngineError, match="empty"):
        engine.generate(b"")
    with pytest.raises(EngineError, match="max_new"):
        engine.generate(b"a", max_new=0)
    with pytest.raises(EngineError, match="free"):
        engine.generate(b"a" * 200)
    assert engine.generate(PROMPT, max_new=3).tokens
    with pytest.raises(EngineError, match="temperature"):
        SamplingParams(temperature=-1.0)


@pytest.mark.parametrize("target", ["target-gqa", "target-mla"])
@pytest.mark.parametrize("draft", ["draft-gqa", "draft-mla"])
def test_shipped_checkpoints(target: str, draft: str) -> None:
    engine = Undivided(checkpoint.CHECKPOINTS / target, checkpoint.CHECKPOINTS / draft, pages=64)
    text = load_text()
    result = engine.generate(paragraphs(text)[2].encode()[:120], max_new=64)
    assert result.stats.mean_acceptance > 1.5
    ends = [engine.generate(document.encode(), max_new=8).tokens == [EOS] for document in documents(text)]
    assert sum(ends) >= len(ends) - 1
