"""Tables and a plot of benchmarks/results/dcp_gpu.json.

`python benchmarks/dcp_report.py [--check]` writes docs/dcp_gpu.svg (needs matplotlib, extra bench) and the tables of
docs/dcp_gpu.md; --check writes nothing, exit status 1: the page says something else than the results. The last table is a
projection: attention by the bytes that a rank reads, between the runs of one rank and of a group of two at
the same batch, and not faster than the rate at which a verify step multiplies; exchange as a line in the bytes that a rank
receives, fitted to all batches of two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

HERE = Path(__file__).parent
DATA: dict[str, Any] = json.loads((HERE / "results/dcp_gpu.json").read_text())
STEPS = {
    name: f"step, {name}"
    for name in ("NCCL all-to-all", "NCCL all-to-all, q on all", "peer memory", "peer memory, q on all")
}
NCCL = ("NCCL all-to-all", "NCCL all-gather and reduce-scatter")
HEADS, VALUES, ROWS = {"GQA": 8, "MLA": 16}, {"GQA": 128, "MLA": 512}, {"GQA": 128, "MLA": 576}
Row = Sequence[str]


def us(of: dict[str, Any]) -> dict[str, float]:
    return {name: median(samples) for name, samples in of["us"].items()}


def tokens(n: int) -> str:
    return f"{n >> 10}K"


def steps() -> Iterator[Row]:
    """One rank against a group of two."""
    yield (
        "",
        "batch",
        "context",
        "one rank, us",
        "two, attention",
        *(f"two, {name}" for name in STEPS),
        "times faster",
    )
    for s in DATA["steps"]:
        of = us(s)
        one, best = of["attention, N=1"], min(of[name] for name in STEPS.values())
        whole = [f"{of[name]:.1f} ({one / of[name]:.2f})" for name in STEPS.values()]
        yield (
            s["shape"],
            str(s["batch"]),
            tokens(s["context"]),
            f"{one:.1f}",
            f"{of['attention, N=2']:.1f}",
            *whole,
            f"{one / best:.2f}",
        )


def attention() -> Iterator[Row]:
    """Through the wrapper against FlashInfer called by hand, and plan()."""
    yield ("", "batch", "context", "N", "bare, us", "ours, us", "share", "plan(), us", "KV MB a rank and layer")
    for s in DATA["steps"]:
        for n in ("1", "2"):
            way = f"attention, N={n}"
            ours, bare = us(s)[way], us(s)[f"{way}, FlashInfer bare"]
            share = median(b / o for b, o in zip(s["us"][f"{way}, FlashInfer bare"], s["us"][way], strict=True))
            yield (
                s["shape"], str(s["batch"]), tokens(s["context"]), n, f"{bare:.1f}", f"{ours:.1f}", f"{share:.3f}",
                f"{median(s['plan'][n]):.0f}", f"{s['kv_bytes'][n] / 1e6:,.1f}",
            )  # fmt: skip


def exchanges() -> Iterator[Row]:
    """Gathering queries, exchange and merge, without attention."""
    yield (
        "",
        "batch",
        "better NCCL way, us",
        "peer memory, us",
        "times faster",
        "q on all: NCCL, us",
        "peer memory, us",
        "times faster",
    )
    for s in DATA["exchanges"]:
        of = us(s)
        both, merge = (min(of[f"{what}, {name}"] for name in NCCL) for what in ("both", "merge"))
        ours, own = of["both, peer memory"], of["merge, peer memory, q on all"]
        yield (
            s["shape"],
            str(s["batch"]),
            f"{both:.1f}",
            f"{ours:.1f}",
            f"{both / ours:.2f}",
            f"{merge:.1f}",
            f"{own:.1f}",
            f"{merge / own:.2f}",
        )


def verify() -> Iterator[Row]:
    """Several tokens a sequence, over what was committed before, beside what memory and arithmetic allow."""
    yield ("", "batch", "context", "tokens", "us", "reading, us", "multiplying, us", "share of the larger")
    for v in DATA["verify"]:
        took, reads = median(v["us"]), v["bytes"] / DATA["ceilings"]["read"] * 1e6
        multiplies = v["flops"] / DATA["ceilings"]["multiply"] * 1e6
        yield (
            v["shape"], str(v["batch"]), tokens(v["context"]), str(v["tokens"]), f"{took:.1f}", f"{reads:.1f}", f"{multiplies:.1f}",
            f"{max(reads, multiplies) / took:.2f}",
        )  # fmt: skip


def break_even() -> Iterator[Row]:
    """The context from which a group of two is faster than one rank, between those that were run."""
    yield "", "batch", *STEPS
    for shape in HEADS:
        for batch in sorted({s["batch"] for s in DATA["steps"]}):
            runs = [s for s in DATA["steps"] if (s["shape"], s["batch"]) == (shape, batch)]
            yield shape, str(batch), *(_break_even(runs, name) for name in STEPS.values())


def _break_even(runs: Sequence[dict[str, Any]], name: str) -> str:
    gains = [(s["context"], us(s)["attention, N=1"] - us(s)[name]) for s in runs]
    if gains[0][1] > 0:
        return f"under {tokens(gains[0][0])}"
    for (shorter, loss), (longer, gain) in zip(gains, gains[1:], strict=False):
        if gain > 0:
            return f"{(shorter + (longer - shorter) * loss / (loss - gain)) / 1024:.0f}K"
    return f"over {tokens(gains[-1][0])}"


def projection() -> Iterator[Row]:
    """What larger groups would give; not measured."""
    yield ("", "batch", "context", "N = 2 measured", "N = 2 of the model", "N = 4", "N = 8")
    for shape in HEADS:
        link = _link(shape)
        rate = max(v["flops"] / median(v["us"]) for v in DATA["verify"] if v["shape"] == shape)
        for batch in sorted({s["batch"] for s in DATA["steps"]}):
            runs = [s for s in DATA["steps"] if (s["shape"], s["batch"]) == (shape, batch)]
            read = [s["kv_bytes"][n] for s in runs for n in ("1", "2")]
            took = [us(s)[f"attention, N={n}"] for s in runs for n in ("1", "2")]
            for s in runs:
                one = us(s)["attention, N=1"]
                modelled = []
                for n in (2, 4, 8):
                    rows = s["kv_bytes"]["1"] / n / {"GQA": 512, "MLA": 1152}[shape]
                    multiplied = 2 * rows * HEADS[shape] * n * (ROWS[shape] + VALUES[shape]) / rate
                    points = zip(*sorted(zip(read, took, strict=True)), strict=True)
                    local = float(np.interp(s["kv_bytes"]["1"] / n, *points))
                    modelled.append(one / (max(local, multiplied) + link(_received(shape, batch, n))))
                measured = one / us(s)["step, peer memory"]
                yield shape, str(batch), tokens(s["context"]), *(f"{x:.2f}" for x in (measured, *modelled))


def _received(shape: str, batch: int, n: int) -> float:
    """Bytes that a rank gets from the others in a step: queries, outputs and log-sum-exps."""
    return (n - 1) * batch * HEADS[shape] * (2 * ROWS[shape] + 2 * VALUES[shape] + 4)


def _link(shape: str) -> Any:
    """Microseconds of queries, exchange and merge by bytes received."""
    points = sorted((_received(s["shape"], s["batch"], 2), us(s)["both, peer memory"]) for s in DATA["exchanges"])
    slope, start = np.polyfit(*zip(*points, strict=True), 1)
    return lambda received: start + slope * received


TABLES = {
    "steps": steps,
    "attention": attention,
    "exchanges": exchanges,
    "verify": verify,
    "break_even": break_even,
    "projection": projection,
}


def plot() -> None:
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "kvproto", "font.size": 9}
    figure, places = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    looks = {"NCCL all-to-all": ("#777777", "--"), "peer memory, q on all": ("#0b6e4f", "-")}
    for axes, shape in zip(places, HEADS, strict=True):
        for mark, batch in zip("osD", sorted({s["batch"] for s in DATA["steps"]}), strict=False):
            runs = [s for s in DATA["steps"] if (s["shape"], s["batch"]) == (shape, batch)]
            for name, (colour, line) in looks.items():
                gains = [us(s)["attention, N=1"] / us(s)[STEPS[name]] for s in runs]
                axes.plot(
                    [s["context"] for s in runs],
                    gains,
                    line,
                    color=colour,
                    marker=mark,
                    markersize=4,
                    label=f"{name}, batch {batch}",
                )
        axes.set(xscale="log", xlabel="context, tokens", title=shape)
        axes.set_xticks([s["context"] for s in runs], [tokens(s["context"]) for s in runs])
        axes.set_xticks([], minor=True)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.grid(alpha=0.3)
    places[0].set_ylabel("a layer's step, times faster than on one rank")
    places[1].legend(fontsize=7)
    figure.suptitle(f"DCP over two {DATA['machine']}, {DATA['date']}", fontsize=10)
    figure.savefig(HERE.parent / "docs/dcp_gpu.svg", bbox_inches="tight", metadata={"Date": None})


def main() -> int:
    page = HERE.parent / "docs/dcp_gpu.md"
    text = page.read_text()
    for name, rows in TABLES.items():
        head, *body = ["| " + " | ".join(row) + " |" for row in rows()]
        mark = f"<!-- table {name} -->\n\n"
        before, after = text.split(mark)
        made = "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])
        text = before + mark + made + after[after.index("\n\n") :]
    if "--check" in sys.argv:
        return int(text != page.read_text())
    page.write_text(text)
    plot()
    return 0


if __name__ == "__main__":
    sys.exit(main())
