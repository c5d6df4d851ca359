"""Worlds made by hand as wildly as by an adversary, not through `lay_out`.

A world is a source and a sink of the same caches. Each side groups the parts, orders the layers, folds and divides the
lanes, cuts parts into sections and deals the tokens as it likes, and now and then states something that does not fit.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvproto.planning.geometry import Geometry, Group
from kvproto.wire.enums import DType, Feature, ItemKind
from kvproto.wire.messages import LaneSpan, Owns, Part, Rank
from tests.plan.worlds import deal


@attrs.frozen
class Cache:
    """Parts of some layers that both sides hold; each part is a name and the bytes of its lane axis."""

    model: int
    parts: tuple[tuple[str, int, str | None], ...]
    """Name, bytes of all lanes, encoding."""
    layers: tuple[int, ...]
    tokens: bool
    """Whether its rows stand for tokens; if not, its items are slots."""
    step: int
    partial: bool
    live: int
    shape: random.Random | None
    """Where both sides page, deal and divide alike, for opaque parts: the seed of what they agree on."""


@attrs.frozen
class World:
    source: Geometry
    sink: Geometry
    windows: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]
    """First token and count by group, of the source and of the sink."""
    features: tuple[Feature, ...]


def caches(rng: random.Random) -> Iterator[Cache]:
    names = iter(rng.sample(["k", "v", "latent", "rope", "index", "scale", "conv", "ssm", "x", "y", "z", "w"], 12))
    for model in range(rng.choice([1, 1, 1, 2])):
        for _ in range(rng.choice([1, 1, 1, 2])):
            tokens = rng.random() < 0.85
            opaque = rng.random() < 0.3
            parts = tuple(
                (next(names), rng.choice([4, 6, 12, 24]), "tiled" if opaque and (i == 0 or rng.random() < 0.5) else None)
                for i in range(rng.choice([1, 1, 2, 3]))
            )  # fmt: skip
            yield Cache(
                model, parts, tuple(sorted(rng.sample(range(9), rng.choice([1, 1, 2, 3])))), tokens,
                rng.choice([1, 1, 2, 3, 4]) if tokens else 1, tokens and rng.random() < 0.3, rng.randint(1, 3),
                random.Random(rng.random()) if opaque else None,
            )  # fmt: skip


def world(seed: int) -> World:
    rng = random.Random(seed)
    held = list(caches(rng))
    sides, groups_of = [], []
    for complete in (True, False):
        groups = [(cache, group, layers) for cache in held for group, layers in _groups(rng, cache)]
        ids = sorted(rng.sample(range(40), len(groups)))
        rng.shuffle(groups)
        groups = [(c, attrs.evolve(g, id=i, name=f"g{i}"), x) for i, (c, g, x) in zip(ids, groups, strict=True)]
        sides.append(_engine(rng, groups, complete))
        groups_of.append(groups)
    if rng.random() < 0.12:
        sides[1] = _odd(rng, sides[1])
    windows: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
    for cache in held:
        mine, yours = ([g for c, g, _ in groups if c is cache] for groups in groups_of)
        (first, end), begin, beyond = _span(rng, mine, yours)
        windows[0].update({g.id: (begin, end + beyond - begin) for g in mine})
        windows[1].update({g.id: (first, end - first) for g in yours})
    features = rng.choice([(), (), (Feature.SPREAD_ONE,), (Feature.FEW_SOURCES,), (Feature.COLD_DRAFT,)])
    return World(sides[0], sides[1], (windows[0], windows[1]), features)


def _groups(rng: random.Random, cache: Cache) -> Iterator[tuple[Group, list[int]]]:
    """One side's groups of a cache: layers apart, parts apart, in any order."""
    whole = cache.shape is not None and rng.random() < 0.7
    for layers in deal(rng, cache.layers, rng.choice([1, 1, 2, 3])):
        numbers = range(len(cache.parts))
        for parts in [list(numbers)] if whole else deal(rng, numbers, rng.choice([1, 1, 2])):
            yield _group(rng, cache, [cache.parts[p] for p in rng.sample(parts, len(parts))]), layers


