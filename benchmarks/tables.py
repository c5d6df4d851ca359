"""Writes the tables of docs/*.md from benchmarks/results, so that no figure is copied by hand.

`python benchmarks/tables.py [--check]`: what stands between `<!-- table NAME -->` and the next empty line is generated;
benchmarks/plots.py draws the pages' pictures. --check writes nothing; exit status 1: a table differs from the results.

The projection of docs/dcp_gpu.md: attention by the bytes that a rank reads, between the runs of one rank and of a group of
two at the same batch, and not faster than the rate at which a verify step multiplies; exchange as a line in the bytes that
a rank receives, fitted to all batches of two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from harness import RESULTS, ROOT, results

ALLOWED = 100e-6
"""Seconds from the last layer to the last byte, beyond those of the last part on an idle GPU."""
DCP: dict[str, Any] = json.loads((RESULTS / "dcp_gpu.json").read_text())
STEPS = {
    name: f"step, {name}"
    for name in ("NCCL all-to-all", "NCCL all-to-all, q on all", "peer memory", "peer memory, q on all")
}
NCCL = ("NCCL all-to-all", "NCCL all-gather and reduce-scatter")
HEADS, VALUES, ROWS = {"GQA": 8, "MLA": 16}, {"GQA": 128, "MLA": 512}, {"GQA": 128, "MLA": 576}
Rows = Iterator[Sequence[object]]
TABLES: list[tuple[str, str, str, Callable[[], Rows]]] = []
"""Page, name, head and rows of each."""


def table(page: str, name: str, head: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """A decorator of functions that yield the rows of a table."""

    def add(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES.append((page, name, head, rows))
        return rows

    return add


# docs/libkvproto.md


@table("libkvproto", "library", "what | figure")
def library() -> Rows:
    found = results("library")
    frames = {way: median(took) for way, took in found["frames_us"].items()}
    for way, took in frames.items():
        yield f"{way} a Transfer of 2 x 2,048 pages", f"{took:.1f} us"
    for name, took in found["plan_ms"].items():
        yield f"plan, {name}", f"{median(took):.2f} ms"
    for name in list(found["describe_ms"])[::3]:
        yield (
            f"read and check one of these Descriptions, {name.split(',')[0].split(' x ')[1]}",
            f"{median(found['describe_ms'][name]):.2f} ms",
        )
    yield "lines of header and sources", f"{found['size']['lines']:,}"
    yield "shared library, stripped", f"{found['size']['bytes'] / 1000:.0f} kB"


# docs/performance.md


@table("performance", "conversion", " | copy | checksum")
def conversion() -> Rows:
    kept = results("convert_host")
    for way, samples in kept["samples"].items():
        if not way.endswith(", checksum"):
            both = samples, kept["samples"][f"{way}, checksum"]
            yield way, *(f"{kept['bytes'] / median(of) / 1e9:.2f}" for of in both)


@table("performance", "conversion on a GPU", " | copy | of the plain copy | checksum")
def conversion_gpu() -> Rows:
    kept = results("convert_gpu")
    plain = median(kept["samples"]["BF16 as it is"])
    for way, samples in kept["samples"].items():
        if not way.endswith(", sum"):
            took, summed = median(samples), median(kept["samples"][f"{way}, sum"])
            yield (
                way,
                f"{kept['bytes'] / took / 1e9:,.0f}",
                f"{plain / took:.2f}",
                f"{kept['bytes'] / summed / 1e9:,.0f}",
            )


# docs/crate.md


@table("crate", "crate", " | Rust | Python")
def crate() -> Rows:
    for work, samples in results("crate")["seconds"].items():
        cells = (f"{median(samples[of]) * 1e6:,.1f}" if of in samples else "" for of in ("rust", "python"))
        yield work, *cells


# docs/gpu.md


def gb(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def rates() -> Iterator[tuple[str, dict[str, float]]]:
    """By length of runs, in GB/s: the median of each contender."""
    for run, samples in results("transfer_gpu")["samples"].items():
        yield f"{int(run):,}", {name: median(s) for name, s in samples.items()}


@table("gpu", "verify", " | with checksums | without | with checksums, before | without, before")
def verify() -> Rows:
    samples = results("verify_gpu")["samples"]
    before = samples.pop("before")
    for name, now in samples.items():
        yield name, *(f"{median(map(max, rounds[way])):.0f}" for rounds in (now, before[name]) for way in rounds)


@table(
    "gpu",
    "cuda",
    "run, bytes | peer copy | pull | push | torch: select, copy, put | cuMemcpyBatchAsync | NIXL, a descriptor a run"
    " | Mooncake, a descriptor a run",
)
def cuda() -> Rows:
    others = "torch, float64", "cuMemcpyBatchAsync", "NIXL, descriptors", "Mooncake, descriptors"
    for run, of in rates():
        ours = [f"{gb(of[n])} ({of[n] / of['peer copy']:.3f})" for n in ("kernel, pull", "kernel, push")]
        yield run, gb(of["peer copy"]), *ours, *(gb(of.get(name)) for name in others)


@table(
    "gpu", "shapes", "one rank pair's share of a request | tokens | MB | bytes of a run | us | GB/s | of the ceiling"
)
def shapes() -> Rows:
    for s in results("transfer_shapes")["shapes"]:
        seconds = median(s["seconds"])
        rate = s["bytes"] / seconds
        cells = f"{s['tokens']:,}", f"{s['bytes'] / 1e6:,.1f}", f"{s['mean_run']:,.0f}", f"{seconds * 1e6:,.0f}"
        yield s["shape"], *cells, gb(rate / 1e9), f"{rate / median(s['ceiling']):.3f}"


def prefills(run: dict[str, Any]) -> dict[str, float]:
    """Of one way and chunk: medians, with the cycles of the GPU and the tail that is allowed."""
    of = {name: median(p[name] for p in run["prefills"]) for name in run["prefills"][0]}
    cycles = median(p["compute"] * p["mhz"] for p in run["prefills"])
    return of | {"cycles": cycles, "allowed": of["left"] / median(run["rate"]) + ALLOWED}


def slower(of: dict[str, float], than: dict[str, float]) -> list[float]:
    """Per cent, in time and in cycles."""
    return [(of[n] / than[n] - 1) * 100 for n in ("compute", "cycles")]


@table(
    "gpu",
    "overlap",
    "handed over | chunks of | prefill, ms | clock, MHz | slower in time | in cycles | last part, MB"
    " | from the last layer to the last byte, us | allowed",
)
def overlap() -> Rows:
    base: dict[int, dict[str, float]] = {}
    for run in results("overlap")["runs"]:
        of = prefills(run)
        than = base.setdefault(run["chunk"], of)
        more = ["" if than is of else f"{percent:+z.1f} %" for percent in slower(of, than)]
        tail = f"{of['left'] / 1e6:,.1f}", f"{of['tail'] * 1e6:,.0f}", f"{of['allowed'] * 1e6:,.0f}"
        yield run["way"], f"{run['chunk']:,}", f"{of['compute'] * 1e3:.1f}", f"{of['mhz']:,.0f}", *more, *tail


@table(
    "gpu",
    "nixl",
    "run, bytes | packed, GB/s | NIXL's own writes of 64 MB, in the same rounds | share | with its tables"
    " | NIXL, a descriptor a run",
)
def nixl() -> Rows:
    for run, of in rates():
        packed, own, whole = of["NIXL, packed"], of["NIXL, writes of 64 MB"], of["NIXL, packed, with its tables"]
        share = f"{gb(whole)} ({whole / own:.2f})"
        yield run, gb(packed), gb(own), f"{packed / own:.2f}", share, gb(of.get("NIXL, descriptors"))


# docs/dcp_gpu.md


def us(of: dict[str, Any]) -> dict[str, float]:
    return {name: median(samples) for name, samples in of["us"].items()}


def tokens(n: int) -> str:
    return f"{n >> 10}K"


def batches() -> list[int]:
    return sorted({step["batch"] for step in DCP["steps"]})


def runs_of(shape: str, batch: int) -> list[dict[str, Any]]:
    """Steps of one shape and batch, by context."""
    return [step for step in DCP["steps"] if (step["shape"], step["batch"]) == (shape, batch)]


@table(
    "dcp_gpu",
    "steps",
    " | batch | context | one rank, us | two, attention | "
    + " | ".join(f"two, {name}" for name in STEPS)
    + " | times faster",
)
def steps() -> Rows:
    """One rank against a group of two."""
    for s in DCP["steps"]:
        of = us(s)
        one = of["attention, N=1"]
        whole = [f"{of[name]:.1f} ({one / of[name]:.2f})" for name in STEPS.values()]
        best = one / min(of[name] for name in STEPS.values())
        attention = f"{one:.1f}", f"{of['attention, N=2']:.1f}"
        yield s["shape"], s["batch"], tokens(s["context"]), *attention, *whole, f"{best:.2f}"


@table(
    "dcp_gpu",
    "attention",
    " | batch | context | N | bare, us | ours, us | share | plan(), us | KV MB a rank and layer",
)
def attention() -> Rows:
    """Through the wrapper against FlashInfer called by hand, and plan()."""
    for s in DCP["steps"]:
        for n in ("1", "2"):
            way = f"attention, N={n}"
            by_hand = f"{way}, FlashInfer bare"
            share = median(b / o for b, o in zip(s["us"][by_hand], s["us"][way], strict=True))
            cells = f"{us(s)[by_hand]:.1f}", f"{us(s)[way]:.1f}", f"{share:.3f}", f"{median(s['plan'][n]):.0f}"
            yield s["shape"], s["batch"], tokens(s["context"]), n, *cells, f"{s['kv_bytes'][n] / 1e6:,.1f}"


@table(
    "dcp_gpu",
    "exchanges",
    " | batch | better NCCL way, us | peer memory, us | times faster | q on all: NCCL, us | peer memory, us | times faster",
)
def exchanges() -> Rows:
    """Gathering queries, exchange and merge, without attention."""
    for s in DCP["exchanges"]:
        of = us(s)
        both, merge = (min(of[f"{what}, {name}"] for name in NCCL) for what in ("both", "merge"))
        ours, own = of["both, peer memory"], of["merge, peer memory, q on all"]
        cells = f"{both:.1f}", f"{ours:.1f}", f"{both / ours:.2f}", f"{merge:.1f}", f"{own:.1f}", f"{merge / own:.2f}"
        yield s["shape"], s["batch"], *cells


@table(
    "dcp_gpu",
    "verify",
    " | batch | context | tokens | us | reading, us | multiplying, us | share of the larger",
)
def verify_steps() -> Rows:
    """Several tokens a sequence, over what was committed before, beside what memory and arithmetic allow."""
    for v in DCP["verify"]:
        took, reads = median(v["us"]), v["bytes"] / DCP["ceilings"]["read"] * 1e6
        multiplies = v["flops"] / DCP["ceilings"]["multiply"] * 1e6
        cells = f"{took:.1f}", f"{reads:.1f}", f"{multiplies:.1f}", f"{max(reads, multiplies) / took:.2f}"
        yield v["shape"], v["batch"], tokens(v["context"]), v["tokens"], *cells


@table("dcp_gpu", "break_even", " | batch | " + " | ".join(STEPS))
def break_even() -> Rows:
    """The context from which a group of two is faster than one rank, between those that were run."""
    for shape in HEADS:
        for batch in batches():
            yield shape, batch, *(_break_even(runs_of(shape, batch), name) for name in STEPS.values())


def _break_even(runs: Sequence[dict[str, Any]], name: str) -> str:
    gains = [(s["context"], us(s)["attention, N=1"] - us(s)[name]) for s in runs]
    if gains[0][1] > 0:
        return f"under {tokens(gains[0][0])}"
    for (shorter, loss), (longer, gain) in zip(gains, gains[1:], strict=False):
        if gain > 0:
            return f"{(shorter + (longer - shorter) * loss / (loss - gain)) / 1024:.0f}K"
    return f"over {tokens(gains[-1][0])}"


@table("dcp_gpu", "projection", " | batch | context | N = 2 measured | N = 2 of the model | N = 4 | N = 8")
def projection() -> Rows:
    """Projection for larger groups; not measured."""
    for shape in HEADS:
        link = _link(shape)
        rate = max(v["flops"] / median(v["us"]) for v in DCP["verify"] if v["shape"] == shape)
        for batch in batches():
            runs = runs_of(shape, batch)
            read = [s["kv_bytes"][n] for s in runs for n in ("1", "2")]
            took = [us(s)[f"attention, N={n}"] for s in runs for n in ("1", "2")]
            points = [*zip(*sorted(zip(read, took, strict=True)), strict=True)]
            for s in runs:
                one = us(s)["attention, N=1"]
                modelled = []
                for n in (2, 4, 8):
                    rows = s["kv_bytes"]["1"] / n / {"GQA": 512, "MLA": 1152}[shape]
                    multiplied = 2 * rows * HEADS[shape] * n * (ROWS[shape] + VALUES[shape]) / rate
                    local = float(np.interp(s["kv_bytes"]["1"] / n, *points))
                    modelled.append(one / (max(local, multiplied) + link(_received(shape, batch, n))))
                measured = one / us(s)["step, peer memory"]
                yield shape, batch, tokens(s["context"]), *(f"{x:.2f}" for x in (measured, *modelled))


def _received(shape: str, batch: int, n: int) -> float:
    """Bytes that a rank gets from the others in a step: queries, outputs and log-sum-exps."""
    return (n - 1) * batch * HEADS[shape] * (2 * ROWS[shape] + 2 * VALUES[shape] + 4)


def _link(shape: str) -> Callable[[float], float]:
    """Microseconds of queries, exchange and merge by bytes received."""
    points = sorted((_received(s["shape"], s["batch"], 2), us(s)["both, peer memory"]) for s in DCP["exchanges"])
    slope, start = np.polyfit(*zip(*points, strict=True), 1)
    return lambda received: float(start + slope * received)


# docs/serving.md

WAYS = {
    "generate": "transformers, `generate`",
    "continuous": "transformers, continuous batching",
    "undivided": "one reference engine",
    "pair": "prefill and decode engine",
}


@table(
    "serving",
    "batches",
    "prompts at once | served by | tokens/s | of `generate` | tokens a second of CPU | of `generate`",
)
def serving_batches() -> Rows:
    yield from _batches("serving", WAYS, "generate")


def _batches(name: str, ways: Mapping[str, str], base: str) -> Rows:
    """Medians of tokens a second, by the clock and of CPU, each with the median of its ratio to the base's."""
    for batch, of in results(name)["batches"].items():
        for way, shown in ways.items():
            cells = []
            for by in (of["rates"], of["cpu"]):
                times = median(mine / other for mine, other in zip(by[way], by[base], strict=True))
                cells += [f"{median(by[way]):.1f}", f"{times:.2f}"]
            yield batch, shown, *cells


