"""Adapters with random weights, which change what their target says from the first tokens on."""

from pathlib import Path

import torch

from kvproto_reference import checkpoint
from kvproto_reference.adapters import Adapters, adapters_of, changeable, save_adapter
from kvproto_reference.models.hf import source

RANK, ALPHA = 4, 8.0


def drawn(folder: Path, target: Path, seed: int) -> Path:
    """Draw the weights of an adapter of the target from a seed, and save it in a folder."""
    config, random = checkpoint.load_config(target), torch.Generator().manual_seed(seed)
    halves = {
        source(name, config): (
            torch.randn(RANK, width, generator=random) * width**-0.5,
            torch.randn(out, RANK, generator=random) * 0.6,
        )
        for name, (out, width) in changeable(config).items()
    }
    save_adapter(folder, RANK, ALPHA, halves)
    return folder


def two(folder: Path, target: Path) -> Adapters:
    """Two adapters of a target."""
    return adapters_of({name: drawn(folder / name, target, seed) for seed, name in enumerate(("red", "blue"))})
