"""Draws benchmarks/results/vllm_gpu.json: two vLLM engines on two GPUs, through kvproto and through NIXL.

`python benchmarks/vllm_plot.py` writes docs/vllm_gpu.svg (needs matplotlib, extra bench).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
LOOKS = {
    "ours, no checksums": ("#0b6e4f", "kvproto"), "ours": ("#41b883", "kvproto, every byte checked"),
    "nixl": ("#2b6cb0", "vLLM's own NIXL connector"), "nothing": ("#999999", "nothing moves: the engines alone"),
}  # fmt: skip
ROUNDS = {"ordered": "blocks in order", "scattered": "blocks scattered", "again": "in order again"}


def rounds(axes: Any, data: dict[str, Any]) -> None:
    """Bars are medians, dots the samples."""
    for place, (name, (colour, label)) in enumerate(LOOKS.items()):
        for at, key in enumerate(ROUNDS):
            samples = [1e3 * s for s in data[name][key]]
            x = at + 0.21 * (place - 1.5)
            axes.bar(x, median(samples), 0.19, color=colour, alpha=0.75, label=label if at == 0 else None)
            axes.plot([x] * len(samples), samples, ".", color="black", markersize=4)
    axes.set_xticks(range(len(ROUNDS)), ROUNDS.values())
    axes.set(
        ylim=(0, 250), ylabel="ms until all have their first token", title="8 prompts of 8,192 tokens at once, 2.15 GB"
    )
    axes.legend(fontsize=8, loc="upper right")


def first_token(axes: Any, data: dict[str, Any]) -> None:
    """Medians, and from the best to the worst of the samples."""
    for place, (name, (colour, label)) in enumerate(LOOKS.items()):
        lengths = list(data[name]["first token"])
        samples = [[1e3 * s for s in data[name]["first token"][n]] for n in lengths]
        middle = [median(s) for s in samples]
        spread = [[m - min(s) for m, s in zip(middle, samples, strict=True)],
                  [max(s) - m for m, s in zip(middle, samples, strict=True)]]  # fmt: skip
        places = [at + 0.08 * (place - 1.5) for at in range(len(lengths))]
        axes.errorbar(places, middle, spread, color=colour, marker=".", capsize=2, label=label)
    axes.set_xticks(range(len(lengths)), [f"{int(n):,}" for n in lengths])
    axes.set(xlabel="tokens", ylabel="ms until the first token", title="one prompt", ylim=(0, None))


def main() -> None:
    data = json.loads((HERE / "results/vllm_gpu.json").read_text())
    machine = data["ours"]["machine"]
    plt.rcParams |= {"svg.hashsalt": "kvproto", "font.size": 9}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), width_ratios=(3, 2))
    rounds(left, data)
    first_token(right, data)
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"Two vLLM {data['vllm']} on two {machine['machine']}, {machine['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(HERE.parent / "docs/vllm_gpu.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