@table(
    "serving",
    "loads",
    "offered, requests/s | served by | served, requests/s | tokens/s | first token, ms: median | 90 % | between tokens, ms: median | 99 %",
)
def serving_loads() -> Rows:
    for rate, way, runs, served in _loads("serving"):
        first, between = ([each for run in runs for each in run[name]] for name in ("first", "between"))
        yield rate, WAYS[way], *served, *_percentiles((first, 50), (first, 90), (between, 50), (between, 99))


def _loads(name: str) -> Iterator[tuple[str, str, list[dict[str, Any]], list[str]]]:
    """Rate, way, runs, and how many requests and tokens were served a second."""
    found = results(name)["loads"]
    for rate, way in dict.fromkeys((run["rate"], run["way"]) for run in found):
        runs = [run for run in found if (run["rate"], run["way"]) == (rate, way)]
        wall = sum(run["wall"] for run in runs)
        served = [f"{sum(run[of] for run in runs) / wall:.{d}f}" for of, d in (("requests", 2), ("tokens", 1))]
        yield f"{rate:g}", way, runs, served


def _percentiles(*shares: tuple[list[float], int]) -> list[str]:
    """Milliseconds."""
    return [f"{np.percentile(times, share) * 1e3:,.0f}" for times, share in shares]


_PAIRS = {"no draft": "no draft", "cold": "EAGLE head, cold", "handed over": "EAGLE head, handed over"}


