"""The Descriptions and Transfers within the limits that take longest to plan and to check: a search.

`python benchmarks/worst_cases.py [--rounds N] [--write]`. Each family makes cases from a few sizes; sizes are drawn, and those of the slowest case
so far are changed further. What the limits refuse counts too: a refusal must not take long either. Times are CPU seconds of one core. --write keeps the worst of
each family in benchmarks/results/worst_cases.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvproto.copying.aliasing import Overlaps
from kvproto.copying.grants import check_grants
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError
from kvproto.node.pool import pack
from kvproto.planning.geometry import Geometry, Group, Owns, Part, Rank, decode_geometry, encode_geometry, mla, owns
from kvproto.planning.plan import plan
from kvproto.wire.enums import DType, Feature
from kvproto.wire.messages import Columns, Grants

RESULTS = Path(__file__).parent / "results/worst_cases.json"
PLAN_S, CHECK_S, CHECK_BYTES = 1.0, 0.05, 64 << 20
"""What the slowest Description may take, from bytes to plan; and the slowest Transfer, with its memory."""
Sizes = dict[str, int]
RULES: dict[str, tuple[Feature, ...]] = {"even": (), "few": (Feature.FEW_SOURCES,), "one": (Feature.SPREAD_ONE,)}


def group(id: int = 0, parts: int = 1, lanes: int = 1, **changes: Any) -> Group:
    """Pages of parts of 16 bytes a lane."""
    stated = tuple(Part(name=f"p{i}", dtype=DType.U8, lanes=lanes, lane_bytes=16) for i in range(parts))
    return attrs.evolve(mla(id, f"g{id}", id, 16, 4), parts=stated, **changes)


def geometry(groups: list[Group], shares: list[list[Owns]]) -> Geometry:
    """Ranks 0, 1, .. with these shares."""
    ranks = tuple(Rank(rank=r, owns=tuple(own)) for r, own in enumerate(shares))
    return Geometry(replica=0, facts=(), groups=tuple(groups), ranks=ranks)


def replicas(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Every rank has everything: candidates without end."""
    g = group()
    for ranks in (n["ranks"], max(1, n["ranks"] - 1 - dice.randrange(n["ranks"]) // 8)):
        yield geometry([g], [[owns(g, range(n["layers"]))]] * ranks)


def random_layers(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """A set of candidates for each layer."""
    g = group()
    for ranks in (n["ranks"], max(1, n["ranks"] * 4 // 5)):
        some = [sorted(dice.sample(range(n["layers"]), max(1, n["layers"] // 2))) for _ in range(ranks - 1)]
        yield geometry([g], [[owns(g, range(n["layers"]))], *([owns(g, layers)] for layers in some)])


def owner_pairs(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Another pair of owners for each layer."""
    g = group()
    ranks, layers = max(2, n["ranks"] // 16), n["layers"] * 8
    for owner in (lambda layer: layer % ranks, lambda layer: layer // ranks % ranks):
        held = [[layer for layer in range(layers) if owner(layer) == r] for r in range(ranks)]
        yield geometry([g], [[owns(g, some)] if some else [] for some in held])


def cut_lanes(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Lanes cut at each second place by one rank, and whole on the others."""
    g = group(lanes=2 * n["cuts"])
    for _ in range(2):
        cut = owns(g, range(n["layers"]), [(i, i + 1) for i in range(0, 2 * n["cuts"], 2)])
        yield geometry([g], [*[[owns(g, range(n["layers"]))]] * n["ranks"], [cut]])


def random_lanes(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Lanes of each rank drawn; opaque or not."""
    g = group(lanes=4 * n["cuts"])
    if dice.random() < 0.5:
        g = attrs.evolve(g, parts=tuple(attrs.evolve(p, encoding="tiled") for p in g.parts))
    drawn = [sorted(dice.sample(range(4 * n["cuts"]), n["cuts"])) for _ in range(n["ranks"])]
    for _ in range(2):
        yield geometry([g], [[owns(g, range(n["layers"]), [(i, i + 1) for i in some])] for some in drawn])


def many_groups(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Groups and parts without end."""
    parts = dice.choice([1, 2, 8, 64])
    groups = [group(i, parts) for i in range(max(1, n["ranks"] // parts))]
    for _ in range(2):
        yield geometry(groups, [[owns(g, range(max(1, n["layers"] // 64))) for g in groups]])


def dealt_tokens(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Pairs of cp ranks."""
    for run in (1, dice.choice([1, 3, 7, 64])):
        g = group(cp_size=n["ranks"], interleave=run)
        yield geometry([g], [[owns(g, range(n["layers"]), cp_rank=r)] for r in range(n["ranks"])])


def tables_of_runs(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Deals in drawn orders, as many as there is room for."""
    draw, runs = np.random.default_rng(dice.randrange(1 << 32)), min(max(2 * n["cuts"], n["ranks"]), 4096)
    for run in (1, dice.choice([1, 3, 255, 256])):
        groups = [
            group(i, cp_size=n["ranks"], interleave=run, order=draw.permutation(np.arange(runs) % n["ranks"]))
            for i in range(max(1, n["layers"] // 8))
        ]
        yield geometry(groups, [[owns(g, [0], cp_rank=r) for g in groups] for r in range(n["ranks"])])


DESCRIPTIONS: dict[str, Callable[[Sizes, random.Random], Iterator[Geometry]]] = {
    made.__name__: made for made in (replicas, random_layers, owner_pairs, cut_lanes, random_lanes, many_groups, dealt_tokens, tables_of_runs)
}  # fmt: skip


def draw(dice: random.Random) -> Sizes:
    """Sizes, each as likely small as large."""
    return {
        name: 2 ** dice.randint(0, most) + dice.randrange(4)
        for name, most in (("ranks", 12), ("layers", 11), ("cuts", 11))
    }


def sane(sizes: Sizes) -> bool:
    """Whether a Description of such sizes is not refused for its bytes alone."""
    return sizes["ranks"] * max(sizes["layers"], sizes["cuts"]) <= 1 << 18


def changed(sizes: Sizes, dice: random.Random) -> Sizes:
    """One of the sizes a little larger or smaller."""
    name = dice.choice(sorted(sizes))
    return sizes | {name: max(1, int(sizes[name] * dice.choice([0.5, 0.8, 0.95, 1.05, 1.25, 2])))}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What came of it, and CPU seconds."""
    gc.collect()
    start = time.process_time()
    try:
        found = work()
    except KvprotoError as error:
        found = error
    return found, time.process_time() - start


def planned(pair: list[Geometry]) -> dict[str, Any]:
    """Seconds from the bytes of one side to the plan, by rule; and of the table of the rank pair with most boxes."""
    data = encode_geometry(pair[0])
    row: dict[str, Any] = {"bytes": len(data), "boxes": 0}
    side, row["decode_s"] = timed(lambda: decode_geometry(data))
    other, _ = timed(lambda: decode_geometry(encode_geometry(pair[1])))
    if isinstance(side, KvprotoError) or isinstance(other, KvprotoError):
        row["refused"] = str(side if isinstance(side, KvprotoError) else other)[:80]
        return row | {"plan_s": 0.0, "pair_s": 0.0, "seconds": row["decode_s"]}
    worst = 0.0
    for features in RULES.values():
        made, seconds = timed(lambda features=features: plan(side, other, features))
        worst = max(worst, seconds)
        if isinstance(made, KvprotoError):
            row["refused"] = str(made)[:80]
            continue
        row["boxes"] = max(row["boxes"], sum(len(route.boxes) for route in made.routes))
        row["pair_s"] = max(row.get("pair_s", 0.0), table(side, other, made))
    return row | {"plan_s": worst, "pair_s": row.get("pair_s", 0.0), "seconds": row["decode_s"] + worst}


def table(source: Geometry, sink: Geometry, made: Any) -> float:
    """Seconds to make the table of the rank pair with most boxes."""
    count: dict[tuple[int, int], int] = {}
    for route in made.routes:
        count[route.source, route.sink] = count.get((route.source, route.sink), 0) + len(route.boxes)
    a, b = max(count, key=count.__getitem__)
    layouts = [RankLayout(g, r, pack(g, r, {x.id: 4 for x in g.groups})[0]) for g, r in ((source, a), (sink, b))]
    return timed(lambda: Pair(made.between(a, b), *layouts))[1]


def shared_pools(sizes: Sizes, dice: random.Random) -> tuple[Geometry, dict[int, Columns], tuple[Grants, ...]]:
    """Groups that take turns in the same bytes, in columns whose strides rule an overlap out, or do not."""
    number, layers, items = 1 + sizes["cuts"] % 40, 1 + sizes["layers"] % 64, sizes["ranks"] * 8
    groups = [group(i) for i in range(number)]
    stated = geometry(groups, [[owns(g, range(layers)) for g in groups]])
    step = dice.choice([64, 64 * layers, 64 * layers + 16])
    columns = {
        g.id: Columns(
            group=g.id, items=items * number, region=np.zeros(layers, np.uint32),
            offset=np.arange(layers, dtype=np.uint64) * np.uint64(dice.choice([64, 16, 48])),
            **{name: np.full(layers, size, np.uint64) for name, size in (("item_stride", step), ("row_stride", 16), ("lane_stride", 16))},
        )
        for g in groups
    }  # fmt: skip
    order = np.random.default_rng(sizes["ranks"]).permutation(items * number).astype(np.uint32)
    grants = tuple(
        Grants(group=g.id, first=0, count=4 * items, valid=4 * items, items=order[i * items : (i + 1) * items])
        for i, g in enumerate(groups)
    )
    return stated, columns, grants


def checked(sizes: Sizes, dice: random.Random) -> dict[str, Any]:
    """Seconds and bytes to check a Transfer, of pools that are judged before."""
    stated, columns, grants = shared_pools(sizes, dice)
    items = sum(g.items.size for g in grants if g.items is not None)
    row: dict[str, Any] = {"items": items, "groups": len(grants), "bytes": 0}
    overlaps, row["register_s"] = timed(lambda: Overlaps.of(stated, 0, columns))
    if isinstance(overlaps, KvprotoError):
        return row | {"refused": str(overlaps)[:80], "seconds": 0.0}
    wanted = tuple(g.group for g in grants)
    found, row["seconds"] = timed(lambda: check_grants(stated, 0, columns, wanted, grants, overlaps))
    if isinstance(found, KvprotoError):
        row["refused"] = str(found)[:80]
    tracemalloc.start()
    timed(lambda: check_grants(stated, 0, columns, wanted, grants, overlaps))
    row["bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return row


def search(case: Callable[[Sizes, random.Random], dict[str, Any]], rounds: int, dice: random.Random) -> dict[str, Any]:
    """The slowest case: of sizes drawn, and of changes to the slowest so far."""
    worst: dict[str, Any] = {"seconds": -1.0}
    for n in range(rounds):
        new = n < rounds // 2 or "sizes" not in worst
        sizes = next(s for s in (draw(dice) if new else changed(worst["sizes"], dice) for _ in range(1000)) if sane(s))
        row = case(sizes, dice)
        if row["seconds"] > worst["seconds"]:
            worst = row | {"sizes": sizes}
    return worst


def main() -> int:
    """Search, print, keep; 1 where something takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="cases of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"keep the worst in {RESULTS.name}")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'Descriptions':16}{'bytes':>10}{'boxes':>10}{'decode, s':>11}{'plan, s':>10}{'pair, s':>10}  refused")
    for name, family in DESCRIPTIONS.items():
        row = rows[name] = search(lambda n, d, f=family: planned(list(f(n, d))), args.rounds, dice)
        times = f"{row['decode_s']:11.3f}{row['plan_s']:10.3f}{row['pair_s']:10.3f}"
        print(f"{name:16}{row['bytes']:10,}{row['boxes']:10,}{times}  {row.get('refused', '')[:40]}", flush=True)
    row = rows["shared_pools"] = search(checked, args.rounds, dice)
    print(
        f"\nTransfers: {row['items']:,} items of {row['groups']} groups, {row['seconds'] * 1e3:.1f} ms, {row['bytes'] / 2**20:.1f} MiB"
    )
    if args.write:
        head = {
            "benchmark": "worst_cases",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": args.rounds,
        }
        versions = {
            "machine": f"{platform.machine()}, {platform.system()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        RESULTS.write_text(json.dumps(head | versions | {"worst": rows}, indent=1) + "\n")
    late = [name for name in DESCRIPTIONS if max(rows[name]["seconds"], rows[name]["pair_s"]) > PLAN_S]
    late += ["shared_pools"] if row["seconds"] > CHECK_S or row["bytes"] > CHECK_BYTES else []
    print(f"too slow: {', '.join(late) or 'nothing'}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
