"""Tiny untrained models, and the reference package on the path where it is not installed."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))

from kvproto_reference import checkpoint
from kvproto_reference.models import Decoder, ModelConfig

# The models are too small for more threads to be of use.
torch.set_num_threads(1)

CONFIGS = {
    "gqa": ModelConfig(kind="gqa", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48),
    "mla": ModelConfig(kind="mla", hidden=32, layers=2, heads=4, latent=12, rope_dim=4, nope_dim=8, v_dim=6, ffn=48),
}
Make = Callable[[str, int], Decoder]


@pytest.fixture(scope="session")
def make() -> Make:
    """Builds an untrained model of a kind from a seed."""

    def build(kind: str, seed: int) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(CONFIGS[kind]).eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def folders(make: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders of untrained models: target-gqa, draft-gqa, target-mla, draft-mla."""
    root = tmp_path_factory.mktemp("checkpoints")
    out: dict[str, Path] = {}
    for kind in CONFIGS:
        for seed, role in enumerate(("target", "draft")):
            out[f"{role}-{kind}"] = root / f"{role}-{kind}"
            checkpoint.save(out[f"{role}-{kind}"], make(kind, seed))
    return out