@table("serving", "drafts", "prompts at once | draft | tokens/s | of no draft | tokens a second of CPU | of no draft")
def serving_drafts() -> Rows:
    yield from _batches("serving_drafts", _PAIRS, "no draft")


@table(
    "serving",
    "draft_loads",
    "offered, requests/s | draft | served, requests/s | tokens/s | tokens a step | first token, ms: median | 90 %",
)
def serving_draft_loads() -> Rows:
    for rate, way, runs, served in _loads("serving_drafts"):
        first = [each for run in runs for each in run["first"]]
        gains = sum(run["tokens"] - run["requests"] for run in runs) / sum(run["steps"] for run in runs)
        yield rate, _PAIRS[way], *served, f"{gains:.2f}", *_percentiles((first, 50), (first, 90))


@table("serving", "frameworks", "prompts at once | tokens a second of CPU in | torch | JAX | of torch")
def serving_frameworks() -> Rows:
    for batch, of in results("frameworks")["batches"].items():
        for phase in ("prefill", "decode"):
            both = of[phase]["torch"], of[phase]["jax"]
            times = median(mine / base for base, mine in zip(*both, strict=True))
            yield batch, phase, *(f"{median(rates):.1f}" for rates in both), f"{times:.2f}"


@table(
    "serving",
    "frameworks on a GPU",
    "element type | prompts at once | tokens a second in | torch | torch, CUDA graphs | JAX | of graphs",
)
def serving_frameworks_gpu() -> Rows:
    for name in ("frameworks_gpu", "frameworks_gpu_bf16"):
        kept = results(name)
        for batch, of in kept["batches"].items():
            for phase in ("prefill", "decode"):
                eager, graphs, jax = of[phase].values()
                times = median(mine / base for base, mine in zip(graphs, jax, strict=True))
                yield (
                    kept["dtype"],
                    batch,
                    phase,
                    *(f"{median(each):,.0f}" for each in (eager, graphs, jax)),
                    f"{times:.2f}",
                )


