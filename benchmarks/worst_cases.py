"""The Descriptions and Transfers within the limits that take longest to plan and to check: a search.

`python benchmarks/worst_cases.py [--rounds N | --seconds S] [--seed N] [--out]`. Each family makes cases from a few sizes; sizes are drawn, and those of the slowest case
so far are changed further. What the limits refuse counts too: a refusal must not take long either. Times are CPU seconds of one core. --out keeps the worst of
each family.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from harness import arguments, facts, keep

from kvproto.copying.columns import Overlaps
from kvproto.copying.grants import check_grants, cut_to_begins
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout
from kvproto.errors import KvprotoError
from kvproto.planning.geometry import Geometry, Group, Owns, Part, Rank, decode_geometry, encode_geometry, mla, owns
from kvproto.planning.plan import plan
from kvproto.rank.pool import columns_without_gaps
from kvproto.wire.enums import DType, Feature
from kvproto.wire.messages import Columns, Grants

PLAN_S, CHECK_S, CHECK_BYTES = 1.0, 0.05, 64 << 20
"""Limits of the slowest Description, from bytes to plan; and of the slowest Transfer, with its memory."""
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


def tables_in_a_grid(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Each group of one side meets each of the other in a layer, and all deal by tables of their own."""
    draw, side = np.random.default_rng(dice.randrange(1 << 32)), 1 + n["layers"] % 90
    cp, layers = 1 + n["ranks"] % 8, np.arange(side * side).reshape(side, side)
    runs = min(4096, cp * (1 + n["cuts"]))
    for stripes in (layers, layers.T):
        groups = [
            attrs.evolve(group(i, cp_size=cp, order=draw.permutation(np.arange(runs) % cp).astype(np.uint32)), model=0)
            for i in range(side)
        ]
        yield geometry(
            groups, [[owns(g, some, cp_rank=r) for g, some in zip(groups, stripes, strict=True)] for r in range(cp)]
        )


