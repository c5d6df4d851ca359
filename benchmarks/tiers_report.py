"""The table of docs/tiers.md about disks, and its plot, from benchmarks/results/tiers.json.

`python -m benchmarks.tiers_report [--check]` writes docs/tiers_disk.svg (needs matplotlib, extra bench) and the table;
--check writes nothing, exit status 1: the page says something else than the results. Results without rates of a disk have
no table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT, PAGE, PLOT = HERE / "results/tiers.json", HERE.parent / "docs/tiers.md", HERE.parent / "docs/tiers_disk.svg"
MARK = "<!-- table disk -->\n\n"
ALT = "MB/s of each contender in each round, written and read"
COLOURS = {
    "one file": "#777777",
    "one file, direct": "#aaaaaa",
    "plain files": "#b58900",
    "files": "#0b6e4f",
    "packs": "#c0392b",
    "lmdb": "#3465a4",
}


def rows(disk: dict[str, Any]) -> Iterator[Sequence[str]]:
    """A row for each contender."""
    rates, ratios = disk["mb_s"], disk["of_one_file"]
    yield "", "write, MB/s", "of one file", "read, MB/s", "of one file"
    for name in rates["write"]:
        pairs = ((rates[way][name], ratios[way].get(name)) for way in ("write", "read"))
        yield name, *(cell for rate, of in pairs for cell in (f"{rate:,}", "" if of is None else f"{of:.2f}"))


def written(page: str, disk: dict[str, Any]) -> str:
    """The page with its table and its plot."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows(disk)]
    before, after = page.split(MARK)
    for begins in ("|", "!["):
        after = after.partition("\n\n")[2] if after.startswith(begins) else after
    table = "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])
    return f"{before}{MARK}{table}\n\n![{ALT}]({PLOT.name})\n\n{after}"


def plot(disk: dict[str, Any]) -> None:
    """The rate of each contender in each round."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "kvproto", "font.size": 9}
    figure, places = plt.subplots(1, 2, figsize=(9, 3.4))
    for axes, (way, samples) in zip(places, disk["samples_mb_s"].items(), strict=True):
        for name, rates in samples.items():
            axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=3, color=COLOURS[name], label=name)
        axes.set(title=way, xlabel="round", ylim=(0, None))
        axes.grid(alpha=0.3)
    places[0].set_ylabel("MB/s")
    places[1].legend(fontsize=8)
    figure.savefig(PLOT, bbox_inches="tight", metadata={"Date": None})


def main(args: Sequence[str]) -> int:
    """Write, or compare."""
    disk, page = json.loads(RESULT.read_text()).get("disk"), PAGE.read_text()
    if disk is None:
        return 0
    if "--check" in args:
        return int(written(page, disk) != page)
    PAGE.write_text(written(page, disk))
    plot(disk)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
