"""Prefill and decode that divide tokens and layers in ways of their own: context parallel, DCP, stages, and replicas."""

from pathlib import Path

import pytest
import torch

from kvproto_reference.checkpoint import save
from kvproto_reference.models import Decoder, ModelConfig
from tests.cases import rest
from tests.demo.test_demo import demo, nothing_is_left_behind, prompts, report, right
from tests.processes import JAX, imported

__all__ = ["nothing_is_left_behind", "prompts"]
imported("kvproto_reference.demo.__main__", *JAX)

MODELS = {
    "MLA-6": ModelConfig(
        kind="mla", hidden=48, layers=3, heads=6, latent=24, rope_dim=8, nope_dim=12, v_dim=12, ffn=96
    ),
    "GQA-4": ModelConfig(kind="gqa", hidden=48, layers=2, heads=4, kv_heads=4, head_dim=8, ffn=96, tied=False),
    "GQA-8": ModelConfig(kind="gqa", hidden=48, layers=2, heads=8, kv_heads=2, head_dim=8, ffn=96),
    "MLA-1": ModelConfig(
        kind="mla", hidden=48, layers=1, heads=4, latent=24, rope_dim=8, nope_dim=12, v_dim=12, ffn=96
    ),
}
"""Shapes that the shipped checkpoints do not have: with random weights, and as their own drafts."""
RUNS = {
    "GQA, CP 3 in fives to TP 4 with DCP 2 in threes": (
        "--prefill-tp 1 --prefill-cp 3 --prefill-interleave 5 --target gqa --draft gqa"
        " --decode-tp 4 --dcp 2 --interleave 3 --exchange ag_rs"
    ),
    "MLA, TP 2 x CP 2 in a zigzag to DCP 4 in shares of unequal size, with the draft dealt": (
        "--prefill-cp 2 --prefill-deal zigzag --decode-tp 4 --dcp 4 --interleave 16 --deal 3,0,1,2,0 --draft mla --draft-sharded"
    ),
    "GQA, queries on every rank": "--prefill-tp 1 --decode-tp 2 --dcp 2 --target gqa --draft mla --replicate-q",
    "JAX with CP 2 in a zigzag to torch with DCP 2": (
        "--prefill-framework jax --prefill-tp 1 --prefill-cp 2 --prefill-interleave 5 --prefill-deal zigzag"
        " --decode-tp 2 --dcp 2 --target gqa --draft mla"
    ),
    "two replicas of each": "--prefill-tp 2 --prefill-dp 2 --decode-dp 2 --target mla --draft mla",
    "TP 2 to DCP 3": "--decode-tp 3 --dcp 3 --interleave 16 --target MLA-6 --draft MLA-6",
    "PP 4 to DCP 2": "--prefill-tp 1 --prefill-pp 4 --decode-tp 2 --dcp 2 --interleave 16",
    "the draft on one of two ranks, to TP 4 with DCP 2": (
        "--prefill-draft-tp 1 --decode-tp 4 --dcp 2 --interleave 4 --target GQA-4 --draft GQA-4"
    ),
    "TP 1 to PP 2, each stage with two chunks": "--prefill-tp 1 --decode-pp 2 --decode-virtual 2",
}  # fmt: skip
MORE = {
    "MLA, TP 2 to DCP 2": "--decode-tp 2 --dcp 2",
    "JAX to JAX, TP 2 to TP 4 with DCP 2 in a zigzag": (
        "--prefill-framework jax --decode-framework jax --decode-tp 4 --dcp 2 --interleave 3 --deal zigzag"
    ),
    "TP 2 to DCP 4, with a GQA draft that is not dealt": "--decode-tp 4 --dcp 4 --interleave 16",
    "CP 4 in runs of 32 to DCP 4": "--prefill-tp 1 --prefill-cp 4 --prefill-interleave 32 --decode-tp 4 --dcp 4",
    "CP 4 to DCP 2, other runs of tokens": "--prefill-tp 1 --prefill-cp 4 --decode-tp 2 --dcp 2",
    "CP 4 to TP 2": "--prefill-tp 1 --prefill-cp 4 --decode-tp 2",
    "TP 1 to TP 4 with DCP 2": "--prefill-tp 1 --decode-tp 4 --dcp 2 --interleave 4",
    "GQA, TP 2 to TP 8 with DCP 4": "--decode-tp 8 --dcp 4 --interleave 8 --target GQA-8 --draft GQA-8",
}  # fmt: skip
"""Other sizes of what RUNS has."""
STORED = {
    "MLA, TP 2 to DCP 2": (2, 1),
    "GQA, queries on every rank": (1, 1),
    "TP 2 to DCP 3": (3, 1),
    "GQA, TP 2 to TP 8 with DCP 4": (4, 1),
}
"""How many times less a decode rank stores of the target, and of the draft, than it would without DCP."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoint folders of MODELS."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(1)
        save(folder / name, Decoder(config))
    return {name: str(folder / name) for name in MODELS}


@pytest.mark.parametrize("name", [*RUNS, *rest(*MORE)])
def test_tokens_are_those_of_one_engine(name: str, prompts: Path, models: dict[str, str]) -> None:
    args = [models.get(word, word) for word in (RUNS | MORE)[name].split()]
    told = right(*args, "--prompt-file", prompts, "--max-new", "12")
    assert max(request["acceptance"] for request in told["requests"]) > 1.5
    stored = told["plan"]["stored"]
    ratios = {group: whole / dealt for group, (dealt, whole) in stored.items()}
    if name in STORED:
        assert (ratios["target"], ratios["draft"]) == STORED[name]


def test_a_rank_without_a_route_frees_its_pages(prompts: Path, models: dict[str, str]) -> None:
    """Four ranks hold the same latents: two send one layer each, one the first token, and nothing is left for the last."""
    options = ["--prefill-tp", "4", "--target", models["MLA-1"], "--draft", models["MLA-1"]]
    result = demo(*options, "--prompt-file", prompts, "--json", "--max-new", "12")
    assert result.status == 0, result.said
    told = report(result)
    assert told["identical"]
    assert told["plan"]["required"] == {"0": [0, 1, 2]}
    assert {route["source"] for route in told["plan"]["routes"]} == {0, 1, 2}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--decode-tp 2 --dcp 3", "DCP groups of 3 do not divide 2 TP ranks: choose another --dcp"),
        (
            "--decode-tp 3 --dcp 3",
            "DCP needs as many heads on every rank: 3 ranks do not divide 4 heads: choose another TP size",
        ),
        ("--dcp 0", "--dcp must be at least 1"),
        ("--prefill-dp 0", "must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_one_sentence(args: str, says: str, prompts: Path) -> None:
    result = demo(*args.split(), "--prompt-file", prompts)
    assert result.status == 1
    assert says in result.said
    assert "Traceback" not in result.said
