"""What the planner must find, by loops over tokens, rows and bytes: shares no formula with it.

A pool is a flat array for each region. The oracle knows, for a rank, which global coordinate each of its bytes stands
for, by walking tokens one by one and counting; and who must send what, by electing a source for each byte apart.
"""

import functools
import hashlib
import itertools
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.wire.enums import ItemKind
from kvproto.wire.messages import Columns, Geometry, Group, Owns, Part

Coordinate = tuple[int, int, str, int, int]
"""model, layer, part, row, byte on the lane axis"""
Row = tuple[int, ...]
"""A box as the digest sees it: twelve numbers."""
Pools = dict[int, npt.NDArray[np.uint8]]
"""By region id."""


@attrs.frozen
class Request:
    """Tokens [first, first + count) of a group at one rank, and its items from the one with the first owned row."""

    first: int
    count: int
    items: Sequence[int]


def value(at: Coordinate) -> int:
    """The byte that stands at a global coordinate."""
    return line(*at[:4])[at[4]]


@functools.lru_cache(maxsize=1 << 16)
def line(model: int, layer: int, part: str, row: int) -> bytes:
    """The bytes of the lane axis of one row, up to 64 of them."""
    return hashlib.blake2b(repr((model, layer, part, row)).encode(), digest_size=64).digest()


def cp_rank_of(group: Group, row: int) -> int | None:
    """Whose row it is; None before the origin of the deal."""
    token = row * group.tokens_per_row
    return _dealt(group, 1 << max(token.bit_length(), 10))[token]


@functools.lru_cache(maxsize=4096)
def _dealt(group: Group, tokens: int) -> list[int | None]:
    """The cp rank of each token, one after the other."""
    order = list(range(group.cp_size)) if group.order is None else group.order.tolist()
    found: list[int | None] = []
    turn, left = 0, group.interleave
    for token in range(tokens):
        if group.cp_size == 1 or token < group.origin:
            found.append(0 if group.cp_size == 1 else None)
            continue
        found.append(order[turn])
        left -= 1
        if not left:
            turn, left = (turn + 1) % len(order), group.interleave
    return found