def _group(rng: random.Random, cache: Cache, parts: list[tuple[str, int, str | None]]) -> Group:
    alike = cache.shape is not None and rng.random() < 0.95
    if cache.shape is not None and alike:
        rng = random.Random(cache.shape.getstate()[1][0])
    step, made = cache.step, []
    for name, size, encoding in parts:
        sizes = [n for n in range(1, size + 1) if size % n == 0]
        if rng.random() < 0.95:  # one of a chain in which each divides the next
            sizes = [n for n in ((2, 4, 12, size) if size % 4 == 0 else (3, 6)) if size % n == 0]
        lane = rng.choice(sizes)
        part = Part(name=name, dtype=DType.U8, lanes=size // lane, lane_bytes=lane, encoding=encoding)
        made += _sections(rng, part) if rng.random() < 0.3 and not encoding else [part]
    if rng.random() < 0.3:  # sections of two parts in turn; those of one stay in order
        made.sort(key=lambda part: part.at or 0)
    if not cache.tokens:
        rows = cache.live + (rng.randint(0, 2))
        live = cache.live if rows > cache.live else rng.choice([None, cache.live])
        return _stated(cache, made, ItemKind.SLOT, rows, live_rows=live)
    if rng.random() < (0.1 if alike else 0.25):
        return _stated(cache, made, ItemKind.RING, rng.randint(1, 12))
    size = rng.choice([1, 2, 2, 3] if alike else [1, 1, 1, 1, 2, 2, 3, 5, 12])
    run, origin = rng.choice([1, 2, 3, 11]) * step, rng.choice([0, 0, 1, 4]) * step
    if size == 1:  # without a deal these mean nothing
        run, origin = rng.choice([(1, 0), (7, 5), (2**32 - 1, 2**64 - 1)])
    order: Any = None
    if size > 1 and rng.random() < 0.4:  # a table of runs, in which every rank comes
        order = [*range(size), *(rng.randrange(size) for _ in range(rng.choice([0, 1, size])))]
        order = np.array(rng.sample(order, len(order)), np.uint32)
    deal = {"cp_size": size, "interleave": run, "origin": origin, "order": order}
    return _stated(cache, made, ItemKind.PAGE, rng.randint(1, 5), **deal)


def _sections(rng: random.Random, part: Part) -> list[Part]:
    """A part in several columns, each some bytes of every lane."""
    cuts = sorted(rng.sample(range(1, part.lane_bytes), min(rng.randint(1, 3), part.lane_bytes - 1)))
    ends = zip([0, *cuts], [*cuts, part.lane_bytes], strict=True)
    return [attrs.evolve(part, at=lo, whole=part.lane_bytes, lane_bytes=hi - lo) for lo, hi in ends]


def _stated(cache: Cache, parts: list[Part], kind: ItemKind, rows: int, **more: Any) -> Group:
    numbers = {"cp_size": 1, "interleave": 1, "origin": 0} | more
    return Group(
        id=0, name="g", model=cache.model, kind=kind, rows=rows, tokens_per_row=cache.step, parts=tuple(parts),
        partial=True if cache.partial else None, **numbers,
    )  # fmt: skip


def _engine(rng: random.Random, groups: Sequence[tuple[Cache, Group, list[int]]], complete: bool) -> Geometry:
    """Ranks of any numbers that together hold everything: stages, shares of the tokens, odd sets of owners of lanes."""
    numbers = sorted(rng.sample(range(60), rng.randint(max(g.cp_size for _, g, _ in groups), 16)))
    shares: dict[int, list[Owns]] = {n: [] for n in numbers}
    for cache, group, layers in groups:
        stages = deal(rng, layers, rng.choice([1, 2]) if len(numbers) >= 2 * group.cp_size else 1)
        free = rng.sample(numbers, len(numbers))
        hands = _hands(rng, len(free), group.cp_size * len(stages))
        for i, hand in enumerate(hands):
            cp_rank, stage = i % group.cp_size, stages[i // group.cp_size]
            who, free = free[:hand], free[hand:]
            opaque = cache.shape is not None
            for rank, lanes in zip(who, _owned(rng, group, len(who), opaque), strict=True):
                if complete or rng.random() < 0.85:
                    some = np.array(sorted(stage), np.uint32)
                    shares[rank].append(Owns(group=group.id, layers=some, cp_rank=cp_rank, lanes=lanes))
    ranks = tuple(Rank(rank=n, owns=tuple(sorted(owned, key=lambda o: o.group))) for n, owned in shares.items())
    return Geometry(replica=rng.randint(0, 3), facts=(), groups=tuple(g for _, g, _ in groups), ranks=ranks)


def _hands(rng: random.Random, ranks: int, shares: int) -> list[int]:
    """How many ranks hold each share: one at least, rarely all."""
    found = [1] * shares
    for _ in range(rng.randint(0, ranks - shares)):
        found[rng.randrange(shares)] += 1
    return found


def _owned(rng: random.Random, group: Group, ranks: int, opaque: bool) -> list[tuple[LaneSpan, ...]]:
    """Lanes of each of some ranks, which together own all: replicas, shares, and anything between, in any order."""
    found: list[list[LaneSpan]] = [[] for _ in range(ranks)]
    for p, part in enumerate(group.parts):
        if opaque and rng.random() < 0.99:
            for r in range(ranks):
                found[r].append(LaneSpan(part=p, lo=0, hi=part.lanes))
            continue
        mine: list[set[int]] = [{rng.randrange(part.lanes)} for _ in range(ranks)]
        for lane in range(part.lanes):
            mine[rng.randrange(ranks)].add(lane)
        if rng.random() < 0.3:
            mine = [set(range(part.lanes))] * ranks
        for r, lanes in enumerate(mine):
            runs: list[tuple[int, int]] = []
            for lane in sorted(lanes):
                if runs and runs[-1][1] == lane and rng.random() < 0.8:
                    runs[-1] = (runs[-1][0], lane + 1)
                else:
                    runs.append((lane, lane + 1))
            found[r] += [LaneSpan(part=p, lo=lo, hi=hi) for lo, hi in rng.sample(runs, len(runs))]
    return [tuple(spans) for spans in found]


def _odd(rng: random.Random, geometry: Geometry) -> Geometry:
    """The same, with one statement of one group that the other side does not make."""
    at = rng.randrange(len(geometry.groups))
    group = geometry.groups[at]
    parts = tuple(attrs.evolve(p, dtype=DType.I8) if p.name == group.parts[0].name else p for p in group.parts)
    change: dict[str, Any] = rng.choice([{"parts": parts}, {"model": group.model + 5}])
    if group.parts[0].whole is None and rng.random() < 0.5:
        change = {"parts": (attrs.evolve(group.parts[0], encoding="other"), *group.parts[1:])}
    groups = list(geometry.groups)
    groups[at] = attrs.evolve(group, **change)
    return attrs.evolve(geometry, groups=tuple(groups))


def _span(rng: random.Random, mine: list[Group], yours: list[Group]) -> tuple[tuple[int, int], int, int]:
    """Tokens [first, end) that the sink asks for, the source's first token, and how many it has beyond the end."""
    groups = [*mine, *yours]
    step, dealt = groups[0].tokens_per_row, [g for g in groups if g.cp_size > 1]
    origin = max([g.origin for g in dealt], default=0)
    first = origin + rng.randint(0, 20)
    opaque = [g for g in yours if any(p.encoding for p in g.parts)]
    if opaque and opaque[0].kind == ItemKind.PAGE:  # where an item begins, of every rank
        g = opaque[0]
        runs = g.cp_size if g.order is None else g.order.size
        block = g.rows * (runs * g.interleave if g.cp_size > 1 else step)
        first = origin + rng.randint(0, 1) * block
    elif groups[0].partial:
        first -= first % step
    several = len({(g.rows, g.cp_size, g.interleave, g.origin, str(g.order)) for g in opaque}) > 1
    end = first + (0 if several else rng.choice([0, 1, 5, 20, 40]))
    beyond = rng.choice([0, 0, 3])
    rings = [g.rows for g in mine if g.kind == ItemKind.RING]
    most = min([*rings, *(g.rows for g in yours if g.kind == ItemKind.RING)], default=None)
    if most is not None:  # rows that every ring holds
        beyond = 0 if rings else beyond
        whole = -(-end // step) if groups[0].partial else end // step
        first = max(first, (whole - most) * step)
        end = max(end, first)
    begin = 0 if rng.random() < 0.5 and not dealt else first
    return (first, end), begin, beyond
