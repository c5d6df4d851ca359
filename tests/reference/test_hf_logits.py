"""Hugging Face checkpoints give the logits that transformers gives, in whole, in chunks and token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

from kvproto_reference import checkpoint
from kvproto_reference.models import SOLO, Decoder, ModelConfig, TensorParallel
from tests.processes import all_end_well, imported
from tests.reference.engines import Alone
from tests.reference.hf_tiny import CASES, TOKENS, write

imported(__name__)
PAGES = [5, 1, 3, 0, 4]
WORST = 1e-4
Made = dict[str, tuple[Path, torch.Tensor]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Folder and transformers' logits of each case."""
    root = tmp_path_factory.mktemp("hf")
    return {name: (root / name, write(name, root / name)) for name in CASES}


def runner(model: Decoder, device: str = "cpu") -> Alone:
    return Alone.of(model, 6, 8, device=device)


def whole(model: Decoder) -> torch.Tensor:
    return runner(model).run(TOKENS, 0, PAGES)


def by_steps(model: Decoder) -> torch.Tensor:
    """Prefill in chunks of 11, then decode token by token."""
    engine, ends = runner(model), [*range(0, 33, 11), *range(33, len(TOKENS) + 1)]
    return torch.cat([engine.run(TOKENS[lo:hi], lo, PAGES) for lo, hi in zip(ends, ends[1:], strict=False)])


def numel(model: Decoder) -> int:
    return sum(value.numel() for value in model.state_dict().values())


def error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((logits - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_one_rank(made: Made, name: str) -> None:
    folder, wanted = made[name]
    model = checkpoint.load(folder)
    assert error(whole(model), wanted) < WORST
    assert error(by_steps(model), wanted) < WORST


@pytest.mark.parametrize("seed", range(12))
def test_drawn_sizes(tmp_path: Path, seed: int) -> None:
    wanted = write(seed, tmp_path)
    model = checkpoint.load(tmp_path)
    assert error(whole(model), wanted) < WORST
    assert error(by_steps(model), wanted) < WORST


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "deepseek-v2"])
def test_nothing_is_bound_to_the_cpu(tmp_path: Path, case: str) -> None:
    """Tensors of another device refuse to meet those of the CPU; experts ask for values, which meta tensors lack."""
    dense = {"first_k_dense_replace": 3} if case == "deepseek-v2" else {}
    write(case, tmp_path, **dense)
    model = checkpoint.load(tmp_path, device="meta")
    engine = runner(model, "meta")
    engine.run(TOKENS[:9], 0, PAGES)
    assert engine.run(TOKENS[9:], 9, PAGES).device.type == "meta"


def work(rank: int, made: Made, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    shares = [TensorParallel(rank, 3)] if rank == 2 else [TensorParallel(rank, 3), TensorParallel(rank, 2, pair)]
    found = []
    for tp in shares:
        for name, (folder, wanted) in made.items():
            model = checkpoint.load(folder, tp)
            found.append((name, tp.size, numel(model), error(whole(model), wanted), error(by_steps(model), wanted)))
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


def test_tensor_parallel(made: Made, tmp_path: Path) -> None:
    """Six heads on three ranks, which do not divide all widths, and on two."""
    all_end_well(work, *((rank, made, tmp_path) for rank in range(3)))
    full = {name: numel(checkpoint.load(folder)) for name, (folder, _) in made.items()}
    found = [one for rank in range(3) for one in torch.load(tmp_path / f"{rank}.pt")]
    assert len(found) == 5 * len(made)
    for name, size, held, at_once, in_steps in found:
        assert max(at_once, in_steps) < WORST, (name, size)
        assert held < 0.85 * full[name], (name, size)


def changed_moe(**fields: Any) -> Callable[[ModelConfig], dict[str, Any]]:
    return lambda config: {"moe": attrs.evolve(config.moe, **fields) if config.moe else None}


def reach(tokens: int) -> Callable[[ModelConfig], dict[str, Any]]:
    return lambda config: {"window": attrs.evolve(config.window, tokens=tokens) if config.window else None}


MATTERS: list[tuple[str, str, Callable[[ModelConfig], dict[str, Any]]]] = [
    ("llama", "llama3 rates", lambda config: {"rope_rates": ()}),
    ("llama", "norm eps", lambda config: {"norm_eps": 0.1}),
    ("qwen3-yarn", "yarn rates", lambda config: {"rope_rates": ()}),
    ("qwen3-yarn", "yarn gain", lambda config: {"rope_gain": 1.0}),
    ("qwen3-window", "one token less", reach(6)),
    ("qwen3-window", "one token more", reach(8)),
    ("qwen3-moe", "normalized", changed_moe(normalize=False)),
    ("qwen3-moe-step", "not normalized", changed_moe(normalize=True)),
    ("deepseek-v2-lite", "yarn rates", lambda config: {"rope_rates": ()}),
    ("deepseek-v2-lite", "yarn in scores", lambda config: {"score_factor": 1.0}),
    ("deepseek-v2-lite", "neighbours turned", lambda config: {"rope_pairs": False}),
    ("deepseek-v2", "yarn gain", lambda config: {"rope_gain": 1.0}),
    ("deepseek-v2", "groups", changed_moe(groups=1, top_groups=1)),
    ("deepseek-v2", "scale", changed_moe(scale=1.0)),
    ("deepseek-v3", "groups rank by two", changed_moe(group_best=1)),
    ("deepseek-v3", "sigmoid", changed_moe(scores="softmax")),
    ("deepseek-v3-plain", "not normalized", changed_moe(normalize=True)),
]


@pytest.mark.parametrize(("name", "what", "change"), MATTERS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_tested_matters(
    made: Made, name: str, what: str, change: Callable[[ModelConfig], dict[str, Any]]
) -> None:
    """A model without it gives other logits, so the tests above see it."""
    folder, wanted = made[name]
    model = checkpoint.load(folder)
    other = Decoder(attrs.evolve(model.config, **change(model.config)), SOLO).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    assert error(whole(other), wanted) > 100 * WORST


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-plain"])
def test_correction_matters(made: Made, name: str) -> None:
    folder, wanted = made[name]
    model = checkpoint.load(folder)
    for key, value in model.state_dict().items():
        if key.endswith("correction"):
            value.zero_()
    assert error(whole(model), wanted) > 100 * WORST


@pytest.mark.parametrize("name", ["qwen2", "deepseek-v3"])
def test_bfloat16_is_near(made: Made, name: str) -> None:
    """At most tokens; at some, rounding sends a token to another expert."""
    folder, wanted = made[name]
    model = checkpoint.load(folder, dtype="bfloat16")
    assert model.embed.dtype == torch.bfloat16
    errors = torch.tensor([error(a, b) for a, b in zip(by_steps(model), wanted, strict=True)])
    assert 1e-4 < float(errors.median()) < 0.05
