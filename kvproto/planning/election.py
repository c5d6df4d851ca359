"""Who could send each byte to whom: what both sides own, cut into pieces (spec/v1/planning.md, step 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs
import numpy.typing as npt

from kvproto.planning.compare import incompatible
from kvproto.planning.deals import shared_classes
from kvproto.planning.geometry import Geometry, Group, LaneSpan, Part, lane_bytes
from kvproto.planning.spreading import Layers, Piece, Ranks, joined
from kvproto.wire.enums import ErrorCode

__all__ = ["MOST_PIECES", "Claim", "Claims", "alike", "claims_of", "cut", "whole"]


_MOST_PAIRS = 1 << 16
"""Pairs of a cp rank of the source and one of the sink, for one part."""


MOST_PIECES = 1 << 18
"""Pieces of lane intervals and token classes, each in so many layers, that are looked at for one plan."""


@attrs.frozen
class Claim:
    """One lane interval that a rank owns of a part, in bytes [lo, hi), with its layers and its share of the tokens."""

    rank: int
    group: Group
    lo: int
    hi: int
    cp_rank: int
    layers: tuple[tuple[int, int], ...]
    """Intervals of layers, ascending."""


Claims = dict[tuple[int, str], list[Claim]]
"""(model, part name) -> claims."""


def claims_of(geometry: Geometry) -> Claims:
    groups = {g.id: g for g in geometry.groups}
    claims: Claims = defaultdict(list)
    for rank in geometry.ranks:
        for share in rank.owns:
            group = groups[share.group]
            layers = _intervals(share.layers)
            for span in share.lanes:
                part = group.parts[span.part]
                found = claims[group.model, part.name]
                for lo, hi in _bytes_of(part, span):
                    found.append(Claim(rank.rank, group, lo, hi, share.cp_rank, layers))
    return claims


def _bytes_of(part: Part, span: LaneSpan) -> Iterator[tuple[int, int]]:
    """Bytes [lo, hi) of the lane axis of the whole part; those of a section lie apart, in each lane."""
    size = lane_bytes(part)
    if size == part.lane_bytes:
        yield span.lo * size, span.hi * size
        return
    for lane in range(span.lo, span.hi):
        begin = lane * size + (part.at or 0)
        yield begin, begin + part.lane_bytes


def _intervals(numbers: npt.NDArray[Any]) -> Layers:
    """Ascending numbers [n] as intervals [lo, hi)."""
    lo, hi = int(numbers[0]), int(numbers[-1]) + 1
    return ((lo, hi),) if hi - lo == numbers.size else tuple(joined((n, n + 1) for n in numbers.tolist()))


Alike = tuple[tuple[Claim, ...], tuple[Claim, ...], Layers]


def alike(sources: list[Claim], sinks: list[Claim]) -> dict[int, list[Alike]]:
    """Sets of the sink's layers that the same claims own on both sides, with these claims, by the sink's group."""
    cuts = sorted({x for claim in (*sources, *sinks) for interval in claim.layers for x in interval})
    at = {x: i for i, x in enumerate(cuts)}
    owners: tuple[list[list[int]], ...] = ([[] for _ in cuts], [[] for _ in cuts])
    for side, claims in enumerate((sources, sinks)):
        for n, claim in enumerate(claims):
            for lo, hi in claim.layers:
                for i in range(at[lo], at[hi]):
                    owners[side][i].append(n)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for i, (a, b) in enumerate(zip(*owners, strict=True)):
        if b:
            alike[tuple(a), tuple(b)].append((cuts[i], cuts[i + 1]))
    found: dict[int, list[Alike]] = defaultdict(list)
    for (a, b), layers in alike.items():
        some = tuple(sources[n] for n in a), tuple(sinks[n] for n in b), tuple(joined(layers))
        found[sinks[b[0]].group.id].append(some)
    return found


def whole(
    sources: tuple[Claim, ...], sinks: tuple[Claim, ...], part: str
) -> Iterator[tuple[tuple[Claim, ...], tuple[Claim, ...]]]:
    """Families of an opaque part, which moves whole: sinks and sources that own the same intervals in the same order.

    Raises LAYOUT_OPAQUE (KVP-PLAN-OPAQUE).
    """
    owned: tuple[dict[int, list[tuple[int, int]]], ...] = ({}, {})
    for held, claims in zip(owned, (sources, sinks), strict=True):
        for claim in claims:
            held.setdefault(claim.rank, []).append((claim.lo, claim.hi))
    for spans in sorted({tuple(v) for v in owned[1].values()}):
        some = tuple(c for c in sources if tuple(owned[0][c.rank]) == spans)
        if not some:
            theirs = sorted({tuple(v) for v in owned[0].values()})
            where = f"groups[{sinks[0].group.name}].parts[{part}]"
            raise incompatible(ErrorCode.LAYOUT_OPAQUE, where, str(theirs), str(spans), "divide opaque parts alike")
        yield some, tuple(c for c in sinks if tuple(owned[1][c.rank]) == spans)


def cut(
    sources: tuple[Claim, ...], sinks: tuple[Claim, ...], layers: Layers, part: str, most: int, pieces: list[Piece]
) -> int:
    """Cut what both sides claim into pieces that the same ranks own throughout, and add them to `pieces`.

    Returns how many were looked at, times layers: `most` at most. Raises COVERAGE (KVP-PLAN-COVER), ROW_MISMATCH
    (KVP-PLAN-DEALS) or TOO_LARGE (KVP-PLAN-SIZE).
    """
    cuts = sorted({x for claim in sources + sinks for x in (claim.lo, claim.hi)})
    dst = sinks[0].group
    pairs = _class_pairs(sources[0].group, dst)
    at = {x: i for i, x in enumerate(cuts)}
    number = sum(at[claim.hi] - at[claim.lo] for claim in sources + sinks) + len(cuts) * len(pairs)
    number *= sum(hi - lo for lo, hi in layers)
    where = f"groups[{dst.name}].parts[{part}]"
    if number > most:
        mine, yours = f"at most {MOST_PIECES} pieces times layers", str(MOST_PIECES - most + number)
        raise incompatible(ErrorCode.TOO_LARGE, where, mine, yours, "cut lanes at fewer places")
    have, want = _by_cut(sources, cuts), _by_cut(sinks, cuts)
    index = [p.name for p in dst.parts].index(part)
    for i, (lo, hi) in enumerate(pairwise(cuts)):
        for c, d in pairs:
            needy, candidates = want[i].get(d, ()), have[i].get(c, ())
            if needy and not candidates:
                mine = f"no rank of cp rank {c} owns bytes {lo}..{hi} of {_text(layers)}"
                raise incompatible(
                    ErrorCode.COVERAGE,
                    where,
                    mine,
                    f"rank {needy[0]} needs them",
                    "state every rank in the Description",
                )
            if needy:
                pieces.append(Piece(dst.id, index, lo, hi, c, d, layers, candidates, needy))
    return number


def _text(layers: Layers) -> str:
    """Layers for people."""
    one = len(layers) == 1 and layers[0][1] - layers[0][0] == 1
    spans = ", ".join(f"{lo}-{hi - 1}" if hi - lo > 1 else str(lo) for lo, hi in layers)
    return f"layer{'s' * (not one)} {spans}"


def _by_cut(claims: tuple[Claim, ...], cuts: list[int]) -> list[dict[int, Ranks]]:
    """For each interval between two cuts: the ranks that own it, ascending, by cp rank."""
    at = {x: i for i, x in enumerate(cuts)}
    found: list[dict[int, set[int]]] = [defaultdict(set) for _ in cuts]
    for claim in claims:
        for i in range(at[claim.lo], at[claim.hi]):
            found[i][claim.cp_rank].add(claim.rank)
    return [{k: tuple(sorted(v)) for k, v in row.items()} for row in found]


def _class_pairs(src: Group, dst: Group) -> tuple[tuple[int, int], ...]:
    """Pairs (source cp rank, sink cp rank) that share a row at all."""
    if src.cp_size == dst.cp_size == 1:
        return ((0, 0),)
    if src.cp_size * dst.cp_size > _MOST_PAIRS:
        path, advice = f"groups[{dst.name}].cp_size", f"at most {_MOST_PAIRS} pairs of cp ranks"
        raise incompatible(ErrorCode.ROW_MISMATCH, path, str(src.cp_size), str(dst.cp_size), advice)
    return shared_classes(src, dst)
