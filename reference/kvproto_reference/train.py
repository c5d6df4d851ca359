"""Trains the shipped checkpoints: python -m kvproto_reference.train [--only NAME] [--steps N]."""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from . import checkpoint
from .data import load_text, passages
from .models import Decoder, Dense
from .presets import HEADS, PRESETS, HeadPreset, Preset
from .train_head import config_of, counts_of_text, loss_of, untrained_head

# Batches of [windows, tokens]: prompts in use run up to some 400 tokens, so some windows must be that long.
BATCHES = ((20, 128), (10, 256), (6, 480))
WORKERS = 2


class Windows:
    """Random windows of the text; half of them start where a paragraph does, as prompts do."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        parts = passages(load_text())
        tokens = [token for part in parts for token in part]
        self._length = len(tokens)
        # The text is read as a ring, so that its beginning follows its end as it follows any EOS.
        self._tokens = torch.tensor(tokens + tokens[:1024])
        sizes = torch.tensor([len(part) for part in parts])
        self._starts = sizes.cumsum(0) - sizes

    def batch(self) -> Tensor:
        """Token ids [windows, tokens + 1] int64."""
        count, length = BATCHES[int(self._draw(len(BATCHES), 1).item())]
        anywhere = self._draw(self._length, count)
        aligned = self._starts[self._draw(len(self._starts), count)]
        starts = torch.where(torch.arange(count) % 2 == 0, aligned, anywhere)
        return self._tokens[starts[:, None] + torch.arange(length + 1)]

    def _draw(self, stop: int, count: int) -> Tensor:
        return torch.randint(stop, (count,), generator=self._random)


def rate_factor(step: int, steps: int, warmup: int = 40) -> float:
    """Share of the peak learning rate: linear warmup, then cosine to 2 percent."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def build_optimizers(model: nn.Module, preset: Preset | HeadPreset) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which then learn the text in about half the steps; AdamW for the rest."""
    named = {
        p: p.ndim == 2 and name != "embed" and not name.endswith("_conv")
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    matrices, rest = ([p for p, is_matrix in named.items() if is_matrix == wanted] for wanted in (True, False))
    return [
        torch.optim.Muon(matrices, lr=preset.matrix_rate, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=preset.rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(name: str, preset: Preset | HeadPreset, folder: Path) -> float:
    """Train one model and save it in a folder; returns the mean loss (nats per byte) of the last 50 steps.

    The target of a head is the one beside it, or the shipped one if there is none.
    """
    torch.set_num_threads(1)
    torch.manual_seed(preset.seed)
    if isinstance(preset, HeadPreset):
        beside = folder.parent / preset.target
        where = beside if beside.is_dir() else checkpoint.CHECKPOINTS / preset.target
        target = checkpoint.load(where)
        config = config_of(preset, where, target.config)
        head, unrolled = untrained_head(config, target, counts_of_text(config.vocab)), preset.unrolled
        # half of a batch, as each window is computed several times
        loss = fit(name, head, preset, lambda batch: loss_of(head, target, batch[: len(batch) // 2], unrolled))
        checkpoint.save(folder, head)
        return loss
    model = Decoder(preset.config)
    loss = fit(name, model, preset, lambda batch: _next_token(model, batch))
    checkpoint.save(folder, model)
    return loss


def _next_token(model: Decoder, batch: Tensor) -> Tensor:
    logits = model.forward(batch[:, :-1], torch.arange(batch.shape[1] - 1), Dense(model.config))
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def fit(name: str, model: nn.Module, preset: Preset | HeadPreset, loss_on: Callable[[Tensor], Tensor]) -> float:
    """Train a model by the loss of batches of windows; returns the mean of the last 50 steps."""
    windows, optimizers = Windows(preset.seed), build_optimizers(model, preset)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    losses: list[float] = []
    begun = time.monotonic()
    for step in range(preset.steps):
        loss = loss_on(windows.batch())
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step, preset.steps)
            optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            spent = time.monotonic() - begun
            print(f"{name}: step {step + 1}/{preset.steps}  loss {mean:.3f}  {spent:.0f} s", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    """Train all presets, two at a time, or one of them; heads come after their targets."""
    parser = argparse.ArgumentParser(description="Train the reference checkpoints on the frozen text.")
    parser.add_argument("--only", choices=sorted(PRESETS | HEADS), help="train only this model")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the preset's")
    parser.add_argument("--out", type=Path, default=checkpoint.CHECKPOINTS, help="folder of the checkpoint folders")
    args = parser.parse_args()
    presets: tuple[Mapping[str, Preset | HeadPreset], ...] = (PRESETS, HEADS)
    for some in presets:
        jobs = [
            (name, attrs.evolve(preset, steps=args.steps or preset.steps), args.out / name)
            for name, preset in some.items()
            if args.only in (None, name)
        ]
        if not jobs:
            continue
        with mp.get_context("spawn").Pool(min(WORKERS, len(jobs))) as pool:
            # Chunks of one: the targets, first in the list, run side by side, and the drafts after them.
            losses = pool.starmap(train, jobs, chunksize=1)
        for (name, _, folder), loss in zip(jobs, losses, strict=True):
            print(f"{name}: loss {loss:.3f}, saved in {folder}")


if __name__ == "__main__":
    main()
