"""Times of planning and lowering: `python benchmarks/plan.py [--out]`. Rounds are interleaved; medians of one core."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from harness import arguments, facts, in_turn, keep

from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.planning.geometry import Geometry, Rank, gqa, mla, owns
from kvproto.planning.plan import plan
from kvproto.wire.messages import Columns


def gqa_engine(tp: int, heads: int, layers: int = 80, replica: int = 0) -> Geometry:
    """A GQA target and a one-layer GQA draft, `tp` ranks; heads are shared by consecutive ranks where tp is larger."""
    target, draft = gqa(0, "target", 0, heads, 256, 64), gqa(1, "draft", 1, heads, 256, 64)

    def lanes(rank: int) -> list[tuple[int, int]]:
        return [(heads * rank // tp, max(heads * (rank + 1) // tp, heads * rank // tp + 1))]

    ranks = (Rank(rank=r, owns=(owns(target, range(layers), lanes(r)), owns(draft, [0], lanes(r)))) for r in range(tp))
    return Geometry(replica=replica, facts=(), groups=(target, draft), ranks=tuple(ranks))


def plans() -> dict[str, Callable[[], Any]]:
    """The plans that are timed."""
    sixty, sixty_many = (gqa_engine(64, 8), gqa_engine(64, 8)), (gqa_engine(64, 64), gqa_engine(64, 64))
    fewer, large = (gqa_engine(64, 8), gqa_engine(32, 8)), (gqa_engine(512, 8), gqa_engine(512, 8))
    return {
        "64 x 64 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*sixty),
        "64 x 64 ranks, 80 layers GQA (64 heads) + draft": lambda: plan(*sixty_many),
        "64 x 32 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*fewer),
        "512 x 512 ranks, 80 layers GQA (8 heads) + draft": lambda: plan(*large),
    }


def lowering(page: int, layers: int, tokens: int = 131072) -> Callable[[], Any]:
    """One request of an MLA cache, with pages in random order."""
    group = mla(0, "target", 0, 1152, page)
    items, wanted = 262144 // page, tokens // page
    geometry = Geometry(replica=0, facts=(), groups=(group,), ranks=(Rank(rank=0, owns=(owns(group, range(layers)),)),))
    strides = {"offset": 0, "item_stride": page * 1152, "row_stride": 1152, "lane_stride": 1152}
    full = {name: np.full(layers, size, np.uint64) for name, size in strides.items()}
    columns = Columns(group=0, items=items, region=np.arange(layers, dtype=np.uint32), **full)
    side = RankLayout(geometry, 0, {0: columns})
    pair = Pair(plan(geometry, geometry).between(0, 0), side, side)
    dice = np.random.default_rng(page)
    from_, to = ({0: Window(0, tokens, dice.permutation(items)[:wanted].astype(np.int32))} for _ in range(2))
    return lambda: pair.lower(from_, to)


def timed(work: Callable[[], Any], number: int = 1) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - start) / number * 1e3


def main() -> int:
    """Measure, print, keep."""
    args = arguments(__doc__, "plan", rounds=5).parse_args()
    work = {name: lambda job=job: timed(job) for name, job in plans().items()}
    samples = {"planning_ms": in_turn(work, args.rounds)}
    shapes = {(page, layers): lowering(page, layers) for page, layers in ((1, 61), (1, 1), (16, 61), (64, 61), (64, 1))}
    work = {f"page size {p}, {layers} layers": lambda job=job: timed(job, 10) for (p, layers), job in shapes.items()}
    samples["lowering_ms"] = in_turn(work, 3 * args.rounds)
    titles = {"planning_ms": "planning", "lowering_ms": "lowering 131,072 tokens, MLA, pages in no order"}
    for part, title in titles.items():
        print(f"{title:52}{'median, ms':>12}")
        for name, took in samples[part].items():
            print(f"{name:52}{median(took):12.3f}")
    keep(args.out, {"benchmark": "plan"} | facts() | samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
