"""Random pairs of engines that hold the same caches in different ways, and their memory."""

import random
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from kvproto.wire.enums import DType, ItemKind, MemoryKind
from kvproto.wire.messages import Columns, Geometry, Group, LaneSpan, Owns, Part, Rank, Region
from tests.plan import oracle

LANE_BYTES = 6


@attrs.frozen
class Cache:
    """What both sides agree on: some layers of a model, of one kind."""

    model: int
    kind: ItemKind
    parts: tuple[tuple[str, int], ...]
    """Name and lanes, of LANE_BYTES each where not folded."""
    layers: tuple[int, ...]
    tokens_per_row: int
    live: int
    folds: tuple[int, ...]
    """Into how many lanes a side may cut one."""


def caches(rng: random.Random) -> list[Cache]:
    """One or two models; a model has a cache of attention, or of state, or both."""
    found = []
    for model in range(rng.randint(1, 2)):
        for extra in range(rng.choice([1, 1, 2])):
            kind = rng.choice([ItemKind.PAGE, ItemKind.PAGE, ItemKind.PAGE, ItemKind.SLOT, ItemKind.RING])
            names = ("index", "scale") if extra else ("conv", "ssm") if kind == ItemKind.SLOT else ("k", "v")
            lanes = rng.randint(1, 4)
            parts = tuple((n, lanes if rng.random() < 0.7 else rng.randint(1, 4)) for n in names)
            if kind != ItemKind.SLOT and rng.random() < 0.3:
                parts = (("latent" + "x" * extra, 1),)
            layers = tuple(sorted(rng.sample(range(6), rng.randint(1, 4))))
            step = 1 if kind == ItemKind.SLOT else rng.choice([1, 1, 2, 3])
            found.append(
                Cache(model, kind, parts, layers, step, rng.randint(1, 3), rng.choice([(1,), (1, 2), (1, 3), (2,)]))
            )
    return found


def side(rng: random.Random, held: Sequence[Cache], replica: int, complete: bool) -> Geometry:
    """One side's way of holding the caches: layers, tokens and lanes dealt over ranks, replicated or not.

    One that is not complete leaves out what it likes, and says so.
    """
    numbers = sorted(rng.sample(range(12), rng.randint(1, 8)))
    groups: list[Group] = []
    shares: dict[int, list[Owns]] = {n: [] for n in numbers}
    ids = iter(sorted(rng.sample(range(30), 2 * len(held))))
    for cache in rng.sample(held, len(held)):
        for layers in deal(rng, cache.layers, rng.choice([1, 1, 2])):
            group = _group(rng, cache, next(ids), len(numbers))
            groups.append(group)
            for rank, share in _spread(rng, group, layers, numbers):
                if complete or rng.random() < 0.85:
                    shares[rank].append(share)
    ranks = tuple(Rank(rank=n, owns=tuple(owned)) for n, owned in shares.items())
    names = tuple(sorted({name for cache in held for name, _ in cache.parts}))
    return Geometry(replica=replica, facts=(), groups=tuple(groups), ranks=ranks, without=None if complete else names)


def deal(rng: random.Random, things: Sequence[int], hands: int) -> list[list[int]]:
    """Uneven, not always in runs, none empty."""
    hands = min(hands, len(things))
    found: list[list[int]] = [[] for _ in range(hands)]
    marks = [*range(hands), *(rng.randrange(hands) for _ in range(len(things) - hands))]
    marks = sorted(marks) if rng.random() < 0.5 else rng.sample(marks, len(marks))
    for thing, mark in zip(things, marks, strict=True):
        found[mark].append(thing)
    return found


