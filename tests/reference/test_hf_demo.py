"""The main job with Hugging Face checkpoints: any family as target, any with the same tokens as draft."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvproto import DType
from kvproto_reference import checkpoint
from kvproto_reference.cache import KVPool
from kvproto_reference.cache.memory import shareable
from kvproto_reference.data import load_text
from kvproto_reference.demo.__main__ import main
from kvproto_reference.demo.options import parse as parse_engine
from kvproto_reference.demo.options import shared_tokenizer
from kvproto_reference.demo.report import TIED
from kvproto_reference.engine.description import DRAFT, TARGET, Layout, geometry, hand_over
from kvproto_reference.engine.undivided import Undivided
from kvproto_reference.errors import EngineError
from tests.processes import Command, imported
from tests.reference.engines import Alone
from tests.reference.hf_tiny import write

imported("kvproto_reference.demo.__main__")

VOCAB = 320
BEGIN, END = 0, 1
TEXT = b"Alice was not a bit hurt, and she jumped up \xe2\x80\x94 in a moment."
PROMPTS = "Alice was beginning to get very tired\n\nThe White Rabbit\n\n" + "Down, down, down. " * 9


def write_tokenizer(path: Path, vocab: int = VOCAB) -> None:
    """Byte-level BPE of the training text, which puts a token of beginning before a prompt."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([load_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    for name in ("llama", "qwen3", "deepseek-v3"):
        write(name, root / name, vocab_size=VOCAB, bos_token_id=BEGIN, eos_token_id=[END, 7])
        write_tokenizer(root / name / "tokenizer.json")
    return {folder.name: folder for folder in root.iterdir()}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return path


@pytest.mark.parametrize(
    ("target", "draft", "more"),
    [("llama", "qwen3", []), ("deepseek-v3", "llama", ["--decode-dp", "2", "--dp-attention"])],
)
def test_two_prefill_ranks_to_decode(
    folders: dict[str, Path], target: str, draft: str, more: list[str], prompts: Path
) -> None:
    args = ["--model", folders[target], "--draft-model", folders[draft], "--json", "--max-new", "16", *more]
    status, out, said = Command(main, [*args, "--prefill-tp", "2", "--prompt-file", prompts]).wait()
    assert status == 0, said
    told: dict[str, Any] = json.loads(out)
    assert told["verdicts"] == {"requests": True, "checksums": True, "tokens": True, "acceptance": True}
    assert {(m["source"], m["group"]) for m in told["matrix"]} == {(s, g) for s in (0, 1) for g in (TARGET, DRAFT)}
    assert [r["prompt_tokens"] for r in told["requests"]][1] < len("The White Rabbit")
    assert all(r["tokens"] == r["undivided_tokens"] != [] for r in told["requests"])


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_cache_in_bfloat16_is_stated_and_handed_over(folders: dict[str, Path], name: str) -> None:
    folder, draft = folders[name], folders["qwen3"]
    configs = checkpoint.load_config(folder, "bfloat16"), checkpoint.load_config(draft, "bfloat16")
    stated = geometry((folder, draft), configs, "tokens", Layout(), 8)
    assert {part.dtype for group in stated.groups[:2] for part in group.parts} == {DType.BF16}
    caches = [KVPool.allocate(config, 6, 8, memory=shareable) for config in configs]
    pool = hand_over(stated, dict(zip((TARGET, DRAFT), caches, strict=True)), 0)
    model = checkpoint.load(folder, dtype="bfloat16")
    ours, alone = caches[0], KVPool.allocate(model.config, 6, 8)
    logits = [Alone.of(model, 6, 8, one).run([3, 1, 4, 1, 5, 9, 2, 6, 5], 0, [4, 2]) for one in (ours, alone)]
    assert torch.equal(*logits)
    part = model.config.parts[0]
    kept = pool.array(TARGET, 0, part)[4].tobytes()
    assert kept == alone.tensors[0, part][4].view(torch.uint8).numpy().tobytes() != bytes(len(kept))


