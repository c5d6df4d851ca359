"""Distilled heads: text that the target writes, weights of 8 bits, and the target of each head."""

import abc
import inspect
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from kvproto_reference import checkpoint
from kvproto_reference.data import load_text
from kvproto_reference.distill import Writer, as_bytes, batches, beginnings, chosen, docstrings, save
from kvproto_reference.engine.sampling import SamplingParams
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from kvproto_reference.models import SOLO, TensorParallel, cut
from kvproto_reference.tokenizer import BYTES, EOS
from kvproto_reference.weights import SCALES, Weights

CPU = torch.device("cpu")
TARGETS = [checkpoint.CHECKPOINTS / f"target-{name}" for name in ("mla", "gqa")]


@pytest.mark.parametrize("folder", TARGETS, ids=lambda folder: folder.name)
def test_greedy_text_is_the_engines(folder: Path) -> None:
    prompts = [[*load_text().encode()[at : at + 12]] for at in (30, 700, 1500)]
    written = Writer(checkpoint.load(folder), 3, 32, CPU, (0.0,)).write(torch.tensor(prompts))
    engine = Undivided(folder, pages=64)
    answers = engine.generate_all([(prompt, SamplingParams(ignore_eos=True)) for prompt in prompts], 20)
    assert written.tolist() == [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]


def test_texts_with_one_beginning_differ_also_where_they_are_greedy() -> None:
    begun = torch.tensor([[*b"Alice was"]]).expand(6, -1)
    written = Writer(checkpoint.load(checkpoint.CHECKPOINTS / "target-small"), 6, 60, CPU).write(begun)
    assert written[:, :9].equal(begun)
    assert len({*map(tuple, written.tolist())}) == 6


def test_texts_as_bytes() -> None:
    texts = torch.tensor([[65, 66, EOS, 67, 68], [69, 70, 71, EOS, 72]])
    assert as_bytes(texts, BYTES, 5).tolist() == [[65, 66, EOS, 67, 68, EOS], [69, 70, 71, EOS, 72, EOS]]


def test_beginnings_are_pieces_of_docstrings() -> None:
    begun = beginnings(BYTES, islice(docstrings(), 200))
    pieces = {bytes(row) for row in begun.tolist()}
    assert len(pieces) > 1000
    assert inspect.cleandoc(abc.__doc__ or "").encode()[: begun.shape[1]] in pieces


def test_weights_of_8_bits(tmp_path: Path) -> None:
    target = checkpoint.load(TARGETS[0])
    save(tmp_path, target)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.4 * (TARGETS[0] / "model.safetensors").stat().st_size
    whole, wanted = checkpoint.state(tmp_path), target.state_dict()
    for name, weight in wanted.items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.ndim > 1 else 0.01
        assert bool(((whole[name] - weight).abs() <= step).all()), name
    half = TensorParallel(1, 2)
    for name, part in checkpoint.state(tmp_path, half).items():
        assert torch.equal(part, whole[name][cut(target.config, half, name, tuple(wanted[name].shape))]), name


def test_weights_of_8_bits_without_their_scales(tmp_path: Path) -> None:
    save(tmp_path, checkpoint.load(TARGETS[1]))
    path = tmp_path / "model.safetensors"
    path.write_bytes(to_bytes({name: w for name, w in load_file(path).items() if name != f"embed{SCALES}"}))
    with pytest.raises(EngineError, match=r"no tensor embed\.scales"):
        Weights(tmp_path).read("embed", (257, 64))


def test_the_shipped_heads_of_a_target(tmp_path: Path) -> None:
    small = checkpoint.CHECKPOINTS / "target-small"
    assert [checkpoint.shipped_head(form, small).name for form in ("eagle3", "mtp")] == ["eagle-small", "mtp-small"]
    checkpoint.save(tmp_path, checkpoint.load(TARGETS[0]))
    with pytest.raises(
        EngineError,
        match=r"no mtp head of target .*, only mtp-small \(--target small\), mtp-smollm2 \(--real\): choose",
    ):
        checkpoint.shipped_head("mtp", tmp_path)


@pytest.mark.parametrize("name", ["eagle-small", "mtp-small"])
def test_a_distilled_head_chooses_as_its_target_does(name: str) -> None:
    folder = checkpoint.CHECKPOINTS / "target-small"
    target, text = checkpoint.load(folder), load_text().encode()
    prompts = torch.tensor([[*text[at : at + 96]] for at in range(0, 8000, 1000)])
    texts = Writer(target, 8, 160, CPU, (0.0,)).write(prompts)
    made = checkpoint.load_head(checkpoint.CHECKPOINTS / name, folder, SOLO)
    with torch.no_grad():
        assert 1 + chosen(made, target, texts, 4)[:, 96:].float().mean().item() > 2.8


def test_batches_are_of_the_texts() -> None:
    texts = torch.arange(12).reshape(4, 3)
    drawn = batches(texts, 2, seed=1)
    assert {tuple(row) for _ in range(20) for row in next(drawn).tolist()} == {tuple(row) for row in texts.tolist()}