# docs/dcp_serving.md

Point = dict[str, Any]
DEALT = ("TP alone", "DCP 2", "DCP 4", "DP attention")
"""The columns of the page: the best exchange of each DCP size."""
MERGED = "NCCL", "peer memory", "peer memory, q on all"


def points(load: str) -> Iterator[tuple[tuple[str, int, str], Point, dict[str, Point]]]:
    """Shape, GPUs and context of each point; the point; and by column what was measured of this load."""
    for at in results("dcp_serving_gpu")["points"]:
        found = {}
        for name in DEALT:
            ways = [way for way in at.get(load, ()) if _column(way) == name]
            if ways:
                found[name] = min((at[load][way] for way in ways), key=lambda of: median(of["seconds"]))
        yield (at["shape"], at["gpus"], tokens(at["context"])), at, found


def _column(way: str) -> str:
    """The column of a way such as TP 4 DCP 2, NCCL."""
    if way.startswith("DP"):
        return "DP attention"
    size = way.partition(",")[0].partition(" DCP ")[2]
    return f"DCP {size}" if size else "TP alone"


def rate(of: Point) -> float:
    """Tokens a second of a whole step."""
    return float(of["requests"] / median(of["seconds"]))


def _beside(found: dict[str, Point], cell: Callable[[Point], str]) -> Iterator[str]:
    """Cells of all columns, each with how many times TP alone's rate it has."""
    one = found.get("TP alone")
    for name in DEALT:
        times = f" ({rate(found[name]) / rate(one):.2f})" if name in found and one and name != "TP alone" else ""
        yield cell(found[name]) + times if name in found else "—"


