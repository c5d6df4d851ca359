"""Sampling, speculative decode and ends of a generation."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvproto_reference import checkpoint
from kvproto_reference.data import documents, load_text, paragraphs
from kvproto_reference.engine import (
    KVPool,
    ModelRunner,
    PageAllocator,
    SamplingParams,
    SpeculativeDecoder,
    Undivided,
    prefill_steps,
    sample,
)
from kvproto_reference.engine import Sequence as Request
from kvproto_reference.engine.pool import PagedCache
from kvproto_reference.engine.sampling import pick, probabilities, uniform
from kvproto_reference.engine.speculative import verify
from kvproto_reference.errors import EngineError
from kvproto_reference.models import Decoder, DenseCache
from kvproto_reference.tokenizer import EOS

MIXES = [(t, d) for t in ("target-gqa", "target-mla") for d in ("draft-gqa", "draft-mla", "target-gqa")]
PROMPT = b"So she was considering in her own mind"


def plain_greedy(model: Decoder, prompt: bytes, count: int) -> list[int]:
    """Greedy continuation by whole forwards, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.forward(torch.tensor(ids), torch.arange(len(ids)), DenseCache())[-1].argmax()))
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


def runner(folder: Path) -> ModelRunner:
    model = checkpoint.load(folder)
    return ModelRunner(model, KVPool.allocate(model.config, 16, 8), 8)


def started(target: ModelRunner, draft: ModelRunner, sampling: SamplingParams, max_new: int = 24) -> Request:
    pages = PageAllocator(16, seed=1)
    sequence = Request(
        prompt=list(PROMPT),
        max_new=max_new,
        sampling=sampling,
        target_pages=pages.allocate(8),
        draft_pages=pages.allocate(8),
    )
    steps = list(prefill_steps(sequence, target, draft, 16))
    assert [(step.start, step.stop) for step in steps] == [(0, 16), (16, 32), (32, len(PROMPT))]
    assert [step.first for step in steps] == [None, None, sequence.generated[0]]
    return sequence


def test_rows_are_final_when_their_layer_is_told(folders: dict[str, Path]) -> None:
    models = runner(folders["target-mla"]), runner(folders["draft-gqa"])
    pages = [5, 1, 3, 0, 7]
    request = Request(prompt=list(PROMPT), max_new=1, target_pages=pages, draft_pages=pages)
    told = []

    def rows(model: int, stop: int, layer: int) -> list[torch.Tensor]:
        pool = models[model].pool
        return [PagedCache(pool, pages, 0, stop).read(layer, part).clone() for part in pool.config.parts]

    def on_layer(model: int, stop: int, layer: int) -> None:
        told.append(((model, stop, layer), rows(model, stop, layer)))

    assert len(list(prefill_steps(request, *models, 20, on_layer))) == 2
    layers = [m.model.config.layers for m in models]
    wanted = [(m, stop, layer) for stop in (20, len(PROMPT)) for m in (0, 1) for layer in range(layers[m])]
    assert [place for place, _ in told] == wanted
    for place, then in told:
        assert all(torch.equal(a, b) for a, b in zip(then, rows(*place), strict=True))


@pytest.mark.parametrize("draft_name", ["target-gqa", "draft-gqa", "draft-mla"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_valid_rows_after_every_step(folders: dict[str, Path], draft_name: str, temperature: float) -> None:
    target, draft = runner(folders["target-gqa"]), runner(folders[draft_name])
    sequence = started(target, draft, SamplingParams(temperature=temperature, seed=5))
    decoder = SpeculativeDecoder(target, draft, k=3)
    while not sequence.finished:
        decoder.step(sequence)
        if sequence.generated[-1] == EOS:
            break
        ids = (sequence.prompt + sequence.generated)[: sequence.valid]
        for one, pages in ((target, sequence.target_pages), (draft, sequence.draft_pages)):
            fresh = KVPool.allocate(one.pool.config, 16, 8)
            ModelRunner(one.model, fresh, 8).prefill(ids, pages, 64)
            for key, tensor in fresh.tensors.items():
                rows = tensor[pages].flatten(0, 1)[: len(ids)]
                held = one.pool.tensors[key][pages].flatten(0, 1)[: len(ids)]
                torch.testing.assert_close(held, rows, atol=1e-4, rtol=0)
    assert len(sequence.generated) <= 24
    assert decoder.step(sequence) == []


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
    target, draft = torch.tensor([0.5, 2.0, 1.0, -1.0]), torch.tensor([2.0, 0.5, 1.0, 0.0])
    counts = np.zeros(4)
    for seed in range(6000):
        params = SamplingParams(temperature=1.0, seed=seed)
        token = sample(draft, params, 9, "draft")
        belief = probabilities(draft, params)
        accepted, extra = verify(torch.stack((target, target)), [token], [belief], params, 9)
        counts[token if accepted else extra] += 1
    wanted = probabilities(target, SamplingParams(temperature=1.0))
    np.testing.assert_allclose(counts / 6000, wanted, atol=0.025)


def test_verify_stops_at_an_accepted_eos() -> None:
    logits = torch.zeros(4, 257)
    logits[0, 65] = logits[1, EOS] = logits[2, 66] = logits[3, 67] = 9.0
    assert verify(logits, [65, EOS, 66], [], SamplingParams(), 5) == (2, None)
    assert verify(logits, [65, 66, 66], [], SamplingParams(), 5) == (1, EOS)
    assert verify(logits[:2], [70], [], SamplingParams(), 5) == (0, 65)


def test_nothing_follows_eos(folders: dict[str, Path]) -> None:
    target, draft = runner(folders["target-gqa"]), runner(folders["draft-gqa"])
    sequence = started(target, draft, SamplingParams())
    assert sequence.append([65, EOS, 66]) == [65, EOS]
    assert sequence.finished
    assert SpeculativeDecoder(target, draft).step(sequence) == []


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
