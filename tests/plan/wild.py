"""What becomes of wild worlds: what `plan` accepts must lower, and `execute` must write each wanted byte and no other.

`python -m tests.plan.wild SECONDS` looks at fresh worlds until the time is over.
"""

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
from kvproto.wire.enums import ItemKind
from kvproto.wire.messages import Columns, Owns
from tests.plan import oracle
from tests.plan.wild_worlds import World, world
from tests.plan.worlds import columns_of_group, regions


@functools.lru_cache(maxsize=4096)
def _held(group: Group, cp_rank: int) -> list[int]:
    """The first global rows of a share of the tokens, in the order in which the rank stores them: token by token."""
    if group.cp_size == 1:
        return list(range(300))
    order = list(range(group.cp_size)) if group.order is None else group.order.tolist()
    found, row, turn, left = [], group.origin // group.tokens_per_row, 0, group.interleave
    while len(found) < 240:
        if order[turn] == cp_rank:
            found.append(row)
        row, left = row + 1, left - group.tokens_per_row
        if not left:
            turn, left = (turn + 1) % len(order), group.interleave
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
            own, lengths[pool] = columns_of_group(rng, group, pairs, items, pool, lengths[pool])
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
                ("deals by tables", src.order is not None or dst.order is not None),
                ("opaque pages dealt by a table", any(encoded) and dst.order is not None),
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