_AT = " | GPUs | context | " + " | ".join(DEALT)


@table("dcp_serving", "full", _AT)
def full() -> Rows:
    for head, _, found in points("full"):
        yield *head, *_beside(found, lambda of: f"{of['requests']}: {rate(of):,.0f}")


@table("dcp_serving", "same", " | GPUs | context | requests | " + " | ".join(DEALT))
def same() -> Rows:
    """With the room that is left beside them, in tokens of a cache."""
    for head, at, found in points("same"):
        if "TP alone" in found:
            requests = found["TP alone"]["requests"]
            room = {_column(way): (n - requests) * at["context"] / 1e6 for way, n in at["fits"].items()}
            cells = _beside(found, lambda of: f"{rate(of):,.0f}")
            left = (f", +{room[name]:.1f} M" if room.get(name, 0) > 0 else "" for name in DEALT)
            yield *head, requests, *(cell + more for cell, more in zip(cells, left, strict=True))


@table("dcp_serving", "one", _AT)
def one_request() -> Rows:
    for head, _, found in points("one"):
        yield *head, *_beside(found, lambda of: f"{1e3 * median(of['seconds']):.2f}")


@table(
    "dcp_serving",
    "graphs",
    " | GPUs | context | "
    + " | ".join(name for name in DEALT if "DCP" not in name)
    + " | "
    + " | ".join(f"DCP {size}, {name}" for size in (2, 4) for name in MERGED),
)
def graphs() -> Rows:
    for at in results("dcp_serving_gpu")["points"]:
        n, full = at["gpus"], at["full"]
        names = [f"TP {n}", f"DP attention {n}", *(f"TP {n} DCP {size}, {of}" for size in (2, 4) for of in MERGED)]
        cells = (f"{1e3 * median(full[name]['graph']):.2f}" if name in full else "—" for name in names)
        yield at["shape"], n, tokens(at["context"]), *cells