def test_text_to_tokens_and_back(folders: dict[str, Path]) -> None:
    tokenizer = checkpoint.load_tokenizer(folders["llama"])
    ids = tokenizer.encode(TEXT)
    assert ids[0] == BEGIN
    assert len(ids) < len(TEXT)
    assert tokenizer.decode([*ids, END]) == TEXT
    assert tokenizer.eos == {END, 7}
    with pytest.raises(EngineError, match="not UTF-8"):
        tokenizer.encode(b"\xff")


def test_how_far_tokens_are_from_the_most_likely(folders: dict[str, Path]) -> None:
    engine = Undivided(folders["llama"], chunk=5)
    prompt = engine.tokenizer.encode(TEXT)
    found = engine.generate(prompt, max_new=12).tokens
    assert engine.lag(prompt, found) == 0
    assert engine.lag(prompt, [*found[:-1], (found[-1] + 1) % 100]) == math.inf


def test_tokens_that_rounding_chose_are_told_from_wrong_ones(folders: dict[str, Path]) -> None:
    engine = Undivided(folders["llama"], chunk=5, dtype="bfloat16")
    prompt = engine.tokenizer.encode(TEXT)
    found = engine.generate(prompt, max_new=12).tokens
    assert engine.lag(prompt, found) <= TIED
    assert engine.lag(prompt, [*found[:-1], (found[-1] + 1) % 100]) > TIED
    assert engine.lag(prompt, [(found[0] + 1) % 100, *found[1:]]) > TIED


def test_generation_ends_with_any_of_the_ending_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = Undivided(folders["llama"], folders["qwen3"]).generate(TEXT, max_new=12)
    assert len(plain.tokens) == 12
    ending = shutil.copytree(folders["llama"], tmp_path / "ending")
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, plain.tokens[5]]}))
    ended = Undivided(ending, folders["qwen3"]).generate(TEXT, max_new=12)
    assert ended.tokens == plain.tokens[: plain.tokens.index(plain.tokens[5]) + 1]


def test_a_draft_of_another_vocabulary_is_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(folders["qwen3"], tmp_path / "other")
    write_tokenizer(other / "tokenizer.json", vocab=300)
    both = rf"draft's tokens \({other}.*: 300 tokens .*target's \({folders['llama']}.*: {VOCAB} tokens "
    with pytest.raises(EngineError, match=both):
        Undivided(folders["llama"], other)
    assert main(["--model", str(folders["llama"]), "--json"]) == 1
    said = capsys.readouterr().err
    assert "the draft's tokens (bytes+eos256" in said
    assert str(folders["llama"] / "tokenizer.json") in said


def test_a_draft_of_another_vocabulary_size_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    write("qwen2", tmp_path, vocab_size=VOCAB + 8)
    write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(EngineError, match="draft a vocabulary of 328 and the target a vocabulary of 320"):
        Undivided(folders["llama"], tmp_path)


def test_tokenizers_that_do_not_serve(folders: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders["qwen3"], tmp_path / "other")
    write_tokenizer(other / "tokenizer.json", vocab=330)
    with pytest.raises(EngineError, match="has a token 329, the model a vocabulary of 320"):
        checkpoint.load_tokenizer(other)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match="cannot be read"):
        checkpoint.load_tokenizer(other)
    (other / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"has no tokenizer\.json"):
        checkpoint.load_tokenizer(other)


def test_engines_take_the_same_options(folders: dict[str, Path], tmp_path: Path) -> None:
    args = ["--model", folders["deepseek-v3"], "--draft-model", folders["qwen3"], "--dir", tmp_path / "kv"]
    options = parse_engine("prefill", [str(arg) for arg in [*args, "--dtype", "auto"]])
    assert [config.kind for config in options.configs] == ["mla", "gqa"]
    assert options.tokenizer.identity == shared_tokenizer(options.target, options.draft).identity