@functools.lru_cache(maxsize=4096)
def held(group: Group, cp_rank: int, tokens: int) -> list[int]:
    """Global rows that start below `tokens`, in the order in which the rank stores them."""
    step = group.tokens_per_row
    return [row for row in range(-(-tokens // step)) if cp_rank_of(group, row) == cp_rank]


def pages(group: Group, cp_rank: int, first: int, count: int) -> list[tuple[int, int, int]]:
    """Global row, page counted from that of token 0, and row in the page, of each owned row that the tokens cover."""
    rows = set(covered(group, first, count))
    mine = [(row, i) for i, row in enumerate(held(group, cp_rank, first + count)) if row in rows]
    return [(row, i // group.rows, i % group.rows) for row, i in mine]


def covered(group: Group, first: int, count: int) -> list[int]:
    """Global rows that tokens [first, first + count) cover, all of their tokens or, of a partial group, one at least."""
    tokens, step = set(range(first, first + count)), group.tokens_per_row
    rows = sorted({token // step for token in tokens})
    whole = any if group.partial else all
    return [row for row in rows if whole(token in tokens for token in range(row * step, row * step + step))]


def need(group: Group, cp_rank: int, first: int, count: int) -> int:
    """Items that a rank must name."""
    if group.kind in (ItemKind.SLOT, ItemKind.RING):
        return 1
    found = [page for _, page, _ in pages(group, cp_rank, first, count)]
    return found[-1] - found[0] + 1 if found else 0


def rows_of(group: Group, cp_rank: int, request: Request) -> list[tuple[int, int, int]]:
    """Global row, item and row in the item, of each requested row that the rank owns."""
    if group.kind == ItemKind.SLOT:
        return [(row, request.items[0], row) for row in range(group.live_rows or group.rows)]
    if group.kind == ItemKind.RING:
        rows = covered(group, request.first, request.count)
        return [(row, request.items[0], row % group.rows) for row in rows]
    found = pages(group, cp_rank, request.first, request.count)
    return [(row, request.items[page - found[0][1]], within) for row, page, within in found]


def lanes_of(share: Owns, part: int) -> list[int]:
    """Lanes of a part in local order."""
    return [lane for span in share.lanes if span.part == part for lane in range(span.lo, span.hi)]


def first_byte(part: Part, lane: int) -> int:
    """Where a lane, or the section of it that this is, begins on the lane axis of the whole part."""
    return lane * (part.lane_bytes if part.whole is None else part.whole) + (part.at or 0)


def bytes_of(
    group: Group, share: Owns, columns: Columns, request: Request
) -> Iterator[tuple[tuple[int, int], Coordinate]]:
    """Region and offset, and global coordinate, of every requested byte that the rank owns."""
    rows = rows_of(group, share.cp_rank, request)
    column = 0
    for layer in share.layers.tolist():
        for p, part in enumerate(group.parts):
            region, offset, item_stride, row_stride, lane_stride = (
                int(getattr(columns, name)[column])
                for name in ("region", "offset", "item_stride", "row_stride", "lane_stride")
            )
            for row, item, within in rows:
                for local, lane in enumerate(lanes_of(share, p)):
                    at = offset + item * item_stride + within * row_stride + local * lane_stride
                    for byte in range(part.lane_bytes):
                        yield (region, at + byte), (group.model, layer, part.name, row, first_byte(part, lane) + byte)
            column += 1


def walk(
    geometry: Geometry, rank: int, columns: Mapping[int, Columns], requests: Mapping[int, Request]
) -> Iterator[tuple[tuple[int, int], Coordinate]]:
    """`bytes_of` over all groups of a rank."""
    groups = {g.id: g for g in geometry.groups}
    for share in next(r for r in geometry.ranks if r.rank == rank).owns:
        if groups[share.group].kind != ItemKind.HANDOFF:
            yield from bytes_of(groups[share.group], share, columns[share.group], requests[share.group])


def noise(lengths: Mapping[int, int], seed: int) -> Pools:
    """Pools that hold nothing."""
    random = np.random.default_rng(seed)
    return {region: random.integers(0, 256, length, np.uint8) for region, length in lengths.items()}


Owner = dict[tuple[int, str, int, int], dict[int, int]]
"""(model, part name, layer, byte) -> rank -> cp rank."""


def owners(geometry: Geometry) -> Owner:
    """Who owns each byte of the lane axis."""
    groups = {g.id: g for g in geometry.groups}
    found: Owner = defaultdict(dict)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            for p, part in enumerate(group.parts):
                for lane in lanes_of(share, p):
                    for layer in share.layers.tolist():
                        for byte in range(first_byte(part, lane), first_byte(part, lane) + part.lane_bytes):
                            found[group.model, part.name, layer, byte][rank.rank] = share.cp_rank
    return found


def group_of(geometry: Geometry) -> dict[tuple[int, str, int], Group]:
    """The group of each model, part name and layer."""
    groups = {g.id: g for g in geometry.groups}
    return {
        (groups[s.group].model, part.name, layer): groups[s.group]
        for rank in geometry.ranks
        for s in rank.owns
        for part in groups[s.group].parts
        for layer in s.layers.tolist()
    }


@functools.lru_cache(maxsize=4096)
def meeting(src: Group, dst: Group) -> set[tuple[int, int]]:
    """(source cp rank, sink cp rank) that have a row in common."""
    both = ((cp_rank_of(src, row), cp_rank_of(dst, row)) for row in range(600 if src.cp_size * dst.cp_size > 1 else 1))
    return {(c, d) for c, d in both if c is not None and d is not None}


def boxes(source: Geometry, sink: Geometry) -> list[Row]:
    """Every box of the plan, elected byte by byte, joined as the spec says, as the rows of the digest."""
    have, want = owners(source), owners(sink)
    sources, sinks = group_of(source), group_of(sink)
    asked: list[tuple[Coordinate, int, int, tuple[int, ...], tuple[int, ...]]] = []
    for (model, part, layer, byte), ranks in sorted(want.items()):
        for c, d in meeting(sources[model, part, layer], sinks[model, part, layer]):
            needy = tuple(sorted(r for r, k in ranks.items() if k == d))
            able = tuple(sorted(r for r, k in have[model, part, layer, byte].items() if k == c))
            asked.append(((model, layer, part, 0, byte), c, d, able, needy))
    turn = {
        unit: n + sink.replica
        for _, units in itertools.groupby(
            sorted({
                (able, sinks[at[0], at[2], at[1]].id, at[1], needy, rank)
                for at, _, _, able, needy in asked if len(needy) < len(able) for rank in needy
            }),
            key=lambda unit: unit[0],
        )
        for n, unit in enumerate(units)
    }  # fmt: skip
    cells: dict[Row, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for (model, layer, part, _, byte), c, d, able, needy in asked:
        dst = sinks[model, part, layer]
        index = [p.name for p in dst.parts].index(part)
        for j, rank in enumerate(needy):
            place = turn.get((able, dst.id, layer, needy, rank), j * len(able) // len(needy))
            cells[able[place % len(able)], rank, dst.id, model, index, c, d][layer].append(byte)
    found = []
    for (a, b, group, model, index, c, d), by_layer in cells.items():
        open_: dict[tuple[int, int], int] = {}
        for layer in range(min(by_layer), max(by_layer) + 2):
            now = set(_intervals(by_layer.get(layer, [])))
            for lo, hi in [x for x in open_ if x not in now]:
                found.append((a, b, group, model, open_.pop((lo, hi)), layer, index, lo, hi, c, d, sink.replica))
            for x in now:
                open_.setdefault(x, layer)
    return sorted(found)


def left(source: Geometry, sink: Geometry, optional: Collection[str]) -> tuple[str, str] | None:
    """The first group and part that the sink takes of a layer of which it leaves another part; no hand-off data."""
    there, here = group_of(source), group_of(sink)
    lacking = {
        (model, layer)
        for model, name, layer in there.keys() - here.keys()
        if name not in {*optional, *(sink.without or ())}
    }
    for group in sink.groups:
        for part in (part for part in group.parts if part.name not in optional):
            of_group = {(m, x) for (m, name, x), at in here.items() if (at.id, name) == (group.id, part.name)}
            if of_group & lacking:
                return group.name, part.name
    return None


def _intervals(numbers: list[int]) -> Iterator[tuple[int, int]]:
    for number in numbers:
        if number - 1 not in numbers:
            end = number
            while end in numbers:
                end += 1
            yield number, end


def digest(rows: list[Row]) -> bytes:
    """SHA-256 of sorted rows."""
    return hashlib.sha256(b"".join(struct.pack("<12Q", *row) for row in sorted(rows))).digest()


def checksum(coordinates: Mapping[Coordinate, int], index: Mapping[tuple[int, str], int]) -> int:
    """The sum of feature VERIFY, byte by byte; `index` is the part's number in the sink's group."""
    total = 0
    for (model, layer, part, row, at), byte in coordinates.items():
        seed = _mix((model << 48) + (layer << 16) + index[model, part])
        total += byte * _mix(row + seed) * _mix(at)
    return total % 2**64


@functools.lru_cache(maxsize=1 << 17)
def _mix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) | 1
