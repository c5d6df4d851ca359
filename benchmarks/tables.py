"""Writes the tables of docs/gpu.md from benchmarks/results, so that no figure is copied by hand.

`python benchmarks/tables.py [--check]`: what stands between `<!-- table NAME -->` and the next empty line is generated. --check
writes nothing; exit status 1: a table says something else than the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/gpu.md"
ALLOWED = 100e-6
"""Seconds from the last layer to the last byte, beyond those of the last part on an idle GPU."""


def results(name: str) -> Any:
    return json.loads((HERE / f"results/{name}.json").read_text())


def gb(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def rates() -> Iterator[tuple[str, dict[str, float]]]:
    """By length of runs, in GB/s: the median of each contender."""
    for run, samples in results("transfer_gpu")["samples"].items():
        yield f"{int(run):,}", {name: median(s) for name, s in samples.items()}


def cuda() -> Iterator[Sequence[str]]:
    yield (
        "run, bytes",
        "peer copy",
        "pull",
        "push",
        "torch: select, copy, put",
        "cuMemcpyBatchAsync",
        "NIXL, a descriptor a run",
        "Mooncake, a descriptor a run",
    )
    for run, of in rates():
        ours = [f"{gb(of[n])} ({of[n] / of['peer copy']:.3f})" for n in ("kernel, pull", "kernel, push")]
        others = [
            gb(of.get(n))
            for n in ("torch, float64", "cuMemcpyBatchAsync", "NIXL, descriptors", "Mooncake, descriptors")
        ]
        yield run, gb(of["peer copy"]), *ours, *others


def nixl() -> Iterator[Sequence[str]]:
    yield (
        "run, bytes",
        "packed, GB/s",
        "NIXL's own writes of 64 MB, in the same rounds",
        "share",
        "with its tables",
        "NIXL, a descriptor a run",
    )
    for run, of in rates():
        packed, own, tables = of["NIXL, packed"], of["NIXL, writes of 64 MB"], of["NIXL, packed, with its tables"]
        yield (
            run,
            gb(packed),
            gb(own),
            f"{packed / own:.2f}",
            f"{gb(tables)} ({tables / own:.2f})",
            gb(of.get("NIXL, descriptors")),
        )


def shapes() -> Iterator[Sequence[str]]:
    yield "one rank pair's share of a request", "tokens", "MB", "bytes of a run", "us", "GB/s", "of the ceiling"
    for s in results("transfer_shapes")["shapes"]:
        seconds = median(s["seconds"])
        rate = s["bytes"] / seconds
        yield (
            s["shape"],
            f"{s['tokens']:,}",
            f"{s['bytes'] / 1e6:,.1f}",
            f"{s['mean_run']:,.0f}",
            f"{seconds * 1e6:,.0f}",
            gb(rate / 1e9),
            f"{rate / median(s['ceiling']):.3f}",
        )


def prefills(run: dict[str, Any]) -> dict[str, float]:
    """Of one way and chunk: medians, with the cycles of the GPU and the tail that is allowed."""
    of = {name: median(p[name] for p in run["prefills"]) for name in run["prefills"][0]}
    return of | {
        "cycles": median(p["compute"] * p["mhz"] for p in run["prefills"]),
        "allowed": of["left"] / median(run["rate"]) + ALLOWED,
    }


def slower(of: dict[str, float], than: dict[str, float]) -> list[float]:
    """Per cent, in time and in cycles."""
    return [(of[n] / than[n] - 1) * 100 for n in ("compute", "cycles")]


def overlap() -> Iterator[Sequence[str]]:
    yield (
        "handed over",
        "chunks of",
        "prefill, ms",
        "clock, MHz",
        "slower in time",
        "in cycles",
        "last part, MB",
        "from the last layer to the last byte, us",
        "allowed",
    )
    base: dict[int, dict[str, float]] = {}
    for r in results("overlap")["runs"]:
        of = prefills(r)
        than = base.setdefault(r["chunk"], of)
        more = ["" if than is of else f"{percent:+z.1f} %" for percent in slower(of, than)]
        yield (r["way"], f"{r['chunk']:,}", f"{of['compute'] * 1e3:.1f}", f"{of['mhz']:,.0f}", *more, f"{of['left'] / 1e6:,.1f}", f"{of['tail'] * 1e6:,.0f}",
               f"{of['allowed'] * 1e6:,.0f}")  # fmt: skip


def verify() -> Iterator[Sequence[str]]:
    samples = results("verify_gpu")["samples"]
    before = samples["before"]
    yield "", "with checksums", "without", "with checksums, before", "without, before"
    for name, rounds in samples.items():
        if name != "before":
            of = [f"{median(map(max, some[way])):.0f}" for some in (rounds, before[name]) for way in some]
            yield name, *of


TABLES = {"verify": verify, "cuda": cuda, "shapes": shapes, "overlap": overlap, "nixl": nixl}


def written(page: str) -> str:
    """`page` with all tables made anew."""
    for name, rows in TABLES.items():
        head, *body = ["| " + " | ".join(row) + " |" for row in rows()]
        mark = f"<!-- table {name} -->\n\n"
        before, after = page.split(mark)
        page = (
            before
            + mark
            + "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *body])
            + after[after.index("\n\n") :]
        )
    return page


def main() -> int:
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(written(page))
    return int("--check" in sys.argv and written(page) != page)


if __name__ == "__main__":
    sys.exit(main())
