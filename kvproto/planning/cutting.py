"""Who could send each byte to whom: what both sides own, cut into pieces (spec/v1/planning.md, steps 1 to 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import PlanError
from kvproto.planning.arrays import merged_intervals, stretch_bounds
from kvproto.planning.deals import runs, shared_classes
from kvproto.planning.election import Layers, PieceTable, Ranks, ShareTable, elect
from kvproto.planning.geometry import Geometry, Group, lane_bytes
from kvproto.planning.limits import MAX_CLASS_PAIRS, MAX_PIECES, MAX_SHARES
from kvproto.wire.enums import ErrorCode

__all__ = [
    "Cutter",
    "OwnedInterval",
    "OwnedIntervals",
    "class_pairs",
    "common_layers",
    "opaque_families",
    "owned_intervals",
    "share_unit",
]


_SHOWN = 8
"""Intervals, or lists of them, that an error shows."""


class OwnedInterval(NamedTuple):
    """One lane interval that a rank owns of a part, in bytes [lo, hi), with its layers and its share of the tokens."""

    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int
    layers: tuple[tuple[int, int], ...]
    """Intervals of layers, ascending."""


OwnedIntervals = dict[tuple[int, str], list[OwnedInterval]]
"""(model, part name) -> claims."""


def owned_intervals(geometry: Geometry) -> OwnedIntervals:
    """What the ranks of a Description own, by model and part name."""
    groups = {g.id: g for g in geometry.groups}
    claims: OwnedIntervals = defaultdict(list)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            layers = _intervals(share.layers)
            for span in share.lanes:
                part = group.parts[span.part]
                found, size = claims[group.model, part.name], lane_bytes(part)
                if size == part.lane_bytes:
                    bounds = [(span.lo * size, span.hi * size)]
                else:  # a section has bytes in each lane, which lie apart
                    first = part.at or 0
                    bounds = [
                        (x, x + part.lane_bytes) for x in range(span.lo * size + first, span.hi * size + first, size)
                    ]
                found += [OwnedInterval(rank.rank, group, lo, hi, share.cp_rank, layers) for lo, hi in bounds]
    return claims


def _intervals(numbers: npt.NDArray[Any]) -> Layers:
    """Ascending numbers [n] as intervals [lo, hi)."""
    lo, hi = int(numbers[0]), int(numbers[-1]) + 1
    if hi - lo == numbers.size:
        return ((lo, hi),)
    first, last = stretch_bounds(numbers[1:] - numbers[:-1] == 1)
    return tuple(zip(numbers[first].tolist(), (numbers[last].astype(np.int64) + 1).tolist(), strict=True))


Alike = tuple[tuple[OwnedInterval, ...], tuple[OwnedInterval, ...], Layers]
"""OwnedIntervals of the source, claims of the sink, and the layers that all of them own."""


def common_layers(sources: list[OwnedInterval], sinks: list[OwnedInterval]) -> dict[int, list[Alike]]:
    """By the sink's group id: sets of its layers that the same claims own on both sides, with these claims."""
    by_layers: tuple[dict[Layers, list[int]], ...] = (defaultdict(list), defaultdict(list))
    for claims, some in zip((sources, sinks), by_layers, strict=True):
        for n, claim in enumerate(claims):
            some[claim.layers].append(n)
    cuts = sorted({x for some in by_layers for layers in some for interval in layers for x in interval})
    at = {x: i for i, x in enumerate(cuts)}
    owners: tuple[list[list[int]], ...] = ([[] for _ in cuts], [[] for _ in cuts])
    for held, some in zip(owners, by_layers, strict=True):
        for k, layers in enumerate(some):
            for lo, hi in layers:
                for i in range(at[lo], at[hi]):
                    held[i].append(k)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for i, (a, b) in enumerate(zip(*owners, strict=True)):
        if b:
            alike[tuple(a), tuple(b)].append((cuts[i], cuts[i + 1]))
    of_source, of_sink = (list(some.values()) for some in by_layers)
    found: dict[int, list[Alike]] = defaultdict(list)
    for (a, b), intervals in alike.items():
        have = tuple(sources[n] for n in sorted(n for k in a for n in of_source[k]))
        want = tuple(sinks[n] for n in sorted(n for k in b for n in of_sink[k]))
        found[want[0].group.id].append((have, want, tuple(merged_intervals(intervals))))
    return found


