"""Draws benchmarks/results/transfer_gpu.json: GB/s over run length, all contenders and the ceiling.

`python benchmarks/plot.py` writes docs/transfer_gpu.svg (needs matplotlib, extra bench).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
LOOKS = {
    "peer copy": ("#777777", "--", "peer copy of 1 GB (the ceiling)"), "kernel, pull": ("#0b6e4f", "-", "kvproto, pull"),
    "kernel, push": ("#41b883", "-", "kvproto, push"), "torch, float64": ("#c05621", "-", "torch: index_select, copy, index_copy"),
    "NIXL, packed": ("#2b6cb0", "--", "kvproto over NIXL (UCX), packed"), "cuMemcpyBatchAsync": ("#6b46c1", "-", "cuMemcpyBatchAsync"), "NIXL, descriptors": ("#2b6cb0", "-", "NIXL (UCX), a descriptor a run"),
    "Mooncake, descriptors": ("#b83280", "-", "Mooncake, a descriptor a run"),
}  # fmt: skip


def main() -> None:
    data = json.loads((HERE / "results/transfer_gpu.json").read_text())
    plt.rcParams |= {"svg.hashsalt": "kvproto", "font.size": 9}
    figure, axes = plt.subplots(figsize=(8, 4.6))
    for name, (colour, line, label) in LOOKS.items():
        points = [(int(run), median(s[name])) for run, s in data["samples"].items() if name in s]
        axes.plot(*zip(*points, strict=True), line, color=colour, label=label, marker="." if line == "-" else None)
    axes.set(xscale="log", yscale="log", xlabel="bytes of a contiguous run", ylabel="GB/s", ylim=(0.05, 600))
    ticks = [256, 1152, 8192, 131072, 1 << 20, 1 << 24, 1 << 26]
    axes.set_xticks(ticks, ["256 B", "1,152 B", "8 KB", "128 KB", "1 MB", "16 MB", "64 MB"])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title(f"1 GB in scattered runs between two {data['machine']}, {data['date']}", fontsize=10)
    out = HERE.parent / "docs/transfer_gpu.svg"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
