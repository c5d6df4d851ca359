"""How long planning and lowering take, compared with the page grouping and per-layer expansion of today's engines.

`python benchmarks/plan.py [--write]`: prints the tables; --write keeps raw samples in benchmarks/results/plan.json. Rounds
are interleaved; times are medians of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.geometry import Geometry, Rank, gqa, mla, owns
from kvproto.planning.plan import Plan, plan
from kvproto.wire.enums import Feature
from kvproto.wire.messages import Columns

ROUNDS = 15
RESULTS = Path(__file__).parent / "results/plan.json"


def gqa_engine(tp: int, heads: int, layers: int = 80, replica: int = 0) -> Geometry:
    """A GQA target and a one-layer GQA draft, `tp` ranks; heads are shared by consecutive ranks where tp is larger."""
    target, draft = gqa(0, "target", 0, heads, 256, 64), gqa(1, "draft", 1, heads, 256, 64)

    def lanes(rank: int) -> list[tuple[int, int]]:
        return [(heads * rank // tp, max(heads * (rank + 1) // tp, heads * rank // tp + 1))]

    ranks = (Rank(rank=r, owns=(owns(target, range(layers), lanes(r)), owns(draft, [0], lanes(r)))) for r in range(tp))
    return Geometry(replica=replica, facts=(), groups=(target, draft), ranks=tuple(ranks))


def mla_engine(tp: int, layers: int = 61) -> Geometry:
    """An MLA target on every rank."""
    target = mla(0, "target", 0, 1152, 64)
    return Geometry(
        replica=0,
        facts=(),
        groups=(target,),
        ranks=tuple(Rank(rank=r, owns=(owns(target, range(layers)),)) for r in range(tp)),
    )


def spread(made: Plan, candidates: int) -> tuple[float, int, int]:
    """Layers that a source gives on average, and that the busiest gives; and the sources that a sink rank awaits at most."""
    load: Counter[int] = Counter()
    for route in made.routes:
        for box in route.boxes:
            load[route.source] += box.layer_hi - box.layer_lo
    return sum(load.values()) / candidates, max(load.values()), max(len(made.required(r.sink)) for r in made.routes)


def plans() -> dict[str, Callable[[], Any]]:
    """What is planned."""
    sixty, sixty_many = (gqa_engine(64, 8), gqa_engine(64, 8)), (gqa_engine(64, 64), gqa_engine(64, 64))
    fewer, large = (gqa_engine(64, 8), gqa_engine(32, 8)), (gqa_engine(512, 8), gqa_engine(512, 8))
    return {
        "64 x 64 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*sixty),
        "64 x 64 ranks, 80 layers GQA (64 heads) + draft": lambda: plan(*sixty_many),
        "64 x 32 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*fewer),
        "512 x 512 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*large),
    }


def lowering(page: int, layers: int, tokens: int = 131072) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """Ours and theirs on one request of an MLA cache, with pages in random order."""
    group = mla(0, "target", 0, 1152, page)
    items, wanted = 262144 // page, tokens // page
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(layers)),)),))
    size = page * 1152
    full = np.ones(layers, np.uint64)
    columns = Columns(
        group=0,
        items=items,
        region=np.arange(layers, dtype=np.uint32),
        offset=full * np.uint64(0),
        item_stride=full * np.uint64(size),
        row_stride=full * np.uint64(1152),
        lane_stride=full * np.uint64(1152),
    )
    side = RankLayout(geometry, 0, {0: columns})
    pair = Pair(plan(geometry, geometry).between(0, 0), side, side)
    dice = np.random.default_rng(page)
    src, dst = (dice.permutation(items)[:wanted].astype(np.int32) for _ in range(2))
    from_, to = {0: Window(0, tokens, src)}, {0: Window(0, tokens, dst)}
    bases = [(0x7F00_0000_0000 + i * items * size, 0x7E00_0000_0000 + i * items * size) for i in range(layers)]
    assert pair.lower(from_, to).runs().count == len(today(src, dst, bases, size))
    return lambda: pair.lower(from_, to), lambda: today(src, dst, bases, size), wanted


def today(src: Any, dst: Any, bases: list[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """Grouping and expansion as done today: pages contiguous on both sides are joined, then repeated for every layer."""
    breaks = np.where((np.diff(src) != 1) | (np.diff(dst) != 1))[0] + 1
    groups = list(zip(np.split(src, breaks), np.split(dst, breaks), strict=True))
    blocks = []
    for source, sink in bases:
        for a, b in groups:
            blocks.append((source + int(a[0]) * size, sink + int(b[0]) * size, len(a) * size))
    return blocks


def timed(work: Callable[[], Any], number: int = 1) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - start) / number * 1e3


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the samples in {RESULTS.name}")
    args = parser.parse_args()
    work = plans()
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(5):
        for name, job in work.items():
            print(f"  {name} ...", end="\r", file=sys.stderr, flush=True)
            samples[name].append(timed(job))
    print(f"{'planning':52}{'median, ms':>12}")
    for name, found in samples.items():
        print(f"{name:52}{median(found):12.1f}")
    print(f"\n{'MLA, 61 layers: layers of the busiest source':52}{'mean':>8}{'even':>14}{'few':>14}{'one':>14}")
    loads: dict[str, dict[str, Any]] = {}
    for tp, to in ((8, 1), (8, 4), (16, 4), (8, 3)):
        name, row = f"MLA, 61 layers, {tp} to {to} ranks", {}
        for rule, features in (("even", ()), ("few", (Feature.FEW_SOURCES,)), ("one", (Feature.SPREAD_ONE,))):
            mean, busiest, awaited = spread(plan(mla_engine(tp), mla_engine(to), features), tp)
            row[rule] = {"busiest": busiest, "awaited": awaited}
        loads[name] = {"mean": mean} | row
        said = [f"{found['busiest']}, awaits {found['awaited']}" for found in row.values()]
        print(f"{name:52}{mean:8.2f}" + "".join(f"{cell:>14}" for cell in said))
    print(f"\n{'lowering 131,072 tokens, MLA, pages in no order':52}{'kvproto, ms':>12}{'today, ms':>12}{'ratio':>8}")
    lowered: dict[str, dict[str, list[float]]] = {}
    for page, layers in ((1, 61), (1, 1), (16, 61), (64, 61), (64, 1)):
        ours, theirs, _ = lowering(page, layers)
        row = lowered[f"page size {page}, {layers} layers"] = {"kvproto_ms": [], "today_ms": []}
        for i in range(ROUNDS):
            row["kvproto_ms"].append(timed(ours, 10))
            if i < 5:
                row["today_ms"].append(timed(theirs))
        a, b = median(row["kvproto_ms"]), median(row["today_ms"])
        print(f"{f'page size {page}, {layers} layers':52}{a:12.3f}{b:12.1f}{b / a:8.0f}")
    if args.write:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        head = {
            "benchmark": "plan",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {platform.system()}",
            "versions": versions,
        }
        RESULTS.write_text(
            json.dumps(head | {"planning_ms": samples, "load_layers": loads, "lowering": lowered}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