def opaque_families(
    sources: tuple[OwnedInterval, ...], sinks: tuple[OwnedInterval, ...], part: str
) -> Iterator[tuple[tuple[OwnedInterval, ...], tuple[OwnedInterval, ...]]]:
    """The families (sources, sinks) of an opaque part, which own the same intervals in the same order.

    Raises LAYOUT_OPAQUE for sinks without such sources (KVP-PLAN-OPAQUE).
    """
    families: tuple[dict[tuple[tuple[int, int], ...], list[OwnedInterval]], ...] = ({}, {})
    for found, claims in zip(families, (sources, sinks), strict=True):
        owned: dict[int, list[OwnedInterval]] = defaultdict(list)
        for claim in claims:
            owned[claim.rank].append(claim)
        for some in owned.values():
            found.setdefault(tuple((claim.lo, claim.hi) for claim in some), []).extend(some)
    have, want = families
    for spans, needy in sorted(want.items()):
        if spans not in have:
            where = f"groups[{sinks[0].group.name}].parts[{part}]"
            theirs = str(sorted(have)[:_SHOWN])
            raise PlanError(ErrorCode.LAYOUT_OPAQUE, where, theirs, str(spans[:_SHOWN]), "divide opaque parts alike")
        yield tuple(have[spans]), tuple(needy)


_MOST = {"pieces": MAX_PIECES, "shares": MAX_SHARES}