# docs/acceptance.md

_LENGTHS = (24, 96, 320)
_ACCEPTANCE = " | " + " | ".join(f"{text}, {n}" for text in ("trained on", "never seen") for n in _LENGTHS)
_UNSEEN = " | " + " | ".join(f"{text}, {n}" for text in ("story", "page", "licence") for n in _LENGTHS)
_NAMES = {"mla": "MLA", "gqa": "GQA", "small": "MLA of bytes", "smollm2": "SmolLM2"}


def _accepted(row: dict[str, Any]) -> Iterator[str]:
    """Tokens a step, and the share of proposals accepted, by text and length."""
    for lengths in row["found"].values():
        for of in lengths.values():
            yield f"{of['decoded'] / of['steps']:.2f} ({of['accepted'] / of['proposed']:.0%})"


def _spread(each: Sequence[tuple[int, int]]) -> float:
    """The standard error of tokens a step, from tokens and steps of each request: of a ratio of two sums."""
    tokens, steps = np.array(each, float).T
    off = tokens - tokens.sum() / steps.sum() * steps
    return float(np.sqrt((off**2).sum() * len(off) / (len(off) - 1)) / steps.sum())


def _drafted(*targets: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of target and draft, and the row, of each demo."""
    for target in targets:
        for row in results("acceptance")[target]["rows"]:
            yield f"{_NAMES[target]} + {row['draft'].upper()}", row


@table("acceptance", "ways", "target + draft | the draft's rows" + _ACCEPTANCE)
def ways() -> Rows:
    for name, row in _drafted("mla", "gqa"):
        if row["tp"] == [2, 1]:
            yield name, row["way"], *_accepted(row)


@table("acceptance", "sizes", "target + draft | TP" + _ACCEPTANCE)
def sizes() -> Rows:
    for name, row in _drafted("mla", "gqa"):
        if row["way"] == "handed over":
            here, there = row["tp"]
            yield name, f"{here} to {there}", *_accepted(row)


@table("acceptance", "experts", "draft | its rows | sizes" + _ACCEPTANCE)
def experts() -> Rows:
    for row in results("acceptance")["moe"]["rows"]:
        yield row["draft"].upper(), row["way"], row["dp"], *_accepted(row)


@table("acceptance", "distilled", "target + head | the head's rows" + _UNSEEN)
def distilled() -> Rows:
    for name, row in _drafted("small", "smollm2"):
        cells = [of for lengths in row["found"].values() for of in lengths.values()]
        shown = (f"{of['decoded'] / of['steps']:.2f} ± {_spread(of['each']):.2f}" for of in cells)
        yield name, row["way"], *shown


@table("acceptance", "moved_cold", "target + head" + _UNSEEN)
def moved_cold() -> Rows:
    """By how much a moved head gives more tokens a step than a cold one, over the same prompts."""
    for target in ("small", "smollm2"):
        rows = results("acceptance")[target]["rows"]
        for draft in dict.fromkeys(row["draft"] for row in rows):
            moved, cold = (next(r["found"] for r in rows if (r["draft"], r["way"]) == (draft, way)) for way in _MOVED)
            yield (
                f"{_NAMES[target]} + {draft.upper()}",
                *(
                    _difference(of["each"], cold[text][length]["each"])
                    for text, lengths in moved.items()
                    for length, of in lengths.items()
                ),
            )


_MOVED = ("handed over", "cold")


def _difference(moved: Sequence[tuple[int, int]], cold: Sequence[tuple[int, int]]) -> str:
    """The difference of tokens a step, with its standard error by leaving out a prompt at a time (jackknife)."""
    ways = [np.array(way, float) for way in (moved, cold)]

    def gained(kept: Any) -> float:
        more, less = (float(way[kept, 0].sum() / way[kept, 1].sum()) for way in ways)
        return more - less

    count = len(moved)
    without = np.array([gained(np.arange(count) != n) for n in range(count)])
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return f"{gained(np.arange(count)):+.2f} ± {error:.2f}"


# docs/vllm-figures.md

CONNECTORS = {
    "ours": "kvproto, every byte checked",
    "ours, no checksums": 'kvproto, `"verify": false`',
    "nixl": "vLLM's NIXL connector",
    "nothing": "nothing moves",
}
WORLDS = ("TP 1 to 1", "TP 2 to 2", "TP 1 to 2", "TP 2 to 1")
OWNERS = {
    "vLLM: until its worker has the request": (
        "queue to decode's scheduler", "decode's scheduler step", "queue to decode's worker",
    ),
    "kvproto: pages named, Transfer sent": ("pages named, Transfer sent",),
    "kvproto: Transfer read, copy planned and launched": ("Transfer read, copy planned", "launch"),
    "the copy, until its event is seen": ("copy, and poll of its event",),
    "kvproto: checksums at both sides, Done": ("prefill's checksums", "Done sent", "Done read", "decode's checksums"),
    "sockets, threads that wake, the interpreter's lock": (
        "socket, and wake-up of prefill's I/O thread", "prefill's interpreter lock",
        "socket, and wake-up of decode's I/O thread", "decode's interpreter lock",
    ),
    "vLLM: until it schedules the request again": (
        "until decode's worker asks", "vLLM's next steps, with their sleep", "decode's scheduler step, again",
    ),
    "vLLM: forward, sampling, answer": ("forward and sampling", "answer to the client"),
}  # fmt: skip
"""Parts of a hand-over as benchmarks/vllm_marks.py measures them, by whose they are."""


def ms(samples: Sequence[float]) -> str:
    """Median, least and most, of seconds."""
    middle, least, most = (1e3 * of(samples) for of in (median, min, max))
    return f"{middle:.1f} ({least:.1f} to {most:.1f})"


HANDOVER = (
    "prefill to decode | connector | 8 x 8,192 tokens, blocks in order | blocks scattered | 1,024 tokens | 32,768 tokens"
    " | longest step"
)


@table("vllm-figures", "handover", HANDOVER)
def handover() -> Rows:
    return handovers("GQA", results("vllm_handover"))


@table("vllm-figures", "handover of MLA", HANDOVER)
def handover_of_mla() -> Rows:
    return handovers("MLA", results("vllm_handover_mla"))


def handovers(model: str, kept: dict[str, Any]) -> Rows:
    for world in WORLDS:
        for name, title in CONNECTORS.items():
            if (of := kept[f"{model}, {world}"].get(name)) is not None:
                cells = of["ordered"], of["scattered"], *of["alone"].values()
                yield world, title, *map(ms, cells), f"{1e3 * max(of['steps during']):.0f}"


def budget(world: str, tokens: str) -> dict[str, list[float]]:
    """Milliseconds of each hand-over of one prompt, by whose they are."""
    parts = results("vllm_handover")[f"GQA, {world}"]["budget"][tokens]
    return {owner: [sum(each) for each in zip(*map(parts.get, names), strict=True)] for owner, names in OWNERS.items()}


@table("vllm-figures", "budget", "what passes | 1,024 tokens | 32,768 tokens")
def budgets() -> Rows:
    short, long = (budget(WORLDS[0], tokens) for tokens in ("1024", "32768"))
    for owner in OWNERS:
        yield owner, *(ms([each / 1e3 for each in of[owner]]) for of in (short, long))
    yield "in all", *(ms([sum(each) / 1e3 for each in zip(*of.values(), strict=True)]) for of in (short, long))


# docs/tiers.md


@table("tiers", "disk", " | write, MB/s | of one file | read, MB/s | of one file")
def disk() -> Rows:
    of = results("tiers")["disk"]
    for name in of["mb_s"]["write"]:
        pairs = ((of["mb_s"][way][name], of["of_one_file"][way].get(name)) for way in ("write", "read"))
        yield name, *(cell for rate, share in pairs for cell in (f"{rate:,}", "" if share is None else f"{share:.2f}"))


@table("tiers", "hicache", " | first token, ms | found | written, MB/s | read, MB/s")
def hicache() -> Rows:
    """The best of each, as other work on the cores makes all of them slower, and not equally."""
    for contender, rounds in results("tiers_engines")["samples"].items():
        first = min(each for one in rounds for each in one["first_ms"])
        found = median(each for one in rounds for each in one["found"])
        moved = [max(one[way] or 0 for one in rounds) / 1e6 for way in ("write", "read")]
        yield contender, f"{first:,.0f}", f"{100 * found:.0f} %", *(f"{each:,.0f}" if each else "" for each in moved)


@table("tiers", "vllm on a GPU", "first token, ms | vLLM's own files | kvproto, files | kvproto, packs")
def vllm_on_a_gpu() -> Rows:
    yield from _first_tokens("tiers_engines_gpu_vllm", ("vLLM's files", "kvproto, files", "kvproto, packs"))


@table("tiers", "sglang on a GPU", "first token, ms | HiCache's files | kvproto, files | kvproto, packs")
def sglang_on_a_gpu() -> Rows:
    yield from _first_tokens("tiers_engines_gpu_sglang", ("HiCache's files", "kvproto, files", "kvproto, packs"))


def _first_tokens(name: str, contenders: tuple[str, ...]) -> Rows:
    """Medians: of prompts one by one, and of eight at once."""
    kept = results(name)
    places = {"device": "from the device", "host": "from the host", "storage": "from storage, by a fresh engine"}
    for place, title in ({"computed": "computed"} | places).items():
        for key, more in (("one", ""), ("all", ", eight at once")):
            found = [kept[of].get(f"{place}, {key}") for of in contenders]
            if any(found):
                yield title + more, *(f"{1e3 * median(seconds):.0f}" if seconds else "" for seconds in found)


def written(text: str, page: str) -> str:
    """The text of a page with all its tables made anew."""
    for of, name, head, rows in TABLES:
        if of == page:
            mark = f"<!-- table {name} -->\n\n"
            before, after = text.split(mark)
            line = "|---" * (head.count(" | ") + 1) + "|"
            body = ["| " + " | ".join(map(str, row)) + " |" for row in rows()]
            text = before + mark + "\n".join([f"| {head} |", line, *body]) + after[after.index("\n\n") :]
    return text


def main() -> int:
    stale = 0
    for page in dict.fromkeys(of for of, *_ in TABLES):
        path = ROOT / f"docs/{page}.md"
        text = path.read_text()
        new = written(text, page)
        if "--check" in sys.argv:
            stale += new != text
        else:
            path.write_text(new)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
