"""Worlds made by hand as wildly as by an adversary, not through `lay_out`; and what becomes of each.

A world is a source and a sink of the same caches. Each side groups the parts, orders the layers, folds and divides the
lanes, deals the tokens and lays out its memory as it likes, and now and then states something that does not fit. What
`plan` accepts must lower, and `execute` must write each wanted byte and no other. `python -m tests.plan.wild SECONDS`
looks at fresh worlds until the time is over.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvproto.copying.columns import check_columns
from kvproto.copying.execute import checksums, execute
from kvproto.copying.grants import items_needed
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import PlanError
from kvproto.planning.geometry import Geometry, Group, lane_bytes, validate
from kvproto.planning.plan import Route, plan
from kvproto.wire.enums import DType, Feature, ItemKind
from kvproto.wire.messages import Columns, LaneSpan, Owns, Part, Rank
from tests.plan import oracle
from tests.plan.worlds import _columns, deal, regions

TOKENS = frozenset({ItemKind.PAGE, ItemKind.RING})


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
    features = rng.choice([(), (), (Feature.SPREAD_ONE,), (Feature.COLD_DRAFT,)])
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
    if rng.random() < 0.25:
        return _stated(cache, made, ItemKind.RING, rng.randint(1, 12))
    size = rng.choice([1, 2, 2, 3] if alike else [1, 1, 1, 1, 2, 2, 3, 5, 12])
    run, origin = rng.choice([1, 2, 3, 11]) * step, rng.choice([0, 0, 1, 4]) * step
    if size == 1:  # without a deal these mean nothing
        run, origin = rng.choice([(1, 0), (7, 5), (2**32 - 1, 2**64 - 1)])
    return _stated(cache, made, ItemKind.PAGE, rng.randint(1, 5), cp_size=size, interleave=run, origin=origin)


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
        if opaque and rng.random() < 0.95:
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
        block = g.rows * step * (g.cp_size * (g.interleave // step) if g.cp_size > 1 else 1)
        first = origin + rng.randint(0, 1) * block
    elif groups[0].partial:
        first -= first % step
    several = len({(g.rows, g.cp_size, g.interleave, g.origin) for g in opaque}) > 1
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


@functools.lru_cache(maxsize=4096)
def _held(group: Group, cp_rank: int) -> list[int]:
    """The first global rows of a share of the tokens, in the order in which the rank stores them: token by token."""
    if group.cp_size == 1:
        return list(range(200))
    found, row, turn, left = [], group.origin // group.tokens_per_row, 0, group.interleave
    while len(found) < 60:
        if turn == cp_rank:
            found.append(row)
        row, left = row + 1, left - group.tokens_per_row
        if not left:
            turn, left = (turn + 1) % group.cp_size, group.interleave
    return found


class Memory:
    """A rank's poisoned pools, the window of each of its groups, and the byte that belongs at each place."""

    def __init__(self, rng: random.Random, geometry: Geometry, rank: int, spans: dict[int, tuple[int, int]]) -> None:
        self.groups = {g.id: g for g in geometry.groups}
        self.shares = {o.group: o for r in geometry.ranks if r.rank == rank for o in r.owns}
        self.spans, columns, lengths, self.windows = spans, {}, {7: rng.randint(0, 9), 3: rng.randint(0, 9)}, {}
        for share in self.shares.values():
            group, pool = self.groups[share.group], rng.choice(sorted(lengths))
            need = items_needed(group, share.cp_rank, *spans[group.id])
            assert need == len(self._items(share))
            items = max(need, 1) + rng.choice([0, 0, 1, 4])
            lanes = [len(oracle.lanes_of(share, p)) for p in range(len(group.parts))] * share.layers.size
            sizes = [part.lane_bytes for part in group.parts] * share.layers.size
            pairs = list(zip(lanes, sizes, strict=True))
            own, lengths[pool] = _columns(rng, group, pairs, items, pool, lengths[pool])
            columns[group.id] = _unused(rng, own, group.rows, np.array(lanes))
            self.windows[group.id] = Window(*spans[group.id], np.array(rng.sample(range(items), need), np.int64))
        self.data = oracle.noise({region: length + 1 for region, length in lengths.items()}, rng.randrange(1 << 32))
        self.views = {region: memoryview(data) for region, data in self.data.items()}
        self.layout = RankLayout(geometry, rank, columns)
        check_columns(geometry, rank, regions({r: d.size for r, d in self.data.items()}), tuple(columns.values()))

    def _items(self, share: Owns) -> list[list[tuple[int, int, bool]]]:
        """Of each item of the window: the row within the item, the global row, and whether the window asks for it."""
        group, (first, count) = self.groups[share.group], self.spans[share.group]
        if group.kind == ItemKind.SLOT:
            return [[(row, row, row < (group.live_rows or group.rows)) for row in range(group.rows)]]
        rows = oracle.covered(group, first, count)
        if group.kind == ItemKind.RING:  # the last rows below the end of the window, which a short prompt does not fill
            end = (
                -(-(first + count) // group.tokens_per_row)
                if group.partial
                else (first + count) // group.tokens_per_row
            )
            return [[(row % group.rows, row, row in rows) for row in range(end - group.rows, end)]]
        mine = _held(group, share.cp_rank)
        asked = [i for i, row in enumerate(mine) if row in rows]
        pages = range(asked[0] // group.rows, asked[-1] // group.rows + 1) if asked else ()
        local = [range(page * group.rows, page * group.rows + group.rows) for page in pages]
        return [[(i % group.rows, mine[i], i in asked) for i in some] for some in local]

    def _places(self, everything: bool, cold: Sequence[int] = ()) -> Iterator[tuple[int, int, bytes]]:
        """Region, offset and bytes of every lane of the window's rows, or of all rows of its items."""
        for share in self.shares.values():
            group, columns = self.groups[share.group], self.layout.columns[share.group]
            whole = everything or any(part.encoding for part in group.parts)
            rows = [
                (item, within, row)
                for item, some in zip(self.windows[group.id].items.tolist(), self._items(share), strict=True)
                for within, row, asked in some
                if asked or whole
            ]
            if group.model in cold:
                continue
            for k in range(share.layers.size * len(group.parts)):
                layer, p = int(share.layers[k // len(group.parts)]), k % len(group.parts)
                part = group.parts[p]
                region, offset, *strides = (
                    int(getattr(columns, name)[k])
                    for name in ("region", "offset", "item_stride", "row_stride", "lane_stride")
                )
                for n, lane in enumerate(oracle.lanes_of(share, p)):
                    for item, within, row in rows:
                        at = offset + item * strides[0] + within * strides[1] + n * strides[2]
                        line = oracle.line(group.model, layer, part.name, row)
                        byte = oracle.first_byte(part, lane)
                        yield region, at, line[byte : byte + part.lane_bytes]

    def fill(self) -> None:
        """Write every row of the items: what a source's pool holds."""
        for region, at, found in self._places(True):
            self.views[region][at : at + len(found)] = found

    def wanted(self, cold: Sequence[int]) -> oracle.Pools:
        """The pools as they should be after a transfer."""
        made = {region: data.copy() for region, data in self.data.items()}
        for region, at, found in self._places(False, cold):
            made[region][at : at + len(found)] = np.frombuffer(found, np.uint8)
        return made


def _unused(rng: random.Random, own: Columns, rows: int, lanes: Any) -> Columns:
    """Strides of axes of one element, which nobody uses, made anything."""
    odd = np.array([rng.choice([0, 1, 2**63, 2**64 - 1]) for _ in lanes], np.uint64)
    return attrs.evolve(
        own,
        item_stride=odd if own.items == 1 else own.item_stride,
        row_stride=odd if rows == 1 else own.row_stride,
        lane_stride=np.where(lanes == 1, odd, own.lane_stride),
    )


def outcome(made: World, seed: int) -> tuple[str, set[str]]:
    """The code of the refusal, or "accepted" with what the world has of all that is odd; asserts that bytes are right."""
    for geometry in (made.source, made.sink):
        validate(geometry)
    try:
        routes = plan(made.source, made.sink, made.features)
    except PlanError as error:
        return error.code.name, set()
    rng = random.Random(seed)
    have = {r.rank: Memory(rng, made.source, r.rank, made.windows[0]) for r in made.source.ranks}
    for memory in have.values():
        memory.fill()
    before = {(n, i): pool.copy() for n, memory in have.items() for i, pool in memory.data.items()}
    moved: Counter[int] = Counter()
    for rank in made.sink.ranks:
        memory = Memory(rng, made.sink, rank.rank, made.windows[1])
        wanted = memory.wanted(routes.cold)
        for number in routes.required(rank.rank):
            pair = Pair(routes.between(number, rank.rank), have[number].layout, memory.layout)
            program = pair.lower(have[number].windows, memory.windows)
            assert execute(program, have[number].views, memory.views) == program.bytes
            assert checksums(program, have[number].views, False) == checksums(program, memory.views, True)
            moved.update(program.bytes_by_group())
        for region, pool in memory.data.items():
            assert np.array_equal(pool, wanted[region]), f"sink rank {rank.rank}, region {region}"
    assert all(np.array_equal(have[n].data[i], pool) for (n, i), pool in before.items())
    return "accepted", _oddities(made, routes.routes, moved)


def _oddities(made: World, routes: Sequence[Route], moved: Counter[int]) -> set[str]:
    """What is odd in the routes that moved something."""
    found: set[str] = {feature.name for feature in made.features} if moved else {"nothing moved"}
    sides = {g.id: g for g in made.source.groups}, {g.id: g for g in made.sink.groups}
    drawn: dict[int, set[int]] = {}
    for route in routes:
        dst = sides[1][route.group]
        if not moved[dst.id]:
            continue
        for box in route.boxes:
            src, part = sides[0][box.source_group], dst.parts[box.part]
            drawn.setdefault(src.id, set()).add(dst.id)
            other = next(p for p in src.parts if p.name == part.name)
            encoded = [p.encoding is not None for p in dst.parts]
            for what, holds in (
                (f"{ItemKind(src.kind).name} to {ItemKind(dst.kind).name}", True),
                ("opaque part", bool(part.encoding)),
                ("plain part beside an opaque one", any(encoded) and not part.encoding),
                ("opaque pages dealt", any(encoded) and dst.cp_size > 1),
                ("opaque slot with scratch", any(encoded) and dst.live_rows is not None),
                ("rows covered in part", bool(dst.partial) and dst.tokens_per_row > 1),
                ("slot with scratch", dst.kind == ItemKind.SLOT and dst.live_rows not in (None, dst.rows)),
                ("deals apart", src.cp_size > 1 and dst.cp_size > 1 and (src.cp_size, src.interleave) != (dst.cp_size, dst.interleave)),
                ("cp size beyond 9", max(src.cp_size, dst.cp_size) > 9),
                ("interleave beyond 9", max(g.interleave for g in (src, dst) if g.cp_size > 1) > 9 if max(src.cp_size, dst.cp_size) > 1 else False),
                ("lanes folded", lane_bytes(part) != lane_bytes(other)),
                ("sections at the source", other.whole is not None),
                ("sections at the sink", part.whole is not None),
                ("sections of several lanes", part.whole is not None and part.lanes > 1),
                ("other parts in the group", {p.name for p in src.parts} != {p.name for p in dst.parts}),
                ("pages of other sizes", src.rows != dst.rows and src.kind == dst.kind == ItemKind.PAGE),
                ("sub-range of lanes", box.hi - box.lo < part.lanes * lane_bytes(part)),
            ):  # fmt: skip
                if holds:
                    found.add(what)
    if any(len(sinks) > 1 for sinks in drawn.values()):
        found.add("a source group for several sink groups")
    return found


def main(seconds: float) -> int:
    """Fresh worlds until the time is over; what was covered, or the seed of the world that went wrong."""
    codes: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    begin, start = time.monotonic(), random.SystemRandom().randrange(1 << 40)
    while time.monotonic() - begin < seconds:
        seed = start + sum(codes.values())
        try:
            code, found = outcome(world(seed), seed)
        except BaseException:
            print(f"seed {seed}", flush=True)
            raise
        codes[code] += 1
        odd.update(found)
    print(summary(codes, odd))
    return 0


def summary(codes: Counter[str], odd: Counter[str]) -> str:
    """Counts as text."""
    total, accepted = sum(codes.values()), codes["accepted"]
    lines = [f"{total} worlds, {accepted} accepted ({100 * accepted // max(total, 1)} %)"]
    lines += [f"  refused {code}: {n}" for code, n in codes.most_common() if code != "accepted"]
    return "\n".join(lines + [f"  {what}: {n}" for what, n in odd.most_common()])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