def dealt_to_whole(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Ranks that deal tokens on one side, ranks that have all of them on the other; many groups."""
    cp, ranks, many = n["ranks"], n["cuts"], 1 + n["layers"] % 64
    dealt, whole = ([group(i, cp_size=size) for i in range(many)] for size in (cp, 1))
    sides = [
        geometry(dealt, [[owns(g, [0], cp_rank=r) for g in dealt] for r in range(cp)]),
        geometry(whole, [[owns(g, [0]) for g in whole]] * ranks),
    ]
    yield from sides if dice.random() < 0.5 else sides[::-1]


def layers_apart(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """No two layers are neighbours, so that each is a box; lanes are cut by the source."""
    cuts, layers = 1 + n["cuts"] % 8, range(0, 2 * min(n["layers"], 4096), 2)
    g = group(lanes=cuts)
    yield geometry([g], [[owns(g, layers, [(r, r + 1)])] for r in range(cuts)])
    yield geometry([g], [[owns(g, layers)]] * n["ranks"])


def lanes_of_other_bytes(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """Lanes of one side hold several of the other's."""
    lanes, times = n["cuts"] * n["ranks"], dice.choice([2, 3, 8])
    for count, size in ((lanes, 2 * times), (lanes * times, 2)):
        stated = (Part(name="p", dtype=DType.U8, lanes=count, lane_bytes=size),)
        g = attrs.evolve(group(), parts=stated)
        yield geometry([g], [[owns(g, range(0, 2 * n["layers"], 2))]])


def sections(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """A part in sections, in each of many lanes, and whole at the other side."""
    many = 2 + dice.randrange(6)
    for cut in (many, 1):
        stated = tuple(
            Part(name="p", dtype=DType.U8, lanes=n["cuts"], lane_bytes=16 * many // cut, at=16 * i, whole=16 * many)
            for i in range(cut)
        )
        g = attrs.evolve(group(), parts=stated)
        yield geometry([g], [[owns(g, range(n["layers"]))]] * (1 + n["ranks"] % 16))


def scaled(n: Sizes, dice: random.Random) -> Iterator[Geometry]:
    """A group for each layer, with scales, on many ranks."""
    groups = [attrs.evolve(group(i, 2), model=0) for i in range(min(n["layers"], 2048))]
    names = [
        attrs.evolve(g, parts=(attrs.evolve(g.parts[0], name="k"), attrs.evolve(g.parts[1], name="k_scale")))
        for g in groups
    ]
    for _ in range(2):
        yield geometry(names, [[owns(g, [i]) for i, g in enumerate(names)]] * (1 + n["ranks"] % 8))


FAMILIES = (
    replicas, random_layers, owner_pairs, cut_lanes, random_lanes, many_groups, dealt_tokens, tables_of_runs,
    tables_in_a_grid, dealt_to_whole, layers_apart, lanes_of_other_bytes, sections, scaled,
)  # fmt: skip
DESCRIPTIONS: dict[str, Callable[[Sizes, random.Random], Iterator[Geometry]]] = {of.__name__: of for of in FAMILIES}


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
    """Run `work`; return its result or its error, and CPU seconds."""
    gc.collect()
    start = time.process_time()
    try:
        found = work()
    except KvprotoError as error:
        found = error
    return found, time.process_time() - start


def planned(made: Iterator[Geometry]) -> dict[str, Any]:
    """Seconds from the bytes of one side to the plan, by rule; and of the table of the rank pair with most boxes."""
    pair = list(made)
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
    layouts = [
        RankLayout(g, r, columns_without_gaps(g, r, {x.id: 4 for x in g.groups})[0])
        for g, r in ((source, a), (sink, b))
    ]
    return timed(lambda: Pair(made.between(a, b), *layouts))[1]


def shared_pools(sizes: Sizes, dice: random.Random) -> tuple[Geometry, dict[int, Columns], tuple[Grants, ...]]:
    """Groups that take turns in the same bytes, in columns whose strides rule an overlap out, or do not."""
    number, layers = 1 + sizes["cuts"] % 127, 1 + sizes["layers"] % 64
    between = dice.choice([64, 16, 48])
    return pool_of(number, layers, sizes["ranks"] * 8, dice.choice([64, 64 * layers, 64 * layers + 16]), between)


def many_pools(sizes: Sizes, dice: random.Random) -> tuple[Geometry, dict[int, Columns], tuple[Grants, ...]]:
    """Hundreds and thousands of groups in one pool, with few items each."""
    number, layers = min(4096, 64 + sizes["ranks"]), 1 + sizes["layers"] % 2
    return pool_of(number, layers, 1 + sizes["cuts"] % 8, dice.choice([64 * layers, 64 * layers + 16]))


def pool_of(
    number: int, layers: int, items: int, stride: int, between: int = 64
) -> tuple[Geometry, dict[int, Columns], tuple[Grants, ...]]:
    """Groups of so many layers and items each, whose columns lie over each other; all their items are named."""
    groups = [group(i) for i in range(number)]
    stated = geometry(groups, [[owns(g, range(layers)) for g in groups]])
    columns = {
        g.id: Columns(
            group=g.id,
            items=items * number,
            region=np.zeros(layers, np.uint32),
            offset=np.arange(layers, dtype=np.uint64) * np.uint64(between),
            **{
                name: np.full(layers, size, np.uint64)
                for name, size in (("item_stride", stride), ("row_stride", 16), ("lane_stride", 16))
            },
        )
        for g in groups
    }
    order = np.random.default_rng(number).permutation(items * number).astype(np.uint32)
    grants = tuple(
        Grants(group=g.id, first=0, count=4 * items, valid=4 * items, items=order[i * items : (i + 1) * items])
        for i, g in enumerate(groups)
    )
    return stated, columns, grants


TRANSFERS = {of.__name__: of for of in (shared_pools, many_pools)}


def checked(made: tuple[Geometry, dict[int, Columns], tuple[Grants, ...]]) -> dict[str, Any]:
    """Seconds and bytes to check a Transfer, of pools that are judged before, and to cut its windows where late."""
    stated, columns, grants = made
    items = sum(g.items.size for g in grants if g.items is not None)
    row: dict[str, Any] = {"items": items, "groups": len(grants), "bytes": 0}
    _, row["describe_s"] = timed(lambda: decode_geometry(encode_geometry(stated)))
    overlaps, row["register_s"] = timed(lambda: Overlaps.of(stated, 0, columns))
    if isinstance(overlaps, KvprotoError):
        return row | {"refused": str(overlaps)[:80], "seconds": 0.0}
    wanted, side = tuple(g.group for g in grants), RankLayout(stated, 0, columns)
    found, row["seconds"] = timed(lambda: check_grants(stated, 0, columns, wanted, grants, overlaps))
    if isinstance(found, KvprotoError):
        row["refused"] = str(found)[:80]
    late = {g.group: g.first + g.count // 2 for g in grants}
    row["late_s"] = timed(lambda: cut_to_begins(side, grants, late))[1]
    tracemalloc.start()
    timed(lambda: check_grants(stated, 0, columns, wanted, grants, overlaps))
    row["bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return row


def search(
    family: Callable[[Sizes, random.Random], Any],
    measured: Callable[[Any], dict[str, Any]],
    rounds: int,
    seconds: float,
    dice: random.Random,
) -> dict[str, Any]:
    """The slowest case: of sizes drawn, and of changes to the slowest so far."""
    worst: dict[str, Any] = {"seconds": -1.0}
    began = time.monotonic()
    for n in itertools.count():
        done = (time.monotonic() - began) / seconds if seconds else n / rounds
        if done >= 1:
            break
        new = done < 0.5 or "sizes" not in worst
        sizes = next(s for s in (draw(dice) if new else changed(worst["sizes"], dice) for _ in range(1000)) if sane(s))
        row = measured(family(sizes, dice))
        if row["seconds"] > worst["seconds"]:
            worst = row | {"sizes": sizes}
    return worst


def main() -> int:
    """Search, print, keep; 1 where something takes too long."""
    parser = arguments(__doc__, "worst_cases", rounds=60)
    parser.add_argument("--seconds", type=float, default=0, help="search each family for so long, in place of rounds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'Descriptions':22}{'bytes':>10}{'boxes':>10}{'decode, s':>11}{'plan, s':>10}{'pair, s':>10}  refused")
    for name, family in DESCRIPTIONS.items():
        row = rows[name] = search(family, planned, args.rounds, args.seconds, dice)
        times = f"{row['decode_s']:11.3f}{row['plan_s']:10.3f}{row['pair_s']:10.3f}"
        print(f"{name:22}{row['bytes']:10,}{row['boxes']:10,}{times}  {row.get('refused', '')[:40]}", flush=True)
    print(f"\n{'Transfers':22}{'items':>10}{'groups':>10}{'check, ms':>11}{'late, ms':>10}{'MiB':>10}  refused")
    for name, pools in TRANSFERS.items():
        row = rows[name] = search(pools, checked, args.rounds, args.seconds, dice)
        figures = f"{row['seconds'] * 1e3:11.1f}{row['late_s'] * 1e3:10.1f}{row['bytes'] / 2**20:10.1f}"
        print(f"{name:22}{row['items']:10,}{row['groups']:10,}{figures}  {row.get('refused', '')[:40]}", flush=True)
    keep(args.out, {"benchmark": "worst_cases"} | facts() | {"rounds": args.rounds, "worst": rows})
    late = [name for name in DESCRIPTIONS if max(rows[name]["seconds"], rows[name]["pair_s"]) > PLAN_S]
    late += [n for n in TRANSFERS if rows[n]["seconds"] > CHECK_S or rows[n]["bytes"] > CHECK_BYTES]
    print(f"too slow: {', '.join(late) or 'nothing'}")
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
