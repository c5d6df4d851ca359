"""Draws the pictures of docs/gpu.md, docs/dcp_gpu.md, docs/dcp_serving.md, docs/vllm-figures.md and docs/tiers.md from benchmarks/results.

`python benchmarks/plots.py [NAME ...]`: of transfer_gpu, dcp_gpu, dcp_serving, vllm_handover and tiers_disk (needs matplotlib, extra bench).
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from harness import ROOT, results
from tables import (
    CONNECTORS,
    DCP,
    DEALT,
    HEADS,
    OWNERS,
    STEPS,
    WORLDS,
    batches,
    budget,
    points,
    rate,
    runs_of,
    tokens,
    us,
)

TRANSFER = {
    "peer copy": ("#777777", "--", "peer copy of 1 GB (the ceiling)"),
    "kernel, pull": ("#0b6e4f", "-", "kvproto, pull"),
    "kernel, push": ("#41b883", "-", "kvproto, push"),
    "torch, float64": ("#c05621", "-", "torch: index_select, copy, index_copy"),
    "NIXL, packed": ("#2b6cb0", "--", "kvproto over NIXL (UCX), packed"),
    "cuMemcpyBatchAsync": ("#6b46c1", "-", "cuMemcpyBatchAsync"),
    "NIXL, descriptors": ("#2b6cb0", "-", "NIXL (UCX), a descriptor a run"),
    "Mooncake, descriptors": ("#b83280", "-", "Mooncake, a descriptor a run"),
}
VLLM = {"ours, no checksums": "#0b6e4f", "ours": "#41b883", "nixl": "#2b6cb0", "nothing": "#999999"}
BUDGET = dict(
    zip(OWNERS, ("#777777", "#41b883", "#0b6e4f", "#c05621", "#8fd6b0", "#b58900", "#999999", "#cccccc"), strict=True)
)
LOADS = {"full": "as many requests as fit", "one": "one request"}
ROUNDS = {"ordered": "in order", "scattered": "scattered"}
DISK = {
    "one file": "#777777",
    "one file, direct": "#aaaaaa",
    "plain files": "#b58900",
    "files": "#0b6e4f",
    "packs": "#c0392b",
    "lmdb": "#3465a4",
}


def transfer_gpu() -> Any:
    """GB/s by length of runs, all contenders and the ceiling."""
    data = results("transfer_gpu")
    figure, axes = plt.subplots(figsize=(8, 4.6))
    for name, (colour, line, label) in TRANSFER.items():
        points = [(int(run), median(s[name])) for run, s in data["samples"].items() if name in s]
        axes.plot(*zip(*points, strict=True), line, color=colour, label=label, marker="." if line == "-" else None)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a contiguous run", ylabel="GB/s", ylim=(0.05, 600))
    ticks = [256, 1152, 8192, 131072, 1 << 20, 1 << 24, 1 << 26]
    axes.set_xticks(ticks, ["256 B", "1,152 B", "8 KB", "128 KB", "1 MB", "16 MB", "64 MB"])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(f"1 GB in scattered runs between two {data['machine']}, {data['date']}", fontsize=10)
    return figure


def dcp_gpu() -> Any:
    """The speed-up of a step by two ranks, by context."""
    figure, places = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    looks = {"NCCL all-to-all": ("#777777", "--"), "peer memory, q on all": ("#0b6e4f", "-")}
    for axes, shape in zip(places, HEADS, strict=True):
        for mark, batch in zip("osD", batches(), strict=False):
            runs = runs_of(shape, batch)
            contexts = [s["context"] for s in runs]
            for name, (colour, line) in looks.items():
                gains = [us(s)["attention, N=1"] / us(s)[STEPS[name]] for s in runs]
                label = f"{name}, batch {batch}"
                axes.plot(contexts, gains, line, color=colour, marker=mark, markersize=4, label=label)
        axes.set(xscale="log", xlabel="context, tokens", title=shape)
        axes.set_xticks(contexts, [tokens(context) for context in contexts])
        axes.set_xticks([], minor=True)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.grid(alpha=0.3)
    places[0].set_ylabel("a layer's step, times faster than on one rank")
    places[1].legend(fontsize=7)
    figure.suptitle(f"DCP over two {DCP['machine']}, {DCP['date']}", fontsize=10)
    return figure


def dcp_serving() -> Any:
    """Tokens a second with as many requests as fit, beside TP alone, and what a single request waits for a token."""
    data = results("dcp_serving_gpu")
    most, looks = max(at["gpus"] for at in data["points"]), ("#777777", "#41b883", "#0b6e4f", "#c05621")
    contexts = sorted({at["context"] for at in data["points"]})
    figure, places = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for row, shape in zip(places, data["shapes"], strict=True):
        for axes, load in zip(row, ("full", "one"), strict=True):
            here = [(at["context"], of) for (kind, n, _), at, of in points(load) if (kind, n) == (shape, most)]
            for name, colour in zip(DEALT, looks, strict=True):
                found = [(context, of, of[name]) for context, of in here if name in of]
                if load == "full":
                    found = [(context, of, way) for context, of, way in found if "TP alone" in of]
                    values = [rate(way) / rate(of["TP alone"]) for _, of, way in found]
                else:
                    values = [1e3 * median(way["seconds"]) for *_, way in found]
                if found:
                    axes.plot([context for context, *_ in found], values, color=colour, marker=".", label=name)
            axes.set(xscale="log", ylim=(0, None), title=f"{shape}: {LOADS[load]}")
            axes.set_xticks(contexts, [tokens(context) for context in contexts])
            axes.set_xticks([], minor=True)
            axes.grid(alpha=0.3)
        row[0].set_ylabel("tokens/s, times those of TP alone")
        row[1].set_ylabel("ms a token")
    places[0][1].legend(fontsize=8, loc="lower right")
    for axes in places[1]:
        axes.set_xlabel("context, tokens")
    figure.suptitle(
        f"{most} {data['machine']}, {data['date']}; {data['kv_bytes'] / 1e9:.1f} GB of KV on each GPU",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def vllm_handover() -> Any:
    """Two vLLM engines on GPUs, through each connector; and what a hand-over of one prompt is made of."""
    data = results("vllm_handover")
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7.4), height_ratios=(3, 2))
    _loads(above, data)
    _budgets(below)
    machine = data["machine"]
    title = f"vLLM {data['vllm']} on {machine['gpus']} {machine['machine']}, {machine['date']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure


def _loads(axes: Any, data: dict[str, Any]) -> None:
    """Bars are medians, dots the samples."""
    groups = [(world, key) for world in WORLDS for key in ROUNDS]
    for place, (name, colour) in enumerate(VLLM.items()):
        label: str | None = CONNECTORS[name].replace("`", "")
        for at, (world, key) in enumerate(groups):
            if (of := data[f"GQA, {world}"].get(name)) is None:
                continue
            samples = [1e3 * s for s in of[key]]
            x = at + 0.21 * (place - 1.5)
            axes.bar(x, median(samples), 0.19, color=colour, alpha=0.75, label=label)
            axes.plot([x] * len(samples), samples, ".", color="black", markersize=3)
            label = None
    axes.set_xticks(range(len(groups)), [f"{world}\n{ROUNDS[key]}" for world, key in groups])
    title = "8 prompts of 8,192 tokens at once, 2.15 GB"
    axes.set(ylim=(0, 300), ylabel="ms until all have their first token", title=title)
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _budgets(axes: Any) -> None:
    """Medians of the parts, one after the other."""
    ends = [0.0] * len(WORLDS)
    for owner, colour in BUDGET.items():
        parts = [median(budget(world, "1024")[owner]) for world in WORLDS]
        axes.barh(WORLDS, parts, 0.6, left=ends, color=colour, label=owner)
        ends = [end + part for end, part in zip(ends, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms", title="one prompt of 1,024 tokens through kvproto, from the call to its first token")
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def tiers_disk() -> Any:
    """The rate of each contender in each round."""
    figure, places = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, (way, samples) in zip(places, results("tiers")["disk"]["samples_mb_s"].items(), strict=True):
        for name, rates in samples.items():
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, color=DISK[name], label=name)
        axes.set(title=way, xlabel="round", ylim=(0, None))
        axes.grid(alpha=0.3)
    places[0].set_ylabel("MB/s")
    places[1].legend(fontsize=8)
    return figure


PLOTS = {draw.__name__: draw for draw in (transfer_gpu, dcp_gpu, dcp_serving, vllm_handover, tiers_disk)}


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "kvproto", "font.size": 9}
    for name in sys.argv[1:] or PLOTS:
        PLOTS[name]().savefig(ROOT / f"docs/{name}.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