@attrs.define(eq=False)
class Cutter:
    """Cuts what both sides claim into pieces that the same ranks own throughout, and keeps their number in bounds."""

    _rows: list[tuple[int, ...]] = attrs.field(factory=list)
    """The pieces, each with the values of the columns of `PieceTable`."""
    _layers: list[Layers] = attrs.field(factory=list)
    _sets: list[Ranks] = attrs.field(factory=list)
    _numbers: dict[Ranks, int] = attrs.field(factory=dict)
    """The index in `_sets` of each set of ranks."""
    _pairs: dict[tuple[int, int], tuple[tuple[int, int], ...]] = attrs.field(factory=dict)
    """`class_pairs` by the ids of both groups."""
    _spent: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(_MOST, 0))

    def elect(self, ordinal: int, features: Collection[int]) -> tuple[PieceTable, ShareTable]:
        """All pieces, and who reads them from whom; `ordinal` is the sink's replica."""
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_COLUMNS)
        pieces = PieceTable(*(np.array(column, kind) for column, kind in zip(columns, _COLUMNS, strict=True)))
        return pieces, elect(pieces, self._layers, self._sets, ordinal, features)

    def meet(self, src: Group, dst: Group, part: int) -> None:
        """Find the token classes of two groups that share rows; errors name the sink's part of index `part`.

        Raises ROW_MISMATCH (KVP-PLAN-DEALS) or TOO_LARGE (KVP-PLAN-SIZE).
        """
        if (src.id, dst.id) not in self._pairs:
            if src.cp_size * dst.cp_size <= MAX_CLASS_PAIRS:
                self._spend("pieces", sum(runs(g) for g in (src, dst) if g.cp_size > 1), dst, part)
            self._pairs[src.id, dst.id] = class_pairs(src, dst)

    def cut(
        self,
        sources: tuple[OwnedInterval, ...],
        sinks: tuple[OwnedInterval, ...],
        layers: Layers,
        part: int,
        unit: int | None,
    ) -> None:
        """Add pieces of intervals of the same layers, after `meet` for their groups; `unit` is that of `share_unit`.

        Raises COVERAGE (KVP-PLAN-COVER) or TOO_LARGE (KVP-PLAN-SIZE).
        """
        cuts = sorted({x for claim in sources + sinks for x in (claim.lo, claim.hi)})
        dst, at = sinks[0].group, {x: i for i, x in enumerate(cuts)}
        pairs = self._pairs[sources[0].group.id, dst.id]
        number = sum(at[claim.hi] - at[claim.lo] for claim in sources + sinks) + len(cuts) * len(pairs)
        self._spend("pieces", number, dst, part)
        have, want = self._by_cut(sources, cuts), self._by_cut(sinks, cuts)
        some, shares, fewer = len(self._layers), 0, unit is not None
        self._layers.append(layers)
        for i, (lo, hi) in enumerate(pairwise(cuts)):
            lanes = 1 if unit is None else -(-hi // unit) - lo // unit
            for c, d in pairs:
                needy, candidates = want[i].get(d), have[i].get(c)
                if needy is None:
                    continue
                if candidates is None:
                    mine = f"no rank of cp rank {c} owns bytes {lo}..{hi} of {_text(layers)}"
                    yours, advice = f"rank {self._sets[needy][0]} needs them", "state every rank in the Description"
                    raise PlanError(ErrorCode.COVERAGE, _where(dst, part), mine, yours, advice)
                self._rows.append((dst.id, part, lo, hi, c, d, some, candidates, needy))
                shares += len(self._sets[needy]) * lanes
                fewer |= len(self._sets[needy]) < len(self._sets[candidates])
        self._spend("shares", shares * (sum(hi - lo for lo, hi in layers) if fewer else len(layers)), dst, part)

    def _spend(self, what: str, number: int, dst: Group, part: int) -> None:
        self._spent[what] += number
        if self._spent[what] > _MOST[what]:
            mine, advice = f"at most {_MOST[what]} {what}", "state fewer ranks, runs or intervals, or layers in one run"
            raise PlanError(ErrorCode.TOO_LARGE, _where(dst, part), mine, str(self._spent[what]), advice)

    def _by_cut(self, claims: tuple[OwnedInterval, ...], cuts: list[int]) -> list[dict[int, int]]:
        """For each interval between two cuts: the index of the set of ranks that own it, by cp rank."""
        at = {x: i for i, x in enumerate(cuts)}
        found: list[dict[int, set[int]]] = [defaultdict(set) for _ in cuts]
        for claim in claims:
            for i in range(at[claim.lo], at[claim.hi]):
                found[i][claim.cp_rank].add(claim.rank)
        return [{k: self._numbered(tuple(sorted(v))) for k, v in row.items()} for row in found]

    def _numbered(self, ranks: Ranks) -> int:
        number = self._numbers.setdefault(ranks, len(self._sets))
        if number == len(self._sets):
            self._sets.append(ranks)
        return number


def share_unit(src: Group, dst: Group, part: str) -> int | None:
    """If lanes differ in size: bytes of the lanes by which shares are counted (KVP-PLAN-SIZE); None if they do not.

    It is the larger of both sizes, or the smaller if the part is in sections on a side.
    """
    parts = [[p for p in group.parts if p.name == part] for group in (src, dst)]
    sizes = [lane_bytes(some[0]) for some in parts]
    if sizes[0] == sizes[1]:
        return None
    return max(sizes) if len(parts[0]) == len(parts[1]) == 1 else min(sizes)


def _where(dst: Group, part: int) -> str:
    return f"groups[{dst.name}].parts[{dst.parts[part].name}]"


_COLUMNS = ("<i8", "<i8", "<u8", "<u8", "<i8", "<i8", "<i8", "<i8", "<i8")
"""Dtypes of the columns of `PieceTable`: places on a lane axis may need 64 bits."""


def _text(layers: Layers) -> str:
    """Layers in words."""
    one = len(layers) == 1 and layers[0][1] - layers[0][0] == 1
    spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in layers)
    return f"layer{'s' * (not one)} {spans}"


def class_pairs(src: Group, dst: Group) -> tuple[tuple[int, int], ...]:
    """Pairs (source cp rank, sink cp rank) that share a row at all. Raises ROW_MISMATCH (KVP-PLAN-DEALS)."""
    if src.cp_size == dst.cp_size == 1:
        return ((0, 0),)
    if src.cp_size * dst.cp_size > MAX_CLASS_PAIRS:
        path, advice = f"groups[{dst.name}].cp_size", f"at most {MAX_CLASS_PAIRS} pairs of cp ranks"
        raise PlanError(ErrorCode.ROW_MISMATCH, path, str(src.cp_size), str(dst.cp_size), advice)
    return shared_classes(src, dst)