def _group(rng: random.Random, cache: Cache, id: int, ranks: int) -> Group:
    fold, step = rng.choice(cache.folds), cache.tokens_per_row
    parts = tuple(
        Part(name=n, dtype=DType.U8, lanes=lanes * fold, lane_bytes=LANE_BYTES // fold) for n, lanes in cache.parts
    )
    cp = rng.randint(1, min(4, ranks)) if cache.kind == ItemKind.PAGE and rng.random() < 0.6 else 1
    live: int | None = None
    if cache.kind == ItemKind.SLOT:
        rows = cache.live + rng.randint(0, 2)
        live = cache.live if rows > cache.live else rng.choice([None, cache.live])
    else:
        rows = rng.randint(8, 11) if cache.kind == ItemKind.RING else rng.randint(1, 5)
    order = None
    if cp > 1 and rng.random() < 0.4:  # runs by a table
        runs = [*range(cp), *(rng.randrange(cp) for _ in range(rng.randint(0, 3)))]
        order = np.array(rng.sample(runs, len(runs)), np.uint32)
    free = cp == 1 and rng.random() < 0.3  # one rank: the deal means nothing
    return Group(
        id=id, name=f"g{id}", model=cache.model, kind=cache.kind, rows=rows, tokens_per_row=step, live_rows=live,
        cp_size=cp, interleave=rng.randint(1, 9) if free else step * rng.randint(1, 3),
        origin=rng.randint(0, 20) if free else step * rng.randint(0, 2), parts=parts,
        order=order,
    )  # fmt: skip


def _spread(rng: random.Random, group: Group, layers: list[int], numbers: list[int]) -> list[tuple[int, Owns]]:
    """Shares that together own everything, copies of some of them, and who has them."""
    room = len(numbers) // group.cp_size
    stages = deal(rng, layers, rng.randint(1, min(2, room)))
    room //= len(stages)
    tp = rng.randint(1, max(1, min(room, *(p.lanes for p in group.parts))))
    cuts = [deal(rng, range(part.lanes), tp) for part in group.parts]
    made = []
    for stage in stages:
        for cp_rank in range(group.cp_size):
            for t in range(tp):
                spans: list[LaneSpan] = []
                for p, cut in enumerate(cuts):
                    runs = _runs(rng, cut[t])
                    spans += [LaneSpan(part=p, lo=lo, hi=hi) for lo, hi in rng.sample(runs, len(runs))]
                made.append(
                    Owns(group=group.id, layers=np.array(stage, np.uint32), cp_rank=cp_rank, lanes=tuple(spans))
                )
    copies = max(
        1,
        rng.randint(1, 3) if len(made) * 3 <= len(numbers) else len(numbers) // len(made) if rng.random() < 0.5 else 1,
    )
    made = [m for m in made for _ in range(copies)] if rng.random() < 0.5 else made * copies
    extra = rng.randint(0, len(numbers) - len(made))
    for _ in range(extra):  # copies, or anything at all
        if rng.random() < 0.5:
            made.append(rng.choice(made))
            continue
        spans = []
        for p, part in enumerate(group.parts):
            runs = _runs(rng, sorted(rng.sample(range(part.lanes), rng.randint(1, part.lanes))))
            spans += [LaneSpan(part=p, lo=lo, hi=hi) for lo, hi in rng.sample(runs, len(runs))]
        some = np.array(sorted(rng.sample(layers, rng.randint(1, len(layers)))), np.uint32)
        made.append(Owns(group=group.id, layers=some, cp_rank=rng.randrange(group.cp_size), lanes=tuple(spans)))
    who = numbers[: len(made)] if rng.random() < 0.5 else rng.sample(numbers, len(made))
    return list(zip(who, made, strict=True))


def _runs(rng: random.Random, lanes: list[int]) -> list[tuple[int, int]]:
    """Intervals of ascending lanes, cut here and there for no reason."""
    runs: list[tuple[int, int]] = []
    for lane in lanes:
        if runs and runs[-1][1] == lane and rng.random() < 0.8:
            runs[-1] = (runs[-1][0], lane + 1)
        else:
            runs.append((lane, lane + 1))
    return runs


def layout(rng: random.Random, geometry: Geometry, rank: int, items: int) -> tuple[dict[int, Columns], dict[int, int]]:
    """Columns by group, and the lengths of two regions: NHD or HND, padded, each column apart, or joint pools."""
    groups = {g.id: g for g in geometry.groups}
    lengths = {7: rng.randint(0, 9), 3: rng.randint(0, 9)}
    found = {}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        group = groups[share.group]
        pool = rng.choice(sorted(lengths))
        sizes = [
            (len(oracle.lanes_of(share, p)), part.lane_bytes) for p, part in enumerate(group.parts)
        ] * share.layers.size
        found[group.id], lengths[pool] = columns_of_group(rng, group, sizes, items, pool, lengths[pool])
    return found, {region: length + 1 for region, length in lengths.items()}


def columns_of_group(
    rng: random.Random, group: Group, sizes: list[tuple[int, int]], items: int, pool: int, at: int
) -> tuple[Columns, int]:
    """The columns of one group from byte `at` of region `pool` on, and where they end; `sizes` are lanes and bytes."""
    style = rng.choice(["apart", "apart", "rows", "blocks"])
    rows = []
    if style == "rows":  # a row holds every layer and part: joint K|V
        record = 0
        starts = []
        for lanes, size in sizes:
            stride = size + rng.choice([0, 0, 1])
            starts.append((record, stride))
            record += stride * lanes + rng.choice([0, 0, 2])
        record += rng.choice([0, 0, 5])
        block = record * group.rows + rng.choice([0, 0, 3])
        rows = [(at + start, block, record, stride) for start, stride in starts]
        at += block * items
    else:
        inside = 0
        for lanes, size in sizes:
            axes = {"row": group.rows, "lane": lanes} | ({"item": items} if style == "apart" else {})
            order = rng.sample(["row", "lane"], 2)
            if style == "apart":
                order.insert(rng.choice([2, 2, 2, 0, 1]), "item")
            strides, step = {}, size
            for axis in order:
                strides[axis] = step + rng.choice([0, 0, 1, 3])
                step = strides[axis] * axes[axis]
            rows.append((at + inside, strides.get("item", 0), strides["row"], strides["lane"]))
            inside += step + rng.choice([0, 0, 2])
        block = inside + rng.choice([0, 0, 4])
        if style == "blocks":  # an item holds every layer and part
            rows = [(start, block, row, lane) for start, _, row, lane in rows]
        at += block * items if style == "blocks" else inside
    offset, item_stride, row_stride, lane_stride = np.array(rows, np.uint64).T.copy()
    columns = Columns(
        group=group.id, items=items, region=np.full(len(rows), pool, np.uint32), offset=offset, item_stride=item_stride,
        row_stride=row_stride, lane_stride=lane_stride,
    )  # fmt: skip
    return columns, at


def regions(lengths: Mapping[int, int]) -> dict[int, Region]:
    """As a Register states them."""
    return {
        i: Region(id=i, base=0, length=n, kind=MemoryKind.HOST, boot=bytes(16), handles=()) for i, n in lengths.items()
    }
